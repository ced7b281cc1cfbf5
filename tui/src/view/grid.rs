//! Draws the heat map: cells in rows and columns.

use super::put_line;
use crate::page::Grid;
use crate::page::selection::first_shown;
use crate::page::theme::{Theme, Tone};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

pub(super) fn draw(
    grid: &Grid,
    area: Rect,
    selected: Option<(usize, usize)>,
    theme: &Theme,
    buffer: &mut Buffer,
) {
    let rows_around = grid.rows_around();
    if usize::from(area.height) < rows_around || area.width <= Grid::LABEL_WIDTH {
        return;
    }
    let dim = theme.style(Tone::Dim);
    let room = usize::from(area.width - Grid::LABEL_WIDTH);
    let (row, column) = selected.unwrap_or((0, 0));
    let (shown, column_width) = grid.shown_columns(room, column);
    let body = usize::from(area.height) - rows_around;
    let top = first_shown(row, grid.rows.len(), body);
    if column_width > 1 {
        for (index, name) in grid.columns[shown.clone()].iter().enumerate() {
            let x = area.x + Grid::LABEL_WIDTH + u16::try_from(index * column_width).unwrap_or(0);
            buffer.set_stringn(x, area.y, name, column_width, dim);
        }
    } else if let (Some(first), Some(last)) = (
        grid.columns.get(shown.start),
        grid.columns.get(shown.end.wrapping_sub(1)),
    ) {
        let text = format!(
            "{first} .. {last}  ({} of {})",
            shown.len(),
            grid.columns.len()
        );
        buffer.set_stringn(area.x + Grid::LABEL_WIDTH, area.y, text, room, dim);
    }
    let lines = (area.y + 1..area.bottom()).take(body);
    for (y, index) in lines.zip(top..grid.rows.len()) {
        buffer.set_stringn(
            area.x + 1,
            y,
            &grid.rows[index],
            usize::from(Grid::LABEL_WIDTH) - 2,
            dim,
        );
        for column in shown.clone() {
            let Some(Some((_, dot))) = grid.dots[index].get(column) else {
                continue;
            };
            let x = area.x
                + Grid::LABEL_WIDTH
                + u16::try_from((column - shown.start) * column_width).unwrap_or(0);
            let mut style = theme.style(dot.tone);
            if selected == Some((index, column)) {
                style = style.patch(theme.selected());
            }
            buffer.set_string(x, y, dot.glyph.to_string(), style);
        }
    }
    if !grid.legend.is_empty() {
        let rows = u16::try_from(body.min(grid.rows.len())).unwrap_or(u16::MAX);
        let y = area.y.saturating_add(1).saturating_add(rows);
        let below = Rect::new(area.x + 1, y.min(area.bottom() - 1), area.width - 1, 1);
        put_line(&grid.legend, below, theme, buffer);
    }
}

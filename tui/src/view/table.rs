//! Draws the rows of a table under its columns.

use super::toned;
use crate::page::columns::{GAP, MARK_WIDTH, widths};
use crate::page::layout::headings;
use crate::page::selection::first_shown;
use crate::page::table::{Align, Table};
use crate::page::theme::{Theme, Tone};
use crate::page::width::{fit, text_width};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

pub(super) fn draw(
    table: &Table,
    area: Rect,
    selected: Option<usize>,
    theme: &Theme,
    buffer: &mut Buffer,
) {
    if table.rows.is_empty() {
        let style = theme.style(Tone::Dim);
        let room = usize::from(area.width).saturating_sub(MARK_WIDTH);
        buffer.set_stringn(area.x + 1, area.y, fit(&table.empty, room), room, style);
        return;
    }
    let headings = headings(table);
    let height = usize::from(area.height).saturating_sub(headings);
    let first = first_shown(selected.unwrap_or(0), table.rows.len(), height);
    let shown = first..(first + height).min(table.rows.len());
    let columns = widths(table, shown.clone(), usize::from(area.width));
    if headings > 0 {
        let texts = table.columns.iter().map(|c| (c.name.as_ref(), Tone::Dim));
        put_row(
            table,
            texts,
            &columns,
            area.y,
            area,
            theme,
            Tone::Dim,
            buffer,
        );
    }
    let top = area.y + u16::try_from(headings).unwrap_or(0);
    for (y, index) in (top..area.bottom()).zip(shown) {
        let row = &table.rows[index];
        let mark = row.mark.glyph.to_string();
        buffer.set_stringn(
            area.x,
            y,
            mark,
            usize::from(area.width),
            theme.style(row.mark.tone),
        );
        let texts = row.cells.iter().map(|cell| (cell.text.as_str(), cell.tone));
        put_row(table, texts, &columns, y, area, theme, row.tone, buffer);
        if selected == Some(index) {
            // One color from edge to edge: reversed cells of several colors would look like several marks.
            let tone = match row.tone {
                Tone::Plain | Tone::Dim => row.mark.tone,
                tone => tone,
            };
            let whole = Rect::new(area.x, y, area.width, 1);
            buffer.set_style(whole, theme.selected_row(tone));
        }
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "one call draws a line of a table, nothing more"
)]
fn put_row<'a>(
    table: &Table,
    texts: impl Iterator<Item = (&'a str, Tone)>,
    widths: &[usize],
    y: u16,
    area: Rect,
    theme: &Theme,
    row_tone: Tone,
    buffer: &mut Buffer,
) {
    let mut x = usize::from(area.x) + MARK_WIDTH;
    let right = usize::from(area.right());
    for (((text, cell_tone), column), &width) in texts.zip(&table.columns).zip(widths) {
        if width == 0 {
            continue;
        }
        let room = width.min(right.saturating_sub(x));
        if room == 0 {
            break;
        }
        let text = fit(text, room);
        let padding = match column.align {
            Align::Left => 0,
            Align::Right => room.saturating_sub(text_width(&text)),
        };
        let start = u16::try_from(x + padding).unwrap_or(u16::MAX);
        buffer.set_stringn(start, y, &text, room, toned(theme, row_tone, cell_tone));
        x += width + GAP;
    }
}

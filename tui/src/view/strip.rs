//! Draws one cell per host or rank. If there are more units than cells, several units share a cell, which shows the
//! worst.

use crate::page::Strip;
use crate::page::theme::Theme;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

pub(super) fn draw(strip: &Strip, area: Rect, theme: &Theme, buffer: &mut Buffer) {
    let width = usize::from(area.width.saturating_sub(1)).max(1);
    let cells = width * usize::from(area.height);
    let units_per_cell = strip.dots.len().div_ceil(cells.max(1)).max(1);
    for (index, sharing) in strip.dots.chunks(units_per_cell).enumerate() {
        let Some((_, dot)) = sharing.iter().max_by_key(|(severity, _)| *severity) else {
            continue;
        };
        let x = area.x + 1 + u16::try_from(index % width).unwrap_or(0);
        let y = area.y + u16::try_from(index / width).unwrap_or(0);
        if let Some(cell) = buffer.cell_mut((x, y))
            && x < area.right()
            && y < area.bottom()
        {
            cell.set_char(dot.glyph).set_style(theme.style(dot.tone));
        }
    }
    if units_per_cell > 1 && area.height > 0 {
        let text = format!(" one cell = {units_per_cell} {}s ", strip.unit);
        let wide = u16::try_from(text.len()).unwrap_or(0);
        if wide < area.width {
            let x = area.right() - wide;
            let style = theme.style(crate::page::theme::Tone::Dim);
            let y = area.bottom() - 1;
            let used = strip.dots.len().div_ceil(units_per_cell);
            // Draw the text only where it hides no cell.
            if used + usize::from(wide) <= cells {
                buffer.set_stringn(x, y, &text, text.len(), style);
            }
        }
    }
}

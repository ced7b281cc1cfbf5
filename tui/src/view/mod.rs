//! Draws the state into terminal cells. Changes no state.

mod bars;
mod grid;
mod strip;
mod table;
pub mod text;
mod timeline;

use crate::page::layout::{self, headings};
use crate::page::selection::first_shown;
use crate::page::theme::{Theme, Tone};
use crate::page::width::{fit, text_width};
use crate::page::{Body, Line, Pane};
use crate::state::State;
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};

/// Draws the whole screen.
pub fn draw(state: &State, frame: &mut Frame<'_>) {
    let area = frame.area();
    let buffer = frame.buffer_mut();
    if area.width == 0 || area.height == 0 {
        return;
    }
    let layout = layout::of(&state.page, area);
    let theme = &state.options.theme;
    bars::header(state, layout.header, buffer);
    for (line, rect) in layout.head.iter().zip(layout.head_rects()) {
        put_line(line, rect, theme, buffer);
    }
    let selection = state.selection();
    for (number, (pane, rect)) in state.page.panes.iter().zip(&layout.panes).enumerate() {
        let focused = number == selection.pane;
        draw_pane(state, pane, *rect, focused, buffer);
    }
    let cursor = bars::footer(state, layout.footer, buffer);
    if state.options.ascii {
        to_ascii(area, buffer);
    }
    if let Some(position) = cursor {
        frame.set_cursor_position(position);
    }
}

fn draw_pane(state: &State, pane: &Pane, area: Rect, focused: bool, buffer: &mut Buffer) {
    let theme = &state.options.theme;
    let body = layout::below_title(pane, area);
    if body.y > area.y && area.height > 0 {
        title(state, pane, area, focused, buffer);
    }
    if body.height == 0 || body.width == 0 {
        return;
    }
    let selection = state.selection();
    let selected = focused.then_some(selection.row);
    match &pane.body {
        Body::Table(table) => table::draw(table, body, selected, theme, buffer),
        Body::Strip(dots) => strip::draw(dots, body, theme, buffer),
        Body::Grid(cells) => {
            let selected = focused.then_some((selection.row, selection.column));
            grid::draw(cells, body, selected, theme, buffer);
        }
        Body::Timeline(lanes) => timeline::draw(lanes, body, selected, theme, buffer),
        Body::Text(lines) => {
            let height = usize::from(body.height);
            let first = first_shown(selected.unwrap_or(0), lines.len(), height);
            let shown = lines.iter().enumerate().skip(first).take(height);
            for (row, (index, line)) in (body.y..).zip(shown) {
                let rect = Rect::new(body.x, row, body.width, 1);
                put_line(line, rect, theme, buffer);
                if selected == Some(index) && lines.len() > height {
                    buffer.set_style(rect, theme.selected());
                }
            }
        }
    }
}

/// Draws the title line of a pane and, if a table or a text does not fit, which of its rows are shown:
/// `─ groups ─────────────────── 1-9/128 ─`.
fn title(state: &State, pane: &Pane, area: Rect, focused: bool, buffer: &mut Buffer) {
    let theme = &state.options.theme;
    let dim = theme.style(Tone::Dim);
    let width = usize::from(area.width);
    buffer.set_stringn(area.x, area.y, "─".repeat(width), width, dim);
    // The pane in focus has the most visible title.
    let style = match focused {
        true => theme.style(Tone::Accent).add_modifier(Modifier::BOLD),
        false => theme.style(Tone::Title),
    };
    let text = format!(" {} ", pane.title);
    let room = width.saturating_sub(2);
    buffer.set_stringn(
        area.x + 1.min(area.width - 1),
        area.y,
        fit(&text, room),
        room,
        style,
    );
    let shown = usize::from(layout::below_title(pane, area).height);
    let counts = match &pane.body {
        Body::Table(table) => Some((table.rows.len(), headings(table))),
        Body::Text(lines) => Some((lines.len(), 0)),
        Body::Strip(_) | Body::Grid(_) | Body::Timeline(_) => None,
    };
    if let Some((row_count, headings)) = counts {
        let shown = shown.saturating_sub(headings);
        if row_count > shown && shown > 0 {
            let selected = if focused { state.selection().row } else { 0 };
            let first = first_shown(selected, row_count, shown);
            let text = format!(" {}-{}/{row_count} ", first + 1, first + shown);
            let taken = text_width(&pane.title) + text.len() + 6;
            if taken < width {
                let x = area.right() - u16::try_from(text.len() + 1).unwrap_or(0);
                buffer.set_stringn(x, area.y, &text, text.len(), dim);
            }
        }
    }
}

/// Draws a line, cut at the edge.
fn put_line(line: &Line, area: Rect, theme: &Theme, buffer: &mut Buffer) {
    let mut x = area.x;
    for words in line {
        let room = usize::from(area.right().saturating_sub(x));
        if room == 0 {
            break;
        }
        (x, _) = buffer.set_stringn(
            x,
            area.y,
            fit(&words.text, room),
            room,
            theme.style(words.tone),
        );
    }
}

/// Replaces characters that are not ASCII: those that the views use with similar ones, others with `?`.
fn to_ascii(area: Rect, buffer: &mut Buffer) {
    for position in area.positions() {
        let cell = &mut buffer[position];
        let symbol = match cell.symbol() {
            text if text.is_ascii() => continue,
            "─" => "-",
            "█" => "=",
            "▒" => ">",
            "▐" => "|",
            "…" => "~",
            "·" => ".",
            "└" => "`",
            "│" => "|",
            "▁" => "_",
            "▂" => ".",
            "▃" => ":",
            "▄" => "-",
            "▅" => "=",
            "▆" => "+",
            "▇" => "#",
            _ => "?",
        };
        cell.set_symbol(symbol);
    }
}

/// The style of a cell's tone on top of the tone of its row.
fn toned(theme: &Theme, row: Tone, cell: Tone) -> Style {
    if cell == Tone::Plain {
        theme.style(row)
    } else {
        theme.style(cell)
    }
}

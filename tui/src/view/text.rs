//! A screen as plain text: for scripts, for export and for screen readers.

use crate::state::State;
use crate::view;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;

/// Returns the screen of `state` as lines of text, laid out for a terminal of `state.size`, without spaces at the ends
/// of lines and without empty lines at the end.
pub fn of(state: &State) -> String {
    lines(&buffer(state))
}

/// Draws the screen of `state` into cells.
pub fn buffer(state: &State) -> Buffer {
    let (columns, rows) = state.size;
    // A backend in memory cannot fail.
    let Ok(mut terminal) = Terminal::new(TestBackend::new(columns, rows));
    let Ok(_) = terminal.draw(|frame| view::draw(state, frame));
    terminal.backend().buffer().clone()
}

fn lines(buffer: &Buffer) -> String {
    let area = buffer.area;
    let mut text = String::new();
    for y in area.y..area.bottom() {
        let mut line = String::new();
        let mut x = area.x;
        while x < area.right() {
            let symbol = buffer[(x, y)].symbol();
            line.push_str(symbol);
            // A wide character also takes the cells after it.
            x += u16::try_from(ratatui::text::Span::raw(symbol).width().max(1)).unwrap_or(1);
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    let kept = text.trim_end().len();
    text.truncate(kept);
    text.push('\n');
    text
}

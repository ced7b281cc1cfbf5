//! Draws operations along time: one lane (row) per rank.

use crate::page::selection::first_shown;
use crate::page::theme::{Theme, Tone};
use crate::page::{INSIDE, Lane, PENDING, Timeline};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use rcomm_recorder::model::text::time_of_day;

/// Width of the names of the lanes.
const LABEL: u16 = 10;
/// Number of cells between two times on the axis.
const TICK: usize = 16;

pub(super) fn draw(
    timeline: &Timeline,
    area: Rect,
    selected: Option<usize>,
    theme: &Theme,
    buffer: &mut Buffer,
) {
    if area.height < 2 || area.width <= LABEL {
        return;
    }
    let height = usize::from(area.height) - 1;
    let first = first_shown(selected.unwrap_or(0), timeline.lanes.len(), height);
    let width = usize::from(area.width - LABEL);
    for (y, at) in (area.y..area.bottom() - 1).zip(first..timeline.lanes.len()) {
        let lane = &timeline.lanes[at];
        let label = usize::from(LABEL) - 1;
        buffer.set_stringn(area.x, y, &lane.label, label, theme.style(lane.tone));
        for (x, glyph) in (area.x + LABEL..).zip(cells(timeline, lane, width)) {
            let tone = match glyph {
                INSIDE => Tone::Good,
                PENDING => Tone::Waiting,
                _ => Tone::Dim,
            };
            buffer.set_string(x, y, glyph.to_string(), theme.style(tone));
        }
        if selected == Some(at) {
            buffer.set_style(Rect::new(area.x, y, LABEL, 1), theme.selected());
        }
    }
    axis(timeline, area, width, theme, buffer);
}

/// Returns one character per column: within an operation, within a pending one, or neither.
fn cells(timeline: &Timeline, lane: &Lane, width: usize) -> Vec<char> {
    let mut cells = vec!['·'; width];
    let span = (timeline.to_ns - timeline.from_ns).max(1) as f64;
    let column = |ns: i64| {
        let at = (ns - timeline.from_ns) as f64 / span * width as f64;
        at.clamp(0.0, width as f64) as usize
    };
    for operation in &lane.spans {
        let from = column(operation.from_ns);
        let (to, glyph) = match operation.to_ns {
            Some(to) => (column(to), INSIDE),
            None => (width, PENDING),
        };
        // A short operation takes at least one cell.
        let to = to.max(from + 1).min(width);
        for cell in cells.get_mut(from..to).into_iter().flatten() {
            *cell = glyph;
        }
    }
    cells
}

fn axis(timeline: &Timeline, area: Rect, width: usize, theme: &Theme, buffer: &mut Buffer) {
    let span = timeline.to_ns - timeline.from_ns;
    let y = area.bottom() - 1;
    for at in (0..width).step_by(TICK) {
        let ns = timeline.from_ns + (span as f64 * at as f64 / width as f64) as i64;
        let millis = ns.div_euclid(1_000_000).rem_euclid(1000);
        let text = format!("|{}.{millis:03}", time_of_day(ns));
        let x = area.x + LABEL + u16::try_from(at).unwrap_or(0);
        let room = (width - at).min(TICK - 1);
        buffer.set_stringn(x, y, text, room, theme.style(Tone::Dim));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Span;

    #[test]
    fn pending_reaches_to_the_edge_and_short_operations_are_seen() {
        let lane = Lane {
            rank: 0,
            label: String::new(),
            tone: Tone::Plain,
            spans: vec![
                Span {
                    from_ns: 10,
                    to_ns: Some(11),
                },
                Span {
                    from_ns: 60,
                    to_ns: None,
                },
            ],
        };
        let timeline = Timeline {
            from_ns: 0,
            to_ns: 100,
            lanes: vec![],
        };
        let text: String = cells(&timeline, &lane, 10).into_iter().collect();
        assert_eq!(text, "·█····▒▒▒▒");
    }
}

//! Draws operations over time: one lane (row) per rank, wide operations with their names, and the cursor.

use crate::page::selection::first_shown;
use crate::page::theme::{Theme, Tone};
use crate::page::{INSIDE, Lane, PENDING, Timeline};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use rcomm_recorder::model::text::time_of_day;

/// Width of the names of the lanes.
const LABEL_WIDTH: u16 = 10;
/// Number of cells between two times on the axis.
const TICK: usize = 16;

pub(super) fn draw(
    timeline: &Timeline,
    area: Rect,
    selected: Option<usize>,
    theme: &Theme,
    buffer: &mut Buffer,
) {
    if area.height < 2 || area.width <= LABEL_WIDTH {
        return;
    }
    let height = usize::from(area.height) - 1;
    let first = first_shown(selected.unwrap_or(0), timeline.lanes.len(), height);
    let width = usize::from(area.width - LABEL_WIDTH);
    for (y, position) in (area.y..area.bottom() - 1).zip(first..timeline.lanes.len()) {
        let lane = &timeline.lanes[position];
        let label = usize::from(LABEL_WIDTH) - 1;
        // The label is as wide as what a selection inverts, so that all of it has one color.
        let text = format!("{:label$}", lane.label);
        buffer.set_stringn(area.x, y, text, label, theme.style(lane.tone));
        for (x, cell) in (area.x + LABEL_WIDTH..).zip(cells(timeline, lane, width, theme)) {
            buffer.set_string(x, y, cell.glyph.to_string(), cell.style);
        }
        if selected == Some(position) {
            let label = Rect::new(area.x, y, LABEL_WIDTH - 1, 1);
            buffer.set_style(label, theme.selected());
        }
    }
    axis(timeline, area, width, theme, buffer);
    if let Some(x) = cursor(timeline, width) {
        let lanes = u16::try_from(timeline.lanes.len()).unwrap_or(u16::MAX);
        let column = Rect::new(
            area.x + LABEL_WIDTH + x,
            area.y,
            1,
            lanes.min(area.height - 1),
        );
        buffer.set_style(column, theme.selected());
    }
}

/// The column of the cursor; `None` if it is outside the range, or there is none.
fn cursor(timeline: &Timeline, width: usize) -> Option<u16> {
    let at_ns = timeline.cursor_ns?;
    let (from_ns, to_ns) = (timeline.from_ns, timeline.to_ns);
    if at_ns < from_ns || at_ns >= to_ns {
        return None;
    }
    let share = (at_ns - from_ns) as f64 / (to_ns - from_ns).max(1) as f64;
    u16::try_from(((share * width as f64) as usize).min(width.saturating_sub(1))).ok()
}

/// One character of a lane.
#[derive(Clone, Copy)]
struct Cell {
    glyph: char,
    style: Style,
}

/// Minimum number of columns of an operation that shows its name.
const MIN_NAMED_WIDTH: usize = 8;

/// Returns one character per column: within an operation, within a pending one, or neither. The name of a wide
/// operation is written in inverse colors into its bar.
fn cells(timeline: &Timeline, lane: &Lane, width: usize, theme: &Theme) -> Vec<Cell> {
    let outside = Cell {
        glyph: '·',
        style: theme.style(Tone::Dim),
    };
    let mut cells = vec![outside; width];
    let span = (timeline.to_ns - timeline.from_ns).max(1) as f64;
    let column = |ns: i64| {
        let position = (ns - timeline.from_ns) as f64 / span * width as f64;
        position.clamp(0.0, width as f64) as usize
    };
    for operation in &lane.spans {
        let from = column(operation.from_ns);
        let to = operation.to_ns.map_or(width, column);
        let (glyph, tone) = match operation.pending {
            false => (INSIDE, operation.tone),
            true => (PENDING, Tone::Waiting),
        };
        // A short operation takes at least one cell.
        let to = to.max(from + 1).min(width);
        let Some(bar) = cells.get_mut(from..to) else {
            continue;
        };
        let style = theme.style(tone);
        // One column of the bar is kept before the name, so that two bars side by side can be distinguished.
        let is_named = bar.len() >= MIN_NAMED_WIDTH;
        let name = operation.label.chars().map(Some).filter(|_| is_named);
        let name = std::iter::once(None).chain(name);
        for (cell, letter) in bar.iter_mut().zip(name.chain(std::iter::repeat(None))) {
            *cell = match letter {
                Some(glyph) => Cell {
                    glyph,
                    style: style.add_modifier(Modifier::REVERSED),
                },
                None => Cell { glyph, style },
            };
        }
    }
    cells
}

/// Draws the time of day under the lanes, every [`TICK`] columns.
fn axis(timeline: &Timeline, area: Rect, width: usize, theme: &Theme, buffer: &mut Buffer) {
    let span = timeline.to_ns - timeline.from_ns;
    let lanes = u16::try_from(timeline.lanes.len()).unwrap_or(u16::MAX);
    let y = area.y + lanes.min(area.height - 1);
    for position in (0..width).step_by(TICK) {
        let ns = timeline.from_ns + (span as f64 * position as f64 / width as f64) as i64;
        let millis = ns.div_euclid(1_000_000).rem_euclid(1000);
        let text = format!("|{}.{millis:03}", time_of_day(ns));
        let x = area.x + LABEL_WIDTH + u16::try_from(position).unwrap_or(0);
        // A time that was cut would be another time.
        if text.len() <= (width - position).min(TICK - 1) {
            buffer.set_string(x, y, text, theme.style(Tone::Dim));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Span;
    use crate::page::theme::{Depth, ThemeName};

    #[test]
    fn pending_operations_reach_to_the_edge_and_short_ones_are_visible() {
        let lane = Lane {
            rank: 0,
            label: String::new(),
            tone: Tone::Plain,
            spans: vec![span(10, Some(11)), span(60, None)],
        };
        assert_eq!(drawn(&lane, 10), "·█····▒▒▒▒");
        // In a process that is gone, an operation ends with it.
        let cut_off = Span {
            pending: true,
            ..span(60, Some(80))
        };
        let lane = Lane {
            spans: vec![cut_off],
            ..lane
        };
        assert_eq!(drawn(&lane, 10), "······▒▒··");
    }

    #[test]
    fn a_time_that_does_not_fit_is_left_out_of_the_axis() {
        let timeline = Timeline {
            lanes: vec![],
            from_ns: 0,
            to_ns: 36_000_000,
            cursor_ns: None,
        };
        let area = Rect::new(0, 0, LABEL_WIDTH + 36, 1);
        let mut buffer = Buffer::empty(area);
        axis(
            &timeline,
            area,
            36,
            &Theme::new(ThemeName::Dark, Depth::None),
            &mut buffer,
        );
        let cells = buffer.content().iter();
        let drawn: String = cells.map(|cell| cell.symbol()).collect();
        assert_eq!(drawn.trim(), "|00:00:00.000   |00:00:00.016");
    }

    fn span(from_ns: i64, to_ns: Option<i64>) -> Span {
        Span {
            from_ns,
            to_ns,
            pending: to_ns.is_none(),
            label: "all_reduce #3 dp".into(),
            tone: Tone::Good,
        }
    }

    fn timeline(cursor_ns: Option<i64>) -> Timeline {
        Timeline {
            from_ns: 0,
            to_ns: 100,
            lanes: vec![],
            cursor_ns,
        }
    }

    fn drawn(lane: &Lane, width: usize) -> String {
        let theme = Theme::new(Default::default(), crate::page::theme::Depth::None);
        let cells = cells(&timeline(None), lane, width, &theme);
        cells.iter().map(|cell| cell.glyph).collect()
    }

    #[test]
    fn a_wide_operation_has_its_name_and_a_narrow_one_has_none() {
        let lane = Lane {
            rank: 0,
            label: String::new(),
            tone: Tone::Plain,
            spans: vec![span(0, Some(20)), span(30, None)],
        };
        assert_eq!(drawn(&lane, 40), "█all_red····▒all_reduce #3 dp▒▒▒▒▒▒▒▒▒▒▒");
        assert_eq!(drawn(&lane, 20), "████··▒all_reduce #3");
    }

    #[test]
    fn the_cursor_is_in_the_column_of_its_time_or_nowhere() {
        assert_eq!(cursor(&timeline(None), 50), None);
        assert_eq!(cursor(&timeline(Some(0)), 50), Some(0));
        assert_eq!(cursor(&timeline(Some(99)), 50), Some(49));
        assert_eq!(cursor(&timeline(Some(100)), 50), None);
        assert_eq!(cursor(&timeline(Some(-1)), 50), None);
    }
}

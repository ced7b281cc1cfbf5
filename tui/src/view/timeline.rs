//! Draws operations over time: one lane per rank, wide operations with their names, the axis of time, and the cursor.

use crate::page::layout::rows_of_lane;
use crate::page::selection::first_shown;
use crate::page::theme::{Theme, Tone};
use crate::page::width::{fit, text_width};
use crate::page::{CURSOR, FAILED, GAP_BEFORE, INSIDE, Lane, PENDING, Span, Timeline};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use rcomm_recorder::model::text::time_of_day;

/// Width of the names of the lanes.
const LABEL_WIDTH: u16 = 10;
/// Minimum number of columns from one time on the axis to the next.
const MIN_TICK_COLUMNS: usize = 16;
/// How far apart two neighboring times on the axis may be, ms: round numbers, so that a reader can count them.
const STEPS_MS: [i64; 24] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000,
    120_000, 300_000, 600_000, 900_000, 1_800_000, 3_600_000, 7_200_000, 14_400_000,
];

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
    let lanes_area = Rect {
        height: area.height - 1,
        ..area
    };
    let lane_rows = rows_of_lane(timeline, lanes_area.height);
    let height = usize::from(lanes_area.height / lane_rows);
    let first = first_shown(selected.unwrap_or(0), timeline.lanes.len(), height);
    let width = usize::from(area.width - LABEL_WIDTH);
    let tops = (lanes_area.y..)
        .step_by(usize::from(lane_rows))
        .take(height);
    for (y, position) in tops.zip(first..timeline.lanes.len()) {
        let lane = &timeline.lanes[position];
        let label = usize::from(LABEL_WIDTH) - 1;
        // The label is as wide as what a selection inverts, so that all of it has one color.
        let text = format!("{:label$}", lane.label);
        buffer.set_stringn(area.x, y, text, label, theme.style(lane.tone));
        let drawn = cells(timeline, lane, width, theme);
        for (x, cell) in (area.x + LABEL_WIDTH..).zip(&drawn) {
            buffer.set_string(x, y, cell.glyph.to_string(), cell.style);
        }
        // The last row of a high lane stays empty: bars of two ranks do not touch.
        for below in y + 1..y + lane_rows.saturating_sub(1) {
            for (x, cell) in (area.x + LABEL_WIDTH..).zip(&drawn) {
                buffer.set_string(x, below, cell.bar.to_string(), cell.style);
            }
        }
        if selected == Some(position) {
            let label = Rect::new(area.x, y, LABEL_WIDTH - 1, 1);
            buffer.set_style(label, theme.selected());
        }
    }
    let lanes = u16::try_from(timeline.lanes.len().min(height)).unwrap_or(u16::MAX);
    let rows = lanes.saturating_mul(lane_rows).min(lanes_area.height);
    let under = Rect::new(area.x, area.y + rows, area.width, 1);
    axis(timeline, under, width, theme, buffer);
    if let Some(x) = cursor(timeline, width) {
        // Only on the bars: the empty rows between lanes belong to no rank.
        let bar_rows = lane_rows.saturating_sub(1).max(1);
        for lane in 0..lanes {
            let y = area.y + lane * lane_rows;
            for row in 0..bar_rows {
                let cell = &mut buffer[(area.x + LABEL_WIDTH + x, y + row)];
                draw_cursor(cell, row == 0, theme);
            }
        }
    }
}

/// Draws the cursor into a cell of a lane's first row or of another one. Inside a bar it is a line in the bar, which
/// keeps its color. A letter of a name stays, inverted: a number that has lost a digit would be another number.
fn draw_cursor(cell: &mut ratatui::buffer::Cell, is_first_row: bool, theme: &Theme) {
    let is_letter = |c| !['·', ' ', INSIDE, GAP_BEFORE, PENDING].contains(&c);
    if cell.symbol().chars().any(is_letter) {
        cell.modifier.toggle(Modifier::REVERSED);
        return;
    }
    // Blanks in the first row are in a name; the rows below have them inside named bars, in inverse colors, and
    // outside.
    let is_outside = match cell.symbol() {
        "·" => true,
        " " => !is_first_row && !cell.modifier.contains(Modifier::REVERSED),
        _ => false,
    };
    match is_outside {
        true => cell.set_style(theme.style(Tone::Plain)),
        false => cell.set_style(theme.selected()),
    };
    cell.set_char(CURSOR);
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

/// One column of a lane.
#[derive(Clone, Copy)]
struct Cell {
    /// The character in the lane's first row: inside a wide operation, a letter of its name.
    glyph: char,
    /// The character in the lane's other rows.
    bar: char,
    style: Style,
}

/// Minimum number of columns of an operation that shows its name.
const MIN_NAMED_WIDTH: usize = 8;

/// Returns one cell per column of the lane: inside an operation, or outside. A wide operation has its name in its bar:
/// in inverse colors, or if it is pending or has failed in the bar's color.
fn cells(timeline: &Timeline, lane: &Lane, width: usize, theme: &Theme) -> Vec<Cell> {
    let outside = Cell {
        glyph: '·',
        bar: ' ',
        style: theme.style(Tone::Dim),
    };
    let mut cells = vec![outside; width];
    let span = (timeline.to_ns - timeline.from_ns).max(1) as f64;
    let column = |ns: i64| {
        let position = (ns - timeline.from_ns) as f64 / span * width as f64;
        position.clamp(0.0, width as f64) as usize
    };
    // Which operation each column shows: of several in one column, the last.
    let mut shown: Vec<Option<usize>> = vec![None; width];
    for (number, operation) in lane.spans.iter().enumerate() {
        let from = column(operation.from_ns);
        let to = operation.to_ns.map_or(width, column);
        // A short operation takes at least one cell.
        let to = to.max(from + 1).min(width);
        let Some(bar) = cells.get_mut(from..to) else {
            continue;
        };
        let (glyph, tone) = match (operation.failed, operation.pending) {
            (true, _) => (FAILED, Tone::Late),
            (false, true) => (PENDING, operation.tone),
            (false, false) => (INSIDE, operation.tone),
        };
        bar.fill(Cell {
            glyph,
            bar: glyph,
            style: theme.style(tone),
        });
        shown[from..to].fill(Some(number));
    }
    // A gap divides bars side by side.
    for index in 1..width {
        let begins = shown[index].is_some()
            && shown[index - 1].is_some()
            && shown[index] != shown[index - 1];
        let goes_on = shown.get(index + 1) == Some(&shown[index]);
        if begins && goes_on && cells[index].bar == INSIDE {
            (cells[index].glyph, cells[index].bar) = (GAP_BEFORE, GAP_BEFORE);
        }
    }
    let mut from = 0;
    for columns in shown.chunk_by(|left, right| left == right) {
        let bar = &mut cells[from..from + columns.len()];
        from += columns.len();
        let Some(operation) = columns[0].map(|number| &lane.spans[number]) else {
            continue;
        };
        if bar.len() < MIN_NAMED_WIDTH {
            continue;
        }
        // One column of the bar is kept before the name, so that two bars side by side can be distinguished.
        let room = bar.len() - 1;
        let Span { op, call, age, .. } = operation;
        // The kind of the operation says less than its number and group, and than its age. A number that was cut
        // without a sign of it would be another number.
        let with_age = |text: &str| age.as_ref().map(|age| format!("{text}, {age}"));
        let whole = format!("{op} {call}");
        let number = call.split(' ').next().unwrap_or(call);
        let wanted = [
            with_age(&whole),
            with_age(call),
            with_age(number),
            age.clone(),
            Some(whole),
        ];
        let fitting = wanted
            .into_iter()
            .flatten()
            .find(|name| text_width(name) <= room);
        let name = fitting.unwrap_or_else(|| fit(call, room));
        for (cell, letter) in bar[1..].iter_mut().zip(name.chars()) {
            cell.glyph = letter;
            if !operation.pending && !operation.failed {
                // In inverse colors, a blank is a full bar.
                cell.bar = ' ';
                cell.style = cell.style.add_modifier(Modifier::REVERSED);
            }
        }
    }
    cells
}

/// Draws the time of day under the lanes, at round times at least [`MIN_TICK_COLUMNS`] columns apart.
fn axis(timeline: &Timeline, area: Rect, width: usize, theme: &Theme, buffer: &mut Buffer) {
    let span = (timeline.to_ns - timeline.from_ns).max(1);
    let columns = |ns: i64| ns as f64 / span as f64 * width as f64;
    let steps = STEPS_MS.iter().map(|ms| ms * 1_000_000);
    let is_wide = |step: &i64| columns(*step) >= MIN_TICK_COLUMNS as f64;
    let step = steps.clone().find(is_wide).or(steps.max()).unwrap_or(span);
    let first = timeline.from_ns.saturating_add(step - 1).div_euclid(step);
    for tick in first.. {
        let ns = tick * step;
        if ns >= timeline.to_ns {
            return;
        }
        let position = columns(ns - timeline.from_ns) as usize;
        let mut text = format!("|{}", time_of_day(ns));
        if step < 1_000_000_000 {
            let millis = ns.div_euclid(1_000_000).rem_euclid(1000);
            text.push_str(&format!(".{millis:03}"));
        }
        let x = area.x + LABEL_WIDTH + u16::try_from(position).unwrap_or(0);
        // A time that was cut would be another time.
        if text.len() <= width.saturating_sub(position) {
            buffer.set_string(x, area.y, text, theme.style(Tone::Dim));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        // Two side by side are divided.
        let lane = Lane {
            spans: vec![span(0, Some(30)), span(30, Some(60))],
            ..lane
        };
        assert_eq!(drawn(&lane, 10), "███▐██····");
        // One that has failed looks unlike one that has completed.
        let failed = Span {
            failed: true,
            ..span(60, Some(80))
        };
        let lane = Lane {
            spans: vec![failed],
            ..lane
        };
        assert_eq!(drawn(&lane, 10), "······xx··");
        assert_eq!(
            drawn(&lane, 50),
            format!("{:·<30}x#3 dpxxxx{:·<10}", "", "")
        );
        // One that begins at the end of the range has no cell.
        let lane = Lane {
            spans: vec![span(100, None)],
            ..lane
        };
        assert_eq!(drawn(&lane, 10), "··········");
    }

    #[test]
    fn the_axis_has_round_times_and_none_that_does_not_fit() {
        let timeline = Timeline {
            lanes: vec![],
            from_ns: 0,
            to_ns: 50_000_000,
            cursor_ns: None,
        };
        let area = Rect::new(0, 0, LABEL_WIDTH + 50, 1);
        let mut buffer = Buffer::empty(area);
        axis(
            &timeline,
            area,
            50,
            &Theme::new(ThemeName::Dark, Depth::None),
            &mut buffer,
        );
        let cells = buffer.content().iter();
        let drawn: String = cells.map(|cell| cell.symbol()).collect();
        // There is a time every 20 ms; that at 40 ms does not fit.
        assert_eq!(drawn.trim(), "|00:00:00.000       |00:00:00.020");
    }

    fn span(from_ns: i64, to_ns: Option<i64>) -> Span {
        Span {
            from_ns,
            to_ns,
            pending: to_ns.is_none(),
            failed: false,
            op: "all_reduce".into(),
            call: "#3 dp".into(),
            age: None,
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
        assert_eq!(drawn(&lane, 40), "█#3 dp██····▒all_reduce #3 dp▒▒▒▒▒▒▒▒▒▒▒");
        assert_eq!(drawn(&lane, 18), "███··▒#3 dp▒▒▒▒▒▒▒");
        // An age has room before the kind of the operation, and no part of one is shown.
        let mut lane = lane;
        lane.spans[1].age = Some("31 s".into());
        assert_eq!(drawn(&lane, 40), "█#3 dp██····▒all_reduce #3 dp, 31 s▒▒▒▒▒");
        assert_eq!(drawn(&lane, 22), "████··▒#3 dp, 31 s▒▒▒▒");
        // A narrow bar has the number and the age, or the age.
        assert_eq!(drawn(&lane, 15), "███·▒#3, 31 s▒▒");
        assert_eq!(drawn(&lane, 11), "██·▒31 s▒▒▒");
        lane.spans[1].age = None;
        // A number or a group that does not fit is marked as cut.
        lane.spans[0].call = "#30001 dp".into();
        assert_eq!(drawn(&lane, 40), "█#30001…····▒all_reduce #3 dp▒▒▒▒▒▒▒▒▒▒▒");
        // Another operation in the bar covers no letter of the name.
        lane.spans.push(span(35, Some(36)));
        assert_eq!(drawn(&lane, 40), "█#30001…····▒▒█▒all_reduce #3 dp▒▒▒▒▒▒▒▒");
    }

    #[test]
    fn a_pending_operation_has_the_color_of_its_group_and_the_cursor_hides_no_bar() {
        let theme = Theme::new(ThemeName::Dark, Depth::True);
        let lane = Lane {
            rank: 0,
            label: String::new(),
            tone: Tone::Plain,
            spans: vec![span(10, Some(12)), span(60, None)],
        };
        let drawn = cells(&timeline(None), &lane, 50, &theme);
        let color = theme.style(Tone::Good).fg;
        assert_eq!((drawn[5].style.fg, drawn[40].style.fg), (color, color));
        let timeline = Timeline {
            lanes: vec![lane.clone(), lane],
            ..timeline(Some(10))
        };
        let area = Rect::new(0, 0, LABEL_WIDTH + 50, 3);
        let mut buffer = Buffer::empty(area);
        draw(&timeline, area, None, &theme, &mut buffer);
        let under = &buffer[(LABEL_WIDTH + 5, 0)];
        assert_eq!((under.symbol(), Some(under.fg)), ("│", color));
        assert!(under.modifier.contains(Modifier::REVERSED), "{under:?}");
        // The blank after the name's first word is in the bar too.
        let timeline = Timeline {
            cursor_ns: Some(82),
            ..timeline
        };
        assert_eq!(drawn[41].glyph, ' ');
        draw(&timeline, area, None, &theme, &mut buffer);
        let under = &buffer[(LABEL_WIDTH + 41, 0)];
        assert_eq!((under.symbol(), Some(under.fg)), ("│", color));
        assert!(under.modifier.contains(Modifier::REVERSED), "{under:?}");
    }

    #[test]
    fn the_cursor_covers_no_letter_of_a_name() {
        let theme = Theme::new(ThemeName::Dark, Depth::None);
        let lane = Lane {
            rank: 0,
            label: String::new(),
            tone: Tone::Plain,
            spans: vec![span(0, Some(40)), span(60, None)],
        };
        let area = Rect::new(0, 0, LABEL_WIDTH + 50, 2);
        let at = |cursor_ns| {
            let timeline = Timeline {
                lanes: vec![lane.clone()],
                ..timeline(cursor_ns)
            };
            let mut buffer = Buffer::empty(area);
            draw(&timeline, area, None, &theme, &mut buffer);
            buffer
        };
        let without = at(None);
        for (column, letter) in [(13, "3"), (43, "3")] {
            let x = LABEL_WIDTH + column;
            let drawn = at(Some(i64::from(column) * 2));
            assert_eq!(drawn[(x, 0)].symbol(), letter);
            // Inverted, it differs from its neighbors.
            let inverse = |buffer: &Buffer, x| buffer[(x, 0)].modifier & Modifier::REVERSED;
            assert_ne!(inverse(&drawn, x), inverse(&without, x));
            assert_ne!(inverse(&drawn, x), inverse(&drawn, x + 1));
        }
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

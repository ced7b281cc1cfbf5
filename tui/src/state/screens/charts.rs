//! Draws the trends as charts, and adds them and a timeline to screens that leave rows empty.

use super::overview::{MIN_OPERATIONS, ROOMY_ROWS, operations_pane};
use super::{ViewModel, timeline};
use crate::page::layout::{needed, needed_rows, rows_of_lane};
use crate::page::theme::Tone;
use crate::page::{Body, Line, Page, Pane, Timeline, plain, styled};
use crate::state::screen::Screen;
use crate::state::trends::Trend;

/// Characters of a bar, from low to high. The last one fills its cell, so that a bar can continue in the cell above.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The timeline that is added to a screen takes at most one in this many rows of the terminal.
const TIMELINE_SHARE: u16 = 3;

/// The tables of a screen to which panes are added keep at least one in this many rows of the terminal.
const TABLES_SHARE: u16 = 4;

/// Number of rows of each chart that is added to a screen.
const CHART_ROWS: usize = 2;

/// On a terminal of at least [`ROOMY_ROWS`] rows, fills the rows that the tables of a screen leave empty with panes:
/// the newest operations of the suspect, or else of the first rank; a timeline, which begins with the ranks in trouble;
/// and the trends. They are at the bottom, where the rows above do not move them. The timeline's own screen gets no
/// second one.
pub(in crate::state) fn fill(model: &ViewModel<'_>, screen: &Screen, page: &mut Page) {
    use Screen::{Group, Groups, GroupsOf, InFlight, Jobs, Ranks, RanksOf, Reducer, Sources};
    use Screen::{Stacks, Stragglers, Warnings, Why};
    let is_filled = match screen {
        Groups | GroupsOf(_) | Group(_) | Ranks | RanksOf(_) | InFlight | Stragglers => true,
        Warnings | Why(_) | Stacks | Sources | Jobs | Reducer | Screen::Timeline => true,
        Screen::Overview | Screen::Rank(_) | Screen::Finding(_) => false,
        Screen::Explained(_) | Screen::Compare | Screen::Help => false,
    };
    let (columns, rows) = model.size;
    let Some(last) = page.panes.len().checked_sub(1) else {
        return;
    };
    if rows < ROOMY_ROWS || !is_filled {
        return;
    }
    page.kept_rows = vec![0; page.panes.len()];
    // Another job may be selected in the list of jobs.
    let job = match screen {
        Jobs if !model.snapshot.job.is_empty() => format!(": job {}", model.snapshot.job),
        _ => String::new(),
    };
    let spare = |page: &Page| rows.saturating_sub(needed(page, model.size));
    let mut added = Vec::new();
    if *screen != Screen::Timeline {
        let lane_rows = rows / TIMELINE_SHARE - 2;
        let timeline = timeline::of_first(model, usize::from(lane_rows));
        let kept = match &timeline {
            Body::Timeline(timeline) => rows_of_timeline(timeline, lane_rows),
            _ => 0,
        };
        added.push(("timeline", timeline, kept));
    }
    if has_trends(model) {
        let trends = Body::Text(trends(model, columns, CHART_ROWS));
        added.push(("trends", trends, 0));
    }
    for (title, body, kept) in added {
        let pane = Pane {
            title: format!("{title}{job}"),
            body,
        };
        let height = needed_rows(&pane, columns).max(kept);
        if height <= spare(page) {
            page.panes.push(pane);
            page.kept_rows.push(kept);
        }
    }
    // The tables keep their share of the rows even if they do not fill it now: otherwise the operations below would
    // move when the tables grow.
    let above: u16 = (page.panes[..last].iter())
        .map(|pane| needed_rows(pane, columns))
        .fold(0, u16::saturating_add);
    let (own, least) = match &page.panes[last].body {
        // The number of lanes does not change as long as the job has its ranks.
        Body::Timeline(timeline) => {
            let lanes = u16::try_from(timeline.lanes.len()).unwrap_or(u16::MAX);
            (
                rows_of_timeline(timeline, lanes.saturating_add(spare(page))),
                0,
            )
        }
        _ => (needed_rows(&page.panes[last], columns), rows / TABLES_SHARE),
    };
    let unused = least.saturating_sub(above.saturating_add(own));
    page.kept_rows[last] = own.saturating_add(unused.min(spare(page)));
    let left = spare(page);
    // The title and the headings take a row each.
    let operations = usize::from(left.saturating_sub(2));
    if operations >= MIN_OPERATIONS {
        let mut pane = operations_pane(model, operations);
        pane.title.push_str(&job);
        page.panes.insert(last + 1, pane);
        page.kept_rows.insert(last + 1, left);
    } else {
        page.kept_rows[last] = page.kept_rows[last].saturating_add(left);
    }
}

/// Whether there are trends to show: a replay of dumps has figures of one moment only.
pub(in crate::state) fn has_trends(model: &ViewModel<'_>) -> bool {
    let trends = model.trends.until(model.snapshot.at.wall_ns);
    !model.is_replay || trends.iter().any(|trend| trend.values.len() > 1)
}

/// The rows of a pane with this timeline, whose lanes share `lane_rows` rows. The title and the axis take a row each.
fn rows_of_timeline(timeline: &Timeline, lane_rows: u16) -> u16 {
    let lanes = u16::try_from(timeline.lanes.len()).unwrap_or(u16::MAX);
    lanes
        .saturating_mul(rows_of_lane(timeline, lane_rows))
        .saturating_add(2)
}

/// `steps/s   9.8  ▁▂▃▅▇  max 12`: one chart below the other, each with bars of `height` rows, the newest value on the
/// right of a line of `width` characters. The highest bar ends below the top, so that the bars of two charts do not
/// touch.
pub(super) fn trends(model: &ViewModel<'_>, width: u16, height: usize) -> Vec<Line> {
    let trends = model.trends.until(model.snapshot.at.wall_ns);
    // 36 of the characters are for the texts around the bars.
    let room = usize::from(width).saturating_sub(36).max(8);
    let number = |value: Option<f64>| match value {
        Some(value) if value >= 100.0 => format!("{value:.0}"),
        Some(value) if value >= 10.0 => format!("{value:.1}"),
        Some(value) if value > 0.0 && value < 0.005 => "<0.01".to_owned(),
        Some(value) => format!("{value:.2}"),
        None => "--".to_owned(),
    };
    let lines = |trend: &Trend| {
        if !trend.is_known() {
            let unknown = format!("  {:<9}{:>7}  {}", trend.name, "--", trend.unknown);
            return vec![vec![styled(unknown, Tone::Dim)]];
        }
        let newest = &trend.values[trend.values.len().saturating_sub(room)..];
        let max = newest.iter().flatten().copied().reduce(f64::max);
        // The height of a bar is in eighths of a row: the lowest bar has one, and the highest has all but one.
        let max_eighths = BARS.len() * height - 1;
        let eighths = |value: f64| match max {
            Some(max) if max > 0.0 => 1 + (value / max * (max_eighths - 1) as f64).round() as usize,
            _ => 1,
        };
        let bar = |value: &Option<f64>, row: usize| {
            let bar_eighths = value.map_or(0, |value| eighths(value).min(max_eighths));
            match bar_eighths.saturating_sub(row * BARS.len()) {
                0 => ' ',
                filled => BARS[filled.min(BARS.len()) - 1],
            }
        };
        let blank = " ".repeat(room.saturating_sub(newest.len()));
        let now = number(trend.values.last().copied().flatten());
        (0..height)
            .rev()
            .map(move |row| {
                let bars: String = newest.iter().map(|value| bar(value, row)).collect();
                let first = row + 1 == height;
                let mut line = match first {
                    true => vec![
                        styled(format!("  {:<9}", trend.name), Tone::Dim),
                        plain(format!("{now:>7}  ")),
                    ],
                    false => vec![plain(" ".repeat(20))],
                };
                line.push(styled(format!("{blank}{bars}"), Tone::Accent));
                if first {
                    line.push(styled(format!("  max {}", number(max)), Tone::Dim));
                }
                line
            })
            .collect::<Vec<Line>>()
    };
    trends.iter().flat_map(lines).collect()
}

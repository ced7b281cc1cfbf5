//! The first screen: whether the job is stuck, the rank at fault, and since when.

use super::charts::trends;
use super::{
    ViewModel, finding, groups, in_flight, jobs, look_further, name_ranks, rank, ranks, timeline,
    warnings, why,
};
use crate::keys::Action;
use crate::page::layout::{is_whole, needed, spare_rows};
use crate::page::table::{Cell, Headings, Row, Table, Target};
use crate::page::theme::Tone;
use crate::page::{Body, Grid, Line, Page, Pane, Strip, plain, styled};
use crate::state::index::{Marked, since_ms};
use rcomm_analyzer::causes::{self, Link};
use rcomm_analyzer::format::{count, duration_ms};
use rcomm_analyzer::print::human::format_ranks_read;
use rcomm_analyzer::{Finding, RankState, Report, Until, Verdict};
use rcomm_recorder::model::Rank;
use rcomm_recorder::model::text::time_of_day;
use serde::Deserialize;
use std::collections::HashMap;

/// Minimum number of rows of a terminal for the additional panes.
pub(super) const ROOMY_ROWS: u16 = 36;

/// Minimum number of columns of a terminal for two columns of panes.
const WIDE_COLUMNS: u16 = 160;

/// Maximum number of ranks in the timeline of the first screen.
const MAX_LANES: usize = 32;

/// Minimum number of rows of a terminal for the line with a command.
const TALL_ROWS: u16 = 24;

/// A pane of the first screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OverviewPane {
    /// The findings of the analysis and the problems of its input.
    Warnings,
    /// Process groups.
    Groups,
    /// Collectives and messages in flight.
    InFlight,
    /// One character per rank or host.
    Ranks,
    /// Steps per second, bandwidth, arrival lag and the age of the oldest pending operation over time.
    Trends,
    /// The root causes, and the ranks that wait because of them.
    Why,
    /// A command for the suspect, facts about its process, host and GPU, and the end of its log.
    Look,
    /// The operations of up to 32 ranks over time, those that are marked or in trouble first.
    Timeline,
    /// The newest operations of the suspect, or else of the first rank.
    Operations,
}

impl OverviewPane {
    /// The default panes on a terminal of this size; `blocked` says whether there are root causes. Below [`ROOMY_ROWS`]
    /// rows, only the most important ones; from [`ROOMY_ROWS`] rows and [`WIDE_COLUMNS`] columns on, also the timeline.
    fn default_panes((columns, rows): (u16, u16), blocked: bool) -> &'static [Self] {
        use OverviewPane::{Groups, InFlight, Look, Ranks, Timeline, Trends, Warnings, Why};
        match (rows >= ROOMY_ROWS, blocked) {
            (true, true) if columns >= WIDE_COLUMNS => &[
                Warnings, Why, Look, Groups, InFlight, Trends, Timeline, Ranks,
            ],
            (true, false) if columns >= WIDE_COLUMNS => {
                &[Warnings, Trends, Groups, InFlight, Timeline, Ranks]
            }
            (true, true) => &[Warnings, Why, Look, Groups, InFlight, Trends, Ranks],
            (true, false) => &[Warnings, Trends, Groups, InFlight, Ranks],
            (false, true) => &[Warnings, Groups, Ranks],
            (false, false) => &[Warnings, Trends, Groups, Ranks],
        }
    }

    /// The panes that are added to the default ones, in this order, as long as every pane then shows all of its rows.
    /// If no rank is at fault, a terminal with few rows gets none: the job runs, and the rows of its operations would
    /// come and go.
    pub(in crate::state) fn additional_panes(
        (_, rows): (u16, u16),
        blocked: bool,
    ) -> &'static [Self] {
        match (rows >= ROOMY_ROWS, blocked) {
            (true, _) => &[Self::Timeline, Self::Operations],
            (false, true) => &[Self::InFlight],
            (false, false) => &[],
        }
    }

    /// The panes of a screen with enough rows, from top to bottom: those that the user chose, or the default ones.
    pub(in crate::state) fn chosen(chosen: &[Self], size: (u16, u16), blocked: bool) -> &[Self] {
        if chosen.is_empty() {
            Self::default_panes(size, blocked)
        } else {
            chosen
        }
    }

    fn pane(self, model: &ViewModel<'_>) -> Pane {
        let (title, body) = match self {
            Self::Warnings => {
                let mut table = Table {
                    headings: Headings::Hidden,
                    ..warnings::table(model, warnings::Muted::Hidden)
                };
                refer_to_headline(model, &mut table);
                let title = format!("warnings: {}", warnings::summary(model));
                (title, Body::Table(table))
            }
            Self::Groups => ("groups".into(), Body::Table(groups::table(model, None))),
            Self::InFlight => {
                let table = in_flight::table(model, |_| true);
                (in_flight::title(model).into(), Body::Table(table))
            }
            Self::Ranks if is_roomy(model) && model.index.hosts.len() > 1 => {
                (heat_map_title(), ranks::heat_map(model))
            }
            Self::Ranks => return strip_pane(model),
            Self::Trends => (
                "trends".into(),
                Body::Text(trends(model, column_width(model), 1)),
            ),
            Self::Why => ("why".into(), Body::Table(why::table_of_hang(model))),
            Self::Timeline => ("timeline".into(), timeline::of_first(model, MAX_LANES)),
            Self::Operations => return operations_pane(model, MIN_OPERATIONS),
            Self::Look => {
                let suspect = model.index.suspect;
                return suspect
                    .and_then(|rank| look_further::pane(model, rank, column_width(model)))
                    .unwrap_or_else(|| Pane {
                        title: "look further".into(),
                        body: Body::Text(vec![]),
                    });
            }
        };
        Pane { title, body }
    }
}

/// The first screen with these panes.
pub(in crate::state) fn page_of(
    model: &ViewModel<'_>,
    panes: &[OverviewPane],
    kept_rows: &HashMap<OverviewPane, u16>,
) -> Page {
    let blocked = !model.index.roots().is_empty();
    let mut head = vec![headline(model)];
    head.extend(doubt_lines(model));
    head.extend(next_line(model));
    head.extend(remains_line(model));
    head.extend(unknown_size_line(model));
    if !panes.contains(&OverviewPane::Look) && model.size.1 >= TALL_ROWS {
        head.extend(look_further::line(model));
    }
    if !panes.contains(&OverviewPane::Why) {
        head.extend(why_line(model));
    }
    head.extend(jobs::others(model));
    head.extend(simulated_fault(model));
    let two_columns = has_two_columns(model);
    let right = panes.iter().enumerate().filter(|(_, pane)| {
        use OverviewPane::{Groups, InFlight, Trends};
        // Without a rank at fault, the trends are what the left column has.
        let is_right = matches!(pane, Groups | InFlight) || blocked && matches!(pane, Trends);
        two_columns && is_right
    });
    let mut page = Page {
        head,
        right: right.map(|(index, _)| index).collect(),
        panes: panes.iter().map(|pane| pane.pane(model)).collect(),
        kept_rows: (panes.iter())
            .map(|pane| kept_rows.get(pane).copied().unwrap_or(0))
            .collect(),
    };
    replace_cut_heat_map(model, &mut page);
    enlarge_trends(model, panes, &mut page);
    if let Some(index) = panes
        .iter()
        .position(|pane| *pane == OverviewPane::Operations)
    {
        let spare = model.size.1.saturating_sub(needed(&page, model.size));
        // One of two columns also has the rows by which the other is longer.
        let more = match two_columns {
            true => spare_rows(&page, index, model.size),
            false => 0,
        };
        page.panes[index] = operations_pane(model, MIN_OPERATIONS + usize::from(spare + more));
    }
    page
}

/// The fewest operations for which the first screen has a pane.
pub(super) const MIN_OPERATIONS: usize = 3;

/// The rank whose newest operations the first screen shows: the suspect, or else the first of all.
pub(in crate::state) fn first_rank(model: &ViewModel<'_>) -> Option<Rank> {
    let first = model.snapshot.ranks.first().map(|view| view.rank);
    model.index.suspect.or(first)
}

/// The newest operations of one rank, at most `rows` of them.
pub(super) fn operations_pane(model: &ViewModel<'_>, rows: usize) -> Pane {
    let rank = first_rank(model);
    let view = rank.and_then(|rank| model.snapshot.rank(rank));
    let mut table = view
        .map(|view| rank::operations(model, view))
        .unwrap_or_default();
    table.rows.truncate(rows);
    let whose = rank.map_or_else(String::new, |rank| {
        format!(", of {}", model.rank_label(rank))
    });
    Pane {
        title: format!("{}{whose}", rank::LAST_OPERATIONS),
        body: Body::Table(table),
    }
}

/// A heat map that does not fit would hide ranks, and perhaps the one at fault: the strip takes its place.
fn replace_cut_heat_map(model: &ViewModel<'_>, page: &mut Page) {
    let is_cut = |(index, pane): (usize, &Pane)| match &pane.body {
        Body::Grid(grid) => {
            !is_whole(page, index, model.size)
                || grid.columns.len() > usize::from(model.size.0.saturating_sub(Grid::LABEL_WIDTH))
        }
        _ => false,
    };
    let cut = page.panes.iter().enumerate().position(is_cut);
    if let Some(index) = cut {
        page.panes[index] = strip_pane(model);
    }
}

/// For a simulated job whose fault has not been found yet, a line that says when its fault begins or began.
fn simulated_fault(model: &ViewModel<'_>) -> Option<Line> {
    let fault_ns = model.fault_ns.filter(|_| model.index.head.is_none())?;
    let left_s = (fault_ns - model.wall_ns) as f64 / 1e9;
    let text = if left_s > 0.0 {
        format!("simulated job: its fault begins in {:.0} s", left_s.ceil())
    } else {
        format!(
            "simulated job: its fault began {:.0} s ago and has not been found yet",
            -left_s
        )
    };
    Some(vec![styled(text, Tone::Dim)])
}

/// Whether panes are drawn in two columns. A user's own order of panes is kept: one below the other.
pub(in crate::state) fn has_two_columns(model: &ViewModel<'_>) -> bool {
    is_roomy(model) && model.size.0 >= WIDE_COLUMNS && model.layout.is_empty()
}

/// The width of a pane that is in one of two columns where there are two.
fn column_width(model: &ViewModel<'_>) -> u16 {
    match has_two_columns(model) {
        true => model.size.0.saturating_sub(1) / 2,
        false => model.size.0,
    }
}

/// Whether the terminal has enough rows for the additional panes.
fn is_roomy(model: &ViewModel<'_>) -> bool {
    model.size.1 >= ROOMY_ROWS
}

/// The name of a report's verdict in the view, and its tone, whatever findings are muted.
pub(super) fn verdict(report: &Report) -> (&'static str, Tone) {
    match report.verdict {
        Verdict::Stuck if report.has_failed() => ("FAILED", Tone::Bad),
        Verdict::Healthy => ("HEALTHY", Tone::Good),
        Verdict::Running => ("RUNNING", Tone::Good),
        Verdict::Stuck => ("STUCK", Tone::Bad),
        Verdict::Mismatch => ("MISMATCH", Tone::Bad),
        Verdict::Slow => ("SLOW", Tone::Late),
        Verdict::Ended => ("ENDED", Tone::Good),
        Verdict::Cancelled => ("CANCELLED", Tone::Silent),
        Verdict::Crashed => ("CRASHED", Tone::Bad),
        Verdict::Inconclusive => ("INCONCLUSIVE", Tone::Silent),
    }
}

/// The finding that the first line shows; `None` if there is none. The end of a job replaces warnings about its run.
fn head_finding<'a>(model: &ViewModel<'a>) -> Option<&'a Finding> {
    let report = &model.snapshot.report;
    let shown = report.end.is_none() || report.lead().is_some();
    let index = model.index.head.filter(|_| shown)?;
    Some(&report.findings[index])
}

/// The first line: the verdict, then the sentence of the finding or of the job's end, or else one about what is
/// pending.
fn headline(model: &ViewModel<'_>) -> Line {
    let report = &model.snapshot.report;
    let head = head_finding(model);
    let (word, tone) = match (report.verdict, head) {
        // No operation hangs or mismatches, but there is a finding of another kind.
        (Verdict::Healthy | Verdict::Running, Some(_)) => ("WARNING", Tone::Late),
        _ => verdict(report),
    };
    let mut line = vec![styled(format!(" {word} "), tone)];
    match head {
        Some(finding) => {
            if matches!(report.verdict, Verdict::Stuck | Verdict::Mismatch) {
                line.extend(since(model, finding).map(|text| styled(text, tone)));
            }
            line.push(plain(model.sentence(finding)));
        }
        None if let Some(end) = &report.end => line.push(plain(end.sentence.clone())),
        None => line.push(plain(report.calm())),
    }
    line
}

/// The age and the beginning of a finding: `for 102 s, since 14:03:27 UTC  ` or, if the age is counted to the time of
/// the records' files, `since 14:03:27 UTC, 5.0 s before the files were written  `. Without the age if it is unknown or
/// below one second; `None` if the beginning is unknown, even if an age is known.
fn since(model: &ViewModel<'_>, finding: &Finding) -> Option<String> {
    let age_ms = match finding.since {
        Some(since) => since.age_ms,
        None => since_ms(model.snapshot, finding),
    };
    let age_ms = age_ms.filter(|ms| *ms >= 1e3);
    let from_age = age_ms.zip(model.as_of_ns);
    let from_age = from_age.map(|(ms, as_of_ns)| as_of_ns - (ms * 1e6) as i64);
    let at_ns = finding.since.map(|since| since.at_ns).or(from_age)?;
    let since = time_of_day(at_ns);
    if let Some(Until::Written) = finding.since.map(|since| since.until) {
        let before = age_ms.map_or_else(String::new, |ms| {
            format!(", {} before the files were written", duration_ms(ms))
        });
        return Some(format!("since {since} UTC{before}  "));
    }
    let age = model
        .age(age_ms)
        .map_or_else(String::new, |ms| format!("for {}, ", duration_ms(ms)));
    Some(format!("{age}since {since} UTC  "))
}

/// The lines with the doubts of the headline's finding; see [`finding::doubts_if_unsure`].
fn doubt_lines(model: &ViewModel<'_>) -> Vec<Line> {
    let finding = head_finding(model);
    let mut lines = finding.map_or_else(Vec::new, |it| finding::doubts_if_unsure(model, it));
    for line in &mut lines {
        line[0].text.insert_str(0, "   ");
    }
    lines
}

/// The line with the next step: `next: look at what rank 2 does after train.py:64`. `None` if the headline is not
/// about a finding, or the finding has no next step.
fn next_line(model: &ViewModel<'_>) -> Option<Line> {
    let mut line = finding::next(head_finding(model)?)?;
    line[0].text.insert_str(0, "   ");
    Some(line)
}

/// The line about what is left of the records of a job that is over. `None` if the job is not over, or no source knows
/// what is left.
fn remains_line(model: &ViewModel<'_>) -> Option<Line> {
    model.snapshot.report.end.as_ref()?;
    let mut sources = model.snapshot.sources.iter();
    let remains = sources.find_map(|source| source.remains.clone())?;
    let mut line = vec![styled("   records: ", Tone::Accent), plain(remains)];
    let export = model.hint("; ", &[Action::Export], "exports the report");
    line.push(styled(export, Tone::Accent));
    Some(line)
}

/// If no record states how many ranks the job has, the line that says so: the job may have ranks that were not read and
/// that no view can show.
fn unknown_size_line(model: &ViewModel<'_>) -> Option<Line> {
    let input = &model.snapshot.report.input;
    let read = format_ranks_read(input);
    let text = format!("   read {read}; no record states how many ranks the job has");
    input.may_have_more.then(|| vec![styled(text, Tone::Dim)])
}

/// In the row of the finding that the first line shows, replaces the sentence with a reference to that line.
fn refer_to_headline(model: &ViewModel<'_>, table: &mut Table) {
    let Some(finding) = head_finding(model) else {
        return;
    };
    let is_of_headline = |row: &&mut Row| row.target == Some(Target::Finding(finding.id));
    if let Some(row) = table.rows.iter_mut().find(is_of_headline)
        && let Some(cell) = row.cells.last_mut()
    {
        let more = match warnings::ways_to_more(model, "; ") {
            // A printed page has no keys.
            keys if keys.is_empty() => format!("; rcomm-fr explain {} explains it", finding.code),
            keys => keys,
        };
        *cell = Cell::text(format!("see above{more}"));
    }
}

/// Maximum number of rows of the chart of one trend.
const MAX_CHART_ROWS: u16 = 3;

/// On terminals of at least [`ROOMY_ROWS`] rows, divides the rows that no pane needs evenly among the charts of the
/// trends, up to [`MAX_CHART_ROWS`] each. The rest stays empty.
fn enlarge_trends(model: &ViewModel<'_>, panes: &[OverviewPane], page: &mut Page) {
    let trends_index = panes.iter().position(|pane| *pane == OverviewPane::Trends);
    let Some(index) = trends_index.filter(|_| is_roomy(model)) else {
        return;
    };
    let spare = model.size.1.saturating_sub(needed(page, model.size));
    let drawn = model.trends.until(model.snapshot.at.wall_ns);
    let drawn = drawn.iter().filter(|trend| trend.is_known());
    let charts = u16::try_from(drawn.count()).unwrap_or(u16::MAX).max(1);
    let height = (1 + spare / charts).min(MAX_CHART_ROWS);
    page.panes[index].body = Body::Text(trends(model, column_width(model), usize::from(height)));
}

/// `why: rank 517 <- dp_5 #9133 (15 ranks wait) <- tp_64..71 (56 ranks wait), pp_3 #7 (1 rank waits)`: the ranks right
/// of an arrow wait for those left of it. `None` if there are no root causes or no ranks wait.
fn why_line(model: &ViewModel<'_>) -> Option<Line> {
    let roots = model.index.roots();
    if roots.is_empty() {
        return None;
    }
    let chain = causes::consequences(&model.snapshot.report, roots);
    if chain.is_empty() {
        return None;
    }
    let mut text = format!("   why: {}", name_ranks(roots, 4));
    let mut level = 0;
    let name = |link: &Link| {
        let groups = model.labels(&link.groups);
        match link.seq {
            (a, b) if a == b => format!("{groups} #{a}"),
            _ => groups,
        }
    };
    for link in &chain {
        // Messages have numbers of their own: a message and a collective of a group may have the same one.
        let alike = chain.iter().filter(|other| name(other) == name(link));
        let op = match alike.count() {
            1 => String::new(),
            _ => format!("{} ", link.op),
        };
        let name = name(link);
        // Links of one level wait for the previous level, not for each other.
        let sign = if link.level == level { "," } else { " <-" };
        level = link.level;
        let verb = why::verb(model, &link.ranks);
        let ranks = count(link.ranks.len() as u64, "rank");
        text.push_str(&format!("{sign} {op}{name} ({ranks} {verb})"));
    }
    // The hint is left out if it does not fit: the footer shows the key too.
    let hint = model.hint("  ", &[Action::Why], "");
    let fits = text.chars().count() + hint.len() <= usize::from(model.size.0);
    let mut line = vec![styled(text, Tone::Dim)];
    line.extend(fits.then(|| styled(hint, Tone::Accent)));
    Some(line)
}

/// Whether the strip shows hosts instead of ranks: if there are several hosts and more than 256 ranks, so that a cell
/// for each rank would take too many rows.
fn by_host(model: &ViewModel<'_>) -> bool {
    let hosts = &model.index.hosts;
    hosts.len() > 1 && model.snapshot.ranks.len() > 256
}

/// The meanings of the characters that show the states of ranks.
fn legend() -> String {
    let mut legend = String::new();
    for state in RankState::ALL {
        let (glyph, word) = (state.mark().glyph, state.word());
        legend.push_str(&format!(" {glyph}={word}"));
    }
    legend
}

/// The title of the heat map, with its legend.
fn heat_map_title() -> String {
    format!("ranks: host by host {}", legend())
}

/// The ranks or hosts as a strip, and its title with the legend.
fn strip_pane(model: &ViewModel<'_>) -> Pane {
    // The pane keeps its name, by which the focus stays on it.
    let title = match by_host(model) {
        true => "ranks, by host",
        false => "ranks",
    };
    Pane {
        title: format!("{title} {}", legend()),
        body: Body::Strip(strip(model)),
    }
}

fn strip(model: &ViewModel<'_>) -> Strip {
    let shown = |rank: Rank| {
        let subject = rcomm_analyzer::filter::Subject {
            state: Some(model.index.filter_words(model.snapshot, rank)),
            ..Default::default()
        };
        model.passes_rank(rank, &subject)
    };
    let dot = |state: RankState, visible: bool| {
        let mark = state.mark();
        let tone = if visible { mark.tone } else { Tone::Dim };
        let severity = if visible { state as u8 + 1 } else { 0 };
        (
            severity,
            crate::page::Dot {
                glyph: mark.glyph,
                tone,
            },
        )
    };
    let ranks = &model.snapshot.ranks;
    let states = &model.index.states;
    if by_host(model) {
        let dots = model.index.hosts.iter().map(|host| {
            let mut all = host.ranks.iter();
            let visible = model.filter.is_empty() || all.any(|&index| shown(ranks[index].rank));
            let worst = host.ranks.iter().map(|&index| states[index]).max();
            let worst = worst.unwrap_or(RankState::Unread);
            dot(worst, visible)
        });
        Strip {
            unit: "host",
            dots: dots.collect(),
        }
    } else {
        let all = ranks.iter().zip(states);
        Strip {
            unit: "rank",
            dots: all
                .map(|(view, &state)| dot(state, shown(view.rank)))
                .collect(),
        }
    }
}

/// An operation with its sequence number and group: `all_reduce #41 on dp_5`.
pub(super) fn call(
    model: &ViewModel<'_>,
    op: &str,
    seq: u64,
    group: &rcomm_analyzer::GroupRef,
) -> String {
    format!("{op} #{seq} on {}", model.labels([group]))
}

//! The ranks: a heat map of hosts × local ranks, and tables of some ranks.

use super::ViewModel;
use crate::keys::Action;
use crate::page::table::{Cell, Headings, Mark, Row, Table, Target, number, rest, text};
use crate::page::theme::Tone;
use crate::page::{Body, Dot, Grid, Line, Page, Pane, plain, styled};
use crate::state::index::{Host, Marked};
use rcomm_analyzer::filter::Subject;
use rcomm_analyzer::{RankReport, RankState};
use rcomm_recorder::model::Rank;
use rcomm_recorder::model::text::{age, duration_ms, millis};
use std::collections::HashMap;

/// The metric of the heat map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Metric {
    /// The rank's state.
    #[default]
    State,
    /// Median arrival lag.
    Lag,
    /// Share of the job's time that was lost because of the rank.
    Share,
    /// Age of the rank's oldest pending operation.
    Age,
    /// Operations issued and not completed.
    Pending,
    /// Operations that the rank's recorder could not keep.
    Lost,
}

impl Metric {
    /// All metrics with their names, in the order in which the key goes through them.
    pub const ALL: &'static [(Self, &'static str)] = &[
        (Self::State, "state"),
        (Self::Lag, "arrival lag"),
        (
            Self::Share,
            "share of the job's time that was lost because of it",
        ),
        (Self::Age, "age of the oldest pending operation"),
        (Self::Pending, "operations pending"),
        (Self::Lost, "operations lost by the recorder"),
    ];

    /// The metric after this one.
    pub fn next(self) -> Self {
        let index = Self::ALL.iter().position(|(m, _)| *m == self).unwrap_or(0);
        Self::ALL[(index + 1) % Self::ALL.len()].0
    }

    fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(m, _)| *m == self);
        found.map_or("", |(_, name)| name)
    }

    /// Lower limits of the shades 1 to 3: ms for lags and ages, a share from 0 to 1, or a count. The state has no
    /// shades. The web page's `assets/ranks.js` has the same limits for the metrics that it shows.
    fn steps(self) -> [f64; 3] {
        match self {
            Self::State => [0.0; 3],
            Self::Lag => [0.2, 1.0, 4.0],
            Self::Share => [0.01, 0.03, 0.1],
            Self::Age => [100.0, 1_000.0, 5_000.0],
            Self::Pending => [1.0, 4.0, 64.0],
            Self::Lost => [1.0, 100.0, 10_000.0],
        }
    }

    /// The shade of a value, 0..=3.
    fn shade(self, value: f64) -> usize {
        self.steps().iter().filter(|&&step| value >= step).count()
    }

    /// A value with its unit.
    fn format(self, value: f64) -> String {
        match self {
            Self::Lag => duration_ms(value),
            Self::Age => age(Some(value)),
            Self::Share => format!("{}%", value * 100.0),
            _ => format!("{value}"),
        }
    }
}

/// The character and the tone of each shade, from low to high.
const SHADES: [(char, Tone); 4] = [
    ('.', Tone::Good),
    ('o', Tone::Plain),
    ('O', Tone::Late),
    ('@', Tone::Bad),
];

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    let ages = pending_ages(model);
    let grid = grid(model, &ages);
    let title = if is_by_host(model, &hosts(model)) {
        "ranks: host by host, local ranks downwards"
    } else {
        "ranks: in order, from left to right"
    };
    let mut head: Vec<Line> = vec![vec![
        styled(model.metric.name(), Tone::Title),
        plain(model.hint("  ", &[Action::Metric], "next metric")),
    ]];
    head.extend(pattern(model, &ages).map(|text| vec![plain("pattern: "), plain(text)]));
    Page {
        head,
        panes: vec![Pane {
            title: title.into(),
            body: Body::Grid(grid),
        }],
        ..Page::default()
    }
}

/// The heat map without its legend, for the first screen, where the title of the pane has the legend.
pub(super) fn heat_map(model: &ViewModel<'_>) -> Body {
    Body::Grid(Grid {
        legend: vec![],
        ..grid(model, &pending_ages(model))
    })
}

/// The age of each rank's oldest pending operation, ms. Ranks without a pending operation of known age are left out.
fn pending_ages(model: &ViewModel<'_>) -> HashMap<Rank, f64> {
    let mut ages: HashMap<Rank, f64> = HashMap::new();
    for instance in model.snapshot.report.pending() {
        if let Some(ms) = model.age_of(instance) {
            for &rank in &instance.joined {
                let known = ages.entry(rank).or_default();
                *known = known.max(ms);
            }
        }
    }
    ages
}

/// The hosts; those with a problem while only problems are shown.
fn hosts<'a>(model: &'a ViewModel<'_>) -> Vec<&'a Host> {
    let is_listed = |host: &&Host| {
        let has_problem = |&index: &usize| model.index.states[index].is_problem();
        !model.problems_only || host.ranks.iter().any(has_problem)
    };
    model.index.hosts.iter().filter(is_listed).collect()
}

/// Whether the heat map has a column for each of these hosts; else it has the ranks in reading order.
fn is_by_host(model: &ViewModel<'_>, hosts: &[&Host]) -> bool {
    model.index.hosts.len() > 1
        && hosts.iter().any(|host| !host.name.is_empty())
        && hosts.iter().any(|host| host.ranks.len() > 1)
}

fn grid(model: &ViewModel<'_>, ages: &HashMap<Rank, f64>) -> Grid {
    let hosts = hosts(model);
    let dot = |index: usize| (model.snapshot.ranks[index].rank, dot(model, index, ages));
    if is_by_host(model, &hosts) {
        let height = hosts.iter().map(|host| host.ranks.len()).max().unwrap_or(0);
        let row = |local: usize| -> Vec<Option<(Rank, Dot)>> {
            let cells = hosts.iter();
            cells
                .map(|host| host.ranks.get(local).map(|&index| dot(index)))
                .collect()
        };
        Grid {
            columns: hosts.iter().map(|host| host.name.to_string()).collect(),
            rows: (0..height).map(|local| local.to_string()).collect(),
            dots: (0..height).map(row).collect(),
            legend: legend(model),
        }
    } else {
        // Without hosts, with a single one, or with one rank per host, ranks are in reading order.
        const ROW_LENGTH: usize = 32;
        let all = model.snapshot.ranks.len();
        let rows: Vec<usize> = (0..all).step_by(ROW_LENGTH).collect();
        let label = |&index: &usize| model.snapshot.ranks[index].rank.to_string();
        let row = |&from: &usize| -> Vec<Option<(Rank, Dot)>> {
            (from..from + ROW_LENGTH)
                .map(|index| (index < all).then(|| dot(index)))
                .collect()
        };
        Grid {
            columns: (0..ROW_LENGTH.min(all)).map(|n| format!("+{n}")).collect(),
            rows: rows.iter().map(label).collect(),
            dots: rows.iter().map(row).collect(),
            legend: legend(model),
        }
    }
}

/// The value of the metric for a rank; `None` if it is unknown, or the metric is the state.
fn value(
    model: &ViewModel<'_>,
    rank: Rank,
    report: &RankReport,
    ages: &HashMap<Rank, f64>,
) -> Option<f64> {
    match model.metric {
        Metric::State => None,
        Metric::Lag => report.lag_p50_ms,
        Metric::Share => report.lag_share,
        Metric::Age => Some(ages.get(&rank).copied().unwrap_or(0.0)),
        Metric::Pending => Some(report.pending as f64),
        Metric::Lost => {
            let status = model.snapshot.rank(rank)?.first_dump()?.status.as_ref()?;
            Some(status.dropped as f64)
        }
    }
}

/// The cell of the rank at this index; blank if it does not pass the filter, or has no problem while only problems are
/// shown.
fn dot(model: &ViewModel<'_>, index: usize, ages: &HashMap<Rank, f64>) -> Dot {
    let view = &model.snapshot.ranks[index];
    let state = model.index.states[index];
    let report = model.index.report(model.snapshot, view.rank);
    let (glyph, tone) = if model.metric == Metric::State {
        let mark = state.mark();
        (mark.glyph, mark.tone)
    } else {
        match report.and_then(|report| value(model, view.rank, report, ages)) {
            None => ('?', Tone::Silent),
            Some(value) => SHADES[model.metric.shade(value)],
        }
    };
    let subject = Subject {
        state: Some(model.index.filter_words(model.snapshot, view.rank)),
        lag_ms: Some(report.and_then(|r| r.lag_p50_ms).unwrap_or(f64::NAN)),
        age_ms: Some(ages.get(&view.rank).copied().unwrap_or(f64::NAN)),
        ..Subject::default()
    };
    let wanted =
        model.passes_rank(view.rank, &subject) && (!model.problems_only || state.is_problem());
    if wanted {
        Dot { glyph, tone }
    } else {
        Dot {
            glyph: ' ',
            tone: Tone::Dim,
        }
    }
}

fn legend(model: &ViewModel<'_>) -> Line {
    let mut line = Vec::new();
    if model.metric == Metric::State {
        for state in RankState::ALL {
            let (Mark { glyph, tone }, word) = (state.mark(), state.word());
            line.push(styled(glyph.to_string(), tone));
            line.push(plain(format!(" {word}  ")));
        }
        return line;
    }
    let steps = model.metric.steps();
    for (index, (glyph, tone)) in SHADES.iter().enumerate() {
        line.push(styled(glyph.to_string(), *tone));
        let bound = match steps.get(index) {
            Some(&step) => format!(" <{}  ", model.metric.format(step)),
            None => format!(" >={}  ", model.metric.format(steps[2])),
        };
        line.push(plain(bound));
    }
    line.push(styled("?", Tone::Silent));
    line.push(plain(" no data"));
    line
}

/// Describes what the conspicuous ranks (by state, or of the two highest shades) have in common: a host, a local rank
/// on several hosts, or nothing. A single rank is named. `None` if no rank or every rank is conspicuous.
fn pattern(model: &ViewModel<'_>, ages: &HashMap<Rank, f64>) -> Option<String> {
    let ranks = &model.snapshot.ranks;
    let stands_out = |index: usize| {
        if model.metric == Metric::State {
            return matches!(
                model.index.states[index],
                RankState::Root | RankState::Late | RankState::Silent | RankState::Unread
            );
        }
        let rank = ranks[index].rank;
        let report = model.index.report(model.snapshot, rank);
        let value = report.and_then(|report| value(model, rank, report, ages));
        value.is_some_and(|value| model.metric.shade(value) >= 2)
    };
    let conspicuous: Vec<usize> = (0..ranks.len())
        .filter(|&index| stands_out(index))
        .collect();
    // If all ranks are affected there is no pattern.
    if conspicuous.len() == ranks.len() {
        return None;
    }
    let first = *conspicuous.first()?;
    let view = &ranks[first];
    let hosts: std::collections::BTreeSet<_> = conspicuous
        .iter()
        .map(|&index| &ranks[index].host)
        .collect();
    let locals: std::collections::BTreeSet<_> = conspicuous
        .iter()
        .map(|&index| ranks[index].local_rank)
        .collect();
    let host = model.index.hosts.iter().find(|host| host.name == view.host);
    let size = host.map_or(0, |host| host.ranks.len());
    // With one rank on each host, all have the same local rank.
    let mut known_hosts = (model.index.hosts.iter()).filter(|host| !host.name.is_empty());
    let has_local_ranks = known_hosts.any(|host| host.ranks.len() > 1);
    let number = conspicuous.len();
    Some(match (hosts.len(), locals.len()) {
        _ if number == 1 => format!("{} alone", model.rank_label(view.rank)),
        (1, _) if view.host.is_empty() => format!("{number} ranks, whose hosts are unknown"),
        (1, _) if number == size => {
            format!("all {size} ranks of host {}: look at the host", view.host)
        }
        (1, _) => format!("{number} of {size} ranks of host {}", view.host),
        (n, 1) if has_local_ranks => format!(
            "local rank {} of {n} hosts: look at what these share (a rail, a slot)",
            view.local_rank
        ),
        (n, _) => format!("{number} ranks on {n} hosts, no pattern"),
    })
}

/// The page of some ranks, one row each.
pub(super) fn page_of(model: &ViewModel<'_>, some: &[Rank]) -> Page {
    let ages = pending_ages(model);
    let rows = some
        .iter()
        .filter_map(|&rank| {
            let state = model.index.rank(rank);
            let subject = Subject {
                state: Some(model.index.filter_words(model.snapshot, rank)),
                age_ms: Some(ages.get(&rank).copied().unwrap_or(f64::NAN)),
                ..Subject::default()
            };
            let problem = state.is_problem();
            let shown = model.passes_rank(rank, &subject) && (problem || !model.problems_only);
            shown.then(|| {
                let report = model.index.report(model.snapshot, rank);
                let oldest = ages.get(&rank).copied();
                let lag = report.and_then(|r| r.lag_p50_ms);
                let pending = report.map_or(0, |r| r.pending);
                let last = report.and_then(|r| r.last_call.clone());
                Row {
                    mark: state.mark(),
                    cells: vec![
                        Cell::number(rank.to_string(), f64::from(rank)),
                        Cell::text(model.host(rank)),
                        Cell::text(state.word()),
                        Cell::number(pending.to_string(), pending as f64),
                        Cell::number(age(oldest), oldest.unwrap_or(f64::NAN)),
                        Cell::number(millis(lag), lag.unwrap_or(f64::NAN)),
                        Cell::text(last.unwrap_or_default()),
                    ],
                    tone: Tone::Plain,
                    target: Some(Target::Rank(rank)),
                    problem,
                }
            })
        })
        .collect();
    let table = Table {
        columns: vec![
            number("rank", 0),
            text("host", 1),
            text("state", 0),
            number("pending", 2),
            number("oldest", 0),
            number("lag p50 ms", 3),
            rest("last call", 0),
        ],
        rows,
        headings: Headings::Shown,
        empty: model.none_left("rank"),
    };
    Page::of(vec![], "ranks", table)
}

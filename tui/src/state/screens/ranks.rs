//! Ranks: a heat map of hosts × local ranks, and lists of some.

use super::Lens;
use crate::page::{Body, Dot, Grid, Line, Page, Pane, plain, words};
use crate::state::digest::{Host, RankState};
use crate::table::{Cell, Heads, Row, Table, Target, number, rest, text};
use crate::theme::Tone;
use crate::units::{age, millis};
use rcomm_analyzer::RankReport;
use rcomm_analyzer::filter::Subject;
use rcomm_recorder::model::Rank;
use std::collections::HashMap;

/// What the heat map shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Metric {
    /// The rank's state.
    #[default]
    State,
    /// Median arrival lag.
    Lag,
    /// Share of the job's time that others spent waiting for it.
    Share,
    /// Age of its oldest pending operation.
    Age,
    /// Operations issued and not completed.
    Pending,
    /// Operations that its recorder could not keep.
    Lost,
}

impl Metric {
    /// All of them with their names, in the order of the key.
    pub const ALL: &'static [(Self, &'static str)] = &[
        (Self::State, "state"),
        (Self::Lag, "arrival lag"),
        (
            Self::Share,
            "share of the job's time others spent waiting for it",
        ),
        (Self::Age, "age of the oldest pending"),
        (Self::Pending, "operations pending"),
        (Self::Lost, "operations lost by the recorder"),
    ];

    /// The next one.
    pub fn next(self) -> Self {
        let at = Self::ALL.iter().position(|(m, _)| *m == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()].0
    }

    fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(m, _)| *m == self);
        found.map_or("", |(_, name)| name)
    }

    /// From where on a value is worth the next character.
    fn steps(self) -> [f64; 3] {
        match self {
            Self::State => [0.0; 3],
            Self::Lag => [0.2, 1.0, 4.0],
            Self::Share => [0.001, 0.005, 0.01],
            Self::Age => [100.0, 1_000.0, 5_000.0],
            Self::Pending => [1.0, 4.0, 64.0],
            Self::Lost => [1.0, 100.0, 10_000.0],
        }
    }

    /// How dark a value is, 0..=3.
    fn shade(self, value: f64) -> usize {
        self.steps().iter().filter(|&&step| value >= step).count()
    }

    fn unit(self, value: f64) -> String {
        match self {
            Self::Lag => format!("{}ms", millis(Some(value))),
            Self::Age => age(Some(value)),
            Self::Share => format!("{}%", value * 100.0),
            _ => format!("{value}"),
        }
    }
}

const SHADES: [(char, Tone); 4] = [
    ('.', Tone::Good),
    ('o', Tone::Plain),
    ('O', Tone::Late),
    ('@', Tone::Bad),
];

pub(super) fn page(lens: &Lens<'_>) -> Page {
    let ages = pending_ages(lens);
    let grid = grid(lens, &ages);
    let mut head: Vec<Line> = vec![vec![
        words(lens.metric.name(), Tone::Title),
        plain("  ([c] next metric)"),
    ]];
    head.extend(pattern(lens, &ages).map(|text| vec![plain("pattern: "), plain(text)]));
    Page {
        head,
        panes: vec![Pane {
            title: "ranks: host by host, local ranks downwards".into(),
            body: Body::Grid(grid),
        }],
    }
}

/// The age of each rank's oldest pending operation, ms.
fn pending_ages(lens: &Lens<'_>) -> HashMap<Rank, f64> {
    let mut ages: HashMap<Rank, f64> = HashMap::new();
    for instance in &lens.snapshot.report.in_flight {
        if let Some(ms) = lens.age(instance.age_ms) {
            for &rank in &instance.joined {
                let known = ages.entry(rank).or_default();
                *known = known.max(ms);
            }
        }
    }
    ages
}

fn grid(lens: &Lens<'_>, ages: &HashMap<Rank, f64>) -> Grid {
    let worth = |host: &&Host| {
        let bad = |&at: &usize| lens.digest.states[at] != RankState::Ok;
        !lens.problems_only || host.ranks.iter().any(bad)
    };
    let hosts: Vec<&Host> = lens.digest.hosts.iter().filter(worth).collect();
    let named = hosts.iter().any(|host| !host.name.is_empty()) && lens.digest.hosts.len() > 1;
    let dot = |at: usize| (lens.snapshot.ranks[at].rank, dot(lens, at, ages));
    if named && hosts.iter().any(|host| host.ranks.len() > 1) {
        let height = hosts.iter().map(|host| host.ranks.len()).max().unwrap_or(0);
        let row = |local: usize| -> Vec<Option<(Rank, Dot)>> {
            let cells = hosts.iter();
            cells
                .map(|host| host.ranks.get(local).map(|&at| dot(at)))
                .collect()
        };
        Grid {
            columns: hosts.iter().map(|host| host.name.to_string()).collect(),
            rows: (0..height).map(|local| local.to_string()).collect(),
            dots: (0..height).map(row).collect(),
            legend: legend(lens),
        }
    } else {
        // Without hosts, or with one: ranks in reading order.
        const WIDE: usize = 32;
        let all = lens.snapshot.ranks.len();
        let rows: Vec<usize> = (0..all).step_by(WIDE).collect();
        let label = |&at: &usize| lens.snapshot.ranks[at].rank.to_string();
        let row = |&from: &usize| -> Vec<Option<(Rank, Dot)>> {
            (from..from + WIDE)
                .map(|at| (at < all).then(|| dot(at)))
                .collect()
        };
        Grid {
            columns: (0..WIDE.min(all)).map(|n| format!("+{n}")).collect(),
            rows: rows.iter().map(label).collect(),
            dots: rows.iter().map(row).collect(),
            legend: legend(lens),
        }
    }
}

fn value(
    lens: &Lens<'_>,
    rank: Rank,
    report: &RankReport,
    ages: &HashMap<Rank, f64>,
) -> Option<f64> {
    match lens.metric {
        Metric::State => None,
        Metric::Lag => report.lag_p50_ms,
        Metric::Share => report.lag_share,
        Metric::Age => Some(ages.get(&rank).copied().unwrap_or(0.0)),
        Metric::Pending => Some(report.pending as f64),
        Metric::Lost => {
            let status = lens.snapshot.rank(rank)?.dump()?.status.as_ref()?;
            Some(status.dropped as f64)
        }
    }
}

fn dot(lens: &Lens<'_>, at: usize, ages: &HashMap<Rank, f64>) -> Dot {
    let view = &lens.snapshot.ranks[at];
    let state = lens.digest.states[at];
    let report = lens.digest.report(lens.snapshot, view.rank);
    let (glyph, tone) = if lens.metric == Metric::State {
        let mark = state.mark();
        (mark.glyph, mark.tone)
    } else {
        match report.and_then(|report| value(lens, view.rank, report, ages)) {
            None => ('?', Tone::Silent),
            Some(value) => SHADES[lens.metric.shade(value)],
        }
    };
    let subject = Subject {
        state: Some(state.word()),
        lag_ms: Some(report.and_then(|r| r.lag_p50_ms).unwrap_or(f64::NAN)),
        age_ms: Some(ages.get(&view.rank).copied().unwrap_or(f64::NAN)),
        ..Subject::default()
    };
    let wanted =
        lens.passes_rank(view.rank, &subject) && (!lens.problems_only || state != RankState::Ok);
    if wanted {
        Dot { glyph, tone }
    } else {
        Dot {
            glyph: ' ',
            tone: Tone::Dim,
        }
    }
}

fn legend(lens: &Lens<'_>) -> Line {
    let mut line = Vec::new();
    if lens.metric == Metric::State {
        for &(_, glyph, tone, word) in RankState::ALL {
            line.push(words(glyph.to_string(), tone));
            line.push(plain(format!(" {word}  ")));
        }
        return line;
    }
    let steps = lens.metric.steps();
    for (at, (glyph, tone)) in SHADES.iter().enumerate() {
        line.push(words(glyph.to_string(), *tone));
        let bound = match steps.get(at) {
            Some(&step) => format!(" <{}  ", lens.metric.unit(step)),
            None => format!(" >={}  ", lens.metric.unit(steps[2])),
        };
        line.push(plain(bound));
    }
    line.push(words("?", Tone::Silent));
    line.push(plain(" no data"));
    line
}

/// What the ranks that stand out have in common: a host, a place on every host, nothing.
fn pattern(lens: &Lens<'_>, ages: &HashMap<Rank, f64>) -> Option<String> {
    let ranks = &lens.snapshot.ranks;
    let stands_out = |at: usize| {
        if lens.metric == Metric::State {
            return matches!(
                lens.digest.states[at],
                RankState::Root | RankState::Late | RankState::Silent
            );
        }
        let rank = ranks[at].rank;
        let report = lens.digest.report(lens.snapshot, rank);
        let value = report.and_then(|report| value(lens, rank, report, ages));
        value.is_some_and(|value| lens.metric.shade(value) >= 2)
    };
    let odd: Vec<usize> = (0..ranks.len()).filter(|&at| stands_out(at)).collect();
    // What all have in common makes nobody stand out.
    if odd.len() == ranks.len() {
        return None;
    }
    let first = *odd.first()?;
    let view = &ranks[first];
    let hosts: std::collections::BTreeSet<_> = odd.iter().map(|&at| &ranks[at].host).collect();
    let locals: std::collections::BTreeSet<_> =
        odd.iter().map(|&at| ranks[at].local_rank).collect();
    let on_host = lens.digest.hosts.iter().find(|host| host.name == view.host);
    let size = on_host.map_or(0, |host| host.ranks.len());
    Some(match (hosts.len(), locals.len()) {
        _ if odd.len() == 1 => format!("{} alone", lens.rank_label(view.rank)),
        (1, n) if n == size && !view.host.is_empty() => {
            format!("all {size} ranks of host {}: look at the host", view.host)
        }
        (1, n) => format!("{n} of {size} ranks of host {}", view.host),
        (n, 1) => format!(
            "local rank {} of {n} hosts: look at what these share (a rail, a slot)",
            view.local_rank
        ),
        (n, _) => format!("{} ranks on {n} hosts, no pattern", odd.len()),
    })
}

/// Some ranks, one row each.
pub(super) fn some(lens: &Lens<'_>, some: &[Rank]) -> Page {
    let ages = pending_ages(lens);
    let rows = some
        .iter()
        .filter_map(|&rank| {
            let state = lens.digest.rank(lens.snapshot, rank);
            let subject = Subject {
                state: Some(state.word()),
                age_ms: Some(ages.get(&rank).copied().unwrap_or(f64::NAN)),
                ..Subject::default()
            };
            let problem = state != RankState::Ok;
            let shown = lens.passes_rank(rank, &subject) && (problem || !lens.problems_only);
            shown.then(|| {
                let report = lens.digest.report(lens.snapshot, rank);
                let oldest = ages.get(&rank).copied();
                let lag = report.and_then(|r| r.lag_p50_ms);
                let pending = report.map_or(0, |r| r.pending);
                let last = report.and_then(|r| r.last_call.clone());
                Row {
                    mark: state.mark(),
                    cells: vec![
                        Cell::number(rank.to_string(), f64::from(rank)),
                        Cell::word(lens.host(rank)),
                        Cell::word(state.word()),
                        Cell::number(pending.to_string(), pending as f64),
                        Cell::number(age(oldest), oldest.unwrap_or(f64::NAN)),
                        Cell::number(millis(lag), lag.unwrap_or(f64::NAN)),
                        Cell::word(last.unwrap_or_default()),
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
        heads: Heads::Shown,
        empty: lens.none_left("rank"),
    };
    Page::of(vec![], "ranks", table)
}

//! The timeline of ranks: marked ranks first, then root causes, late, silent and waiting ranks.

use super::ViewModel;
use crate::page::theme::Tone;
use crate::page::{Body, INSIDE, Lane, PENDING, Page, Pane, Span, Timeline, plain, styled};
use crate::state::index::RankState;
use rcomm_analyzer::RankView;
use rcomm_analyzer::filter::Subject;
use rcomm_recorder::model::EntryState;

/// The time range on display.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Width in ns.
    pub width_ns: i64,
    /// How far the range is moved back in time, in ns; at 0, the last recorded event is at four fifths of the width.
    pub back_ns: i64,
}

impl Default for Scale {
    fn default() -> Self {
        Self {
            width_ns: 4_000_000_000,
            back_ns: 0,
        }
    }
}

impl Scale {
    /// Multiplies the width by `factor`, within 1 ms and 1 h.
    pub fn zoom(&mut self, factor: f64) {
        let width = (self.width_ns as f64 * factor) as i64;
        self.width_ns = width.clamp(1_000_000, 3_600_000_000_000);
    }

    /// Moves the range by quarters of its width, earlier (+) or later (-), but not later than at the start.
    pub fn pan(&mut self, quarters: i64) {
        let back = self.back_ns + quarters * self.width_ns / 4;
        self.back_ns = back.max(0);
    }
}

/// Maximum number of lanes: rows of the timeline, one per rank.
const LANES: usize = 256;

pub(super) fn page(model: &ViewModel<'_>) -> Page {
    let ranks = &model.snapshot.ranks;
    let mut shown: Vec<(u8, usize)> = (0..ranks.len())
        .filter(|&at| {
            let state = model.index.states[at];
            let subject = Subject {
                state: Some(state.word()),
                ..Subject::default()
            };
            (!model.problems_only || state != RankState::Ok)
                && model.passes_rank(ranks[at].rank, &subject)
        })
        .map(|at| {
            let first = match model.index.states[at] {
                _ if model.marks.contains(&ranks[at].rank) => 0,
                RankState::Root => 1,
                RankState::Late => 2,
                RankState::Silent => 3,
                RankState::Waits => 4,
                RankState::Ok => 5,
            };
            (first, at)
        })
        .collect();
    shown.sort_unstable();
    let left = shown.len().saturating_sub(LANES);
    shown.truncate(LANES);
    let last = shown
        .iter()
        .filter_map(|&(_, at)| last_event(&ranks[at]))
        .max()
        .unwrap_or(model.snapshot.at.wall_ns);
    // Include a little time after the last event, where the absence of events is visible.
    let to_ns = last + model.scale.width_ns / 5 - model.scale.back_ns;
    let from_ns = to_ns - model.scale.width_ns;
    let lanes = shown
        .iter()
        .map(|&(_, at)| lane(model, at, from_ns, to_ns))
        .collect();
    let mut head = vec![vec![
        styled(INSIDE.to_string(), Tone::Good),
        plain(" in an operation  "),
        styled(PENDING.to_string(), Tone::Waiting),
        plain(" pending  [h] earlier [l] later [+] closer [_] wider"),
    ]];
    if left > 0 {
        head.push(vec![plain(format!(
            "{left} ranks not shown: filter, or mark the ranks to keep"
        ))]);
    }
    Page {
        head,
        panes: vec![Pane {
            title: "timeline".into(),
            body: Body::Timeline(Timeline {
                from_ns,
                to_ns,
                lanes,
            }),
        }],
    }
}

fn last_event(view: &RankView) -> Option<i64> {
    let entries = view.dumps.iter().filter_map(|dump| dump.entries.last());
    entries
        .map(|e| e.time_discovered_completed_ns.max(e.time_created_ns))
        .max()
}

fn lane(model: &ViewModel<'_>, at: usize, from_ns: i64, to_ns: i64) -> Lane {
    let view = &model.snapshot.ranks[at];
    let state = model.index.states[at];
    let marked = model.marks.contains(&view.rank);
    let mut spans: Vec<Span> = view
        .dumps
        .iter()
        .flat_map(|dump| &dump.entries)
        .filter(|e| e.time_created_ns > 0 && e.time_created_ns < to_ns)
        .filter_map(|e| {
            let pending = e.state < EntryState::Completed && !e.retired;
            let end = (!pending).then(|| e.time_discovered_completed_ns.max(e.time_created_ns));
            let visible = end.is_none_or(|end| end >= from_ns);
            visible.then_some(Span {
                from_ns: e.time_created_ns,
                to_ns: end,
            })
        })
        .collect();
    spans.sort_by_key(|span| span.from_ns);
    let glyph = match state {
        RankState::Ok if marked => '*',
        RankState::Ok => ' ',
        other => other.mark().glyph,
    };
    Lane {
        rank: view.rank,
        label: format!("{glyph} r{}", view.rank),
        tone: if state == RankState::Ok {
            Tone::Plain
        } else {
            state.mark().tone
        },
        spans,
    }
}

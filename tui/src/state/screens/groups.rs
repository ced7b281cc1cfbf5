//! Groups: progress and pending operations of each. Groups with the same description, size and trouble share a row if
//! all or none of them have issued a collective, unless the user unfolds them.

use super::{Fold, ViewModel, group_target};
use crate::page::Page;
use crate::page::table::{Cell, Headings, Row, Table, number, rest};
use crate::page::theme::Tone;
use crate::state::index::Marked;
use rcomm_analyzer::filter::Subject;
use rcomm_analyzer::format::{arrived, expected};
use rcomm_analyzer::{GroupRef, GroupReport, GroupState, InstanceState, RankState, SeqKind};
use rcomm_recorder::model::Rank;
use rcomm_recorder::model::text::{age, millis};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

pub(super) fn page(model: &ViewModel<'_>, only: Option<&[Arc<GroupRef>]>) -> Page {
    let title = match only {
        Some(some) => format!("groups {}", model.labels(some.iter().map(Arc::as_ref))),
        None => "groups".into(),
    };
    Page::of(vec![], title, table(model, only))
}

/// The table of the groups in `only`, one row each; without `only`, of all groups.
pub(super) fn table(model: &ViewModel<'_>, only: Option<&[Arc<GroupRef>]>) -> Table {
    let wanted: Option<HashSet<&GroupRef>> =
        only.map(|some| some.iter().map(Arc::as_ref).collect());
    let fold = only.is_none() && model.fold == Fold::Alike;
    let late = late_ranks(model);
    // The state of the groups, whether ranks are late there, and the groups.
    let mut folds: Vec<(GroupState, bool, Vec<&GroupReport>)> = Vec::new();
    let mut fold_of_key: HashMap<(GroupState, bool, bool, &str, usize), usize> = HashMap::new();
    for report in &model.snapshot.report.groups {
        let group = &report.group;
        if wanted
            .as_ref()
            .is_some_and(|wanted| !wanted.contains(group))
        {
            continue;
        }
        let state = model.index.group(group);
        let oldest = model.index.oldest(model.snapshot, group);
        let more = Subject {
            op: oldest.map(|instance| instance.op.as_str()),
            state: Some(model.index.group_filter_words(model.snapshot, group)),
            age_ms: Some(model.age_in(report).unwrap_or(f64::NAN)),
            lag_ms: Some(report.lag_p50_ms.unwrap_or(f64::NAN)),
            seq: report.last_seq,
            ..Subject::default()
        };
        if (model.problems_only && !state.is_problem()) || !model.passes_group(group, &more) {
            continue;
        }
        // What happens to be in flight does not divide groups: their rows would come and go.
        let state = state.min(GroupState::Busy);
        let used = report.last_seq.is_some();
        let is_late = used && is_late(group, &late);
        let key = (state, is_late, used, group.desc.as_str(), group.ranks.len());
        // Groups without a meaningful description are not folded; `undefined` is PyTorch's default.
        let alike = fold && !group.desc.is_empty() && group.desc != "undefined";
        match fold_of_key.get(&key) {
            Some(&index) if alike => folds[index].2.push(report),
            _ => {
                if alike {
                    fold_of_key.insert(key, folds.len());
                }
                folds.push((state, is_late, vec![report]));
            }
        }
    }
    let mut messages: HashMap<&GroupRef, usize> = HashMap::new();
    for instance in model.snapshot.report.pending() {
        if instance.seq_kind == SeqKind::P2pSeqId {
            *messages.entry(&instance.group).or_default() += 1;
        }
    }
    // Causes first, then waiting and then failed groups, each kind by the age of the oldest operation, then those where
    // a rank is late, then the rest in the report's order.
    folds.sort_by(
        |(left_state, left_late, left), (right_state, right_late, right)| {
            let waited_ms = |reports: &[&GroupReport]| match left_state {
                GroupState::Busy => 0.0,
                _ => oldest_ms(reports).unwrap_or(0.0),
            };
            // Groups without a collective come last.
            let used = |reports: &[&GroupReport]| reports.iter().any(|it| it.last_seq.is_some());
            (left_state.cmp(right_state))
                .then(waited_ms(right).total_cmp(&waited_ms(left)))
                .then(right_late.cmp(left_late))
                .then(used(right).cmp(&used(left)))
        },
    );
    Table {
        columns: vec![
            rest("group", 0),
            number("", 0),
            number("ranks", 3),
            number("seq last/min", 1),
            number("in flight", 0),
            number("oldest", 0),
            number("lag p50/p99 ms", 4),
            number("GB/s", 5),
        ],
        rows: folds
            .iter()
            .map(|(state, late, reports)| row(model, *state, *late, reports, &messages))
            .collect(),
        headings: Headings::Shown,
        empty: if model.snapshot.report.groups.is_empty() {
            "no group has been recorded yet".into()
        } else {
            model.none_left("group")
        },
    }
}

/// The ranks that are repeatedly late.
fn late_ranks(model: &ViewModel<'_>) -> HashSet<Rank> {
    let states = model.snapshot.ranks.iter().zip(&model.index.states);
    states
        .filter(|(_, state)| **state == RankState::Late)
        .map(|(view, _)| view.rank)
        .collect()
}

/// Whether other members of a group wait for a late one. If all are late, none waits for another.
fn is_late(group: &GroupRef, late: &HashSet<Rank>) -> bool {
    let count = group.ranks.iter().filter(|rank| late.contains(rank));
    (1..group.ranks.len()).contains(&count.count())
}

fn oldest_ms(reports: &[&GroupReport]) -> Option<f64> {
    reports.iter().filter_map(|r| r.oldest_ms).reduce(f64::max)
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// The row of groups that share one; `messages` counts the pending messages of each group, which its report does not
/// count.
fn row(
    model: &ViewModel<'_>,
    state: GroupState,
    late: bool,
    reports: &[&GroupReport],
    messages: &HashMap<&GroupRef, usize>,
) -> Row {
    let groups: Vec<&GroupRef> = reports.iter().map(|r| &r.group).collect();
    let members = groups.first().map_or(0, |group| group.ranks.len());
    let pending = |r: &&GroupReport| r.in_flight + messages.get(&r.group).copied().unwrap_or(0);
    let in_flight: usize = reports.iter().map(pending).sum();
    // Of the oldest operations of the folded groups, the one that the fewest members have joined.
    let joined = groups
        .iter()
        .filter_map(|group| model.index.oldest(model.snapshot, group))
        .filter(|instance| instance.state != InstanceState::Failed)
        .min_by_key(|instance| arrived(instance))
        .map_or_else(String::new, |instance| {
            let size = match instance.seq_kind {
                SeqKind::CollectiveSeqId => instance.group.ranks.len().max(members),
                SeqKind::P2pSeqId => expected(instance),
            };
            format!(" ({}/{size})", arrived(instance))
        });
    let last = reports.iter().filter_map(|r| r.last_seq).max();
    let lowest = reports.iter().filter_map(|r| r.min_seq).min();
    let seq = |seq: Option<u64>| seq.map_or("--".to_owned(), |seq| seq.to_string());
    let p50 = median(reports.iter().filter_map(|r| r.lag_p50_ms).collect());
    let p99 = reports.iter().filter_map(|r| r.lag_p99_ms).reduce(f64::max);
    let bandwidth = median(reports.iter().filter_map(|r| r.busbw_gbs).collect());
    let ages = reports.iter().filter_map(|report| model.age_in(report));
    let waited = ages.reduce(f64::max);
    let fold_count = if reports.len() > 1 {
        format!("x{}", reports.len())
    } else {
        String::new()
    };
    let or_nan = |value: Option<f64>| value.unwrap_or(f64::NAN);
    Row {
        mark: match late && !state.is_problem() {
            true => RankState::Late.mark(),
            false => state.mark(),
        },
        cells: vec![
            Cell::text(model.labels(groups.iter().copied())),
            Cell::text(fold_count).toned(Tone::Dim),
            Cell::number(members.to_string(), members as f64),
            Cell::number(
                format!("{}/{}", seq(last), seq(lowest)),
                or_nan(last.map(|n| n as f64)),
            ),
            Cell::number(format!("{in_flight}{joined}"), in_flight as f64),
            Cell::number(age(waited), or_nan(waited)),
            Cell::number(format!("{}/{}", millis(p50), millis(p99)), or_nan(p50)),
            Cell::number(
                bandwidth.map_or("--".into(), |gbs| format!("{gbs:.1}")),
                or_nan(bandwidth),
            ),
        ],
        tone: match state {
            GroupState::Bad => Tone::Bad,
            GroupState::Waiting => Tone::Waiting,
            GroupState::Failed => Tone::Late,
            GroupState::Busy | GroupState::Idle if late => Tone::Late,
            GroupState::Busy | GroupState::Idle => Tone::Plain,
        },
        target: Some(group_target(&groups)),
        problem: state.is_problem(),
    }
}

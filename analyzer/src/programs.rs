//! Two ranks' programs side by side, from where they part.

use crate::align::{GroupIx, RecordIx};
use crate::case::{Case, name_ranks};
use rcomm_recorder::model::Rank;
use std::collections::BTreeMap;

/// Steps that both have in common, shown before the first difference.
const BEFORE: usize = 1;
/// Steps of each program shown from the first difference on.
const AFTER: usize = 4;

/// Ranks that issued one call, by where in the source they did: one line for each place and its caller,
/// since the call itself often stands in a wrapper that all share.
pub(crate) fn sites(
    case: &Case<'_>,
    group: GroupIx,
    seq: u32,
    records: &[RecordIx],
    call: u32,
) -> Vec<String> {
    let mut by_site: BTreeMap<Option<String>, Vec<Rank>> = BTreeMap::new();
    for &record in records {
        let position = position_of(case, record, group, seq);
        let frames = position.map(|at| case.own_frames(case.aligned.op(record, at)));
        let mut frames = frames.into_iter().flatten();
        let site = frames.next().map(|frame| {
            let called = frames.next();
            let called = called.map(|frame| format!(", called from {}", Case::name_site(frame)));
            format!("{}{}", Case::name_site(frame), called.unwrap_or_default())
        });
        let ranks = by_site.entry(site).or_default();
        ranks.push(case.aligned.records[record].rank);
    }
    let described = case.aligned.shared.calls.get(call).describe();
    let line = |(site, mut ranks): (Option<String>, Vec<Rank>)| {
        ranks.sort_unstable();
        let site = site.map_or(String::new(), |site| format!(" at {site}"));
        format!("{}: {described} #{seq}{site}", name_ranks(&ranks))
    };
    by_site.into_iter().map(line).collect()
}

/// ` (train.py:88)`: where in its source a rank issued a collective; empty where that is not recorded.
pub(crate) fn at_site(case: &Case<'_>, group: GroupIx, seq: u32, record: RecordIx) -> String {
    let position = position_of(case, record, group, seq);
    position.map_or(String::new(), |at| {
        case.at_site(case.aligned.op(record, at))
    })
}

/// The steps of two ranks in a group from just before number `seq` on, as a diff under the names of the
/// two: ` ` both, `-` only `usual`, `+` only `odd`.
pub(crate) fn next_steps(
    case: &Case<'_>,
    group: GroupIx,
    seq: u32,
    usual: RecordIx,
    odd: RecordIx,
) -> Vec<String> {
    let rank = |record: RecordIx| case.aligned.records[record].rank;
    let mut lines = vec![
        format!("--- rank {}", rank(usual)),
        format!("+++ rank {}", rank(odd)),
    ];
    let (usual, odd) = (steps(case, usual, group, seq), steps(case, odd, group, seq));
    let same = |a: &Step, b: &Step| {
        case.aligned
            .shared
            .calls
            .difference(a.call, b.call)
            .is_none()
    };
    // Longest common part of what follows, by length of what is left of each.
    let mut common = vec![vec![0u8; odd.len() + 1]; usual.len() + 1];
    for a in (0..usual.len()).rev() {
        for b in (0..odd.len()).rev() {
            common[a][b] = if same(&usual[a], &odd[b]) {
                common[a + 1][b + 1] + 1
            } else {
                common[a + 1][b].max(common[a][b + 1])
            };
        }
    }
    let (mut a, mut b) = (0, 0);
    while a < usual.len() || b < odd.len() {
        if a < usual.len() && b < odd.len() && same(&usual[a], &odd[b]) {
            lines.push(format!("  {}", usual[a].text));
            (a, b) = (a + 1, b + 1);
        } else if b == odd.len() || (a < usual.len() && common[a + 1][b] >= common[a][b + 1]) {
            lines.push(format!("- {}", usual[a].text));
            a += 1;
        } else {
            lines.push(format!("+ {}", odd[b].text));
            b += 1;
        }
    }
    lines
}

struct Step {
    call: u32,
    text: String,
}

fn steps(case: &Case<'_>, record: RecordIx, group: GroupIx, seq: u32) -> Vec<Step> {
    let lane = case.aligned.lanes[record]
        .iter()
        .find(|lane| lane.group == group);
    let Some(lane) = lane else { return Vec::new() };
    let Ok(at) = case.aligned.find(record, lane, seq) else {
        return Vec::new();
    };
    let shown = lane.collectives[at.saturating_sub(BEFORE)..].iter();
    let before = at.min(BEFORE);
    shown
        .take(before + AFTER)
        .map(|&at| {
            let op = case.aligned.op(record, at);
            let described = case.aligned.shared.calls.get(op.call).describe();
            Step {
                call: op.call,
                text: format!("{described}{}", case.at_site(op)),
            }
        })
        .collect()
}

fn position_of(case: &Case<'_>, record: RecordIx, group: GroupIx, seq: u32) -> Option<u32> {
    let lane = case.aligned.lanes[record]
        .iter()
        .find(|lane| lane.group == group)?;
    let at = case.aligned.find(record, lane, seq).ok()?;
    Some(lane.collectives[at])
}

//! Decides whether a failure that a rank recorded is history: the ranks concerned work together again.
//!
//! A program may catch the error of an operation that timed out and try again. What it recorded then explains nothing
//! that happens later.

use crate::align::{Aligned, GroupIx, RecordIx};
use rcomm_recorder::model::{Failure, OpType, Rank};

/// Whether the rank of a record and the ranks that its failure names have all completed an operation that they issued
/// after the failure, in the group that failed or in another one of the same ranks.
///
/// With `recent_ns`, common time, an operation in any group that they share counts as well, if it completed after that
/// time.
pub(crate) fn is_overcome(
    aligned: &Aligned<'_>,
    record: RecordIx,
    failure: &Failure,
    recent_ns: Option<i64>,
) -> bool {
    let whole = &aligned.records[record];
    let after_ns = failure.time_ns.saturating_sub(aligned.offsets_ns[record]);
    let mut concerned: Vec<Rank> = failure.ranks.clone();
    concerned.push(whole.rank);
    let failed = failure.group.and_then(|id| {
        let at = whole.groups.iter().position(|group| group.id == id)?;
        Some(aligned.lanes[record].get(at)?.group)
    });
    let lanes = aligned.lanes[record].iter();
    let mut groups = lanes.map(|lane| lane.group);
    groups.any(|group| {
        let members = &aligned.groups[group].ranks;
        let same = failed.is_some_and(|failed| *members == aligned.groups[failed].ranks);
        let since_ns = match recent_ns {
            _ if same => i64::MIN,
            Some(recent_ns) => recent_ns,
            None => return false,
        };
        members.len() > 1
            && concerned.iter().all(|rank| {
                members.contains(rank) && went_on(aligned, group, *rank, after_ns, since_ns)
            })
    })
}

/// Whether a rank issued an operation in a group after one common time, ns, and completed it after another. A send may
/// complete although its receiver never comes, so it does not count.
fn went_on(
    aligned: &Aligned<'_>,
    group: GroupIx,
    rank: Rank,
    after_ns: i64,
    since_ns: i64,
) -> bool {
    aligned.records_of(rank).any(|record| {
        let lanes = aligned.lanes[record].iter();
        lanes.filter(|lane| lane.group == group).any(|lane| {
            [&lane.collectives, &lane.messages].into_iter().any(|list| {
                let newest_first = list.iter().rev().map(|&at| aligned.op(record, at));
                newest_first
                    .take_while(|op| aligned.created_ns(record, op) > after_ns)
                    .filter(|op| op.completed() && op.kind != OpType::Send)
                    .filter_map(|op| op.completed_ns())
                    .any(|ns| ns.saturating_sub(aligned.offsets_ns[record]) > since_ns)
            })
        })
    })
}

//! Decides whether a failed operation, or a failure that a rank recorded, is overcome: the ranks work together again.
//!
//! A program may catch the error of an operation that timed out and try again. What it recorded then explains nothing
//! that happens later.

use crate::align::record::Op;
use crate::align::{Aligned, GroupIx, RecordIx};
use rcomm_recorder::model::{EntryState, Failure, OpType, Rank};

/// A rank that has completed at least this many operations with others since one failed has caught the error. A program
/// that ends because of the error may still complete fewer.
const LATER_OPERATIONS: usize = 3;

/// Whether an operation has failed and its rank [`continued`].
pub(crate) fn is_history(aligned: &Aligned<'_>, record: RecordIx, op: &Op) -> bool {
    op.state == EntryState::Failed
        && continued(aligned, record, op.failed_ns().unwrap_or(op.created_ns))
}

/// Whether a rank has issued [`LATER_OPERATIONS`] after a time, ns by its own clock, and completed them. Sends do not
/// count, since a send may complete although its receiver never comes, and neither do operations in a group of one
/// rank.
pub(crate) fn continued(aligned: &Aligned<'_>, record: RecordIx, after_ns: i64) -> bool {
    let with_others = |op: &&Op| {
        let lane = aligned.lanes[record].get(usize::from(op.group));
        lane.is_some_and(|lane| aligned.groups[lane.group].ranks.len() != 1)
    };
    let newest_first = aligned.records[record].ops.iter().rev();
    newest_first
        .take_while(|op| op.created_ns > after_ns)
        .filter(|op| op.completed() && op.kind != OpType::Send)
        .filter(with_others)
        .take(LATER_OPERATIONS)
        .count()
        == LATER_OPERATIONS
}

/// Whether the rank of a record and the ranks that its failure names have all completed an operation that they issued
/// after the failure, in the group that failed or in another one of the same ranks. A failure without a group belongs
/// to a group that was not made: then any group that these ranks share counts.
///
/// With `recent_ns`, common time, an operation in any group that these ranks share counts as well, if it completed
/// after that time.
pub(crate) fn is_overcome(
    aligned: &Aligned<'_>,
    record: RecordIx,
    failure: &Failure,
    recent_ns: Option<i64>,
) -> bool {
    let full_record = &aligned.records[record];
    let after_ns = failure.time_ns.saturating_sub(aligned.offsets_ns[record]);
    let mut concerned: Vec<Rank> = failure.ranks.clone();
    concerned.push(full_record.rank);
    let failed_group = failure.group.and_then(|id| {
        let index = full_record.groups.iter().position(|group| group.id == id)?;
        Some(aligned.lanes[record].get(index)?.group)
    });
    let lanes = aligned.lanes[record].iter();
    let mut groups = lanes.map(|lane| lane.group);
    groups.any(|group| {
        let members = &aligned.groups[group].ranks;
        let is_same_group =
            failed_group.is_some_and(|failed_group| *members == aligned.groups[failed_group].ranks);
        let since_ns = match recent_ns {
            _ if is_same_group || failure.group.is_none() => i64::MIN,
            Some(recent_ns) => recent_ns,
            None => return false,
        };
        members.len() > 1
            && concerned.iter().all(|rank| {
                members.contains(rank) && went_on(aligned, group, *rank, after_ns, since_ns)
            })
    })
}

/// Whether a rank issued an operation in a group after `after_ns` and completed it after `since_ns`, both common time.
/// A send may complete although its receiver never comes, so it does not count.
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
                let newest_first = list
                    .iter()
                    .rev()
                    .map(|&position| aligned.op(record, position));
                newest_first
                    .take_while(|op| aligned.created_ns(record, op) > after_ns)
                    .filter(|op| op.completed() && op.kind != OpType::Send)
                    .filter_map(|op| op.completed_ns())
                    .any(|ns| ns.saturating_sub(aligned.offsets_ns[record]) > since_ns)
            })
        })
    })
}

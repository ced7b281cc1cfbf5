//! Names the ranks that had not joined an operation when it timed out, where no recorder has noted them.
//!
//! rcomm's runtime records each time-out with the ranks that had not arrived. PyTorch's hooks only show that an
//! operation failed, and when. A member that issued the operation after that came too late: it did not wait with the
//! others, and the operation failed on it because the others had given up.

use crate::align::record::{Op, Record};
use crate::align::shared::Shared;
use rcomm_recorder::model::{EntryState, FailedOperation, Failure, FailureKind, Rank};
use std::collections::HashMap;

/// An operation that took at least this share of its time-out, and failed, was ended by the time-out.
const AT_TIMEOUT: f32 = 0.9;

/// Adds to each ring without recorded failures the first time-out of a collective after the newest one that completed,
/// with the members that had not issued it by then: a time-out may break connections, so that later ones fail at once. Leaves out groups of which a member left a dump, or a ring on another host, whose clock
/// is not compared yet.
pub(crate) fn note(shared: &Shared, records: &mut [Record]) {
    let by_rank: HashMap<Rank, usize> = records
        .iter()
        .enumerate()
        .map(|(index, record)| (record.rank, index))
        .collect();
    let noted: Vec<Option<Failure>> = shared.map(records.len(), |index| {
        timeout(shared, records, &by_rank, &records[index])
    });
    for (record, failure) in records.iter_mut().zip(noted) {
        record.failures.extend(failure);
    }
}

/// The first time-out of a record after its newest collective that completed. `None` if there is none, if all members had issued it by then, if members cannot be compared, or if the record is not a ring or has failures.
fn timeout(
    shared: &Shared,
    records: &[Record],
    by_rank: &HashMap<Rank, usize>,
    record: &Record,
) -> Option<Failure> {
    if !record.is_ring() || !record.failures.is_empty() || record.identity.host.is_empty() {
        return None;
    }
    let has_timed_out = |op: &&Op| {
        let limit_ms = shared.calls.get(op.call).timeout_ms as f32;
        let is_long = |ms: f32| limit_ms > 0.0 && ms >= limit_ms * AT_TIMEOUT;
        op.state == EntryState::Failed && op.wait_ms().is_some_and(is_long)
    };
    let collectives = record.ops.iter().rev().filter(|op| !op.is_p2p);
    let since_completed = collectives.take_while(|op| !op.completed());
    let op = since_completed.filter(has_timed_out).last()?;
    let gave_up_ns = op.failed_ns()?;
    let local = record.groups.get(usize::from(op.group))?;
    let came = |other: &Record| {
        let is_same = |candidate: &Op| {
            let group = other.groups.get(usize::from(candidate.group));
            !candidate.is_p2p
                && candidate.seq == op.seq
                && group.is_some_and(|group| group.group == local.group)
        };
        // A ring that has wrapped may have dropped the operation, which was then issued long before.
        other.wrapped()
            || other
                .ops
                .iter()
                .any(|candidate| is_same(candidate) && candidate.created_ns <= gave_up_ns)
    };
    let members = shared.groups[local.group as usize].ranks.iter();
    let mut others = members.filter_map(|rank| Some(&records[*by_rank.get(rank)?]));
    // Clocks of other hosts are not compared yet.
    let is_comparable =
        |other: &Record| other.is_ring() && other.identity.host == record.identity.host;
    if !others.clone().all(is_comparable) {
        return None;
    }
    let mut absent: Vec<Rank> = others
        .by_ref()
        .filter(|other| !came(other))
        .map(|other| other.rank)
        .collect();
    absent.sort_unstable();
    if absent.is_empty() {
        return None;
    }
    let mut failure = Failure::new(FailureKind::Timeout, &absent, record.rank, "");
    failure.group = Some(local.id);
    failure.time_ns = gave_up_ns;
    failure.operation = Some(FailedOperation {
        op: op.kind,
        seq: u64::from(op.seq),
        is_p2p: false,
        record_id: record.record_id(op),
    });
    Some(failure)
}

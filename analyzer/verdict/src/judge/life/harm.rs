//! Finds the failures that ranks suffered because other processes ended.

use super::BEFORE_TIMEOUT;
use crate::align::record::{Op, Record};
use crate::align::{Aligned, GroupIx, Presence, RecordIx};
use crate::judge::overcome::{is_history, is_overcome};
use rcomm_recorder::model::{EntryState, Failure, FailureKind, Rank};
use std::collections::BTreeSet;

/// Each collective of all members that failed early ([`failed_early`]): its record, the position in it, and its group.
pub(crate) fn collectives_failed_early(
    aligned: &Aligned<'_>,
) -> impl Iterator<Item = (RecordIx, u32, GroupIx)> {
    let records = aligned.records.iter().enumerate();
    records.flat_map(move |(record, full_record)| {
        let ops = (0..).zip(&full_record.ops);
        let failed = ops.filter(move |(_, op)| {
            op.kind.needs_all_members() && failed_early_ns(aligned, record, op).is_some()
        });
        failed.map(move |(position, op)| {
            let group = aligned.lanes[record][usize::from(op.group)].group;
            (record, position, group)
        })
    })
}

/// The ranks that have not issued a collective of all members that failed early ([`failed_early`]) for other members.
pub(super) fn lack_failed(aligned: &Aligned<'_>) -> BTreeSet<Rank> {
    let failed = collectives_failed_early(aligned);
    let failed: BTreeSet<(GroupIx, u32)> = failed
        .map(|(record, position, group)| (group, aligned.op(record, position).seq))
        .collect();
    let ranks = failed.into_iter().flat_map(|(group, seq)| {
        let members = aligned.groups[group].ranks.iter().enumerate();
        let lacking = members
            .filter(move |&(member, _)| aligned.presence(group, member, seq) == Presence::Absent);
        lacking.map(|(_, &rank)| rank)
    });
    ranks.collect()
}

/// When a rank last suffered from the end of another process, common time, ns; `None` if it did not. When a process
/// ends, the operations of its living peers fail, but the last operation of the process itself does not.
pub(crate) fn suffered_ns(aligned: &Aligned<'_>, rank: Rank) -> Option<i64> {
    let of_record = |record: RecordIx| {
        let full_record = &aligned.records[record];
        let lasting =
            losses(full_record).filter(|failure| !is_overcome(aligned, record, failure, None));
        let named = lasting.map(|failure| failure.time_ns);
        let named = named.map(|at_ns| at_ns.saturating_sub(aligned.offsets_ns[record]));
        named.chain(failed_early(aligned, record)).max()
    };
    aligned.records_of(rank).filter_map(of_record).max()
}

/// The earliest time, common time, ns, at which a rank last suffered from the end of another process; `None` if none
/// did.
pub(super) fn harm_ns(aligned: &Aligned<'_>) -> Option<i64> {
    let ranks = aligned.expected.iter();
    ranks.filter_map(|&rank| suffered_ns(aligned, rank)).min()
}

/// The failures by which a record states that another rank is gone.
pub(super) fn losses(record: &Record) -> impl Iterator<Item = &Failure> {
    let other = |rank: &Rank| *rank != record.rank;
    let failures = record.failures.iter();
    failures.filter(move |failure| {
        failure.kind == FailureKind::PeerGone && failure.ranks.iter().any(other)
    })
}

/// All ranks that others state to be gone.
pub(super) fn lost(aligned: &Aligned<'_>) -> BTreeSet<Rank> {
    let records = aligned.records.iter();
    let failures = records.flat_map(|record| losses(record).map(|failure| (record.rank, failure)));
    failures
        .flat_map(|(by, failure)| {
            failure
                .ranks
                .iter()
                .copied()
                .filter(move |rank| *rank != by)
        })
        .collect()
}

/// The last time, common time, ns, at which an operation of a record failed early ([`failed_early_ns`]); `None` if none
/// did.
pub(super) fn failed_early(aligned: &Aligned<'_>, record: RecordIx) -> Option<i64> {
    let ops = aligned.records[record].ops.iter();
    ops.filter_map(|op| failed_early_ns(aligned, record, op))
        .max()
}

/// When an operation failed, common time, ns, if that was well before its time-out. `None` if it did not, and for
/// operations that are history ([`is_history`]).
pub(crate) fn failed_early_ns(aligned: &Aligned<'_>, record: RecordIx, op: &Op) -> Option<i64> {
    if op.state != EntryState::Failed || is_history(aligned, record, op) {
        return None;
    }
    let limit_ms = aligned.limit_ms(record, op)?;
    let took = f64::from(op.wait_ms()?);
    let is_early = took < limit_ms * BEFORE_TIMEOUT;
    let took_ns = (took * 1e6) as i64;
    is_early.then(|| aligned.created_ns(record, op).saturating_add(took_ns))
}

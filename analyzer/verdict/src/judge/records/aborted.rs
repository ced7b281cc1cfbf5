//! Reopens operations that an abort ended and that PyTorch's NCCL recorder therefore holds as completed.
//!
//! When a job gives up at a time-out it aborts its communicators. Their kernels end, the CUDA events behind them fire,
//! and a dump that is written after that shows the operations that hung as completed. This is visible if one of them
//! took its whole time-out and a member never issued it: a collective that needs every member cannot have completed.
//! But if a rank issued and completed operations after it, it was no abort that ended it: the member's record was taken
//! too early.

use crate::align::record::{NONE, Op, Record};
use crate::align::shared::Shared;
use rcomm_recorder::model::EntryState;
use rcomm_recorder::publish::Recorder;
use std::collections::BTreeSet;

/// An operation that took at least this share of its time-out was ended by the time-out.
const AT_TIMEOUT: f32 = 0.98;
/// An abort ends all operations of a process within this time, ns.
const ABORT_NS: i64 = 1_000_000_000;

/// A collective: its group in [`Shared::groups`] and its number.
type Collective = (u32, u32);

/// Gives operations that an abort ended the state that they had before. In each record, these are all operations that
/// completed after the first aborted collective did, or at most [`ABORT_NS`] before it.
pub(crate) fn reopen(shared: &Shared, records: &mut [Record]) {
    // Each with whether its rank went on after it.
    let of_records = shared.map(records.len(), |index| -> Vec<(Collective, bool)> {
        let record = &records[index];
        if record.recorder != Recorder::Nccl {
            return Vec::new();
        }
        let ended = record.ops.iter().filter(|op| took_its_timeout(shared, op));
        let mut ended = ended.peekable();
        if ended.peek().is_none() {
            return Vec::new();
        }
        let completed = record.ops.iter().filter(|op| op.completed());
        let last_issued_ns = completed.map(|op| op.created_ns).max();
        let collectives = ended.filter_map(|op| {
            let went_on = last_issued_ns > op.completed_ns();
            Some((collective_of(record, op)?, went_on))
        });
        collectives.collect()
    });
    let at_timeout = || of_records.iter().flatten().copied();
    let overcome: BTreeSet<Collective> = at_timeout()
        .filter(|&(_, went_on)| went_on)
        .map(|(collective, _)| collective)
        .collect();
    let aborted: BTreeSet<Collective> = at_timeout()
        .map(|(collective, _)| collective)
        .filter(|collective| !overcome.contains(collective))
        .filter(|&collective| {
            records
                .iter()
                .any(|record| never_issued(shared, record, collective))
        })
        .collect();
    if aborted.is_empty() {
        return;
    }
    for record in records {
        if record.recorder != Recorder::Nccl {
            continue;
        }
        let completed = |is_wanted: &dyn Fn(&Op) -> bool| -> Vec<i64> {
            let ended = record.ops.iter().filter(|op| is_wanted(op));
            ended.filter_map(Op::completed_ns).collect()
        };
        let of_aborted = completed(&|op| {
            collective_of(record, op).is_some_and(|known| aborted.contains(&known))
        });
        // In a record without an aborted collective, the last operation that took its whole time-out counts. An earlier
        // one may just have been slow.
        let at_timeout = completed(&|op| took_its_timeout(shared, op));
        let first = of_aborted
            .into_iter()
            .min()
            .or(at_timeout.into_iter().max());
        let Some(first_ns) = first else {
            continue;
        };
        for op in &mut record.ops {
            let ended_ns = op.completed_ns().filter(|_| op.completed());
            if ended_ns.is_some_and(|ns| ns >= first_ns.saturating_sub(ABORT_NS)) {
                op.state = match op.started_us {
                    NONE => EntryState::Scheduled,
                    _ => EntryState::Started,
                };
                op.completed_us = NONE;
                op.duration_ms = -1.0;
                op.retired = false;
            }
        }
    }
}

/// The collective of an operation; `None` for a message, or if the operation does not need all members.
fn collective_of(record: &Record, op: &Op) -> Option<Collective> {
    let is_comparable = op.kind.needs_all_members() && !op.is_p2p;
    is_comparable.then(|| (record.groups[usize::from(op.group)].group, op.seq))
}

/// Whether an operation is recorded as completed after its whole time-out.
fn took_its_timeout(shared: &Shared, op: &Op) -> bool {
    let limit_ms = shared.calls.get(op.call).timeout_ms as f32;
    let took = op.completed_us != NONE && op.completed_us as f32 / 1e3 >= limit_ms * AT_TIMEOUT;
    op.completed() && limit_ms > 0.0 && took
}

/// Whether this is the record of a member that had not issued the collective when the record was taken.
fn never_issued(shared: &Shared, record: &Record, (group, seq): Collective) -> bool {
    if record.cut
        || record.only_active
        || !shared.groups[group as usize].ranks.contains(&record.rank)
    {
        return false;
    }
    let Some(local) = record.groups.iter().position(|local| local.group == group) else {
        return false;
    };
    let mut newest = record.ops.iter().rev();
    let newest =
        newest.find(|op| usize::from(op.group) == local && op.kind.is_collective() && !op.is_p2p);
    newest.map_or(!record.wrapped(), |op| op.seq < seq)
}

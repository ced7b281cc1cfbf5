//! The unfinished accesses to windows of each rank, and the rank without which each does not complete.
//!
//! An access has no number in its group and no other half, so it is in no lane. But it names its peer: a signal that a
//! rank waits for comes from there, and a process that does not run serves neither a read nor a write.

use crate::align::pending::{Pending, goes_on_beside, on_device};
use crate::align::record::{NONE, Op, Record};
use crate::align::{Aligned, GroupIx, RecordIx};
use rcomm_recorder::model::{OpType, Pattern, Peer, Rank};

/// An unfinished access to a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OneSided {
    /// Position in the record's operations.
    pub(crate) position: u32,
    /// The rank that must signal, or whose memory is read or written.
    pub(crate) peer: Rank,
}

/// The unfinished accesses to other ranks' windows that the record's rank waits in, in order of issue. `pending` are
/// the unfinished collectives and messages of the record.
///
/// Accesses that a device has not reached are left out. So are two kinds of waits for a signal: those whose signal the
/// peer's record shows as sent, and those that a separate thread holds open while the rank works.
pub(crate) fn one_sided_of(
    aligned: &Aligned<'_>,
    record: RecordIx,
    pending: &[Pending],
) -> Vec<OneSided> {
    let full_record = &aligned.records[record];
    let runs_on_device = |operation: &Pending| {
        let op = aligned.op(record, operation.position);
        on_device(&aligned.shared.calls.get(op.call).signature.backend)
    };
    // A device runs accesses in the order of its queue: it has not reached those behind an unfinished operation.
    let device = full_record.recorder.sees_device() || pending.iter().any(runs_on_device);
    let front = pending.iter().map(|operation| operation.position).min();
    let reached = |position: u32| !device || front.is_none_or(|front| position < front);
    let ops = (0..).zip(&full_record.ops);
    ops.filter(|&(position, op)| is_access(op) && !op.completed() && reached(position))
        .filter_map(|(position, op)| {
            let lane = aligned.lanes[record].get(usize::from(op.group))?;
            let (Peer::Rank(peer), true) = (op.peer(), lane.member != NONE) else {
                return None;
            };
            let rank = *aligned.groups[lane.group].ranks.get(peer as usize)?;
            let waits_for_signal = op.kind == OpType::WaitSignal;
            let is_beside_work = waits_for_signal && goes_on_beside(aligned, record, op, position);
            let is_open = rank != full_record.rank
                && !is_beside_work
                && !(waits_for_signal && is_sent(aligned, lane.group, (lane.member, peer)));
            is_open.then_some(OneSided {
                position,
                peer: rank,
            })
        })
        .collect()
}

fn is_access(op: &Op) -> bool {
    op.kind.pattern() == Pattern::OneSided
}

/// Whether the record of `peer` shows at least as many signals to `member` as the record of `member` shows waits for
/// them.
///
/// False if that is unknown. A record does not name the window of a signal, so the records of a group with several
/// windows do not show it; and a ring that has dropped operations does not hold all signals.
fn is_sent(aligned: &Aligned<'_>, group: GroupIx, (member, peer): (u32, u32)) -> bool {
    let record_of = |member: u32| {
        let (record, _) = aligned.lane(group, member as usize)?;
        let full_record = &aligned.records[record];
        (!full_record.wrapped() && !full_record.only_active).then_some((record, full_record))
    };
    let (Some(waits), Some(signals)) = (record_of(member), record_of(peer)) else {
        return false;
    };
    let count = |(record, full_record): (RecordIx, &Record), kind: OpType, peer: Option<u32>| {
        let matching = full_record.ops.iter().filter(|op| {
            let lane = aligned.lanes[record].get(usize::from(op.group));
            op.kind == kind
                && lane.is_some_and(|lane| lane.group == group)
                && peer.is_none_or(|peer| op.peer == peer)
                && (kind != OpType::Signal || op.completed())
        });
        matching.count()
    };
    count(waits, OpType::NewWindow, None) == 1
        && count(signals, OpType::Signal, Some(member))
            >= count(waits, OpType::WaitSignal, Some(peer))
}

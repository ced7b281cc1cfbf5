//! The unfinished accesses to windows of each rank, and the rank without which each does not complete.
//!
//! An access has no number in its group and no other half, so it is in no lane. It names its peer, though: a signal that
//! is waited for comes from there, and a process that does not run serves neither a read nor a write.

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

/// The unfinished accesses of a record that its rank waits in, in order of issue. `pending` are the unfinished
/// collectives and messages of the record.
///
/// Not among them: a wait for a signal that the peer's record shows as sent, and one that a thread of its own holds open
/// while the rank works.
pub(crate) fn one_sided_of(
    aligned: &Aligned<'_>,
    record: RecordIx,
    pending: &[Pending],
) -> Vec<OneSided> {
    let whole = &aligned.records[record];
    let backend = |one: &Pending| {
        let op = aligned.op(record, one.position);
        on_device(&aligned.shared.calls.get(op.call).signature.backend)
    };
    // A device runs accesses in the order of its queue: it has not reached those behind an unfinished operation.
    let device = whole.recorder.sees_device() || pending.iter().any(backend);
    let front = pending.iter().map(|one| one.position).min();
    let reached = |position: u32| !device || front.is_none_or(|front| position < front);
    let ops = (0..).zip(&whole.ops);
    ops.filter(|&(position, op)| is_access(op) && !op.completed() && reached(position))
        .filter_map(|(position, op)| {
            let lane = aligned.lanes[record].get(usize::from(op.group))?;
            let (Peer::Rank(peer), true) = (op.peer(), lane.member != NONE) else {
                return None;
            };
            let rank = *aligned.groups[lane.group].ranks.get(peer as usize)?;
            let waits_for_signal = op.kind == OpType::WaitSignal;
            let serves = waits_for_signal && goes_on_beside(aligned, record, op, position);
            let is_open = rank != whole.rank
                && !serves
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

/// Whether the record of `peer` shows as many signals to `member` as the record of `member` shows waits for them. Unknown
/// counts as not sent: records do not name the window of a signal, and those of a ring that has dropped operations do not
/// have all signals.
fn is_sent(aligned: &Aligned<'_>, group: GroupIx, (member, peer): (u32, u32)) -> bool {
    let record_of = |member: u32| {
        let (record, _) = aligned.lane(group, member as usize)?;
        let whole = &aligned.records[record];
        (!whole.wrapped() && !whole.only_active).then_some((record, whole))
    };
    let (Some(waits), Some(signals)) = (record_of(member), record_of(peer)) else {
        return false;
    };
    let count = |(record, whole): (RecordIx, &Record), kind: OpType, peer: Option<u32>| {
        let its = whole.ops.iter().filter(|op| {
            let lane = aligned.lanes[record].get(usize::from(op.group));
            op.kind == kind
                && lane.is_some_and(|lane| lane.group == group)
                && peer.is_none_or(|peer| op.peer == peer)
                && (kind != OpType::Signal || op.completed())
        });
        its.count()
    };
    count(waits, OpType::NewWindow, None) == 1
        && count(signals, OpType::Signal, Some(member))
            >= count(waits, OpType::WaitSignal, Some(peer))
}

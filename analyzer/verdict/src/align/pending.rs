//! The unfinished operations of each rank, and whether its device has reached them.

use crate::align::message;
use crate::align::p2p::{self, Counterpart, Half, Messages};
use crate::align::record::{NONE, Op, Record};
use crate::align::{Aligned, GroupIx, Lane, RecordIx};
use rcomm_recorder::model::{EntryState, OpType, Peer};
use rcomm_recorder::publish::Recorder;
use std::collections::HashMap;

/// Whether the device of a rank has reached an operation that the rank issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Arrival {
    /// No: it follows an older unfinished operation of its group, and is not recorded as started.
    Queued,
    /// Unknown. The ring may have dropped an operation before it. Or it is the first unfinished one of its group, and
    /// either it is not recorded as started, or starts are not recorded and an unfinished operation of another group
    /// precedes it.
    Head,
    /// Yes.
    Arrived,
}

/// An unfinished operation that a rank has issued.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) group: GroupIx,
    /// Position of its first entry in the record's operations.
    pub(crate) position: u32,
    pub(crate) kind: PendingKind,
    pub(crate) arrival: Arrival,
    /// Whether the operation consists of receives that a separate thread holds open while the rank works: such a thread
    /// waits for its next task, and the rank does not wait for the receives.
    pub(crate) held_open: bool,
    /// Whether the operation consists of messages whose other halves have completed ([`is_delivered`]).
    pub(crate) delivered: bool,
}

/// A collective, or a batch of messages; a single message is a batch of one.
#[derive(Clone, Debug)]
pub(crate) enum PendingKind {
    Collective { seq: u32 },
    Batch { halves: Vec<Half> },
}

/// Whether the ring may have dropped the operation that the rank is in. That happens if the program runs far ahead of
/// its device and the ring is small.
pub(crate) fn front_is_lost(record: &Record) -> bool {
    record.wrapped()
        && !record.only_active
        && !record.ops.is_empty()
        && (!record.ops.iter().any(|op| op.completed() || op.retired) || begins_pending(record))
}

/// Whether the oldest entry of the ring has not completed; the closing marker decides for the messages of a batch.
fn begins_pending(record: &Record) -> bool {
    let Some(first) = record.ops.first() else {
        return false;
    };
    let marker = record.ops.iter().find(|op| {
        op.kind == OpType::Coalesced
            && op.group == first.group
            && op.is_p2p == first.is_p2p
            && (op.p2p_seq, op.seq) == (first.p2p_seq, first.seq)
    });
    let status = marker.unwrap_or(first);
    !status.completed() && !status.retired
}

/// Whether operations of this backend run on a device, in the order of one queue unless records show otherwise.
pub(crate) fn on_device(backend: &str) -> bool {
    [
        "nccl", "rccl", "xccl", "hccl", "cncl", "mccl", "eccl", "flagcx",
    ]
    .iter()
    .any(|name| backend.starts_with(name))
}

/// Whether this is a message of a rank to itself. NCCL reports no end of such a message to a profiler, and no peer if
/// it copies in place. It needs no other rank.
fn is_copy(record: &Record, lane: &Lane, op: &Op) -> bool {
    record.recorder == Recorder::NcclProfiler
        && op.retired
        && op.state == EntryState::Scheduled
        && match op.peer() {
            Peer::Rank(peer) => peer == lane.member,
            Peer::None => true,
            Peer::Any => false,
        }
}

/// The unfinished operations of a record, in order of issue.
pub(crate) fn pending_of(
    aligned: &Aligned<'_>,
    messages: &Messages,
    record: RecordIx,
) -> Vec<Pending> {
    let full_record = &aligned.records[record];
    let mut pending: Vec<Pending> = Vec::new();
    let mut started: Vec<bool> = Vec::new();
    let mut shows_starts: Vec<bool> = Vec::new();
    for (lane_index, lane) in aligned.lanes[record].iter().enumerate() {
        if lane.member == NONE {
            continue;
        }
        let mut index = lane.pending_from;
        while index < lane.collectives.len() {
            let block = aligned.block(record, lane, index);
            let status_op = aligned.op(record, lane.collectives[block.end - 1]);
            // Completed operations were left out of the record, so a missing marker shows that the block has completed.
            let is_closed = full_record.only_active
                && full_record.recorder == Recorder::Nccl
                && block.len() > 1
                && status_op.kind != OpType::Coalesced
                && status_op.state == EntryState::Scheduled;
            if !status_op.completed()
                && !is_closed
                && !aligned.is_over_since(record, lane.group, status_op.seq)
            {
                let any_started = block.clone().any(|index| {
                    let op = aligned.op(record, lane.collectives[index]);
                    op.state == EntryState::Started || op.started_us != NONE
                });
                pending.push(Pending {
                    group: lane.group,
                    position: lane.collectives[index],
                    kind: PendingKind::Collective { seq: status_op.seq },
                    arrival: Arrival::Queued,
                    held_open: false,
                    delivered: false,
                });
                started.push(any_started);
                shows_starts.push(lane.shows_starts);
            }
            index = block.end;
        }
        let status_ops = messages.status_ops(record, lane_index);
        let mut index = 0;
        // A send or receive is over if a later one with the same peer and direction has completed.
        let mut over = overtaken(aligned, record, &lane.messages, status_ops);
        if full_record.only_active && full_record.recorder == Recorder::Nccl {
            leave_out_closed(aligned, record, &lane.messages, status_ops, &mut over);
            if !loses_completed_messages(aligned, record, lane) {
                leave_out_matched(aligned, messages, (record, lane), status_ops, &mut over);
            }
        }
        while index < lane.messages.len() {
            let status_op = status_ops[index];
            let end = index
                + status_ops[index..]
                    .iter()
                    .take_while(|&&other| other == status_op)
                    .count();
            let op = aligned.op(record, status_op);
            let halves: Vec<Half> = (index..end)
                .filter(|&index| {
                    let op = aligned.op(record, lane.messages[index]);
                    !over[index] && op.kind.is_p2p() && !is_copy(full_record, lane, op)
                })
                .map(|index| Half {
                    position: lane.messages[index],
                    status_op,
                })
                .collect();
            if p2p::pending(op) && !halves.is_empty() {
                pending.push(Pending {
                    group: lane.group,
                    position: halves[0].position,
                    kind: PendingKind::Batch { halves },
                    arrival: Arrival::Queued,
                    held_open: false,
                    delivered: false,
                });
                started.push(op.state == EntryState::Started || op.started_us != NONE);
                shows_starts.push(lane.shows_starts);
            }
            index = end;
        }
    }
    let mut order: Vec<usize> = (0..pending.len()).collect();
    order.sort_by_key(|&index| pending[index].position);
    let runs_on_device = |index: &usize| {
        let op = aligned.op(record, pending[*index].position);
        on_device(&aligned.shared.calls.get(op.call).signature.backend)
    };
    let device = full_record.recorder.sees_device() || order.iter().any(runs_on_device);
    let mut lane_has_head: HashMap<(GroupIx, bool), bool> = HashMap::new();
    for (nth, &index) in order.iter().enumerate() {
        let operation = &mut pending[index];
        let is_message = matches!(operation.kind, PendingKind::Batch { .. });
        // A device runs the messages and collectives of a group in one order; a host does not.
        let lane = (operation.group, is_message && !device);
        let is_head = !std::mem::replace(lane_has_head.entry(lane).or_default(), true);
        operation.arrival = if shows_starts[index] {
            if started[index] {
                Arrival::Arrived
            } else if is_head {
                Arrival::Head
            } else {
                Arrival::Queued
            }
        } else if device {
            if nth == 0 {
                Arrival::Arrived
            } else if is_head {
                Arrival::Head
            } else {
                Arrival::Queued
            }
        } else if is_head || is_message {
            Arrival::Arrived
        } else {
            Arrival::Queued
        };
    }
    let lost = device && front_is_lost(full_record);
    let mut sorted = Vec::with_capacity(pending.len());
    for index in order {
        let mut operation = pending[index].clone();
        if lost {
            operation.arrival = operation.arrival.min(Arrival::Head);
        }
        operation.held_open = is_held_open(aligned, record, &operation);
        operation.delivered = !device && is_delivered(aligned, messages, record, &operation);
        sorted.push(operation);
    }
    sorted
}

/// A rank continues despite an unfinished operation if its other threads have since completed at least this many
/// operations with other ranks, sends not counted.
const GOES_ON: usize = 3;

/// Whether the operation consists of receives by a thread that has issued nothing else, while other threads of the rank
/// continued.
fn is_held_open(aligned: &Aligned<'_>, record: RecordIx, operation: &Pending) -> bool {
    let PendingKind::Batch { halves } = &operation.kind else {
        return false;
    };
    let receives = |half: &Half| aligned.op(record, half.position).kind == OpType::Recv;
    let op = aligned.op(record, operation.position);
    halves.iter().all(receives) && goes_on_beside(aligned, record, op, operation.position)
}

/// Whether the operation consists of messages, none of which has failed, and the other half of each has certainly
/// completed. Gloo ends a send or a receive only when the program waits for it: until then, one that has arrived is
/// recorded as unfinished.
fn is_delivered(
    aligned: &Aligned<'_>,
    messages: &Messages,
    record: RecordIx,
    operation: &Pending,
) -> bool {
    let PendingKind::Batch { halves } = &operation.kind else {
        return false;
    };
    let group = operation.group;
    let mut lanes = aligned.lanes[record].iter();
    let Some(member) = (lanes.find(|lane| lane.group == group)).map(|lane| lane.member) else {
        return false;
    };
    let members = aligned.groups[group].ranks.len();
    halves.iter().all(|half| {
        let op = aligned.op(record, half.position);
        let Some(ends) = message::ends(op.kind, op.peer(), member, members) else {
            return false;
        };
        let peer = if op.kind == OpType::Send {
            ends.1
        } else {
            ends.0
        };
        let there = aligned.lane(group, peer as usize);
        let other = messages.other_half((group, ends), op.kind, half.position);
        let (Some((there, _)), Counterpart::Posted(other)) = (there, other) else {
            return false;
        };
        let pair = messages.pairs.get(&(group, ends));
        pair.is_some_and(|pair| pair.certain)
            && op.state != EntryState::Failed
            && p2p::done(aligned, there, other)
    })
}

/// Whether the thread that issued this unfinished operation has issued operations of this kind only, and other threads
/// of the rank continued after it. False if the thread is not recorded, or if the operation has failed.
pub(crate) fn goes_on_beside(
    aligned: &Aligned<'_>,
    record: RecordIx,
    op: &Op,
    position: u32,
) -> bool {
    if op.thread == NONE || op.state == EntryState::Failed {
        return false;
    }
    let ops = &aligned.records[record].ops;
    let is_of_thread = |other: &&Op| other.thread == op.thread;
    let with_others = |other: &&Op| {
        let lane = aligned.lanes[record].get(usize::from(other.group));
        lane.is_some_and(|lane| aligned.groups[lane.group].ranks.len() != 1)
    };
    let later = ops[position as usize..].iter();
    later
        .filter(|other| other.thread != NONE && !is_of_thread(other))
        .filter(|other| other.completed() && other.kind != OpType::Send)
        .filter(with_others)
        .take(GOES_ON)
        .count()
        == GOES_ON
        && ops
            .iter()
            .filter(is_of_thread)
            .all(|own| own.kind == op.kind)
}

/// For each unfinished operation of a record: when the thread that issued it last completed an operation that it issued
/// later, else when it was issued; common time, ns.
///
/// Until then the thread did not wait in it: a program may hold a receive open while it works. Another thread may
/// continue while this one waits, so operations whose threads are not recorded do not count. If the job is `over`, an
/// operation that failed may be the cause: then the time of its issue is returned, whatever the thread did later.
pub(crate) fn active_ns(
    aligned: &Aligned<'_>,
    record: RecordIx,
    pending: &[Pending],
    over: bool,
) -> Vec<i64> {
    let mut active: Vec<i64> = Vec::with_capacity(pending.len());
    let mut last_done: HashMap<u32, i64> = HashMap::new();
    let mut later = aligned.records[record].ops.len();
    for operation in pending.iter().rev() {
        let position = operation.position as usize;
        for op in &aligned.records[record].ops[position + 1..later] {
            if op.completed()
                && op.thread != NONE
                && let Some(at_ns) = op.completed_ns()
            {
                let at_ns = at_ns.saturating_sub(aligned.offsets_ns[record]);
                let last = last_done.entry(op.thread).or_insert(at_ns);
                *last = (*last).max(at_ns);
            }
        }
        later = position + 1;
        let op = aligned.op(record, operation.position);
        let issued_ns = aligned.created_ns(record, op);
        let is_cause = over && op.state == EntryState::Failed;
        let done_ns = last_done.get(&op.thread).filter(|_| !is_cause).copied();
        active.push(done_ns.map_or(issued_ns, |done_ns| done_ns.max(issued_ns)));
    }
    active.reverse();
    active
}

/// Marks the messages of completed batches as `over`, in a record from which completed operations were left out: the
/// marker that closed such a batch is missing, and its messages stay `scheduled`. A lane that has markers, or several
/// messages of one number, has all its messages in batches.
fn leave_out_closed(
    aligned: &Aligned<'_>,
    record: RecordIx,
    list: &[u32],
    status_ops: &[u32],
    over: &mut [bool],
) {
    let op = |position: u32| aligned.op(record, position);
    let is_same_batch = |pair: &[u32]| op(pair[0]).p2p_seq == op(pair[1]).p2p_seq;
    let has_batches = list
        .iter()
        .any(|&position| op(position).kind == OpType::Coalesced)
        || list.windows(2).any(is_same_batch);
    for ((over, position), status_op) in over.iter_mut().zip(list).zip(status_ops) {
        *over |= has_batches && position == status_op && op(*position).kind.is_p2p();
    }
}

/// Marks messages without a marker as `over` if their other half was posted, too, in a record from which completed
/// operations were left out: the marker of a batch of one may be missing because the batch completed. A message that
/// has started is in no batch.
fn leave_out_matched(
    aligned: &Aligned<'_>,
    messages: &Messages,
    (record, lane): (RecordIx, &Lane),
    status_ops: &[u32],
    over: &mut [bool],
) {
    let members = aligned.groups[lane.group].ranks.len();
    for ((over, &position), &status_op) in over.iter_mut().zip(&lane.messages).zip(status_ops) {
        let op = aligned.op(record, position);
        let may_lack_marker =
            position == status_op && op.kind.is_p2p() && op.state == EntryState::Scheduled;
        if !may_lack_marker {
            continue;
        }
        let ends = message::ends(op.kind, op.peer(), lane.member, members);
        let other = ends.map(|ends| messages.other_half((lane.group, ends), op.kind, position));
        *over |= match other {
            Some(Counterpart::Posted(_) | Counterpart::Lost) => true,
            Some(Counterpart::Missing) | None => false,
        };
    }
}

/// Whether the messages before those in a lane are missing in its record because they completed. Those of batches would
/// be there: only the marker of a batch is ever noted as completed. No, if the ring may have dropped them.
fn loses_completed_messages(aligned: &Aligned<'_>, record: RecordIx, lane: &Lane) -> bool {
    /// Rings hold at least this many operations.
    const LEAST_RING: u64 = 64;
    /// A program issues a message at least every so many operations.
    const MOST_APART: u64 = 16;
    let full_record = &aligned.records[record];
    let id = |position: u32| full_record.record_id(aligned.op(record, position));
    let mut ids = lane.messages.iter().map(|&position| id(position));
    let Some(first) = ids.next() else {
        return false;
    };
    let newest = full_record
        .ops
        .iter()
        .map(|op| full_record.record_id(op))
        .max();
    let apart = lane
        .messages
        .windows(2)
        .map(|pair| id(pair[1]).saturating_sub(id(pair[0])));
    let before = first.saturating_sub(apart.max().unwrap_or(MOST_APART).max(1));
    let is_in_ring = newest.is_some_and(|newest| newest.saturating_sub(before) < LEAST_RING);
    aligned.op(record, lane.messages[0]).p2p_seq > 1 && is_in_ring
}

/// For each message, whether it is unfinished although a later one with the same peer and direction has completed.
fn overtaken(
    aligned: &Aligned<'_>,
    record: RecordIx,
    list: &[u32],
    status_ops: &[u32],
) -> Vec<bool> {
    let mut over = vec![false; list.len()];
    let mut done_after: Vec<(OpType, u32)> = Vec::new();
    for index in (0..list.len()).rev() {
        let op = aligned.op(record, list[index]);
        if !op.kind.is_p2p() {
            continue;
        }
        let key = (op.kind, op.peer);
        if aligned.op(record, status_ops[index]).completed() {
            if !done_after.contains(&key) {
                done_after.push(key);
            }
        } else if done_after.contains(&key) {
            over[index] = true;
        }
    }
    over
}

//! Pairs sends with receives.
//!
//! A message is identified by (group, source, destination, n-th message): each end counts its point-to-point operations
//! separately, so sequence numbers do not match across ranks. If both records hold all operations, n is counted from
//! the start. Otherwise the two lists are shifted against each other by what both ends share: the newest completed
//! collective that both recorded, the newest completed message, the sizes, and that no message is received before it is
//! sent.
//!
//! If the recorder of PyTorch's NCCL backend wrote a closing marker for a batch, the marker holds the state of the
//! batch's messages, since their own remains `scheduled`.

use crate::align::clocks;
use crate::align::record::{NONE, Op};
use crate::align::{Aligned, GroupIx, Lane, RecordIx, message};
use rcomm_recorder::model::{EntryState, OpType};
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeMap, HashMap};

/// One half of a message, as one rank recorded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Half {
    /// Position in the record's operations.
    pub(crate) position: u32,
    /// Position of the entry that holds the state of this half: its own, or the marker that closes its batch.
    pub(crate) status_op: u32,
}

/// All messages of a group from one member to another as each side recorded them, oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pair {
    pub(crate) sends: Vec<Half>,
    pub(crate) receives: Vec<Half>,
    /// Receive `i` belongs to send `i + shift`.
    pub(crate) shift: i64,
    /// Whether both records hold all operations, or this shift fits clearly better than every other that was tried.
    pub(crate) certain: bool,
}

/// What the record of the other end shows of a message's other half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counterpart {
    /// The other half was posted.
    Posted(Half),
    /// The other half is older than what the record holds.
    Lost,
    /// The record does not hold the other half: it was not posted, or the file was cut before it.
    Missing,
}

/// Source and destination, as group ranks.
pub(crate) type Ends = (u32, u32);

/// All messages of all groups.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    pub(crate) pairs: HashMap<(GroupIx, Ends), Pair>,
    /// By group and receiver: receives from any source, and those whose record names no peer, oldest first.
    pub(crate) any: BTreeMap<(GroupIx, u32), Vec<Half>>,
    /// By record, then lane: for each message of the lane, the position of the entry that holds its state.
    status_ops: Vec<Vec<Vec<u32>>>,
}

impl Messages {
    /// Pairs all messages.
    pub(crate) fn new(aligned: &Aligned<'_>) -> Self {
        let mut messages = Self::default();
        let status_ops = aligned.shared.map(aligned.records.len(), |record| {
            let lanes = aligned.lanes[record].iter();
            let status_ops = lanes.map(|lane| status_ops_of(aligned, record, lane));
            status_ops.collect::<Vec<_>>()
        });
        for (record, lanes) in aligned.lanes.iter().enumerate() {
            for (lane, lane_status_ops) in lanes.iter().zip(&status_ops[record]) {
                messages.collect(aligned, record, lane, lane_status_ops);
            }
        }
        messages.status_ops = status_ops;
        let pairs: Vec<_> = messages.pairs.iter().collect();
        let shifts = aligned.shared.map(pairs.len(), |index| {
            let (&between, pair) = pairs[index];
            shift_of(aligned, between, pair)
        });
        for (pair, shift) in messages.pairs.values_mut().zip(shifts) {
            (pair.shift, pair.certain) = shift;
        }
        messages
    }

    /// For each message of a lane, in order, the position of the entry that holds its state.
    pub(crate) fn status_ops(&self, record: RecordIx, lane: usize) -> &[u32] {
        &self.status_ops[record][lane]
    }

    /// The other half of the `index`-th send of a pair.
    pub(crate) fn receive_of(&self, pair: &Pair, index: usize) -> Counterpart {
        counterpart_at(&pair.receives, index as i64 - pair.shift)
    }

    /// The other half of the `index`-th receive of a pair.
    pub(crate) fn send_of(&self, pair: &Pair, index: usize) -> Counterpart {
        counterpart_at(&pair.sends, index as i64 + pair.shift)
    }

    /// The other half of the send or receive at this position of the record of one end.
    pub(crate) fn other_half(
        &self,
        between: (GroupIx, Ends),
        kind: OpType,
        position: u32,
    ) -> Counterpart {
        let Some(pair) = self.pairs.get(&between) else {
            return Counterpart::Missing;
        };
        let is_send = kind == OpType::Send;
        let list = if is_send { &pair.sends } else { &pair.receives };
        match list.binary_search_by_key(&position, |half| half.position) {
            Ok(index) if is_send => self.receive_of(pair, index),
            Ok(index) => self.send_of(pair, index),
            Err(_) => Counterpart::Lost,
        }
    }

    /// Adds the messages of one lane.
    fn collect(
        &mut self,
        aligned: &Aligned<'_>,
        record: RecordIx,
        lane: &Lane,
        status_ops: &[u32],
    ) {
        if lane.member == NONE {
            return;
        }
        let members = aligned.groups[lane.group].ranks.len();
        for (&position, &status_op) in lane.messages.iter().zip(status_ops) {
            let op = aligned.op(record, position);
            let half = Half {
                position,
                status_op,
            };
            if !op.kind.is_p2p() {
                continue;
            }
            let is_send = op.kind == OpType::Send;
            match message::ends(op.kind, op.peer(), lane.member, members) {
                Some(ends) => {
                    let pair = self.pairs.entry((lane.group, ends)).or_default();
                    let list = if is_send {
                        &mut pair.sends
                    } else {
                        &mut pair.receives
                    };
                    list.push(half);
                }
                None if is_send => {}
                None => {
                    self.any
                        .entry((lane.group, lane.member))
                        .or_default()
                        .push(half);
                }
            }
        }
    }
}

/// The member at the other end; `None` for a receive from any source, or if the record does not name it.
pub(crate) fn peer_of(op: &Op, member: u32, members: u32) -> Option<u32> {
    message::other_end(op.peer(), member, members as usize)
}

/// Whether a half has completed, according to the entry that holds its state.
pub(crate) fn done(aligned: &Aligned<'_>, record: RecordIx, half: Half) -> bool {
    aligned.op(record, half.status_op).completed()
}

/// The half at an index of the other end's list: a negative one is older than the record.
fn counterpart_at(list: &[Half], index: i64) -> Counterpart {
    match usize::try_from(index) {
        Err(_) => Counterpart::Lost,
        Ok(index) => list
            .get(index)
            .map_or(Counterpart::Missing, |&half| Counterpart::Posted(half)),
    }
}

/// For each message of a lane, the position of the entry that holds its state.
fn status_ops_of(aligned: &Aligned<'_>, record: RecordIx, lane: &Lane) -> Vec<u32> {
    let mut status_ops = lane.messages.clone();
    // rcomm's recorder and PyTorch's hook record the state of each message of a batch.
    if aligned.records[record].recorder != Recorder::Nccl {
        return status_ops;
    }
    let mut batch_start = 0;
    for index in 0..lane.messages.len() {
        let op = aligned.op(record, lane.messages[index]);
        let begins_batch =
            index > 0 && aligned.op(record, lane.messages[index - 1]).p2p_seq != op.p2p_seq;
        if begins_batch {
            batch_start = index;
        }
        if op.kind == OpType::Coalesced {
            for status_op in &mut status_ops[batch_start..index] {
                *status_op = lane.messages[index];
            }
            batch_start = index + 1;
        }
    }
    status_ops
}

/// The shift of a pair's receives against its sends, and whether it is certain.
fn shift_of(
    aligned: &Aligned<'_>,
    (group, (source, destination)): (GroupIx, Ends),
    pair: &Pair,
) -> (i64, bool) {
    let (Some((sender, _)), Some((receiver, _))) = (
        aligned.lane(group, source as usize),
        aligned.lane(group, destination as usize),
    ) else {
        return (0, false);
    };
    let is_complete = |record: RecordIx| {
        let record = &aligned.records[record];
        !record.wrapped() && !record.only_active
    };
    if is_complete(sender) && is_complete(receiver) {
        return (0, true);
    }
    let completed = |record: RecordIx, list: &[Half]| {
        list.iter()
            .rposition(|&half| done(aligned, record, half))
            .map_or(0, |last| last as i64 + 1)
    };
    let by_completion = completed(sender, &pair.sends) - completed(receiver, &pair.receives);
    let by_anchor = anchor(aligned, sender, receiver).map(|(sent, received)| {
        let before = |list: &[Half], position: u32| {
            list.partition_point(|half| half.position < position) as i64
        };
        before(&pair.sends, sent) - before(&pair.receives, received)
    });
    let error_ns = order_error_ns(aligned, sender, receiver);
    let by_clock =
        error_ns.and_then(|error_ns| by_clock(aligned, sender, receiver, pair, error_ns));
    let preferred = by_anchor.unwrap_or(by_completion);
    let found = [Some(preferred), Some(by_completion), by_clock];
    let near = |shift: i64| (-2..=2).map(move |step| shift + step);
    let mut candidates: Vec<i64> = found.into_iter().flatten().flat_map(near).collect();
    // The anchor gives a wrong shift only if one end posted a message before it and the other after it.
    let off_anchor = |shift: i64| by_anchor.map_or(0, |anchor| 2 * shift.abs_diff(anchor));
    candidates.sort_unstable();
    candidates.dedup();
    let mut ranked: Vec<_> = candidates
        .into_iter()
        .map(|shift| {
            let cost =
                misfit(aligned, (sender, receiver), pair, shift, error_ns) + off_anchor(shift);
            let by_completion = (shift - by_completion).abs();
            (cost, (shift - preferred).abs(), by_completion, shift)
        })
        .collect();
    ranked.sort_unstable();
    let shift = ranked.first().map_or(preferred, |best| best.3);
    let is_certain = match ranked[..] {
        [best, next, ..] => next.0 - best.0 >= CERTAIN_BY,
        _ => true,
    };
    (shift, is_certain)
}

/// A shift is certain if its cost is lower than that of every other by at least this much.
const CERTAIN_BY: u64 = 2;

/// The shift at which the newest completed receive belongs to the last send that was posted before that receive ended.
/// The receive cannot belong to a later send; it can belong to an earlier one if small messages need no receiver. `None`
/// if no receive has completed. `error_ns` is that of [`order_error_ns`].
fn by_clock(
    aligned: &Aligned<'_>,
    sender: RecordIx,
    receiver: RecordIx,
    pair: &Pair,
    error_ns: i64,
) -> Option<i64> {
    let mut receives = pair.receives.iter();
    let received = receives.rposition(|&half| done(aligned, receiver, half))?;
    let received_ns = received_ns(aligned, receiver, pair.receives[received])?;
    let is_earlier =
        |&send: &Half| posted_ns(aligned, sender, send) <= received_ns.saturating_add(error_ns);
    Some(pair.sends.partition_point(is_earlier) as i64 - 1 - received as i64)
}

/// The newest collective, in any group, that needs every member, that `one` completed and that `other` recorded: its
/// positions in both records. `None` if there is none among the newest 4096 of each group.
fn anchor(aligned: &Aligned<'_>, one: RecordIx, other: RecordIx) -> Option<(u32, u32)> {
    let mut newest: Option<(u32, u32)> = None;
    for lane in &aligned.lanes[one] {
        let Some(peer) = aligned.lanes[other]
            .iter()
            .find(|peer| peer.group == lane.group)
        else {
            continue;
        };
        let done = lane.collectives[..lane.pending_from]
            .iter()
            .rev()
            .take(4096);
        let common = done.copied().find_map(|position| {
            let op = aligned.op(one, position);
            if !op.kind.needs_all_members() {
                return None;
            }
            let peer_index = aligned.find(other, peer, op.seq).ok()?;
            Some((position, peer.collectives[peer_index]))
        });
        newest = newest.max(common);
    }
    newest
}

/// The cost of this shift: how badly the newest 64 messages of the two lists fit; 0 is best. The weights order the
/// cases: what cannot happen costs most, what is only unusual least.
fn misfit(
    aligned: &Aligned<'_>,
    (sender, receiver): (RecordIx, RecordIx),
    pair: &Pair,
    shift: i64,
    error_ns: Option<i64>,
) -> u64 {
    const DEPTH: usize = 64;
    let mut cost = 0;
    let from = pair.receives.len().saturating_sub(DEPTH);
    for (nth, &receive) in pair.receives.iter().enumerate().skip(from) {
        let index = nth as i64 + shift;
        let received = done(aligned, receiver, receive);
        match usize::try_from(index)
            .ok()
            .map(|index| pair.sends.get(index))
        {
            // The send is older than the record and has ended, so a receive that waits for it is unlikely.
            None => cost += u64::from(!received) * 2,
            // The receive completed although its peer posted no send.
            Some(None) => cost += u64::from(received) * 100,
            Some(Some(&send)) => {
                let sent = done(aligned, sender, send);
                // Rarely has only one end completed, unless one was posted in a batch, which completes as a whole.
                // Different sizes are a fault in which both remain pending.
                let are_single =
                    !is_in_batch(aligned, sender, send) && !is_in_batch(aligned, receiver, receive);
                cost += u64::from(received != sent && are_single) * 3;
                let differ = aligned
                    .shared
                    .calls
                    .key(aligned.op(sender, send.position).call)
                    .size
                    != aligned
                        .shared
                        .calls
                        .key(aligned.op(receiver, receive.position).call)
                        .size;
                // Halves of different sizes that completed are not the same message.
                cost += u64::from(differ) * if received { 50 } else { 1 };
                // What was received before it was sent, as far as the clocks show it, is not the same message.
                if received && let Some(error_ns) = error_ns {
                    let received_ns = received_ns(aligned, receiver, receive);
                    let posted_ns = posted_ns(aligned, sender, send);
                    let is_first =
                        received_ns.is_some_and(|ns| ns.saturating_add(error_ns) < posted_ns);
                    cost += u64::from(is_first) * 50;
                }
            }
        }
    }
    let from = pair.sends.len().saturating_sub(DEPTH);
    for (nth, &send) in pair.sends.iter().enumerate().skip(from) {
        let sent = done(aligned, sender, send);
        let index = nth as i64 - shift;
        cost += u64::from(index < 0 && !sent) * 2;
        // A send rarely completes before its receive is posted: only small messages can.
        let has_no_receive = index >= pair.receives.len() as i64;
        cost += u64::from(has_no_receive && sent && !is_in_batch(aligned, sender, send)) * 3;
    }
    cost
}

/// When a receive completed, common time, ns; `None` if it did not, or the record does not state when.
fn received_ns(aligned: &Aligned<'_>, receiver: RecordIx, receive: Half) -> Option<i64> {
    let received_ns = aligned.op(receiver, receive.status_op).completed_ns()?;
    Some(received_ns.saturating_sub(aligned.offsets_ns[receiver]))
}

/// When a send was posted, common time, ns.
fn posted_ns(aligned: &Aligned<'_>, sender: RecordIx, send: Half) -> i64 {
    aligned.created_ns(sender, aligned.op(sender, send.position))
}

/// Common times of two records that differ by more than this, ns, show what came first; `None` if it is not known how
/// well their clocks are related. The ranks of one host share a clock.
fn order_error_ns(aligned: &Aligned<'_>, one: RecordIx, other: RecordIx) -> Option<i64> {
    const LEAST_NS: i64 = 5_000_000;
    let [host, other_host] = [one, other].map(|record| &aligned.records[record].identity.host);
    if !host.is_empty() && host == other_host {
        return Some(LEAST_NS);
    }
    let spread_ns = clocks::sum(aligned.clock_spread_ns[one], aligned.clock_spread_ns[other])?;
    Some(spread_ns.saturating_mul(4).max(LEAST_NS))
}

/// Whether a half was posted with others in a batch that a marker closes.
fn is_in_batch(aligned: &Aligned<'_>, record: RecordIx, half: Half) -> bool {
    let seq = aligned.op(record, half.position).p2p_seq;
    let neighbors = [half.position.checked_sub(1), half.position.checked_add(1)];
    half.status_op != half.position
        && neighbors.into_iter().flatten().any(|neighbor| {
            let op = aligned.records[record].ops.get(neighbor as usize);
            op.is_some_and(|op| op.kind.is_p2p() && op.p2p_seq == seq)
        })
}

/// Whether a half has not completed. A half that failed counts as pending: it waited until it failed.
pub(crate) fn pending(op: &Op) -> bool {
    op.state != EntryState::Completed
}

//! Reads how long each member waited in each completed instance of a group.

use super::hosts::Hosts;
use crate::align::clocks::Offset;
use crate::align::record::Op;
use crate::align::{Aligned, GroupIx, Lane, RecordIx, position, retiring_is_all};
use rcomm_recorder::model::OpType;
use std::collections::HashMap;
use std::sync::atomic::AtomicU32;

/// Issue times of a recorder that records no completions are not compared below this, ms.
const ISSUE_NOISE_MS: f32 = 20.0;
/// A clock may be wrong by this many standard errors.
const STANDARD_ERRORS: f32 = 4.0;
/// Completions that a watchdog notices in one round are at most this far apart, µs.
const ONE_ROUND_US: i64 = 100;
/// At most this many messages are compared between two ranks.
const MAX_MESSAGES: usize = 256;
/// The longest time between two rounds of a watchdog, ms: a longer step is the program's.
const LONGEST_STEP_MS: f32 = 110.0;
/// This many instances of a group are read at once. A record is then read in stretches: the records of a large job do
/// not fit into a processor's caches, so reading one operation of each record at a time would be slow.
const READ_TOGETHER: usize = 16;
/// The time between two rounds is estimated from at most this many completions of a record.
const MAX_COMPLETIONS: usize = 512;

/// One member's arrival in one instance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived {
    pub(super) record: RecordIx,
    /// Position in the record's operations.
    pub(super) position: u32,
    /// The position after the newest earlier operation that all members of the group took part in.
    pub(super) since: u32,
    /// How long the member waited for the others, ms: the last to arrive waits least.
    pub(super) wait_ms: f32,
}

/// The arrivals of all members in one instance.
#[derive(Default)]
pub(super) struct InstanceArrivals {
    pub(super) members: Vec<Arrived>,
    /// Whether the waits are durations that the backend measured; else they come from issue times.
    pub(super) measured: bool,
    /// Whether the durations come from the device.
    pub(super) by_device: bool,
    /// Whether all members that were read so far have completed the instance.
    is_complete: bool,
    /// For each member, when it issued the operation, in common time.
    issued_ns: Vec<i64>,
}

impl InstanceArrivals {
    /// Prepares for the reading of another instance.
    fn clear(&mut self) {
        self.members.clear();
        self.issued_ns.clear();
        (self.measured, self.by_device, self.is_complete) = (true, true, true);
    }

    /// Computes the waits from the issue times if durations are not recorded. To be called once all members were read.
    fn settle(&mut self) {
        if self.measured {
            return;
        }
        let newest = self.issued_ns.iter().copied().max().unwrap_or(0);
        for (member, issued_ns) in self.members.iter_mut().zip(&self.issued_ns) {
            member.wait_ms = newest.saturating_sub(*issued_ns) as f32 / 1e6;
        }
    }
}

/// A member's lane, and how far its operations on wider groups have been read.
struct MemberCursor {
    record: RecordIx,
    lane: usize,
    /// The member's lanes in wider groups ([`ArrivalReader::wider`]), each with the index of the first collective there
    /// that was not passed.
    wider: Vec<(usize, usize)>,
}

/// Reads the instances of all groups.
pub(super) struct ArrivalReader<'a> {
    aligned: &'a Aligned<'a>,
    hosts: &'a Hosts,
    /// For each record: the error of its clock, ms; `f32::MAX` if unknown.
    clock_ms: Vec<f32>,
    /// For each record: the time between two rounds that notice completions, ms.
    round_interval_ms: Vec<f32>,
    /// For each record: the positions of messages and of the markers that end batches of them.
    messages: Vec<Vec<u32>>,
    /// For each group: whether all its members have a record of it.
    all_recorded: Vec<bool>,
}

impl<'a> ArrivalReader<'a> {
    /// `clocks`: for each record, the offset of its clock.
    pub(super) fn new(
        aligned: &'a Aligned<'a>,
        clocks: &[Option<Offset>],
        hosts: &'a Hosts,
    ) -> Self {
        let clock_ms = |record: RecordIx| match clocks[record].and_then(|clock| clock.error_ns) {
            Some(ns) => ns as f32 / 1e6 * STANDARD_ERRORS,
            None => f32::MAX,
        };
        let spread_ms = |record: RecordIx| {
            let spread_ns = clocks[record].and_then(|clock| clock.spread_ns);
            spread_ns.unwrap_or(0) as f32 / 1e6
        };
        let records = aligned.records.len();
        // The times of completions that are noticed in rounds differ by up to the time between two rounds.
        let interval_ms = |record: RecordIx| {
            let steps_ms = round_interval_ms(&aligned.records[record].ops);
            steps_ms.min(LONGEST_STEP_MS).max(spread_ms(record) * 2.0)
        };
        let messages = |record: RecordIx| {
            let mut positions: Vec<u32> = aligned.lanes[record]
                .iter()
                .flat_map(|lane| lane.messages.iter().copied())
                .collect();
            positions.sort_unstable();
            positions
        };
        Self {
            clock_ms: (0..records).map(clock_ms).collect(),
            round_interval_ms: aligned.shared.map(records, interval_ms),
            messages: aligned.shared.map(records, messages),
            all_recorded: (aligned.groups.iter())
                .map(|group| group.lanes.iter().all(Option::is_some))
                .collect(),
            hosts,
            aligned,
        }
    }

    /// Differences of arrival below this, ms, are ignored. Clocks that were estimated from completions are not trusted
    /// below twice the time between two rounds that notice completions.
    pub(super) fn threshold_ms(
        &self,
        instance: &InstanceArrivals,
        one: &Arrived,
        other: &Arrived,
    ) -> f32 {
        let error_ms = self.error_ms(instance, one, other);
        if error_ms == 0.0 {
            return 0.0;
        }
        let round_interval_ms =
            self.round_interval_ms[one.record].max(self.round_interval_ms[other.record]);
        error_ms.max(round_interval_ms * 2.0)
    }

    /// The error of the difference of two members' arrivals, ms: 0 for durations and on one host, a fixed value for a
    /// recorder without completions, else from the errors of the clocks.
    pub(super) fn error_ms(
        &self,
        instance: &InstanceArrivals,
        one: &Arrived,
        other: &Arrived,
    ) -> f32 {
        if instance.measured {
            0.0
        } else if retiring_is_all(self.aligned.records[one.record].recorder) {
            ISSUE_NOISE_MS
        } else if self.one_host(one.record, other.record) {
            0.0
        } else {
            let error_ms = self.clock_ms[one.record].hypot(self.clock_ms[other.record]);
            error_ms.max(f32::MIN_POSITIVE)
        }
    }

    /// Whether two records are of one host and have one clock offset.
    fn one_host(&self, one: RecordIx, other: RecordIx) -> bool {
        let same = self.aligned.offsets_ns[one] == self.aligned.offsets_ns[other];
        let host = self.hosts.of(one);
        same && host.is_some() && host == self.hosts.of(other)
    }

    /// How long the rank's device was still busy with earlier operations when its host issued this one, and the error
    /// of that, ms. A host that is so far ahead delays nothing. `None` if durations are recorded or no earlier
    /// completion is known.
    pub(super) fn busy_ms(
        &self,
        instance: &InstanceArrivals,
        arrived: &Arrived,
    ) -> Option<[f32; 2]> {
        if instance.measured {
            return None;
        }
        let ops = &self.aligned.records[arrived.record].ops;
        let before = ops[..arrived.position as usize].iter().rev();
        let end = before.take(64).find_map(Op::completed_ns)?;
        let busy_ms = end.saturating_sub(ops[arrived.position as usize].created_ns) as f32 / 1e6;
        // On average a completion is noticed half a round late.
        let round_interval_ms = self.round_interval_ms[arrived.record];
        Some([busy_ms - round_interval_ms / 2.0, round_interval_ms])
    }

    /// Positions of the rank's messages since the previous common operation ([`Arrived::since`]).
    fn messages_since(&self, arrived: &Arrived) -> &[u32] {
        let messages = &self.messages[arrived.record];
        let index = |position: u32| messages.partition_point(|&message| message < position);
        // Of a damaged record, the previous common operation may follow.
        let range = index(arrived.since)..index(arrived.position);
        messages.get(range).unwrap_or_default()
    }

    /// An upper bound, ms, of the delay of `one` against `other` that `one` itself caused. If neither passed messages,
    /// or both passed the same ones and durations are recorded, there is no bound (`f32::MAX`). If both passed the same
    /// messages and durations are not recorded, the bound is by how much later `one` issued the first of them. If the
    /// messages differ, arrivals cannot be compared, and the bound is 0.
    pub(super) fn bound_ms(
        &self,
        instance: &InstanceArrivals,
        one: &Arrived,
        other: &Arrived,
    ) -> f32 {
        if self.are_comparable(one, other) {
            return f32::MAX;
        }
        let (messages, other_messages) = (self.messages_since(one), self.messages_since(other));
        let role = |record: RecordIx, position: u32| {
            let op = self.aligned.op(record, position);
            let lanes = self.aligned.lanes[record].get(usize::from(op.group));
            let (group, member) = lanes.map_or((0, 0), |lane| (lane.group, lane.member));
            let members = self.aligned.groups[group].ranks.len().max(1) as u32;
            (op.kind, op.peer.wrapping_sub(member) % members)
        };
        let mut pairs = messages.iter().zip(other_messages).take(MAX_MESSAGES);
        if messages.len() != other_messages.len()
            || pairs.any(|(&a, &b)| role(one.record, a) != role(other.record, b))
        {
            return 0.0;
        }
        if instance.measured {
            return f32::MAX;
        }
        let issued = |member: &Arrived, position: u32| {
            self.aligned
                .created_ns(member.record, self.aligned.op(member.record, position))
        };
        issued(one, messages[0]).saturating_sub(issued(other, other_messages[0])) as f32 / 1e6
    }

    /// Whether neither of the two passed messages since the previous common operation.
    pub(super) fn are_comparable(&self, one: &Arrived, other: &Arrived) -> bool {
        self.messages_since(one).is_empty() && self.messages_since(other).is_empty()
    }

    /// For each record, how long it waited in each operation that no instance compares, by position, as the bits of ms:
    /// in messages, in collectives that need only some members, and in groups of which a member left no record. 0 for
    /// other operations.
    pub(super) fn uncompared_waits(&self) -> Vec<Vec<AtomicU32>> {
        let aligned = self.aligned;
        let of_record = |record: RecordIx| {
            let wait = |op: &Op| {
                let waits = op.completed() && !self.is_compared(record, op);
                let ms: f32 = op.wait_ms().filter(|_| waits).unwrap_or(0.0);
                AtomicU32::new(ms.to_bits())
            };
            aligned.records[record].ops.iter().map(wait).collect()
        };
        aligned.shared.map(aligned.records.len(), of_record)
    }

    /// Whether instances show how long the rank of a record waited in an operation, or the rank waits for no other
    /// there. That is so if the operation is a collective that needs all members and each of them has a record, or if
    /// the group has one member.
    pub(super) fn is_compared(&self, record: RecordIx, op: &Op) -> bool {
        let is_message = op.kind.is_p2p() || op.kind == OpType::Coalesced;
        let group = self.aligned.lanes[record].get(usize::from(op.group));
        let group = group.map(|lane| lane.group);
        let has_one_member = |group: GroupIx| self.aligned.groups[group].ranks.len() < 2;
        let is_recorded =
            group.is_none_or(|group| self.all_recorded[group] || has_one_member(group));
        !is_message && op.kind.needs_all_members() && is_recorded
    }

    /// Calls `visit` with each completed instance of a group that needs every member and that all members recorded.
    pub(super) fn each(&self, group: GroupIx, mut visit: impl FnMut(&InstanceArrivals)) {
        let aligned = self.aligned;
        let lanes = aligned.groups[group].lanes.iter().flatten().copied();
        let mut contains = HashMap::new();
        let mut cursors: Vec<MemberCursor> = lanes
            .map(|(record, lane)| MemberCursor {
                record,
                lane,
                wider: self.wider(group, record, &mut contains),
            })
            .collect();
        if cursors.len() < 2 || cursors.len() < aligned.groups[group].ranks.len() {
            return;
        }
        let length =
            |cursor: &&MemberCursor| aligned.lanes[cursor.record][cursor.lane].collectives.len();
        let Some(first) = cursors.iter().min_by_key(length) else {
            return;
        };
        let (first, reference) = (first.record, &aligned.lanes[first.record][first.lane]);
        let mut seqs = Vec::new();
        let mut index = 0;
        while index < reference.pending_from {
            let op = aligned.op(first, reference.collectives[index]);
            if op.kind.needs_all_members() {
                seqs.push(op.seq);
            }
            index = aligned.block(first, reference, index).end;
        }
        let mut instances: Vec<InstanceArrivals> = Vec::new();
        for seqs in seqs.chunks(READ_TOGETHER) {
            instances.resize_with(seqs.len(), InstanceArrivals::default);
            instances.iter_mut().for_each(InstanceArrivals::clear);
            for cursor in &mut cursors {
                for (instance, &seq) in instances
                    .iter_mut()
                    .zip(seqs)
                    .filter(|(instance, _)| instance.is_complete)
                {
                    instance.is_complete = self.read(cursor, seq, instance);
                }
            }
            for instance in instances.iter_mut().filter(|instance| instance.is_complete) {
                instance.settle();
                visit(instance);
            }
        }
    }

    /// The record's lanes in groups that have all members of this one and others, and whose members all have records;
    /// each with index 0 to start from. `contains` caches which groups these are.
    fn wider(
        &self,
        group: GroupIx,
        record: RecordIx,
        contains: &mut HashMap<GroupIx, bool>,
    ) -> Vec<(usize, usize)> {
        let ranks = &self.aligned.groups[group].ranks;
        let is_wider = |other: GroupIx| {
            let others = &self.aligned.groups[other].ranks;
            others.len() > ranks.len()
                && self.all_recorded[other]
                && ranks.iter().all(|&rank| position(others, rank).is_some())
        };
        let lanes = self.aligned.lanes[record].iter().enumerate();
        lanes
            .filter(|(_, lane)| {
                let known = contains.entry(lane.group);
                *known.or_insert_with(|| is_wider(lane.group))
            })
            .map(|(lane, _)| (lane, 0))
            .collect()
    }

    /// Adds a member's part in one instance to `instance`; `false` if the member has not completed it.
    fn read(&self, cursor: &mut MemberCursor, seq: u32, instance: &mut InstanceArrivals) -> bool {
        let aligned = self.aligned;
        let (record, lane) = (cursor.record, &aligned.lanes[cursor.record][cursor.lane]);
        let Ok(index) = aligned.find(record, lane, seq) else {
            return false;
        };
        if index >= lane.pending_from {
            return false;
        }
        let op = aligned.status_op(record, lane, index);
        let recorder = aligned.records[record].recorder;
        instance.measured &= op.duration_ms >= 0.0;
        instance.by_device &= recorder.sees_device();
        instance.issued_ns.push(aligned.created_ns(record, op));
        let before = index.checked_sub(1);
        let position = lane.collectives[index];
        let mut since = before.map_or(0, |before| lane.collectives[before] + 1);
        for (wider, passed) in &mut cursor.wider {
            let collectives = &aligned.lanes[record][*wider].collectives;
            while collectives
                .get(*passed)
                .is_some_and(|&other| other < position)
            {
                *passed += 1;
            }
            if let Some(before) = passed.checked_sub(1) {
                since = since.max(collectives[before] + 1);
            }
        }
        let own_wait_ms = if recorder.sees_device() {
            f32::MAX
        } else {
            self.own_wait_ms(record, lane, op, before)
        };
        instance.members.push(Arrived {
            record,
            position,
            since,
            wait_ms: op.duration_ms.min(own_wait_ms),
        });
        true
    }

    /// An upper bound, ms, of the time that an operation waited by itself: the time since the group's previous
    /// operation completed. Operations in flight at the same time wait for the same late rank, which counts once.
    /// `f32::MAX` if a completion is unknown.
    fn own_wait_ms(&self, record: RecordIx, lane: &Lane, op: &Op, before: Option<usize>) -> f32 {
        let before = before.map(|before| self.aligned.op(record, lane.collectives[before]));
        match (before.and_then(Op::completed_ns), op.completed_ns()) {
            (Some(before), Some(end)) => end.saturating_sub(before).max(0) as f32 / 1e6,
            _ => f32::MAX,
        }
    }
}

/// The time between two rounds that notice completions, ms; 0 if completions are noticed one by one.
///
/// A watchdog notices all operations that completed since its last round at one moment: moments that several
/// completions share show its rounds.
fn round_interval_ms(ops: &[Op]) -> f32 {
    let newest = ops
        .iter()
        .rev()
        .filter_map(Op::completed_ns)
        .take(MAX_COMPLETIONS);
    let mut ends: Vec<i64> = newest.collect();
    ends.sort_unstable();
    let mut steps = Vec::new();
    let (mut shared, mut moments, mut last, mut at_moment) = (0usize, 1usize, None, 1usize);
    for end in ends {
        if let Some(last) = last {
            let step_us = end.saturating_sub(last) / 1000;
            if step_us <= ONE_ROUND_US {
                at_moment += 1;
            } else {
                steps.push(step_us);
                shared += usize::from(at_moment > 1);
                moments += 1;
                at_moment = 1;
            }
        }
        last = Some(end);
    }
    // A watchdog is taken to make rounds if a quarter of the moments are shared. A step may span rounds that noticed
    // nothing, so the lower quartile of the steps is the time between two.
    if shared * 4 < moments || steps.is_empty() {
        return 0.0;
    }
    let nth = steps.len() / 4;
    let (_, step, _) = steps.select_nth_unstable(nth);
    *step as f32 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::align::record::NONE;
    use rcomm_recorder::model::EntryState;

    fn ended(at_us: u32) -> Op {
        Op {
            created_ns: 0,
            id: 0,
            seq: 0,
            p2p_seq: 0,
            call: 0,
            stack: NONE,
            peer: NONE,
            started_us: NONE,
            completed_us: at_us,
            duration_ms: -1.0,
            thread: NONE,
            group: 0,
            kind: OpType::AllReduce,
            state: EntryState::Completed,
            retired: true,
            is_p2p: false,
        }
    }

    #[test]
    fn times_at_both_ends_of_their_range_show_no_rounds() {
        let mut ops = [ended(1), ended(1)];
        (ops[0].created_ns, ops[1].created_ns) = (i64::MIN, i64::MAX);
        assert!(round_interval_ms(&ops).abs() < f32::EPSILON);
    }

    #[test]
    fn the_polling_interval_of_a_watchdog_is_found_if_there_is_one() {
        let stepped: Vec<Op> = (1..200u32)
            .map(|nth| ended((nth * 7_000).div_ceil(100_000) * 100_000))
            .collect();
        assert_eq!(round_interval_ms(&stepped), 100.0);
        let single: Vec<Op> = (1..200u32).map(|nth| ended(nth * 7_000)).collect();
        assert_eq!(round_interval_ms(&single), 0.0);
        assert_eq!(round_interval_ms(&[]), 0.0);
    }
}

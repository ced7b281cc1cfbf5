//! Aligns the records of all ranks by group and `collective_seq_id`.
//!
//! Collectives are matched across ranks by group (name and members) and sequence number, never by record id or local
//! group number. A *lane* holds the operations of one record in one group: its collectives in order of sequence, its
//! sends and receives in order of issue. A lane may hold a part of them: the ring may have dropped older operations,
//! and a cut file may lack newer ones. [`Aligned::presence`] says whether a member issued a collective, or why that is
//! unknown.

use crate::align::clocks::Offset;
use crate::align::gloo_world::GlooWorld;
use crate::align::membership::{
    Group, GroupIx, RecordIx, names_newest_only, number_families, resolve_groups,
};
use crate::align::presence::{CompletedTo, UnknownReason};
use crate::align::record::{MAX_WORLD, NONE, Op, Record, position, retiring_is_all};
use crate::align::shared::Shared;
use hashbrown::HashMap;
use rcomm_recorder::model::{EntryState, OpType, Rank};
use rcomm_recorder::publish::Recorder;
use std::collections::BTreeSet;
use std::ops::Range;

/// The operations of one record in one group.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lane {
    pub(crate) group: GroupIx,
    /// Group rank; [`NONE`] if the rank is not a member, or if another record of the rank shows the rank's part in the
    /// group.
    pub(crate) member: u32,
    /// Collectives by sequence, as positions in the record's operations.
    pub(crate) collectives: Vec<u32>,
    /// Sends, receives, and the markers that close batches of them, as positions in the record's operations.
    pub(crate) messages: Vec<u32>,
    /// Whether the sequence numbers of the collectives are consecutive and distinct.
    pub(crate) dense: bool,
    /// Index in `collectives` at which the pending ones begin: the one after the newest that is over, or the first that
    /// was reopened.
    pub(crate) pending_from: usize,
    /// Whether the record shows when the lane's operations start on the device.
    pub(crate) shows_starts: bool,
}

/// The parts of an alignment by [`Aligned::as_recorded`] that do not borrow the records, for [`Aligned::again`].
#[derive(Debug)]
pub(crate) struct Alignment {
    by_rank: HashMap<Rank, Range<RecordIx>>,
    groups: Vec<Group>,
    lanes: Vec<Vec<Lane>>,
    families: usize,
    completed_to: Vec<CompletedTo>,
    ends_early: Vec<bool>,
}

/// All records, aligned.
#[derive(Debug)]
pub(crate) struct Aligned<'a> {
    pub(crate) shared: &'a Shared,
    /// By rank, ascending; of several recorders of one rank, the newest first.
    pub(crate) records: &'a [Record],
    by_rank: HashMap<Rank, Range<RecordIx>>,
    pub(crate) groups: Vec<Group>,
    /// For each record: its lanes, in the order of its groups.
    pub(crate) lanes: Vec<Vec<Lane>>,
    /// Ranks that should have left a record, ascending.
    pub(crate) expected: Vec<Rank>,
    /// Whether the job may have more ranks than `expected`: no record states the size or the members of the world, and
    /// some records hold the members of their newest group only.
    pub(crate) may_have_more: bool,
    /// For each record: the offset to subtract from its clock to get common time, ns.
    pub(crate) offsets_ns: Vec<i64>,
    /// For each record: whether common collectives connect its clock to the others'.
    pub(crate) clock_known: Vec<bool>,
    /// By record: how far its offset may be off, ns ([`Offset::spread_ns`]); `None` if that is unknown.
    pub(crate) clock_spread_ns: Vec<Option<i64>>,
    /// The newest time in any record, by the clock of that record, ns; 0 if there is none.
    pub(crate) newest_ns: i64,
    /// The newest time in any record, common time, ns; 0 if there is none.
    pub(crate) newest_common_ns: i64,
    /// The number of families of groups.
    pub(crate) families: usize,
    /// For each group: how far its collectives have provably completed.
    pub(super) completed_to: Vec<CompletedTo>,
    /// For each record: whether it was taken too early to show what its rank did in the end.
    pub(super) ends_early: Vec<bool>,
}

impl<'a> Aligned<'a> {
    /// Aligns `records`, which are sorted by rank.
    pub(crate) fn new(shared: &'a Shared, records: &'a [Record], world_size: Option<u32>) -> Self {
        let mut aligned = Self::as_recorded(shared, records, world_size);
        aligned.reopen();
        aligned
    }

    /// Like [`Aligned::new`], but reuses the alignment of the same records by [`Aligned::as_recorded`].
    /// [`Record::aligns_once`] must hold for all of them.
    pub(crate) fn again(
        shared: &'a Shared,
        records: &'a [Record],
        alignment: Alignment,
        world_size: Option<u32>,
    ) -> Self {
        let mut aligned = Self {
            shared,
            records,
            by_rank: alignment.by_rank,
            groups: alignment.groups,
            lanes: alignment.lanes,
            expected: Vec::new(),
            may_have_more: false,
            offsets_ns: vec![0; records.len()],
            clock_known: vec![false; records.len()],
            clock_spread_ns: vec![None; records.len()],
            newest_ns: 0,
            newest_common_ns: 0,
            families: alignment.families,
            completed_to: alignment.completed_to,
            ends_early: alignment.ends_early,
        };
        aligned.expected = aligned.expected_ranks(world_size);
        aligned
    }

    /// Relates the clocks of the records to common time.
    pub(crate) fn set_clocks(&mut self, clocks: &[Option<Offset>]) {
        let offset_ns = |clock: &Option<Offset>| clock.map_or(0, |clock| clock.ns);
        self.offsets_ns = clocks.iter().map(offset_ns).collect();
        self.clock_known = clocks.iter().map(Option::is_some).collect();
        let spread_ns = |clock: &Option<Offset>| clock.and_then(|clock| clock.spread_ns);
        self.clock_spread_ns = clocks.iter().map(spread_ns).collect();
        let latest_ns = |index: RecordIx| self.records[index].latest_ns();
        let latest_ns = self.shared.map(self.records.len(), latest_ns);
        self.newest_ns = latest_ns.iter().copied().max().unwrap_or(0);
        let in_common_time = latest_ns.iter().zip(&self.offsets_ns);
        self.newest_common_ns = in_common_time
            .map(|(latest_ns, &offset_ns)| latest_ns.saturating_sub(offset_ns))
            .max()
            .unwrap_or(0);
    }

    /// The parts that [`Aligned::again`] needs; the records are no longer borrowed.
    pub(crate) fn into_alignment(self) -> Alignment {
        Alignment {
            by_rank: self.by_rank,
            groups: self.groups,
            lanes: self.lanes,
            families: self.families,
            completed_to: self.completed_to,
            ends_early: self.ends_early,
        }
    }

    /// Like [`Aligned::new`], but without [`Aligned::reopen`]: used to decide which records belong together.
    pub(crate) fn as_recorded(
        shared: &'a Shared,
        records: &'a [Record],
        world_size: Option<u32>,
    ) -> Self {
        let mut by_rank: HashMap<Rank, Range<RecordIx>> = HashMap::with_capacity(records.len());
        for (index, record) in records.iter().enumerate() {
            by_rank.entry(record.rank).or_insert(index..index).end = index + 1;
        }
        let (groups, group_of) = resolve_groups(shared, records, world_size);
        let mut aligned = Self {
            shared,
            records,
            by_rank,
            groups,
            lanes: Vec::new(),
            expected: Vec::new(),
            may_have_more: false,
            offsets_ns: vec![0; records.len()],
            clock_known: vec![false; records.len()],
            clock_spread_ns: vec![None; records.len()],
            newest_ns: 0,
            newest_common_ns: 0,
            families: 0,
            completed_to: Vec::new(),
            ends_early: vec![false; records.len()],
        };
        let lanes_of = |index: RecordIx| aligned.lanes_of(index, &records[index], &group_of);
        aligned.lanes = shared.map(records.len(), lanes_of);
        aligned.families = number_families(&mut aligned.groups, records);
        aligned.find_pending();
        aligned.find_starts();
        aligned.expected = aligned.expected_ranks(world_size);
        let mut stated = records
            .iter()
            .filter_map(|record| record.identity.world_size);
        let mut listed = records.iter().flat_map(|record| &record.groups);
        let names_world = listed.any(|local| {
            let group = &shared.groups[local.group as usize];
            group.desc == "default_pg" && !group.ranks.is_empty()
        });
        let of_gloo = GlooWorld::of(shared, records);
        let names_parts = of_gloo.is_some_and(|world| !world.is_stated);
        let mut newest_only = records
            .iter()
            .map(|record| names_newest_only(shared, record));
        let may_lack_members = names_parts || !names_world && newest_only.any(|only| only);
        aligned.may_have_more = world_size.or(stated.next()).is_none() && may_lack_members;
        aligned
    }

    /// Why a record may lack the newest operations of its rank; `None` if it holds them.
    pub(crate) fn lacks_newest(&self, record: RecordIx) -> Option<UnknownReason> {
        if self.records[record].cut {
            Some(UnknownReason::Cut)
        } else {
            self.ends_early[record].then_some(UnknownReason::Outdated)
        }
    }

    /// The record of a rank, the newest if several recorders of its process left one; `None` if none was read.
    pub(crate) fn record_of(&self, rank: Rank) -> Option<RecordIx> {
        self.records_of(rank).next()
    }

    /// The records of a rank, the newest first; empty if none was read.
    pub(crate) fn records_of(&self, rank: Rank) -> Range<RecordIx> {
        self.by_rank.get(&rank).cloned().unwrap_or_default()
    }

    /// The number of ranks with a record.
    pub(crate) fn ranks_read(&self) -> usize {
        self.by_rank.len()
    }

    /// The record that shows a rank's part in a group. If several recorders recorded the rank: the record that lists
    /// the group, preferably one with operations there. If none lists it, the record by the recorder that recorded a
    /// peer there; if no peer was recorded either, the newest. `None` if the rank left no such record.
    pub(crate) fn record_in(&self, group: GroupIx, rank: Rank) -> Option<RecordIx> {
        let mut of_rank = self.records_of(rank);
        if self.by_rank.len() == self.records.len() {
            return of_rank.next();
        }
        let group = &self.groups[group];
        let member = position(&group.ranks, rank);
        if let Some((record, _)) = member.and_then(|member| group.lanes[member]) {
            return Some(record);
        }
        match group.lanes.iter().flatten().next() {
            Some(&(peer, _)) => {
                of_rank.find(|&index| self.records[index].recorder == self.records[peer].recorder)
            }
            None => of_rank.next(),
        }
    }

    /// The operation at a position of a record.
    pub(crate) fn op(&self, record: RecordIx, position: u32) -> &Op {
        &self.records[record].ops[position as usize]
    }

    /// The sequence number of a collective.
    pub(crate) fn seq(&self, record: RecordIx, position: u32) -> u32 {
        self.op(record, position).seq
    }

    /// The record and the lane of a member; `None` if no record of the member lists the group.
    pub(crate) fn lane(&self, group: GroupIx, member: usize) -> Option<(RecordIx, &Lane)> {
        let (record, lane) = self.groups[group].lanes[member]?;
        Some((record, &self.lanes[record][lane]))
    }

    /// The indices of a lane's collectives that share the sequence number of the one at `first`: one, or a coalesced
    /// block.
    pub(crate) fn block(
        &self,
        record: RecordIx,
        lane: &Lane,
        first: usize,
    ) -> std::ops::Range<usize> {
        if lane.dense {
            return first..first + 1;
        }
        let seq = self.seq(record, lane.collectives[first]);
        let rest = &lane.collectives[first..];
        let len = rest
            .iter()
            .take_while(|&&position| self.seq(record, position) == seq)
            .count();
        first..first + len
    }

    /// The entry that holds the state of the block that begins at `first`: its last, which is the closing marker if
    /// there is one.
    pub(crate) fn status_op(&self, record: RecordIx, lane: &Lane, first: usize) -> &Op {
        let block = self.block(record, lane, first);
        self.op(record, lane.collectives[block.end - 1])
    }

    /// The index of a sequence number in a lane's collectives; `Err` with the index where it would be inserted.
    pub(crate) fn find(&self, record: RecordIx, lane: &Lane, seq: u32) -> Result<usize, usize> {
        let list = &lane.collectives;
        if lane.dense {
            let Some(&first) = list.first() else {
                return Err(0);
            };
            let first = self.seq(record, first);
            return match seq.checked_sub(first) {
                None => Err(0),
                Some(index) if (index as usize) < list.len() => Ok(index as usize),
                Some(_) => Err(list.len()),
            };
        }
        let index = list.partition_point(|&position| self.seq(record, position) < seq);
        match list.get(index) {
            Some(&found) if self.seq(record, found) == seq => Ok(index),
            _ => Err(index),
        }
    }

    /// The oldest and the newest sequence number that any member recorded; `None` if none recorded a collective.
    pub(crate) fn recorded_seqs(&self, group: GroupIx) -> Option<(u32, u32)> {
        let mut ends: Option<(u32, u32)> = None;
        for &(record, lane) in self.groups[group].lanes.iter().flatten() {
            let list = &self.lanes[record][lane].collectives;
            if let (Some(&first), Some(&last)) = (list.first(), list.last()) {
                let (first, last) = (self.seq(record, first), self.seq(record, last));
                ends = Some(ends.map_or((first, last), |(low, high)| {
                    (low.min(first), high.max(last))
                }));
            }
        }
        ends
    }

    /// The time-out of an operation, ms, infinite if it has none. `None` if its record does not state time-outs: that
    /// of the plug-in for NCCL does not, and the plug-in's program may abort at any time.
    pub(crate) fn limit_ms(&self, record: RecordIx, op: &Op) -> Option<f64> {
        if self.records[record].recorder == Recorder::NcclProfiler {
            return None;
        }
        Some(match self.shared.calls.get(op.call).timeout_ms {
            0 => f64::INFINITY,
            limit_ms => limit_ms as f64,
        })
    }

    /// The issue time of an operation in common time, ns.
    pub(crate) fn created_ns(&self, record: RecordIx, op: &Op) -> i64 {
        op.created_ns.saturating_sub(self.offsets_ns[record])
    }

    /// The lanes of a record, in the order of its groups.
    fn lanes_of(&self, index: RecordIx, record: &Record, group_of: &[Vec<GroupIx>]) -> Vec<Lane> {
        let mut lanes: Vec<Lane> = group_of[index]
            .iter()
            .enumerate()
            .map(|(lane, &group)| {
                let member = position(&self.groups[group].ranks, record.rank);
                let member = member
                    .filter(|&member| self.groups[group].lanes[member] == Some((index, lane)));
                Lane {
                    group,
                    member: member.map_or(NONE, |member| member as u32),
                    ..Lane::default()
                }
            })
            .collect();
        for (position, op) in record.ops.iter().enumerate() {
            let lane = &mut lanes[usize::from(op.group)];
            if is_message(op) {
                lane.messages.push(position as u32);
            } else if op.kind.is_collective() {
                lane.collectives.push(position as u32);
            }
        }
        for lane in &mut lanes {
            sort_lane(lane, &record.ops);
        }
        lanes
    }

    /// Finds which lanes show when their operations start on the device.
    ///
    /// PyTorch's hook records start and completion at one moment and gloo records no start: for these, "not started"
    /// means nothing. PyTorch's NCCL recorder records starts where `TORCH_NCCL_ENABLE_TIMING` is set, which may differ
    /// from rank to rank. A lane in which nothing has started or completed is treated like the others of its record, or
    /// else like those of its group.
    fn find_starts(&mut self) {
        let starts = |record: RecordIx| -> Vec<Option<bool>> {
            let lanes = self.lanes[record].iter();
            lanes.map(|lane| self.starts_of(record, lane)).collect()
        };
        let by_lane = self.shared.map(self.lanes.len(), starts);
        let by_group: Vec<bool> = (self.groups.iter())
            .map(|group| {
                let mut lanes = group.lanes.iter().flatten();
                lanes.any(|&(record, lane)| by_lane[record][lane] == Some(true))
            })
            .collect();
        for (lanes, of_record) in self.lanes.iter_mut().zip(&by_lane) {
            let mut known = of_record.iter().flatten();
            let by_record = known.clone().next().map(|_| known.any(|&shown| shown));
            for (lane, shown) in lanes.iter_mut().zip(of_record) {
                lane.shows_starts = shown.or(by_record).unwrap_or(by_group[lane.group]);
            }
        }
    }

    /// Whether a lane shows starts, by the operations just before and after the oldest pending one; false if its
    /// recorder does not see the device, and `None` if none of these operations has started or completed.
    ///
    /// A program may be hundreds of operations ahead of its device, so the newest show nothing.
    fn starts_of(&self, record: RecordIx, lane: &Lane) -> Option<bool> {
        const AROUND: usize = 64;
        if !self.records[record].recorder.sees_device() {
            return Some(false);
        }
        let done = |&position: &u32| self.op(record, position).completed();
        let messages_from = lane.messages.iter().rposition(done);
        let around = |from: usize, len: usize| from.saturating_sub(AROUND)..len.min(from + AROUND);
        let collectives = around(lane.pending_from, lane.collectives.len());
        let messages = around(
            messages_from.map_or(0, |last| last + 1),
            lane.messages.len(),
        );
        let mut ops = (lane.collectives[collectives].iter())
            .chain(&lane.messages[messages])
            .map(|&position| self.op(record, position));
        let mut completed = false;
        let started = ops.any(|op| {
            completed |= op.completed();
            op.state == EntryState::Started || op.started_us != NONE
        });
        (started || completed).then_some(started)
    }

    /// Finds where the pending part of each lane begins, how far each group has provably completed, and which records
    /// were taken too early. Then reopens collectives that a member never issued.
    fn find_pending(&mut self) {
        let pending_from = |record: RecordIx| -> Vec<usize> {
            let retires = retiring_is_all(self.records[record].recorder);
            let done = |&position: &u32| {
                let op = self.op(record, position);
                op.completed() || (op.retired && retires)
            };
            let lanes = self.lanes[record].iter();
            let last = lanes.map(|lane| lane.collectives.iter().rposition(done));
            last.map(|last| last.map_or(0, |last| last + 1)).collect()
        };
        let pending = self.shared.map(self.lanes.len(), pending_from);
        for (lanes, of_record) in self.lanes.iter_mut().zip(pending) {
            for (lane, from) in lanes.iter_mut().zip(of_record) {
                lane.pending_from = from;
            }
        }
        let proven = |group: GroupIx| self.proven_completion(group);
        self.completed_to = self.shared.map(self.groups.len(), proven);
        self.ends_early = (0..self.records.len())
            .map(|record| self.ends_before_its_peers(record, None))
            .collect();
        for group in 0..self.groups.len() {
            self.reopen_retired(group, None);
        }
    }

    /// The ranks that left a record, the other members of groups that a record lists, and all ranks below the stated
    /// world size; ascending.
    fn expected_ranks(&self, world_size: Option<u32>) -> Vec<Rank> {
        let mut expected: BTreeSet<Rank> = self.records.iter().map(|record| record.rank).collect();
        for group in &self.groups {
            if group.lanes.iter().any(Option::is_some) {
                expected.extend(group.ranks.iter());
            }
        }
        let stated = self
            .records
            .iter()
            .filter_map(|record| record.identity.world_size);
        if let Some(size) = world_size
            .or(stated.max())
            .filter(|&size| size <= MAX_WORLD)
        {
            expected.extend(0..size);
        }
        expected.into_iter().collect()
    }
}

/// Whether this is a send, a receive, or the marker that closes a batch of them.
pub(crate) fn is_message(op: &Op) -> bool {
    op.kind.is_p2p() || (op.kind == OpType::Coalesced && op.is_p2p)
}

/// Sorts the collectives of a lane by sequence, and sets `dense`.
fn sort_lane(lane: &mut Lane, ops: &[Op]) {
    let seq = |position: &u32| ops[*position as usize].seq;
    if !lane.collectives.is_sorted_by_key(seq) {
        lane.collectives.sort_by_key(seq);
    }
    lane.dense = lane
        .collectives
        .windows(2)
        .all(|pair| seq(&pair[0]).checked_add(1) == Some(seq(&pair[1])));
}

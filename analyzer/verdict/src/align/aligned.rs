//! Aligns the records of all ranks: what each recorded for one (group, `collective_seq_id`), and what its record does
//! not show.
//!
//! Collectives are matched across ranks by group (name and members) and sequence number, never by record id or local
//! group number. A *lane* holds the operations of one record in one group: its collectives in order of sequence, its
//! sends and receives in order of issue. A lane is a window: the ring may have dropped older operations, and a cut file
//! may lack newer ones. [`Aligned::presence`] alone decides between "never issued", "issued" and "unknown".

use crate::align::membership::{
    Group, GroupIx, RecordIx, number_families, position, resolve_groups,
};
use crate::align::record::{NONE, Op, Record, Shared};
use rcomm_recorder::model::{EntryState, OpType, Rank};
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// The operations of one record in one group.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lane {
    pub(crate) group: GroupIx,
    /// Group rank; [`NONE`] if the record does not list the rank as a member, or another recorder of the process
    /// recorded the rank's operations in this group.
    pub(crate) member: u32,
    /// Collectives by sequence, as positions in the record's operations.
    pub(crate) collectives: Vec<u32>,
    /// Sends and receives, as positions in the record's operations.
    pub(crate) messages: Vec<u32>,
    /// Whether the sequence numbers of the collectives are consecutive and distinct.
    pub(crate) dense: bool,
    /// Index in `collectives` at which the pending ones begin: the one after the newest that is over, or the first that
    /// was reopened.
    pub(crate) pending_from: usize,
}

/// What a rank's record shows about one collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Recorded: index in the lane's collectives of the first entry with this number.
    Issued(usize),
    /// Issued, and no longer in the ring.
    Lost,
    /// The rank has not issued it.
    Absent,
    /// Its record does not show whether it did.
    Unknown(UnknownReason),
}

/// Why a record does not show a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum UnknownReason {
    /// No record that covers the group was read.
    NoRecord,
    /// The file was cut, and the missing part may have held it.
    Cut,
    /// The ring dropped the entries that would show it, or completed operations were left out of the dump.
    HistoryLost,
    /// The record was taken too early: a peer's record shows this collective, or a later one of the group, as
    /// completed.
    Outdated,
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
    /// For each record: the offset to subtract from its clock to get common time, ns.
    pub(crate) offsets_ns: Vec<i64>,
    /// For each record: whether common collectives connect its clock to the others'.
    pub(crate) clock_known: Vec<bool>,
    /// The number of families of groups.
    pub(crate) families: usize,
    /// For each group: the sequence number of the newest collective that needs every member and that some member saw
    /// complete; `None` if there is none.
    completed_to: Vec<Option<u32>>,
}

impl<'a> Aligned<'a> {
    /// Aligns `records`, which are sorted by rank.
    pub(crate) fn new(shared: &'a Shared, records: &'a [Record], world_size: Option<u32>) -> Self {
        let mut aligned = Self::as_recorded(shared, records, world_size);
        aligned.reopen();
        aligned
    }

    /// As [`Aligned::new`], but without [`Aligned::reopen`]: used to decide which records belong together.
    pub(crate) fn as_recorded(
        shared: &'a Shared,
        records: &'a [Record],
        world_size: Option<u32>,
    ) -> Self {
        let mut by_rank: HashMap<Rank, Range<RecordIx>> = HashMap::with_capacity(records.len());
        for (at, record) in records.iter().enumerate() {
            by_rank.entry(record.rank).or_insert(at..at).end = at + 1;
        }
        let (groups, group_of) = resolve_groups(shared, records, world_size);
        let mut aligned = Self {
            shared,
            records,
            by_rank,
            groups,
            lanes: Vec::with_capacity(records.len()),
            expected: Vec::new(),
            offsets_ns: vec![0; records.len()],
            clock_known: vec![false; records.len()],
            families: 0,
            completed_to: Vec::new(),
        };
        for (at, record) in records.iter().enumerate() {
            let lanes = aligned.lanes_of(at, record, &group_of);
            aligned.lanes.push(lanes);
        }
        aligned.families = number_families(&mut aligned.groups, records);
        for at in 0..aligned.groups.len() {
            aligned.groups[at].shows_starts = aligned.starts_are_shown(at);
        }
        aligned.find_pending();
        aligned.expected = aligned.expected_ranks(world_size);
        aligned
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

    /// The record that shows a rank's part in a group. If several recorders recorded the rank: the record with
    /// operations in the group, else the one by the recorder that recorded a peer there; if no peer was recorded
    /// either, the newest. `None` if the rank left no such record.
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
                of_rank.find(|&at| self.records[at].recorder == self.records[peer].recorder)
            }
            None => of_rank.next(),
        }
    }

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
            .take_while(|&&at| self.seq(record, at) == seq)
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
                Some(at) if (at as usize) < list.len() => Ok(at as usize),
                Some(_) => Err(list.len()),
            };
        }
        let at = list.partition_point(|&at| self.seq(record, at) < seq);
        match list.get(at) {
            Some(&found) if self.seq(record, found) == seq => Ok(at),
            _ => Err(at),
        }
    }

    /// What a member's record shows about one collective of the group.
    pub(crate) fn presence(&self, group: GroupIx, member: usize, seq: u32) -> Presence {
        let rank = self.groups[group].ranks[member];
        let Some(record) = self.record_in(group, rank) else {
            return Presence::Unknown(UnknownReason::NoRecord);
        };
        let presence = match self.groups[group].lanes[member] {
            Some((record, lane)) => self.presence_in(record, lane, seq),
            None if self.records[record].cut => Presence::Unknown(UnknownReason::Cut),
            None if self.records[record].only_active && self.completes_together(group, seq) => {
                Presence::Absent
            }
            None if self.records[record].only_active => {
                Presence::Unknown(UnknownReason::HistoryLost)
            }
            None if self.records[record].wrapped() => self.by_peers(group, record, seq),
            None => Presence::Absent,
        };
        if presence == Presence::Absent && self.completed_to[group].is_some_and(|to| seq <= to) {
            return Presence::Unknown(UnknownReason::Outdated);
        }
        presence
    }

    fn presence_in(&self, record: RecordIx, lane_at: usize, seq: u32) -> Presence {
        let lane = &self.lanes[record][lane_at];
        let whole = &self.records[record];
        match self.find(record, lane, seq) {
            Ok(at) => return Presence::Issued(at),
            Err(at) if at < lane.collectives.len() => return Presence::Lost,
            Err(_) => {}
        }
        // The number is above every number in the lane.
        if whole.cut {
            return Presence::Unknown(UnknownReason::Cut);
        }
        let status = whole.groups[lane_at].status;
        if let Some(status) = status {
            let counts_collectives =
                whole.recorder.sees_device() || whole.recorder == Recorder::Rcomm;
            if status.last_enqueued < 0 && lane.collectives.is_empty() {
                return Presence::Absent;
            }
            if counts_collectives && status.last_enqueued >= 0 {
                return if status.last_enqueued < i64::from(seq) {
                    Presence::Absent
                } else {
                    Presence::Lost
                };
            }
        }
        if whole.only_active {
            // A collective that no member can complete alone would still be active, so it was never issued.
            return if self.completes_together(lane.group, seq) {
                Presence::Absent
            } else {
                Presence::Unknown(UnknownReason::HistoryLost)
            };
        }
        if lane.collectives.is_empty() && whole.wrapped() {
            return self.by_peers(lane.group, record, seq);
        }
        Presence::Absent
    }

    /// The presence of a collective in a group of which a wrapped ring holds nothing: absent if a peer issued it after
    /// a collective that both issued and that the ring still holds, else unknown.
    pub(super) fn by_peers(&self, group: GroupIx, record: RecordIx, seq: u32) -> Presence {
        // At most this many peers of each group are compared, which bounds the time in large groups.
        const MOST_PEERS: usize = 16;
        let later = self.lanes[record].iter().any(|lane| {
            let Some(&oldest) = lane.collectives.first() else {
                return false;
            };
            let oldest = self.seq(record, oldest);
            let peers = self.groups[lane.group].lanes.iter().flatten();
            let mut peers = peers.filter(|&&(peer, _)| peer != record).take(MOST_PEERS);
            peers.any(|&(peer, there)| {
                let there = &self.lanes[peer][there];
                let issued = self.lanes[peer].iter().find(|one| one.group == group);
                let position = |lane: &Lane, seq| {
                    let at = self.find(peer, lane, seq).ok()?;
                    Some(lane.collectives[at])
                };
                let issued = issued.and_then(|lane| position(lane, seq));
                position(there, oldest).is_some_and(|both| issued.is_some_and(|at| both < at))
            })
        });
        if later {
            Presence::Absent
        } else {
            Presence::Unknown(UnknownReason::HistoryLost)
        }
    }

    /// Whether this collective needs every member and no member that recorded it saw it complete; false if none
    /// recorded it.
    fn completes_together(&self, group: GroupIx, seq: u32) -> bool {
        let lanes = self.groups[group].lanes.iter().flatten();
        let mut entries = lanes.filter_map(|&(record, lane)| {
            let lane = &self.lanes[record][lane];
            let at = self.find(record, lane, seq).ok()?;
            Some(self.op(record, lane.collectives[at]))
        });
        let waits = |op: &Op| op.kind.needs_all_members() && !op.completed();
        entries.next().is_some_and(waits) && entries.all(waits)
    }

    /// The oldest and the newest sequence number that any member recorded; `None` if none recorded a collective.
    pub(crate) fn window(&self, group: GroupIx) -> Option<(u32, u32)> {
        let mut window: Option<(u32, u32)> = None;
        for &(record, lane) in self.groups[group].lanes.iter().flatten() {
            let list = &self.lanes[record][lane].collectives;
            if let (Some(&first), Some(&last)) = (list.first(), list.last()) {
                let (first, last) = (self.seq(record, first), self.seq(record, last));
                window = Some(window.map_or((first, last), |(low, high)| {
                    (low.min(first), high.max(last))
                }));
            }
        }
        window
    }

    /// The issue time of an operation in common time, ns.
    pub(crate) fn created_ns(&self, record: RecordIx, op: &Op) -> i64 {
        op.created_ns.saturating_sub(self.offsets_ns[record])
    }

    fn lanes_of(&self, at: RecordIx, record: &Record, group_of: &[Vec<GroupIx>]) -> Vec<Lane> {
        let mut lanes: Vec<Lane> = group_of[at]
            .iter()
            .enumerate()
            .map(|(lane, &group)| {
                let member = position(&self.groups[group].ranks, record.rank);
                let member =
                    member.filter(|&member| self.groups[group].lanes[member] == Some((at, lane)));
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

    /// Whether the newest 64 collectives or the newest 64 messages of some member show when an operation starts on the
    /// device.
    ///
    /// PyTorch's hook records start and completion at one moment and gloo records no start: for these, "not started"
    /// means nothing.
    fn starts_are_shown(&self, group: GroupIx) -> bool {
        self.groups[group]
            .lanes
            .iter()
            .flatten()
            .any(|&(record, lane)| {
                let whole = &self.records[record];
                let lane = &self.lanes[record][lane];
                let newest = lane.collectives.iter().rev().take(64);
                whole.recorder.sees_device()
                    && newest
                        .chain(lane.messages.iter().rev().take(64))
                        .any(|&at| {
                            let op = self.op(record, at);
                            op.state == EntryState::Started || op.started_us != NONE
                        })
            })
    }

    /// Finds where the pending part of each lane begins, and how far each group has provably completed.
    fn find_pending(&mut self) {
        let mut pending = Vec::with_capacity(self.lanes.len());
        for (record, lanes) in self.lanes.iter().enumerate() {
            let of_record: Vec<usize> = lanes
                .iter()
                .map(|lane| {
                    let done = |at: u32| {
                        let op = self.op(record, at);
                        op.completed()
                            || (op.retired && retiring_is_all(self.records[record].recorder))
                    };
                    let last = lane.collectives.iter().rposition(|&at| done(at));
                    last.map_or(0, |last| last + 1)
                })
                .collect();
            pending.push(of_record);
        }
        for (lanes, of_record) in self.lanes.iter_mut().zip(pending) {
            for (lane, from) in lanes.iter_mut().zip(of_record) {
                lane.pending_from = from;
            }
        }
        self.completed_to = (0..self.groups.len())
            .map(|group| self.proven_completion(group))
            .collect();
        for group in 0..self.groups.len() {
            self.reopen_retired(group, None);
        }
    }

    /// The sequence number of the newest collective that needs every member and that a record shows as completed, other
    /// than by `retired`; `None` if there is none.
    fn proven_completion(&self, group: GroupIx) -> Option<u32> {
        let mut newest = None;
        for &(record, lane) in self.groups[group].lanes.iter().flatten() {
            if retiring_is_all(self.records[record].recorder) {
                continue;
            }
            let lane = &self.lanes[record][lane];
            let done = lane.collectives[..lane.pending_from].iter().rev();
            let found = done.copied().find(|&at| {
                let op = self.op(record, at);
                op.completed() && op.kind.needs_all_members()
            });
            newest = newest.max(found.map(|at| self.seq(record, at)));
        }
        newest
    }

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

/// No job has more ranks: a larger world size in a file or an answer is damage.
pub const MAX_WORLD: u32 = 1 << 20;

/// Whether `retired` is this recorder's only sign that an operation has ended.
pub(crate) fn retiring_is_all(recorder: Recorder) -> bool {
    recorder == Recorder::NativeGloo
}

/// Whether this is a send, a receive, or the marker that closes a batch of them.
pub(crate) fn is_message(op: &Op) -> bool {
    op.kind.is_p2p() || (op.kind == OpType::Coalesced && op.is_p2p)
}

fn sort_lane(lane: &mut Lane, ops: &[Op]) {
    let seq = |at: &u32| ops[*at as usize].seq;
    if !lane.collectives.is_sorted_by_key(seq) {
        lane.collectives.sort_by_key(seq);
    }
    lane.dense = lane
        .collectives
        .windows(2)
        .all(|pair| seq(&pair[0]).checked_add(1) == Some(seq(&pair[1])));
}

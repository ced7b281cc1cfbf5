//! One recorder's record of a rank in compact columns, and the tables that all ranks share.
//!
//! Each dump has its own tables of shapes, stacks and groups. Here these are interned over all ranks: a thousand rings
//! of the same program cost little more than their entries, and two ranks' calls are compared by number.

use crate::align::batches::number_without_batches;
use crate::align::membership::position;
use crate::align::retiring_is_all;
use crate::align::signature::{CallRef, Calls};
use crate::align::workers::{self, Workers};
use rcomm_recorder::model::{
    Communicator, EntryState, Failure, Frame, GroupId, GroupPlace, OpType, Peer, PeerLink,
    ProcessGroupStatus, ProcessorWait, Rank, RankStatus, ReduceOp,
};
use rcomm_recorder::publish::{Dump, FormatVersion, Identity, Recorder, RingReader};
use std::collections::HashMap;
use std::sync::Arc;

/// The value that marks an absent stack, peer or time in a column.
pub(crate) const NONE: u32 = u32::MAX;
/// A receive from any source.
pub(crate) const ANY: u32 = u32::MAX - 1;

/// Whether a record's file was read to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Extent {
    /// The file was read to its end.
    #[default]
    Whole,
    /// The file was cut short or damaged: the newest operations are missing.
    Cut,
}

/// One operation, 56 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    /// When the operation was issued, wall clock of its host, ns.
    pub(crate) created_ns: i64,
    /// `record_id` minus the first one of the record.
    pub(crate) id: u32,
    pub(crate) seq: u32,
    pub(crate) p2p_seq: u32,
    /// Index into [`Shared::calls`].
    pub(crate) call: u32,
    /// Index into [`Shared::stacks`], or [`NONE`].
    pub(crate) stack: u32,
    /// Group rank of the peer, [`ANY`] or [`NONE`].
    pub(crate) peer: u32,
    /// µs after `created_ns`, or [`NONE`].
    pub(crate) started_us: u32,
    /// µs after `created_ns`, or [`NONE`].
    pub(crate) completed_us: u32,
    /// The duration that the backend measured, ms; negative if it did not.
    pub(crate) duration_ms: f32,
    /// The thread that issued the operation, by a number of this record; [`NONE`] if it is not recorded.
    pub(crate) thread: u32,
    /// Index into [`Record::groups`].
    pub(crate) group: u16,
    pub(crate) kind: OpType,
    pub(crate) state: EntryState,
    pub(crate) retired: bool,
    pub(crate) is_p2p: bool,
}

impl Op {
    /// The peer of a message.
    pub(crate) fn peer(&self) -> Peer {
        match self.peer {
            ANY => Peer::Any,
            NONE => Peer::None,
            rank => Peer::Rank(rank),
        }
    }

    pub(crate) fn completed(&self) -> bool {
        self.state == EntryState::Completed
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.state, EntryState::Completed | EntryState::Failed)
    }

    /// When the end of the operation was noticed, wall clock of its host, ns; `None` if it was not noticed or is not
    /// recorded.
    pub(crate) fn completed_ns(&self) -> Option<i64> {
        (self.completed_us != NONE).then(|| {
            self.created_ns
                .saturating_add(i64::from(self.completed_us) * 1000)
        })
    }

    /// When the operation failed, wall clock of its host, ns; `None` if it did not, or if the record does not state
    /// when.
    pub(crate) fn failed_ns(&self) -> Option<i64> {
        let lasted = self
            .wait_ms()
            .filter(|_| self.state == EntryState::Failed)?;
        let lasted_ns = (f64::from(lasted) * 1e6) as i64;
        Some(self.created_ns.saturating_add(lasted_ns))
    }

    /// How long the rank was in the operation, ms: as the backend measured it, else from issue to the noticed end;
    /// `None` if neither is known.
    pub(crate) fn wait_ms(&self) -> Option<f32> {
        if self.duration_ms >= 0.0 {
            Some(self.duration_ms)
        } else {
            (self.completed_us != NONE).then(|| self.completed_us as f32 / 1000.0)
        }
    }
}

/// What stopped a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Signal,
    Debugger,
}

/// A group in the record of one rank.
#[derive(Clone, Debug)]
pub(crate) struct LocalGroup {
    /// The group's number in its process.
    pub(crate) id: GroupId,
    /// Index into [`Shared::groups`].
    pub(crate) group: u32,
    /// The description as this record states it: a rank that made another group under this name may state another one.
    pub(crate) desc: Box<str>,
    pub(crate) status: Option<ProcessGroupStatus>,
    /// The rank's own group rank and the size, if the record holds these and not the members.
    pub(crate) place: Option<GroupPlace>,
}

/// The record of one rank, by one recorder.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) rank: Rank,
    /// The file or source, for sentences; may be empty.
    pub(crate) path: String,
    pub(crate) version: FormatVersion,
    pub(crate) recorder: Recorder,
    pub(crate) identity: Identity,
    pub(crate) status: Option<RankStatus>,
    pub(crate) groups: Vec<LocalGroup>,
    /// The progress of NCCL's channels and links.
    pub(crate) communicators: Vec<Communicator>,
    /// NCCL's numbers of communicators, each with its group's name, as rcomm's backend for NCCL records them.
    pub(crate) comm_ids: Vec<(u64, String)>,
    /// In order of issue.
    pub(crate) ops: Vec<Op>,
    /// Operations that were pending in another record of the process and that this one no longer holds, each with its
    /// `record_id`. They are in no lane.
    pub(crate) unaligned: Vec<(u64, Op)>,
    /// `record_id` of the first operation.
    pub(crate) first_id: u64,
    /// Whether the file was cut, so the newest part is missing.
    pub(crate) cut: bool,
    /// Whether completed operations seem to have been left out when the record was written.
    pub(crate) only_active: bool,
    /// The failures that the rank's process recorded, in order.
    pub(crate) failures: Vec<Failure>,
    /// When the process closed its record, ns by its own clock; 0 if it did not.
    pub(crate) closed_ns: i64,
    /// The process's connections.
    pub(crate) peers: Vec<PeerLink>,
    /// How long the process's threads had to wait for a processor, if that was recorded.
    pub(crate) processor_wait: Option<ProcessorWait>,
    /// When its file was written, ns by the clock of the file system, if the record itself states no time.
    pub(crate) written_ns: Option<i64>,
    /// Why the record cannot be of the rank that its file's name states; `None` if it may be.
    pub(crate) misnamed: Option<String>,
}

impl Record {
    /// Whether the ring had dropped operations before the first one in the record.
    pub(crate) fn wrapped(&self) -> bool {
        self.first_id > self.recorder.first_record_id()
    }

    /// The number of operations that the ring dropped or overwrote.
    pub(crate) fn lost(&self) -> u64 {
        let dropped = self.status.as_ref().map_or(0, |status| status.dropped);
        let before = self
            .first_id
            .saturating_sub(self.recorder.first_record_id());
        before.saturating_add(dropped)
    }

    /// The newest time among the last 64 operations, ns by the record's own clock; without operations, when the record
    /// was taken; 0 if unknown.
    pub(crate) fn newest_ns(&self) -> i64 {
        let times = self.ops.iter().rev().take(64);
        times
            .map(|op| {
                op.completed_ns()
                    .unwrap_or(op.created_ns)
                    .max(op.created_ns)
            })
            .max()
            .unwrap_or(self.identity.dump_time_ns)
    }

    /// When the record was taken, or [`Record::newest_ns`] if that is later; ns by the record's own clock, 0 if
    /// unknown.
    pub(crate) fn latest_ns(&self) -> i64 {
        self.identity.dump_time_ns.max(self.newest_ns())
    }

    /// Whether the record was read from a ring whose process is dead.
    pub(crate) fn died(&self) -> bool {
        // Compare the whole reason: a reason that quotes an error may contain the word "dead".
        self.identity.reason == RingReader::OWNER_IS_DEAD
    }

    /// Whether the record was read from the ring of a process that lives and is not stopped.
    pub(crate) fn lives(&self) -> bool {
        self.identity.reason == RingReader::OWNER_LIVES
    }

    /// Whether the record was read from a ring, not from a dump.
    pub(crate) fn is_ring(&self) -> bool {
        self.lives() || self.died() || self.closed() || self.stop().is_some()
    }

    /// What stopped the process, if the record was read from a ring whose process is stopped.
    pub(crate) fn stop(&self) -> Option<Stop> {
        match self.identity.reason.as_str() {
            RingReader::OWNER_IS_STOPPED => Some(Stop::Signal),
            RingReader::OWNER_IS_TRACED => Some(Stop::Debugger),
            _ => None,
        }
    }

    /// Whether the record was read from a ring that its process closed.
    pub(crate) fn closed(&self) -> bool {
        self.identity.reason == RingReader::CLOSED
    }

    /// Whether the record aligns with others as it was recorded: nothing of another record is joined to it, no
    /// operation of it is reopened, and it states the members of its groups.
    pub(crate) fn aligns_once(&self) -> bool {
        self.recorder != Recorder::NcclProfiler
            && !retiring_is_all(self.recorder)
            && self.groups.iter().all(|local| local.place.is_none())
    }

    /// The `record_id` of one of this record's operations.
    pub(crate) fn record_id(&self, op: &Op) -> u64 {
        self.first_id.saturating_add(u64::from(op.id))
    }

    /// The operation of this `record_id`, from this record or another one of its process.
    pub(crate) fn operation(&self, record_id: u64) -> Option<&Op> {
        let mut unaligned = self.unaligned.iter();
        let held = self.ops.iter().find(|op| self.record_id(op) == record_id);
        held.or_else(|| Some(&unaligned.find(|(id, _)| *id == record_id)?.1))
    }
}

/// A group as all ranks share it, identified by name, members and incarnation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SharedGroup {
    pub(crate) name: String,
    /// Global ranks in order of group rank; empty if no record holds them.
    pub(crate) ranks: Arc<[Rank]>,
    /// The index among the groups of one name and membership, in a rank's order of creation.
    pub(crate) incarnation: u32,
    pub(crate) desc: String,
}

/// Groups with the same name and members: the members, the process's own group rank if that is recorded instead of the
/// members, and the incarnation of the newest group.
type Namesake<'a> = (&'a Arc<[Rank]>, Option<Rank>, u32);

/// Whether two lists are equal. Records share lists, so addresses are compared first, which is fast for large lists.
fn same_ranks(a: &Arc<[Rank]>, b: &Arc<[Rank]>) -> bool {
    Arc::ptr_eq(a, b) || a == b
}

/// The tables that all records refer to.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) calls: Calls,
    pub(crate) groups: Vec<SharedGroup>,
    group_ids: HashMap<(String, u32), Vec<u32>>,
    pub(crate) frames: Vec<Frame>,
    frame_ids: hashbrown::HashMap<Frame, u32>,
    pub(crate) stacks: Vec<Vec<u32>>,
    stack_ids: hashbrown::HashMap<Vec<u32>, u32>,
    /// For each group, the list of members, equal to the group's, in the record that was last found to have the group.
    equal_lists: Vec<Arc<[Rank]>>,
    /// Threads of the caller, if it lends some.
    pub(crate) workers: Option<Arc<dyn Workers>>,
}

/// Why a dump cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unusable(pub(crate) String);

impl Shared {
    /// The results of `compute` for each number below `count`, in order. The caller's threads share the work, if it
    /// lends some.
    pub(crate) fn map<T: Send>(&self, count: usize, compute: impl Fn(usize) -> T + Sync) -> Vec<T> {
        workers::map(self.workers.as_deref(), count, compute)
    }

    /// Converts a dump into a record and interns its tables.
    ///
    /// # Errors
    ///
    /// If the dump has no rank or more than 65535 groups.
    pub(crate) fn take_in(
        &mut self,
        path: String,
        dump: &Dump,
        extent: Extent,
    ) -> Result<Record, Unusable> {
        let Some(rank) = dump.identity.rank else {
            return Err(Unusable(
                "neither the record nor the file name states its rank; name the file after \
                 the rank, as rank_3"
                    .to_owned(),
            ));
        };
        if dump.groups.len() > usize::from(u16::MAX) {
            return Err(Unusable(format!(
                "it names {} groups; a record with more than {} is not read",
                dump.groups.len(),
                u16::MAX
            )));
        }
        let communicators = dump.communicators();
        let mut groups = self.groups_of(dump);
        let stacks = self.stacks_of(dump);
        let first_id = dump.entries.first().map_or(0, |entry| entry.record_id);
        let mut ids_follow = true;
        let mut last_id = first_id;
        let mut known: Vec<Option<(Arguments, u32)>> = vec![None; dump.signatures.len()];
        let mut ops: Vec<Op> = Vec::with_capacity(dump.entries.len());
        let wrapped = first_id > dump.recorder.first_record_id();
        // For each group, whether its newest operation was a message. Other threads' operations may stand between.
        let mut in_messages = vec![wrapped; dump.groups.len()];
        for entry in &dump.entries {
            // The end marker of a block of messages is not a collective, even if the recorder counts it as one. In a
            // wrapped ring, the messages before the marker may have been dropped.
            let was_message = &mut in_messages[entry.group as usize];
            let ends_messages = entry.op == OpType::Coalesced && *was_message;
            *was_message = entry.is_p2p || ends_messages;
            ids_follow &= entry.record_id <= last_id.saturating_add(1);
            last_id = entry.record_id;
            let arguments = Arguments {
                op: entry.op,
                root: entry.root,
                reduce_op: entry.reduce_op,
                timeout_ms: entry.timeout_ms,
            };
            let slot = &mut known[entry.signature as usize];
            let call = match slot {
                Some((same, call)) if *same == arguments => *call,
                _ => {
                    let call = self.calls.intern(CallRef {
                        op: entry.op,
                        signature: &dump.signatures[entry.signature as usize],
                        root: entry.root,
                        reduce_op: entry.reduce_op,
                        timeout_ms: entry.timeout_ms,
                    });
                    *slot = Some((arguments, call));
                    call
                }
            };
            ops.push(Op {
                created_ns: entry.time_created_ns,
                id: narrow(entry.record_id.saturating_sub(first_id)),
                seq: narrow(entry.collective_seq_id),
                p2p_seq: narrow(entry.p2p_seq_id),
                call,
                stack: entry.stack.map_or(NONE, |stack| stacks[stack as usize]),
                peer: match entry.peer {
                    Peer::None => NONE,
                    Peer::Any => ANY,
                    // A damaged number must not read as `ANY` or `NONE`.
                    Peer::Rank(peer) => peer.min(ANY - 1),
                },
                started_us: after(entry.time_created_ns, entry.time_discovered_started_ns),
                completed_us: after(entry.time_created_ns, entry.time_discovered_completed_ns),
                duration_ms: entry
                    .duration_ms
                    .filter(|ms| ms.is_finite())
                    .unwrap_or(-1.0),
                thread: entry.thread.unwrap_or(NONE),
                group: entry.group as u16,
                kind: entry.op,
                state: entry.state,
                retired: entry.retired,
                is_p2p: entry.is_p2p || ends_messages,
            });
        }
        if dump.recorder == Recorder::Nccl && !wrapped {
            number_without_batches(&mut ops, &mut groups);
        }
        // None of the operations completed, and record ids are missing between them: the dump was written with
        // onlyActive. A ring of rcomm's may lack an entry, too, if it was read while it was written.
        let none_done = !ops.iter().any(|op| op.completed() || op.retired);
        let only_active = none_done && !ids_follow && may_leave_out(dump.recorder);
        Ok(Record {
            rank,
            path,
            version: dump.version,
            recorder: dump.recorder,
            identity: dump.identity.clone(),
            status: dump.status.clone(),
            groups,
            communicators,
            comm_ids: comm_ids_of(dump),
            ops,
            unaligned: Vec::new(),
            first_id,
            cut: extent == Extent::Cut,
            only_active,
            failures: dump.failures.clone(),
            closed_ns: dump.closed_ns,
            peers: dump.peers.clone(),
            processor_wait: dump.processor_wait,
            written_ns: None,
            misnamed: contradicts_groups(dump, rank),
        })
    }

    /// Interns the groups of a dump; returns them in the dump's order.
    fn groups_of(&mut self, dump: &Dump) -> Vec<LocalGroup> {
        let mut order: Vec<usize> = (0..dump.groups.len()).collect();
        order.sort_by_key(|&index| dump.groups[index].info.id);
        let mut by_name: HashMap<&str, Vec<Namesake<'_>>> = HashMap::new();
        let mut groups = vec![
            LocalGroup {
                id: 0,
                group: 0,
                desc: "".into(),
                status: None,
                place: None,
            };
            dump.groups.len()
        ];
        for index in order {
            let info = &dump.groups[index].info;
            let namesakes = by_name.entry(&info.name).or_default();
            let place = dump.groups[index].place.filter(|_| info.ranks.is_empty());
            // A process with several devices has several ranks of one communicator.
            let group_rank = place.map(|place| place.rank);
            let same = |known: &&mut Namesake<'_>| {
                same_ranks(known.0, &info.ranks) && known.1 == group_rank
            };
            let incarnation = match namesakes.iter_mut().find(same) {
                Some((_, _, newest)) => {
                    *newest += 1;
                    *newest
                }
                None => {
                    namesakes.push((&info.ranks, group_rank, 0));
                    0
                }
            };
            groups[index] = LocalGroup {
                id: info.id,
                group: self.group(&info.name, &info.desc, &info.ranks, incarnation),
                desc: info.desc.as_str().into(),
                status: dump.groups[index].status,
                place,
            };
        }
        groups
    }

    /// The index of a group in [`Shared::groups`]; adds the group if it is new.
    fn group(&mut self, name: &str, desc: &str, ranks: &Arc<[Rank]>, incarnation: u32) -> u32 {
        let known = self
            .group_ids
            .entry((name.to_owned(), incarnation))
            .or_default();
        for &id in known.iter() {
            let shared = &mut self.groups[id as usize];
            // The records of one file often share a list that is not the group's.
            let equal = &mut self.equal_lists[id as usize];
            if Arc::ptr_eq(equal, ranks) || same_ranks(&shared.ranks, ranks) {
                *equal = ranks.clone();
                // Ranks may describe a group differently. The lowest text is kept: the order of the records must not
                // decide.
                if desc < shared.desc.as_str() {
                    desc.clone_into(&mut shared.desc);
                }
                return id;
            }
        }
        let id = u32::try_from(self.groups.len()).expect("fewer than 2^32 groups fit in memory");
        known.push(id);
        self.equal_lists.push(ranks.clone());
        self.groups.push(SharedGroup {
            name: name.to_owned(),
            ranks: ranks.clone(),
            incarnation,
            desc: desc.to_owned(),
        });
        id
    }

    /// Interns the stacks of a dump; returns their indices in [`Shared::stacks`], in the dump's order.
    fn stacks_of(&mut self, dump: &Dump) -> Vec<u32> {
        let frames: Vec<u32> = dump
            .frames
            .iter()
            .map(|frame| match self.frame_ids.get(frame) {
                Some(&id) => id,
                None => {
                    let id = self.frames.len() as u32;
                    self.frames.push(frame.clone());
                    self.frame_ids.insert(frame.clone(), id);
                    id
                }
            })
            .collect();
        let mut interned: Vec<u32> = Vec::new();
        dump.stacks
            .iter()
            .map(|stack| {
                interned.clear();
                interned.extend(stack.iter().map(|&frame| frames[frame as usize]));
                match self.stack_ids.get(&interned) {
                    Some(&id) => id,
                    None => {
                        let id = self.stacks.len() as u32;
                        self.stacks.push(interned.clone());
                        self.stack_ids.insert(interned.clone(), id);
                        id
                    }
                }
            })
            .collect()
    }
}

/// Why a dump by PyTorch's NCCL recorder cannot be of the rank that its file's name states: it has operations of a
/// group of which that rank is not a member. `None` if there is no such group.
fn contradicts_groups(dump: &Dump, rank: Rank) -> Option<String> {
    if dump.recorder != Recorder::Nccl {
        return None;
    }
    let mut is_used = vec![false; dump.groups.len()];
    for entry in &dump.entries {
        is_used[entry.group as usize] = true;
    }
    let mut used = dump.groups.iter().zip(is_used).filter(|&(_, used)| used);
    let (group, _) = used.find(|(group, _)| {
        !group.info.ranks.is_empty() && position(&group.info.ranks, rank).is_none()
    })?;
    Some(format!(
        "it has operations of group {}, of which rank {rank}, as its name states, is not a member; name the file after \
         its rank, as rank_3",
        group.info.name
    ))
}

/// NCCL's numbers of communicators with their groups' names, from the sections whose name is such a number in
/// hexadecimal.
fn comm_ids_of(dump: &Dump) -> Vec<(u64, String)> {
    let sections = dump.nccl_comm_state.iter();
    sections
        .filter_map(|(id, facts)| {
            let number = u64::from_str_radix(id.strip_prefix("0x")?, 16).ok()?;
            let (_, group) = facts.iter().find(|(key, _)| key == "group")?;
            Some((number, group.clone()))
        })
        .collect()
}

/// The fields of an entry that, with its signature, make its call.
#[derive(Clone, Copy, PartialEq)]
struct Arguments {
    op: OpType,
    root: Option<u32>,
    reduce_op: Option<ReduceOp>,
    timeout_ms: u64,
}

/// Whether dumps by this recorder may leave out completed operations: those of PyTorch's recorders do if they are asked
/// to (onlyActive).
pub(crate) fn may_leave_out(recorder: Recorder) -> bool {
    !matches!(recorder, Recorder::Rcomm | Recorder::NcclProfiler)
}

/// The value; `u32::MAX` if it is larger.
fn narrow(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// The time from `created` to `then`, which are in ns, in µs: 0 if `then` is earlier, and at most `NONE - 1`. [`NONE`]
/// if `then` is not positive, which means unknown.
fn after(created: i64, then: i64) -> u32 {
    if then <= 0 {
        return NONE;
    }
    let us = then.saturating_sub(created).max(0) / 1000;
    u32::try_from(us).unwrap_or(NONE - 1).min(NONE - 1)
}

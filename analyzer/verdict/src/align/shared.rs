//! The tables that all records share, and the conversion of dumps into records.
//!
//! Each dump has its own tables of shapes, stacks and groups. Here these are interned over all ranks: a thousand rings
//! of the same program cost little more than their entries, and two ranks' calls are compared by number.

use crate::align::batches::number_without_batches;
use crate::align::record::{ANY, Extent, LocalGroup, NONE, Op, Record, may_leave_out, position};
use crate::align::signature::{CallRef, Calls};
use crate::align::workers::{self, Workers};
use rcomm_recorder::model::{Frame, OpType, Peer, Rank, ReduceOp};
use rcomm_recorder::publish::{Dump, Recorder};
use std::collections::HashMap;
use std::sync::Arc;

/// Fewer dumps for each thread are not worth tables of their own.
const MIN_PER_THREAD: usize = 32;

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

    /// Converts dumps without paths into records, as [`Shared::take_in`] does one after another. `extent` is that of
    /// the dump with this index. Each of the caller's threads, if it lends some, takes in a run of the dumps with
    /// tables of its own; these are put together in the order of the dumps, so the numbers are the same as without
    /// threads.
    pub(crate) fn take_in_all(
        &mut self,
        dumps: &[&Dump],
        extent: impl Fn(usize) -> Extent + Sync,
    ) -> Vec<Result<Record, Unusable>> {
        let take = |shared: &mut Self, from: usize, until: usize| -> Vec<_> {
            (from..until)
                .map(|index| shared.take_in(String::new(), dumps[index], extent(index)))
                .collect()
        };
        let parts = |threads: usize| threads.min(dumps.len() / MIN_PER_THREAD);
        let workers = self.workers.clone();
        let Some(workers) = workers.filter(|workers| parts(workers.threads()) > 1) else {
            return take(self, 0, dumps.len());
        };
        let parts = parts(workers.threads());
        let taken = workers::map_parts(&*workers, parts, |part| {
            let mut shared = Self::default();
            let from = |part: usize| dumps.len() * part / parts;
            let records = take(&mut shared, from(part), from(part + 1));
            (shared, records)
        });
        let mut all = Vec::with_capacity(dumps.len());
        for (tables, mut records) in taken {
            let numbers = self.add_tables(&tables);
            for record in records.iter_mut().flatten() {
                numbers.renumber(record);
            }
            all.extend(records);
        }
        all
    }

    /// Adds what other tables hold, in their order.
    fn add_tables(&mut self, other: &Self) -> Renumbering {
        let frames: Vec<u32> = (other.frames.iter())
            .map(|frame| self.frame(frame))
            .collect();
        let stack = |stack: &Vec<u32>| {
            let frames: Vec<u32> = stack.iter().map(|&frame| frames[frame as usize]).collect();
            self.stack(&frames)
        };
        let stacks: Vec<u32> = other.stacks.iter().map(stack).collect();
        let groups = (other.groups.iter())
            .map(|group| self.group(&group.name, &group.desc, &group.ranks, group.incarnation))
            .collect();
        let calls: Vec<u32> = (other.calls.all().iter())
            .map(|call| self.calls.intern(call.as_ref()))
            .collect();
        let keep_theirs = |numbers: &[u32]| numbers.iter().zip(0..).all(|(&new, old)| new == old);
        Renumbering {
            ops_keep_theirs: keep_theirs(&calls) && keep_theirs(&stacks),
            calls,
            groups,
            stacks,
        }
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
                 the rank, as in rank_3"
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
                started_us: elapsed_us(entry.time_created_ns, entry.time_discovered_started_ns),
                completed_us: elapsed_us(entry.time_created_ns, entry.time_discovered_completed_ns),
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
            misnamed: why_misnamed(dump, rank),
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
        let frames: Vec<u32> = dump.frames.iter().map(|frame| self.frame(frame)).collect();
        let mut interned: Vec<u32> = Vec::new();
        dump.stacks
            .iter()
            .map(|stack| {
                interned.clear();
                interned.extend(stack.iter().map(|&frame| frames[frame as usize]));
                self.stack(&interned)
            })
            .collect()
    }

    /// The index of a frame in [`Shared::frames`]; adds the frame if it is new.
    fn frame(&mut self, frame: &Frame) -> u32 {
        if let Some(&id) = self.frame_ids.get(frame) {
            return id;
        }
        let id = self.frames.len() as u32;
        self.frames.push(frame.clone());
        self.frame_ids.insert(frame.clone(), id);
        id
    }

    /// The index of a stack in [`Shared::stacks`]; adds the stack if it is new. `frames` are indices in
    /// [`Shared::frames`].
    fn stack(&mut self, frames: &[u32]) -> u32 {
        if let Some(&id) = self.stack_ids.get(frames) {
            return id;
        }
        let id = self.stacks.len() as u32;
        self.stacks.push(frames.to_vec());
        self.stack_ids.insert(frames.to_vec(), id);
        id
    }
}

/// The numbers that the calls, groups and stacks of some tables have in others.
struct Renumbering {
    calls: Vec<u32>,
    groups: Vec<u32>,
    stacks: Vec<u32>,
    /// Whether all calls and stacks keep their numbers, as they mostly do: the ranks of a job run one program.
    ops_keep_theirs: bool,
}

impl Renumbering {
    fn renumber(&self, record: &mut Record) {
        for local in &mut record.groups {
            local.group = self.groups[local.group as usize];
        }
        if self.ops_keep_theirs {
            return;
        }
        for op in &mut record.ops {
            op.call = self.calls[op.call as usize];
            if op.stack != NONE {
                op.stack = self.stacks[op.stack as usize];
            }
        }
    }
}

/// Why a dump by PyTorch's NCCL recorder cannot be of the rank that its file's name states: it has operations of a
/// group of which that rank is not a member. `None` if there is no such group.
fn why_misnamed(dump: &Dump, rank: Rank) -> Option<String> {
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
        "its name states rank {rank}, but it has operations of group {}, of which that rank is not a member; name the \
         file after its rank, as in rank_3",
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

/// The value; `u32::MAX` if it is larger.
fn narrow(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// The time from `created` to `then`, which are in ns, in µs: 0 if `then` is earlier, and at most `NONE - 1`. [`NONE`]
/// if `then` is not positive, which means unknown.
fn elapsed_us(created: i64, then: i64) -> u32 {
    if then <= 0 {
        return NONE;
    }
    let us = then.saturating_sub(created).max(0) / 1000;
    u32::try_from(us).unwrap_or(NONE - 1).min(NONE - 1)
}

//! The plug-in's state for its process: the ring, the communicators, and the operations in progress.
//!
//! All of it is created with the first communicator and has a fixed size. After that an event takes no lock, allocates
//! no memory and makes no system call, except where it adds something new to the ring's tables: a communicator, its
//! group of graph replays, a shape, or a thread, and where a hang or a stall changes the events that NCCL is asked for.
//! Events without a free slot are not followed. The ring counts groups and links for which its tables have no row.

use crate::deepening::{MaskPlace, STALL};
use crate::handle::{Kind, Pool, SlotUse};
use crate::settings::Events;
use crate::shapes::Shape;
use rcomm_recorder::model::{DType, OpType, Pattern, Peer};
use rcomm_recorder::record::{
    CommunicatorInfo, FlightRecorder, GroupHandle, Operation, RecorderConfig, SignatureKey,
    SignatureRef, Tensor, Ticket, Timestamp,
};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The largest number of communicators at a time.
const COMMUNICATORS: usize = 4_096;
/// The largest number of operations in progress.
const OPERATIONS: usize = 8_192;
/// The largest number of network transfers in progress.
const TRANSFERS: usize = 8_192;
/// The largest number of group calls in progress: one for each thread that is inside one.
const GROUPS: usize = 256;

/// Value for a group that does not exist yet. `NO_GROUP - 1` is the value for one that a thread is creating.
pub(crate) const NO_GROUP: u32 = u32::MAX;

/// One ring, and the state that belongs to it.
pub(crate) struct Process {
    pub(crate) recorder: FlightRecorder,
    pub(crate) events: Events,
    pub(crate) communicators: Pool<Communicator>,
    pub(crate) operations: Pool<Op>,
    pub(crate) transfers: Pool<Transfer>,
    pub(crate) groups: Pool<GroupCall>,
    /// Number of transfers in progress on each link. Only the proxy thread of the communicator changes it, so a load
    /// and a store suffice.
    pub(crate) active: Box<[AtomicU32]>,
    /// How often each link was released, by which the handles of [whole](Kind::Whole) transfers are known.
    pub(crate) released: Box<[AtomicU32]>,
    next_group: AtomicU32,
    pub(crate) pid: u32,
    pub(crate) mask_place: MaskPlace,
    /// The number of operations that are still to be recorded with the steps of their transfers.
    pub(crate) deep_left: AtomicU32,
}

/// Numbers of a group's operations so far, by which the next ones are numbered.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    collectives: AtomicU64,
    messages: AtomicU64,
    operations: AtomicU64,
}

/// Adds one to a count that one thread at a time changes, and returns it.
#[inline]
fn next(count: &AtomicU64) -> u64 {
    let value = count.load(Relaxed) + 1;
    count.store(value, Relaxed);
    value
}

impl Counts {
    fn reset(&self) {
        for count in [&self.collectives, &self.messages, &self.operations] {
            count.store(0, Relaxed);
        }
    }
}

/// A communicator.
#[derive(Debug, Default)]
pub(crate) struct Communicator {
    /// Its group, or [`NO_GROUP`].
    pub(crate) group: AtomicU32,
    /// The group of the operations that its graphs run; see [`NO_GROUP`] for other values.
    pub(crate) replays: AtomicU32,
    pub(crate) hash: AtomicU64,
    pub(crate) rank: AtomicU32,
    /// 0 = unknown.
    pub(crate) size: AtomicU32,
    pub(crate) counts: Counts,
    pub(crate) replay_counts: Counts,
    /// Whether its group has been [created](naming).
    pub(crate) naming: AtomicU32,
}

/// Progress of creating a communicator's group: with NCCL's version 3, its first operation names it.
pub(crate) mod naming {
    pub(crate) const OPEN: u32 = 0;
    pub(crate) const UNDER_WAY: u32 = 1;
    pub(crate) const DONE: u32 = 2;
}

/// An operation in progress.
#[derive(Debug, Default)]
pub(crate) struct Op {
    ticket: [AtomicU64; 3],
    /// The use of its communicator's slot.
    pub(crate) communicator: AtomicU64,
    /// The use of the slot of the next operation in the list of the group call; 0 = none.
    pub(crate) next: AtomicU64,
    pub(crate) flags: AtomicU32,
    /// Number of its channels; 0 = unknown.
    pub(crate) channels: AtomicU32,
    pub(crate) started: AtomicU32,
    pub(crate) finished: AtomicU32,
    /// When the first channel started, by the device's clock, ns; 0 = unknown.
    pub(crate) first_start: AtomicU64,
    /// When the last channel ended, by the device's clock, ns; 0 = unknown.
    pub(crate) last_end: AtomicU64,
    /// When it was reported to be in a plan, by the clock of the records, ns.
    pub(crate) planned: AtomicU64,
}

/// Flags of an operation.
pub(crate) mod flag {
    /// It is in a plan.
    pub(crate) const PLANNED: u32 = 1;
    /// The group call in which it was issued has not ended.
    pub(crate) const IN_GROUP: u32 = 2;
    /// It has ended, or is no longer watched.
    pub(crate) const OVER: u32 = 4;
    /// Its group call ended before it was in a plan.
    pub(crate) const LEFT: u32 = 8;
    /// `channels` is the largest number that it may have.
    pub(crate) const AT_MOST: u32 = 16;
}

impl Op {
    pub(crate) fn ticket(&self) -> Ticket {
        Ticket::of_words([0, 1, 2].map(|word| self.ticket[word].load(Relaxed)))
    }

    fn set(&self, ticket: Ticket, communicator: SlotUse, flags: u32) {
        for (word, value) in self.ticket.iter().zip(ticket.to_words()) {
            word.store(value, Relaxed);
        }
        self.communicator.store(communicator.to_word(), Relaxed);
        self.next.store(0, Relaxed);
        self.flags.store(flags, Relaxed);
        for count in [&self.channels, &self.started, &self.finished] {
            count.store(0, Relaxed);
        }
        for time in [&self.first_start, &self.last_end, &self.planned] {
            time.store(0, Relaxed);
        }
    }
}

/// A network transfer in progress.
#[derive(Debug, Default)]
pub(crate) struct Transfer {
    /// Number of its link.
    pub(crate) link: AtomicU32,
    /// The use of its communicator's slot.
    pub(crate) communicator: AtomicU64,
    pub(crate) operation: [AtomicU64; 3],
    pub(crate) steps: AtomicU32,
    pub(crate) done: AtomicU32,
}

/// A group call: the head of the list of its operations.
#[derive(Debug, Default)]
pub(crate) struct GroupCall {
    pub(crate) first: AtomicU64,
}

/// An operation as NCCL describes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) op: OpType,
    pub(crate) dtype: DType,
    pub(crate) count: u64,
    pub(crate) root: Option<u32>,
    pub(crate) peer: Option<u32>,
}

/// Passes on the signature of this call in a communicator of this size; 0 = unknown.
fn with_key<T>(call: &Call, size: u32, then: impl FnOnce(&SignatureKey<'_>) -> T) -> T {
    let one = [call.count];
    let all = [call.count.saturating_mul(size.into())];
    let dtype = call.dtype;
    let (one, all) = (
        [Tensor { dtype, shape: &one }],
        [Tensor { dtype, shape: &all }],
    );
    // Without the size of the communicator, the full sizes of the tensors are unknown.
    let all: &[Tensor<'_>] = if size > 0 { &all } else { &[] };
    let (inputs, outputs): (&[Tensor<'_>], &[Tensor<'_>]) = match call.op.pattern() {
        Pattern::AllGather | Pattern::Gather => (&one, all),
        Pattern::ReduceScatter | Pattern::Scatter => (all, &one),
        Pattern::AllToAll => (all, all),
        Pattern::Send => (&one, &[]),
        Pattern::Recv => (&[], &one),
        Pattern::AllReduce
        | Pattern::Reduce
        | Pattern::Broadcast
        | Pattern::Barrier
        | Pattern::Block
        | Pattern::Agreement
        | Pattern::OneSided
        | Pattern::Unknown => (&one, &one),
    };
    then(&SignatureKey {
        backend: "nccl",
        op_name: call.op.name(),
        inputs,
        outputs,
    })
}

impl Process {
    /// Creates the ring. The error is a complete sentence.
    pub(crate) fn open(config: &RecorderConfig, events: Events) -> Result<Self, String> {
        let recorder = FlightRecorder::create(config).map_err(|error| error.to_string())?;
        let links = config.links.next_power_of_two();
        let zeros = || (0..links).map(|_| AtomicU32::new(0)).collect();
        Ok(Self {
            recorder,
            events,
            communicators: Pool::new(COMMUNICATORS),
            operations: Pool::new(OPERATIONS),
            transfers: Pool::new(TRANSFERS),
            groups: Pool::new(GROUPS),
            active: zeros(),
            released: zeros(),
            next_group: AtomicU32::new(0),
            pid: std::process::id(),
            mask_place: MaskPlace::default(),
            deep_left: AtomicU32::new(0),
        })
    }

    /// Takes a slot for a communicator, which has no group yet; `None` if there is no free slot.
    pub(crate) fn add_communicator(&self) -> Option<SlotUse> {
        self.communicators.take(|it| {
            it.group.store(NO_GROUP, Relaxed);
            it.replays.store(NO_GROUP, Relaxed);
            it.naming.store(naming::OPEN, Relaxed);
            it.counts.reset();
            it.replay_counts.reset();
        })
    }

    /// Creates the communicator's group, which is named after `hash`; `name` is its description.
    pub(crate) fn create_group(
        &self,
        communicator: &Communicator,
        name: &str,
        hash: u64,
        rank: u32,
        size: Option<u32>,
    ) {
        communicator.hash.store(hash, Relaxed);
        communicator.rank.store(rank, Relaxed);
        communicator.size.store(size.unwrap_or(0), Relaxed);
        let group = self.add_group(&format!("nccl-{hash:016x}"), name, hash, rank, size);
        communicator.group.store(group, Relaxed);
    }

    fn add_group(&self, name: &str, desc: &str, hash: u64, rank: u32, size: Option<u32>) -> u32 {
        let group = self.recorder.add_communicator(&CommunicatorInfo {
            id: self.next_group.fetch_add(1, Relaxed),
            name,
            desc,
            hash,
            rank: Some(rank),
            size,
        });
        group.row()
    }

    /// Creates the group of the operations that the communicator's graphs run, unless it exists. The device runs these
    /// operations when it reaches them, independently of what is issued at that time, so they are numbered separately.
    pub(crate) fn expect_replays(&self, communicator: &Communicator) {
        let claimed =
            communicator
                .replays
                .compare_exchange(NO_GROUP, NO_GROUP - 1, Relaxed, Relaxed);
        if claimed.is_err() {
            return;
        }
        let hash = communicator.hash.load(Relaxed);
        let size = communicator.size.load(Relaxed);
        let group = self.add_group(
            &format!("nccl-{hash:016x}-graphs"),
            "graph replays",
            hash,
            communicator.rank.load(Relaxed),
            (size > 0).then_some(size),
        );
        communicator.replays.store(group, Relaxed);
    }

    /// Records an operation; `None` if its communicator has no group.
    pub(crate) fn begin(
        &self,
        communicator: &Communicator,
        call: &Call,
        is_replay: bool,
    ) -> Option<Ticket> {
        let (group, counts) = match is_replay {
            true => (&communicator.replays, &communicator.replay_counts),
            false => (&communicator.group, &communicator.counts),
        };
        let group = group.load(Relaxed);
        if group >= NO_GROUP - 1 {
            return None;
        }
        self.count_deep();
        // NCCL wants a program's calls on a communicator one at a time.
        let is_p2p = call.op.is_p2p();
        let (collective, message) = match is_p2p {
            true => (counts.collectives.load(Relaxed), next(&counts.messages)),
            false => (next(&counts.collectives), counts.messages.load(Relaxed)),
        };
        let size = communicator.size.load(Relaxed);
        let operation = |signature: SignatureRef<'_>| {
            let operation = Operation {
                collective_seq_id: collective,
                p2p_seq_id: message,
                op_id: next(&counts.operations),
                is_p2p,
                peer: call.peer.map_or(Peer::None, Peer::Rank),
                root: call.root,
                ..Operation::new(GroupHandle::of_row(group), call.op, signature)
            };
            self.recorder.begin(&operation)
        };
        let known = Shape::of(self, call, size)
            .known(|| with_key(call, size, |key| self.recorder.intern(key)));
        Some(match known {
            Some(id) => operation(SignatureRef::Id(id)),
            None => with_key(call, size, |key| operation(SignatureRef::Key(key))),
        })
    }

    /// Follows an operation that was begun; if there is no slot for it, marks it as no longer watched.
    pub(crate) fn follow(
        &self,
        ticket: Ticket,
        communicator: SlotUse,
        flags: u32,
    ) -> Option<SlotUse> {
        let take = || {
            self.operations
                .take(|op| op.set(ticket, communicator, flags))
        };
        let taken = take().or_else(|| {
            // Operations whose group call has ended without a plan for them have waited longest, and some of them
            // never get a plan: their slots are used again.
            for (at, op) in self.operations.taken() {
                if op.flags.load(Relaxed) & (flag::LEFT | flag::PLANNED) == flag::LEFT {
                    self.operations.give_back(at);
                }
            }
            take()
        });
        if taken.is_none() {
            self.recorder.retired(ticket);
        }
        taken
    }

    /// Ends the operations in progress on a communicator that has ended, as failed: NCCL waits for all other operations
    /// before it ends a communicator.
    pub(crate) fn forget(&self, at: SlotUse) {
        let Some(communicator) = self.communicators.get(at) else {
            return;
        };
        let mut has_hung = false;
        for (op_at, op) in self.operations.taken() {
            if op.communicator.load(Relaxed) != at.to_word() {
                continue;
            }
            // The ticket is read before the slot can belong to another operation.
            let ticket = op.ticket();
            let flags = op.flags.fetch_or(flag::OVER, Relaxed);
            if self.operations.give_back(op_at) && flags & (flag::OVER | flag::LEFT) == 0 {
                self.recorder.failed(ticket);
                self.recorder.retired(ticket);
                has_hung = true;
            }
        }
        for (transfer_at, transfer) in self.transfers.taken() {
            if transfer.communicator.load(Relaxed) == at.to_word() {
                self.transfers.give_back(transfer_at);
            }
        }
        for group in [&communicator.group, &communicator.replays] {
            let number = group.swap(NO_GROUP, Relaxed);
            if number < NO_GROUP - 1 {
                let row = GroupHandle::of_row(number);
                self.recorder.release_links(row, |link| {
                    self.released[link.index()].fetch_add(1, Relaxed);
                    self.active[link.index()].store(0, Relaxed);
                });
            }
        }
        if self.communicators.give_back(at) {
            if has_hung {
                self.deepen();
            }
            self.mask_place.ends();
        }
    }

    /// Ends an operation, and returns its slot to the pool if its group call is over.
    pub(crate) fn end(&self, at: SlotUse, op: &Op) {
        let now = self.recorder.now();
        let (start, end) = (op.first_start.load(Relaxed), op.last_end.load(Relaxed));
        let timed = start > 0 && end >= start;
        let duration = timed.then(|| Duration::from_nanos(end - start));
        self.recorder
            .completed_and_retired_at(op.ticket(), now, duration);
        self.release(at, op);
        if duration.is_some_and(|it| it >= STALL) {
            self.deepen();
        }
    }

    /// Marks an operation as over, and returns its slot to the pool if its group call is over, too.
    pub(crate) fn release(&self, at: SlotUse, op: &Op) {
        let before = op.flags.fetch_or(flag::OVER, Relaxed);
        if before & (flag::IN_GROUP | flag::OVER) == 0 {
            self.operations.give_back(at);
        }
    }

    /// Whether an operation has not ended. Those whose group call ended without a plan for them do not count: they may
    /// complete without an event.
    pub(crate) fn has_pending(&self) -> bool {
        let mut taken = self.operations.taken();
        taken.any(|(_, op)| op.flags.load(Relaxed) & (flag::OVER | flag::LEFT) == 0)
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.recorder.now()
    }

    pub(crate) fn context(at: SlotUse) -> *mut c_void {
        at.handle(Kind::Communicator, 0)
    }
}

//! The plug-in's state for its process: the ring, the communicators, and the operations in progress.
//!
//! The whole state is created with the first communicator and has a fixed size. After that, an event takes no lock,
//! allocates no memory and makes no system call, except in four cases: it adds a communicator, its group of graph
//! replays, a shape or a thread to the ring; a communicator ends; the events that NCCL is asked for change; or it
//! searches all operations while another thread sets a slot up, for which it yields. Events without a free slot are not
//! followed. The ring counts groups and links for which its tables have no row.

use crate::deepening::MaskPlace;
use crate::handle::{Kind, Pool, SlotUse, choose_key};
use crate::links::Links;
use crate::operation::{Op, State, flag};
use crate::order::Order;
use crate::settings::{Events, IdentitySource};
use crate::shapes::Shape;
use rcomm_recorder::model::{DType, OpType, Pattern, Peer};
use rcomm_recorder::record::{
    CommunicatorInfo, FlightRecorder, GroupHandle, Operation, RecorderConfig, SignatureKey,
    SignatureRef, Tensor, Ticket, Timestamp,
};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// The largest number of communicators at a time.
const COMMUNICATORS: usize = 4_096;
/// The largest number of operations in progress.
const OPERATIONS: usize = 8_192;
/// The largest number of network transfers in progress.
const TRANSFERS: usize = 8_192;

/// The value of a group that does not exist yet.
pub(crate) const NO_GROUP: u32 = u32::MAX;
/// The value of a group that a thread is creating, and of a group whose communicator has ended.
const CLOSED: u32 = NO_GROUP - 1;

/// One ring, and the state that belongs to it.
pub(crate) struct Process {
    pub(crate) recorder: FlightRecorder,
    pub(crate) events: Events,
    pub(crate) communicators: Pool<Communicator>,
    pub(crate) operations: Pool<Op>,
    pub(crate) transfers: Pool<Transfer>,
    pub(crate) links: Links,
    next_group: AtomicU32,
    pub(crate) pid: u32,
    pub(crate) mask_place: MaskPlace,
    /// The number of operations that are still to be counted after a hang or a stall: see
    /// [`deepening`](crate::deepening).
    pub(crate) deep_left: AtomicU32,
    /// Whether a communicator has ended with watched operations in progress.
    pub(crate) has_failed: AtomicBool,
    /// What gives the process its rank and job.
    pub(crate) identity: IdentitySource,
    /// Whether a thread is moving the ring to another job.
    pub(crate) is_moving: AtomicBool,
}

/// The event by which NCCL reports an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reported {
    /// The operation's call. A program makes the calls on a communicator one at a time.
    Call,
    /// The operation's plan, if NCCL reports no calls. It comes on another thread if the launch waits for a graph.
    Plan,
    /// The operation's plan, when a graph runs the operation.
    Replay,
}

/// The numbers of a group's operations so far, by which the next ones are numbered.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    collectives: AtomicU64,
    messages: AtomicU64,
}

impl Counts {
    fn reset(&self) {
        for count in [&self.collectives, &self.messages] {
            count.store(0, Relaxed);
        }
    }

    /// Counts an operation, and returns the numbers of collectives and of messages up to it.
    fn next(&self, is_message: bool, reported: Reported) -> (u64, u64) {
        let next = |count: &AtomicU64| match reported {
            Reported::Call => {
                let next = count.load(Relaxed) + 1;
                count.store(next, Relaxed);
                next
            }
            Reported::Plan | Reported::Replay => count.fetch_add(1, Relaxed) + 1,
        };
        match is_message {
            true => (self.collectives.load(Relaxed), next(&self.messages)),
            false => (next(&self.collectives), self.messages.load(Relaxed)),
        }
    }
}

/// A communicator.
#[derive(Debug, Default)]
pub(crate) struct Communicator {
    /// Its group, or [`NO_GROUP`], or [`CLOSED`].
    pub(crate) group: AtomicU32,
    /// The group of the operations that its graphs run, or [`NO_GROUP`], or [`CLOSED`].
    pub(crate) replays: AtomicU32,
    pub(crate) hash: AtomicU64,
    pub(crate) rank: AtomicU32,
    /// 0 = unknown.
    pub(crate) size: AtomicU32,
    pub(crate) counts: Counts,
    pub(crate) replay_counts: Counts,
    /// Counts of its operations in plans and of those that have ended.
    pub(crate) order: Order,
    /// How far the creation of its group is: see [`naming`].
    pub(crate) naming: AtomicU32,
}

/// How far the creation of a communicator's group is: with version 3 of the interface, its first operation names it.
pub(crate) mod naming {
    pub(crate) const OPEN: u32 = 0;
    pub(crate) const UNDER_WAY: u32 = 1;
    pub(crate) const DONE: u32 = 2;
}

/// A network transfer in progress.
#[derive(Debug, Default)]
pub(crate) struct Transfer {
    /// Number of its link, and of the link's use.
    pub(crate) link: AtomicU32,
    pub(crate) link_use: AtomicU32,
    /// The use of its communicator's slot.
    pub(crate) communicator: AtomicU64,
    /// The words of the [`Ticket`] of its operation.
    pub(crate) operation: [AtomicU64; 3],
    /// The number of its steps, and of those that are done.
    pub(crate) steps: AtomicU32,
    pub(crate) done: AtomicU32,
    /// What its steps under way wait for; see [`steps`](crate::steps).
    pub(crate) waits: AtomicU64,
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

/// Calls `then` with the signature of this call in a communicator of this size (0 = unknown).
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
        choose_key();
        Ok(Self {
            recorder,
            events,
            communicators: Pool::new(COMMUNICATORS),
            operations: Pool::new(OPERATIONS),
            transfers: Pool::new(TRANSFERS),
            links: Links::new(config.links),
            next_group: AtomicU32::new(0),
            pid: std::process::id(),
            mask_place: MaskPlace::default(),
            deep_left: AtomicU32::new(0),
            has_failed: AtomicBool::new(false),
            identity: IdentitySource::Launcher,
            is_moving: AtomicBool::new(false),
        })
    }

    /// Takes a slot for a communicator, which has no group yet; `None` if there is no free slot.
    pub(crate) fn add_communicator(&self) -> Option<SlotUse> {
        self.communicators.take(|it, _| {
            it.group.store(NO_GROUP, Relaxed);
            it.replays.store(NO_GROUP, Relaxed);
            it.naming.store(naming::OPEN, Relaxed);
            it.counts.reset();
            it.replay_counts.reset();
            it.order.reset();
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
        let claimed = communicator
            .replays
            .compare_exchange(NO_GROUP, CLOSED, Relaxed, Relaxed);
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

    /// Records an operation; `None` if its communicator has no group, or has ended.
    #[inline(always)]
    pub(crate) fn begin(
        &self,
        communicator: &Communicator,
        call: &Call,
        reported: Reported,
    ) -> Option<Ticket> {
        let (group, counts) = match reported {
            Reported::Replay => (&communicator.replays, &communicator.replay_counts),
            Reported::Call | Reported::Plan => (&communicator.group, &communicator.counts),
        };
        let group = group.load(Relaxed);
        if group >= CLOSED {
            return None;
        }
        self.count_deep();
        let (collective, message) = counts.next(call.op.is_p2p(), reported);
        let size = communicator.size.load(Relaxed);
        let known = Shape::of(self, call, size)
            .signature(|| with_key(call, size, |key| self.recorder.intern(key)));
        let numbered = (group, collective, message);
        Some(match known {
            Some(id) => self.record(numbered, call, SignatureRef::Id(id)),
            None => self.record_unknown(numbered, call, size),
        })
    }

    /// Records an operation of this group, with the numbers of collectives and of messages up to it.
    #[inline(always)]
    fn record(
        &self,
        (group, collective, message): (u32, u64, u64),
        call: &Call,
        signature: SignatureRef<'_>,
    ) -> Ticket {
        // Built here, so that the compiler need not build it in memory.
        self.recorder.begin(&Operation {
            collective_seq_id: collective,
            p2p_seq_id: message,
            op_id: collective + message,
            is_p2p: call.op.is_p2p(),
            peer: call.peer.map_or(Peer::None, Peer::Rank),
            root: call.root,
            ..Operation::new(GroupHandle::of_row(group), call.op, signature)
        })
    }

    /// Records an operation in the same way, with a signature that has no row in the ring.
    #[cold]
    fn record_unknown(&self, numbered: (u32, u64, u64), call: &Call, size: u32) -> Ticket {
        with_key(call, size, |key| {
            self.record(numbered, call, SignatureRef::Key(key))
        })
    }

    /// Follows an operation that was begun; `in_group` is the list of the group call that it is added to. `None` if
    /// there is no slot for the operation, which then is no longer watched, or if the communicator has ended since, so
    /// that the operation has failed.
    #[inline(always)]
    pub(crate) fn follow(
        &self,
        ticket: Ticket,
        communicator: SlotUse,
        in_group: Option<u64>,
    ) -> Option<SlotUse> {
        let in_list = match in_group {
            Some(before) => (flag::IN_GROUP, before),
            None => (0, 0),
        };
        let set = |op: &Op, at: SlotUse| op.set(at, ticket, communicator, in_list);
        let taken = self.operations.take(set);
        let Some(at) = taken.or_else(|| self.take_left(set)) else {
            self.recorder.retired(ticket);
            return None;
        };
        // Either `forget` finds the slot, or this finds that the communicator has ended.
        if self.communicators.get(communicator).is_none() {
            self.fail_begun(at);
            return None;
        }
        Some(at)
    }

    /// Takes a slot of an operation that is not watched, if there is no free slot.
    #[cold]
    fn take_left(&self, set: impl FnOnce(&Op, SlotUse)) -> Option<SlotUse> {
        self.reclaim();
        self.operations.take(set)
    }

    /// Ends an operation whose communicator has ended since it was begun.
    #[cold]
    fn fail_begun(&self, at: SlotUse) {
        if let Some(op) = self.operations.get(at) {
            self.fail(at, op);
            // The operation is not in the list of its group call yet, which would return the slot.
            self.operations.give_back(at);
        }
    }

    /// Returns the slots of operations whose group call has ended without a plan for them: some of these never get one.
    fn reclaim(&self) {
        for (at, op) in self.operations.taken() {
            // An operation that gets its plan at this moment keeps its slot.
            let left = op.change(at, |state| {
                let is_left = state.has(flag::LEFT) && !state.has(flag::OVER);
                is_left.then(|| state.with(flag::OVER))
            });
            if left.is_some() {
                self.operations.release(at);
            }
        }
    }

    /// Ends an operation that is not over, and records it as failed if it is watched. Returns whether it was watched.
    fn fail(&self, at: SlotUse, op: &Op) -> bool {
        // The ticket is read before the slot can belong to another operation.
        let ticket = op.ticket();
        let Some((before, _)) = op.change_open(at, |state| state.with(flag::OVER)) else {
            return false;
        };
        let was_watched = !before.has(flag::LEFT);
        if was_watched {
            self.recorder.failed_and_retired(ticket);
        }
        if !before.has(flag::IN_GROUP) {
            self.operations.release(at);
        }
        was_watched
    }

    /// Ends the operations that are in progress on a communicator that has ended. They count as failed, since NCCL
    /// waits for them before it ends a communicator, unless it aborts the communicator.
    pub(crate) fn forget(&self, at: SlotUse) {
        let Some(communicator) = self.communicators.get(at) else {
            return;
        };
        let rows =
            [&communicator.group, &communicator.replays].map(|group| group.swap(CLOSED, Relaxed));
        // From here on, events of the communicator find nothing. Events that take a slot for it at this moment look for
        // it afterwards, so each slot is found here or there.
        if !self.communicators.give_back(at) {
            return;
        }
        let mut has_hung = false;
        for (op_at, op) in self.operations.taken() {
            if op.communicator() == at {
                has_hung |= self.fail(op_at, op);
            }
        }
        for (transfer_at, transfer) in self.transfers.taken() {
            if transfer.communicator.load(Relaxed) == at.to_word() {
                self.transfers.give_back(transfer_at);
            }
        }
        for row in rows.into_iter().filter(|&row| row < CLOSED) {
            self.release_links(GroupHandle::of_row(row));
        }
        if has_hung {
            self.has_failed.store(true, Relaxed);
            self.deepen_after_hang();
        }
        self.mask_place.ends();
    }

    /// Releases the links of a communicator that has ended.
    pub(crate) fn release_links(&self, row: GroupHandle) {
        self.recorder
            .release_links(row, |link| self.links.release(link.index()));
    }

    /// Ends an operation that is over, and returns its slot to the pool if its group call is over.
    pub(crate) fn end(&self, at: SlotUse, op: &Op, ticket: Ticket, state: State) {
        let now = self.recorder.now();
        let duration = op.duration(at);
        self.end_in_order(at, op, now);
        self.recorder
            .completed_and_retired_at(ticket, now, duration);
        if !state.has(flag::IN_GROUP) {
            self.operations.release(at);
        }
        if let Some(duration) = duration {
            self.deepen_after(duration);
        }
    }

    /// Whether an operation has not ended, or an abort has ended one. Those whose group call ended without a plan for
    /// them do not count: they may complete without an event.
    pub(crate) fn has_pending(&self) -> bool {
        let mut taken = self.operations.taken();
        self.has_failed.load(Relaxed)
            || taken.any(|(at, op)| {
                let state = op.state(at);
                state.is_some_and(|state| !state.has(flag::OVER | flag::LEFT))
            })
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.recorder.now()
    }

    pub(crate) fn context(at: SlotUse) -> *mut c_void {
        at.handle(Kind::Communicator, 0)
    }
}

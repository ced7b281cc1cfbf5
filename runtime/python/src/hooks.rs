//! The hooks that PyTorch calls before and after each operation of a group.
//!
//! PyTorch, or for versions without hooks `rcomm/_dispatch.py`, calls the hooks in Python (`before` and `after` of
//! [`GroupHooks`]); if those of `rcomm/_hooks.cpp` were built, PyTorch calls them instead, and they call
//! [`native`](crate::native). Both write the same record.

use crate::pending::Watched;
use crate::ring::RingState;
use crate::tensors::Side;
use pyo3::intern;
use pyo3::prelude::*;
use rcomm_recorder::model::{OpType, Peer, WaitsFor};
use rcomm_recorder::record::{
    CallSite, CallSiteId, FlightRecorder, GroupHandle, Operation, SignatureKey, SignatureRef,
    Start, Ticket,
};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

/// How the operation with one number of a hook is recorded.
pub(crate) struct Named {
    op: OpType,
    /// The name in PyTorch's own records.
    name: &'static str,
    /// Whether the operation's Work has a future on gloo.
    has_future: bool,
    /// Whether, on gloo, the operation ends only within a wait for it, so that its Work shows no end before.
    pub(crate) is_deferred: bool,
}

const fn named(op: OpType, name: &'static str) -> Named {
    Named {
        op,
        name,
        has_future: true,
        is_deferred: false,
    }
}

const fn without_future(op: OpType, name: &'static str) -> Named {
    Named {
        op,
        name,
        has_future: false,
        is_deferred: false,
    }
}

const fn deferred(op: OpType, name: &'static str) -> Named {
    Named {
        op,
        name,
        has_future: false,
        is_deferred: true,
    }
}

/// `c10d::HookOpName` in PyTorch's order (`torch/csrc/distributed/c10d/Hooks.hpp`). The hooks do not report how
/// all_to_all_single splits its tensors, so it is recorded as the operation in which members' sizes may differ.
const NAMED: [Named; 20] = [
    without_future(OpType::Send, "send"),
    without_future(OpType::Recv, "recv"),
    named(OpType::Broadcast, "broadcast"),
    named(OpType::AllReduce, "all_reduce"),
    named(OpType::Reduce, "reduce"),
    named(OpType::AllGather, "all_gather"),
    deferred(OpType::ReduceScatter, "reduce_scatter"),
    named(OpType::AllToAll, "all_to_all"),
    named(OpType::Barrier, "barrier"),
    named(OpType::Scatter, "scatter"),
    named(OpType::Gather, "gather"),
    without_future(OpType::Split, "split"),
    without_future(OpType::NewWindow, "new_window"),
    named(OpType::AllReduceCoalesced, "all_reduce_coalesced"),
    named(OpType::AllGatherSingle, "_all_gather_base"),
    named(OpType::AllGatherCoalesced, "all_gather_coalesced"),
    named(
        OpType::AllGatherCoalesced,
        "all_gather_into_tensor_coalesced",
    ),
    deferred(OpType::ReduceScatterSingle, "_reduce_scatter_base"),
    deferred(
        OpType::ReduceScatterCoalesced,
        "reduce_scatter_tensor_coalesced",
    ),
    named(OpType::AllToAllVSingle, "all_to_all_single"),
];

/// The name of an operation whose number is not in this table.
const UNKNOWN: Named = without_future(OpType::Other, "unknown");

/// PyTorch calls no hook for a monitored barrier: `rcomm/torch.py` notes the call of the method.
const MONITORED_BARRIER: Named = without_future(OpType::MonitoredBarrier, "monitored_barrier");

/// How many operations a hook polls: the oldest ones.
const POLLED_BY_HOOK: usize = 4;

impl Named {
    /// How the operation with this number of PyTorch's hooks is recorded.
    pub(crate) fn of(number: usize) -> &'static Self {
        NAMED.get(number).unwrap_or(&UNKNOWN)
    }

    /// Whether the operation may have a root or a peer.
    fn may_have_root(&self) -> bool {
        self.op == OpType::Other || self.op.is_p2p() || self.op.pattern().is_rooted()
    }
}

/// An operation, from the arguments of a hook.
pub(crate) struct Issued {
    pub(crate) name: &'static Named,
    /// How long the operation may take; `None` for the group's time-out.
    pub(crate) timeout: Option<Duration>,
    /// The root or the peer, as a rank of the group; negative if there is none.
    pub(crate) root: i64,
    pub(crate) inputs: Side,
    pub(crate) outputs: Side,
}

/// An operation between its two hooks, which the same thread calls.
pub(crate) struct Open {
    thread: ThreadId,
    pub(crate) operation: UnderWay,
    /// Whether the operation is a message, and its number among the group's messages or collectives.
    number: (bool, u64),
    /// As in [`Watched`].
    on_host: bool,
    /// As in [`Watched`].
    has_future: bool,
}

/// An operation that is under way.
#[derive(Clone, Copy)]
pub(crate) struct UnderWay {
    pub(crate) ticket: Ticket,
    /// Whether no member completes the operation before all have issued it.
    pub(crate) waits_for_all: bool,
    /// Whether the operation's end is visible only in a wait for it.
    pub(crate) is_deferred: bool,
}

/// How an operation ended.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Ending {
    Completed,
    Failed,
    /// The operation is no longer watched.
    Unwatched,
}

/// How many operations of each kind a group has issued, and those whose second hook or end was not seen.
#[derive(Default)]
struct Counts {
    collectives: u64,
    messages: u64,
    operations: u64,
    /// Operations between their two hooks.
    open: Vec<Open>,
    /// Deferred operations that were not seen to end, oldest first.
    deferred: VecDeque<Ticket>,
}

impl Counts {
    /// Records as failed those operations of this thread whose second hook was not called: PyTorch refused them. Their
    /// numbers are given back, since no other rank has issued them, unless another thread has taken a later number
    /// since. Readers recognize such an operation: it failed and was not retired, and the next has the same number.
    fn refuse(&mut self, ring: &FlightRecorder, thread: ThreadId) {
        let Self {
            collectives,
            messages,
            open,
            ..
        } = self;
        // The newest first, so that several numbers are given back.
        for index in (0..open.len()).rev() {
            if open[index].thread != thread {
                continue;
            }
            let refused = open.remove(index);
            ring.failed(refused.operation.ticket);
            let (is_p2p, number) = refused.number;
            let count = if is_p2p {
                &mut *messages
            } else {
                &mut *collectives
            };
            if *count == number {
                *count -= 1;
            }
        }
    }
}

/// The most deferred operations that are kept per group; if there are more, the oldest is retired.
const MAX_DEFERRED: usize = 1_024;

/// The recording state of one group.
pub(crate) struct RecordedGroup {
    pub(crate) shared: Arc<RingState>,
    group: Option<GroupHandle>,
    backend: String,
    timeout: Duration,
    counts: Mutex<Counts>,
}

impl RecordedGroup {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that an operation is issued. Calls no Python code, which could let another thread issue an operation: so
    /// operations are counted in the order of issue.
    pub(crate) fn begin(&self, issued: &Issued, site: Option<CallSiteId>) {
        let (Some(ring), Some(group)) = (self.shared.ring.get(), self.group) else {
            return;
        };
        let named = issued.name;
        let key = SignatureKey {
            backend: &self.backend,
            op_name: named.name,
            inputs: &issued.inputs.tensors(),
            outputs: &issued.outputs.tensors(),
        };
        let rank = u32::try_from(issued.root).ok();
        let is_p2p = named.op.is_p2p();
        let mut operation = Operation {
            is_p2p,
            timeout: issued.timeout.unwrap_or(self.timeout),
            call_site: site.map(CallSite::Id),
            start: Start::InTurn,
            ..Operation::new(group, named.op, SignatureRef::Key(&key))
        };
        match rank {
            Some(rank) if is_p2p => operation.peer = Peer::Rank(rank),
            None if is_p2p => operation.peer = Peer::Any,
            root => operation.root = root,
        }
        let thread = std::thread::current().id();
        let on_host = issued.inputs.on_host || issued.outputs.on_host;
        let mut counts = self.counts();
        counts.refuse(ring, thread);
        counts.operations += 1;
        match is_p2p {
            true => counts.messages += 1,
            false => counts.collectives += 1,
        }
        operation.op_id = counts.operations;
        operation.collective_seq_id = counts.collectives;
        operation.p2p_seq_id = counts.messages;
        let ticket = ring.begin(&operation);
        let number = match is_p2p {
            true => counts.messages,
            false => counts.collectives,
        };
        counts.open.push(Open {
            thread,
            number: (is_p2p, number),
            operation: UnderWay {
                ticket,
                waits_for_all: named.op.waits_for() == WaitsFor::All,
                is_deferred: named.is_deferred && on_host,
            },
            on_host,
            has_future: named.has_future,
        });
    }

    /// Records as refused those operations of the calling thread whose second hook was not called. Needed where an
    /// exception ends the thread's work: otherwise the thread's next operation does this.
    pub(crate) fn refuse_open(&self) {
        if let Some(ring) = self.shared.ring.get() {
            self.counts().refuse(ring, std::thread::current().id());
        }
    }

    /// Takes out the operation whose second hook the calling thread calls, which is the newest that this thread has
    /// begun, and notes it if it is deferred; `None` if its first hook was not seen. PyTorch numbers its calls, but to
    /// read the number in Python takes longer than the record.
    pub(crate) fn issued(&self) -> Option<Open> {
        let thread = std::thread::current().id();
        let mut counts = self.counts();
        let mut newest_last = counts.open.iter();
        let index = newest_last.rposition(|open| open.thread == thread)?;
        let open = counts.open.remove(index);
        if open.operation.is_deferred {
            counts.deferred.push_back(open.operation.ticket);
            let forgotten = match counts.deferred.len() > MAX_DEFERRED {
                true => counts.deferred.pop_front(),
                false => None,
            };
            match forgotten.zip(self.shared.ring.get()) {
                // Nothing will show this operation's end.
                Some((oldest, ring)) => ring.retired(oldest),
                None => {
                    self.shared.deferred.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Some(open)
    }

    /// Whether this operation is deferred, its end was not seen, no later operation proved that all members have issued
    /// it, and not too many deferred ones came after it.
    pub(crate) fn is_deferred(&self, ticket: Ticket) -> bool {
        self.counts().deferred.contains(&ticket)
    }

    /// Records that an operation was seen, now, to have ended, or that it is no longer watched.
    ///
    /// Once an operation that waits for all members has completed, all members have issued every earlier operation, so
    /// no member is missing in an earlier deferred one. The end of a deferred operation may never be seen, since a wait
    /// in C++ does not call this module: the earlier deferred operations are retired.
    pub(crate) fn ended(&self, operation: UnderWay, ending: Ending) {
        let Some(ring) = self.shared.ring.get() else {
            return;
        };
        let ticket = operation.ticket;
        match ending {
            Ending::Completed => ring.completed_and_retired_at(ticket, ring.now(), None),
            Ending::Failed => {
                ring.failed(ticket);
                ring.retired(ticket);
            }
            Ending::Unwatched => ring.retired(ticket),
        }
        let passes = operation.waits_for_all && ending == Ending::Completed;
        if self.shared.deferred.load(Ordering::Relaxed) == 0 || !passes && !operation.is_deferred {
            return;
        }
        let mut counts = self.counts();
        let before = counts.deferred.len();
        counts.deferred.retain(|earlier| {
            let passed = passes && earlier.collective_seq_id() < ticket.collective_seq_id();
            if passed {
                ring.retired(*earlier);
            }
            !passed && *earlier != ticket
        });
        let removed = before - counts.deferred.len();
        self.shared.deferred.fetch_sub(removed, Ordering::Relaxed);
    }
}

/// The hooks of one group: `before` and `after` are for PyTorch's `register_pre_hook` and
/// `register_post_hook`. Neither ever raises.
#[pyclass(module = "rcomm._native", frozen)]
pub(crate) struct GroupHooks(Arc<RecordedGroup>);

impl GroupHooks {
    pub(crate) fn new(
        shared: Arc<RingState>,
        group: Option<GroupHandle>,
        backend: String,
        timeout: Duration,
    ) -> Self {
        Self(Arc::new(RecordedGroup {
            shared,
            group,
            backend,
            timeout,
            counts: Mutex::default(),
        }))
    }

    /// The hook before an operation.
    fn read(&self, args: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = args.py();
        let shared = &self.0.shared;
        let Some(ring) = shared.ring.get() else {
            return Ok(());
        };
        shared.pending.sweep(py, &shared.ring, POLLED_BY_HOOK);
        // Each attribute is a call of PyTorch's binding.
        let name = Named::of(args.getattr(intern!(py, "name"))?.extract()?);
        let root = match name.may_have_root() {
            true => args.getattr(intern!(py, "root"))?.extract()?,
            false => -1,
        };
        let inputs = args.getattr(intern!(py, "input_tensors"))?;
        let outputs = args.getattr(intern!(py, "output_tensors"))?;
        let issued = Issued {
            name,
            timeout: None,
            root,
            inputs: Side::read(&inputs, &shared.types)?,
            outputs: Side::read(&outputs, &shared.types)?,
        };
        self.0.begin(&issued, shared.sites.of_caller(py, ring));
        Ok(())
    }

    /// The hook after an operation was issued.
    fn watch(&self, args: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = args.py();
        let shared = &self.0.shared;
        if shared.ring.get().is_none() {
            return Ok(());
        }
        let Some(open) = self.0.issued() else {
            return Ok(());
        };
        let work = args.getattr(intern!(py, "work"))?;
        if work.is_none() {
            self.0.ended(open.operation, Ending::Completed);
            return Ok(());
        }
        let watched = Watched {
            group: self.0.clone(),
            operation: open.operation,
            work: work.unbind(),
            on_host: open.on_host,
            has_future: open.has_future,
        };
        shared.pending.push(watched);
        Ok(())
    }
}

#[pymethods]
impl GroupHooks {
    /// Records that an operation is about to be issued.
    fn before(&self, args: &Bound<'_, PyAny>) {
        if !quietly(|| self.read(args)) {
            // Else the second hook would find an operation that PyTorch refused earlier.
            self.0.refuse_open();
        }
    }

    /// Watches an operation that was issued.
    fn after(&self, args: &Bound<'_, PyAny>) {
        quietly(|| self.watch(args));
    }

    /// Records that a monitored barrier is issued, which may take `timeout_ms` or, without that, the group's time-out.
    /// `monitored_barrier_ended` is to be called by the same thread once the call, which blocks, has returned or
    /// raised.
    #[pyo3(signature = (timeout_ms=None))]
    fn monitored_barrier(&self, py: Python<'_>, timeout_ms: Option<u64>) {
        quietly(|| {
            let shared = &self.0.shared;
            if let Some(ring) = shared.ring.get() {
                let issued = Issued {
                    name: &MONITORED_BARRIER,
                    timeout: timeout_ms.map(Duration::from_millis),
                    root: -1,
                    inputs: Side::default(),
                    outputs: Side::default(),
                };
                self.0.begin(&issued, shared.sites.of_caller(py, ring));
            }
            Ok(())
        });
    }

    /// Records that a monitored barrier has passed, or raised.
    fn monitored_barrier_ended(&self, passed: bool) {
        quietly(|| {
            if let Some(open) = self.0.issued() {
                let ending = match passed {
                    true => Ending::Completed,
                    false => Ending::Failed,
                };
                self.0.ended(open.operation, ending);
            }
            Ok(())
        });
    }

    /// Records that PyTorch refused the operations for which the calling thread called the first hook only. Called when
    /// an exception ends the program.
    fn refused(&self) {
        self.0.refuse_open();
    }

    /// The address of this group for `_hooks.cpp`, valid to the end of the process: PyTorch may keep a hook for longer
    /// than the interpreter lives. Each call keeps one reference forever, so call it once per group.
    fn address(&self) -> usize {
        Arc::into_raw(self.0.clone()).expose_provenance()
    }
}

/// Runs a part of the recording: neither an error nor a panic reaches the job. Returns whether there was none.
fn quietly(run: impl FnOnce() -> PyResult<()>) -> bool {
    matches!(catch_unwind(AssertUnwindSafe(run)), Ok(Ok(())))
}

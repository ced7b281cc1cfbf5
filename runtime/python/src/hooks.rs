//! What PyTorch calls before and after each operation of a group.

use crate::pending::Watched;
use crate::ring::Shared;
use crate::tensors::Side;
use pyo3::intern;
use pyo3::prelude::*;
use rcomm_recorder::model::{OpType, Peer};
use rcomm_recorder::record::{
    CallSite, GroupHandle, Operation, SignatureKey, SignatureRef, Start, Ticket,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

/// How a hook's name of an operation is recorded.
struct Named {
    op: OpType,
    /// As PyTorch's own records spell it.
    name: &'static str,
    /// Its Work has a future on gloo.
    future: bool,
}

const fn named(op: OpType, name: &'static str) -> Named {
    Named {
        op,
        name,
        future: true,
    }
}

const fn without_future(op: OpType, name: &'static str) -> Named {
    Named {
        op,
        name,
        future: false,
    }
}

/// `c10d::HookOpName` in PyTorch's order (`torch/csrc/distributed/c10d/Hooks.hpp`). The hooks do not say how
/// all_to_all_single splits its tensors, so members may differ in their sizes.
const NAMED: [Named; 20] = [
    without_future(OpType::Send, "send"),
    without_future(OpType::Recv, "recv"),
    named(OpType::Broadcast, "broadcast"),
    named(OpType::AllReduce, "all_reduce"),
    named(OpType::Reduce, "reduce"),
    named(OpType::AllGather, "all_gather"),
    without_future(OpType::ReduceScatter, "reduce_scatter"),
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
    without_future(OpType::ReduceScatterSingle, "_reduce_scatter_base"),
    without_future(
        OpType::ReduceScatterCoalesced,
        "reduce_scatter_tensor_coalesced",
    ),
    named(OpType::AllToAllVSingle, "all_to_all_single"),
];

const UNKNOWN: Named = without_future(OpType::Other, "unknown");

/// How many operations under way a hook looks at.
const LOOK: usize = 4;

/// An operation between its two hooks.
struct Open {
    op_id: i64,
    thread: ThreadId,
    ticket: Ticket,
    on_host: bool,
    future: bool,
}

#[derive(Default)]
struct Counts {
    collectives: u64,
    messages: u64,
    operations: u64,
    open: Vec<Open>,
}

/// The hooks of one group: `before` and `after` are for PyTorch's `register_pre_hook` and
/// `register_post_hook`. Neither ever raises.
#[pyclass(module = "rcomm._native", frozen)]
pub(crate) struct GroupHooks {
    shared: Arc<Shared>,
    group: Option<GroupHandle>,
    backend: String,
    timeout: Duration,
    counts: Mutex<Counts>,
}

impl GroupHooks {
    pub(crate) fn new(
        shared: Arc<Shared>,
        group: Option<GroupHandle>,
        backend: String,
        timeout: Duration,
    ) -> Self {
        Self {
            shared,
            group,
            backend,
            timeout,
            counts: Mutex::default(),
        }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, args: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = args.py();
        let (Some(ring), Some(group)) = (self.shared.ring.get(), self.group) else {
            return Ok(());
        };
        self.shared.pending.sweep(py, &self.shared.ring, LOOK);
        let code: usize = args.getattr(intern!(py, "name"))?.extract()?;
        let what = NAMED.get(code).unwrap_or(&UNKNOWN);
        let op_id: i64 = args.getattr(intern!(py, "op_id"))?.extract()?;
        let root: i64 = args.getattr(intern!(py, "root"))?.extract()?;
        let types = &self.shared.types;
        let inputs = Side::read(&args.getattr(intern!(py, "input_tensors"))?, types)?;
        let outputs = Side::read(&args.getattr(intern!(py, "output_tensors"))?, types)?;
        let site = self.shared.sites.of_caller(py, ring);
        let key = SignatureKey {
            backend: &self.backend,
            op_name: what.name,
            inputs: &inputs.tensors(),
            outputs: &outputs.tensors(),
        };
        let rank = u32::try_from(root).ok();
        let is_p2p = what.op.is_p2p();
        let mut operation = Operation {
            is_p2p,
            timeout: self.timeout,
            call_site: site.map(CallSite::Id),
            start: Start::InTurn,
            ..Operation::new(group, what.op, SignatureRef::Key(&key))
        };
        match rank {
            Some(rank) if is_p2p => operation.peer = Peer::Rank(rank),
            None if is_p2p => operation.peer = Peer::Any,
            root => operation.root = root,
        }
        let thread = std::thread::current().id();
        // From here to the end nothing calls Python: the order of the counts is the order of issue.
        let mut counts = self.counts();
        // PyTorch calls no second hook for an operation that it refused.
        counts.open.retain(|open| {
            let refused = open.thread == thread;
            if refused {
                ring.failed(open.ticket);
            }
            !refused
        });
        counts.operations += 1;
        match is_p2p {
            true => counts.messages += 1,
            false => counts.collectives += 1,
        }
        operation.op_id = counts.operations;
        operation.collective_seq_id = counts.collectives;
        operation.p2p_seq_id = counts.messages;
        let ticket = ring.begin(&operation);
        counts.open.push(Open {
            op_id,
            thread,
            ticket,
            on_host: inputs.on_host || outputs.on_host,
            future: what.future,
        });
        Ok(())
    }

    fn issued(&self, args: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = args.py();
        let Some(ring) = self.shared.ring.get() else {
            return Ok(());
        };
        let op_id: i64 = args.getattr(intern!(py, "op_id"))?.extract()?;
        let open = {
            let mut counts = self.counts();
            let at = counts.open.iter().position(|open| open.op_id == op_id);
            at.map(|at| counts.open.swap_remove(at))
        };
        let Some(open) = open else { return Ok(()) };
        let work = args.getattr(intern!(py, "work"))?;
        if work.is_none() {
            ring.completed_and_retired_at(open.ticket, ring.now(), None);
            return Ok(());
        }
        let watched = Watched {
            ticket: open.ticket,
            work: work.unbind(),
            on_host: open.on_host,
            future: open.future,
        };
        self.shared.pending.push(&self.shared.ring, watched);
        Ok(())
    }
}

#[pymethods]
impl GroupHooks {
    /// Before an operation is issued.
    fn before(&self, args: &Bound<'_, PyAny>) {
        quietly(|| self.begin(args));
    }

    /// After an operation was issued.
    fn after(&self, args: &Bound<'_, PyAny>) {
        quietly(|| self.issued(args));
    }
}

/// Runs a part of the record: neither an error nor a panic reaches the job.
fn quietly(run: impl FnOnce() -> PyResult<()>) {
    drop(catch_unwind(AssertUnwindSafe(run)));
}

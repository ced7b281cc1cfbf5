//! Makes calls that may wait for peers inside the library, on separate threads.
//!
//! NCCL connects to peers when it first needs a connection. For collectives, a connection belongs to an algorithm,
//! which NCCL chooses by operation and size; for sends and receives, it belongs to a peer (`ncclCollPreconnectFunc` and
//! `ncclP2PPreconnectFunc`, group.cc). On a blocking communicator, a call that needs a new connection does not return
//! until the peer arrives. So the first call that needs a connection is made on a separate thread, which is detached at
//! the deadline. All later calls are made on the thread that issues them.

use super::enqueue::check_call;
use super::pending::Ticket;
use super::{CommQueue, QueueState, Stage};
use crate::comm::Comm;
use crate::cuda::graph::Graph;
use crate::launch::Call;
use crate::library::NcclLibrary;
use crate::library::config::Blocking;
use crate::library::foreign_call::ForeignCall;
use crate::library::sys::{NcclComm, NcclResult};
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::{OpType, Peer};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

/// A set of calls that use the same connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ConnectionKey {
    op: OpType,
    /// The binary logarithm of the bytes of all buffers, rounded down, since the library chooses algorithms by size.
    size: u32,
    /// The peer of a send or receive: each peer has connections of its own.
    peer: Option<u32>,
}

impl ConnectionKey {
    /// Calls `holds` with the key of the operation, or of each operation of a block, until it returns false. Returns
    /// whether it returned true for all keys.
    fn all(op: &Op<'_>, holds: &mut impl FnMut(Self) -> bool) -> bool {
        if let Op::Coalesced(ops) = op {
            return ops.iter().all(|op| Self::all(op, holds));
        }
        let buffers = op.inputs().iter().chain(op.outputs());
        let bytes: usize = buffers.map(|buffer| buffer.size_bytes()).sum();
        let peer = if let Peer::Rank(peer) = op.peer() {
            Some(peer)
        } else {
            None
        };
        holds(Self {
            op: op.op_type(),
            size: bytes.checked_ilog2().unwrap_or(0),
            peer,
        })
    }
}

/// A call that all ranks of a communicator make while nothing else uses it.
pub(crate) struct LoneCall<'q> {
    queue: &'q CommQueue,
    comm: Arc<Comm>,
    state: MutexGuard<'q, QueueState>,
    call: ForeignCall<Result<Call>>,
}

impl LoneCall<'_> {
    /// Waits until the call is done.
    ///
    /// # Errors
    /// The library's error; `Timeout`, or the error of an abort. If the call may not have ended, the queue is unusable
    /// from then on.
    pub(crate) fn wait(mut self, deadline: Deadline) -> Result<()> {
        let waited = match self.queue.wait_for_thread(&mut self.call, deadline) {
            Ok(Ok(Call::InProgress)) => self.queue.wait_until_connected(&self.comm, deadline),
            Ok(called) => return called.map(|_| ()),
            Err(error) => Err(error),
        };
        if let Err(error) = &waited {
            self.state.stage = Stage::Broken(error.clone());
        }
        waited
    }
}

impl CommQueue {
    /// Begins a call on the communicator, on a separate thread, after [`drain`](Self::drain); `None` if the
    /// communicator does not exist yet. No operation goes through the queue until the call has been waited for.
    ///
    /// # Errors
    /// `Timeout` as [`lock`](Self::lock); `Io` if no thread can be started.
    pub(crate) fn begin_alone(
        &self,
        name: &'static str,
        call: impl FnOnce(NcclComm) -> NcclResult + Send + 'static,
        deadline: Deadline,
    ) -> Result<Option<LoneCall<'_>>> {
        let Some(comm) = self.comm.get() else {
            return Ok(None);
        };
        let state = self.lock(deadline)?;
        let work = move |library: &NcclLibrary, raw| {
            let status = call(raw);
            check_call(library, raw, name, status)
        };
        Ok(Some(LoneCall {
            queue: self,
            comm: comm.clone(),
            state,
            call: comm.call_on_thread(&self.shared.device, work)?,
        }))
    }

    /// Returns how long the library expects a collective to take. Asks the library on a separate thread, since it may
    /// connect to peers for the answer.
    ///
    /// # Errors
    /// `Unsupported` as [`LaunchTarget::estimate`](crate::launch::LaunchTarget::estimate), and for communicators that
    /// do not block; `InvalidArgument` during a capture and while the group is suspended; the reason why the queue
    /// is unusable; `Closed` if the communicator does not exist yet; `Timeout`; the error of an abort. The queue is
    /// unusable after a time-out or an abort during the call.
    pub(crate) fn estimate(
        self: &Arc<Self>,
        op: Op<'static>,
        deadline: Deadline,
    ) -> Result<Duration> {
        let deadline = deadline.started();
        if self.shared.options.comm.blocking == Blocking::No {
            let message = "NCCL estimates times only on communicators that block: on others a simulated end of a group \
                           of calls launches the operation";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let mut state = self.lock(deadline)?;
        self.shared.check_awake()?;
        if let Stage::Broken(error) = &state.stage {
            return Err(error.clone());
        }
        let Some(comm) = self.comm.get() else {
            let message = "the communicator does not exist yet: issue an operation once before";
            return Err(Error::new(ErrorKind::Closed, message));
        };
        {
            let _entered = self.shared.device.enter()?;
            if let Some(graph) = self.stream.graph()? {
                let message = format!(
                    "the stream of the group is being captured into graph {}, in which NCCL would register the buffers",
                    graph.id
                );
                return Err(Error::new(ErrorKind::InvalidArgument, message));
            }
        }
        let (queue, made_for) = (self.clone(), comm.clone());
        let work = move |library: &NcclLibrary, raw| {
            // SAFETY: the communicator is live and locked while it is lent, and blocks; the queue, which is held here,
            // owns the stream, which is not captured, since the caller holds the queue's lock. The group has validated
            // the operation, which is held here with its buffers, and `check_place` their device.
            unsafe { queue.target(&made_for, library, raw).estimate(&op) }
        };
        let mut call = comm.call_on_thread(&self.shared.device, work)?;
        match self.wait_for_thread(&mut call, deadline) {
            Ok(estimated) => estimated,
            Err(error) => {
                // The thread may still be inside the library's call.
                state.stage = Stage::Broken(error.clone());
                Err(error)
            }
        }
    }

    /// Launches an operation, on a separate thread if the library may wait for peers. The context must be
    /// current.
    pub(super) fn launch(
        &self,
        state: &mut QueueState,
        ticket: &Arc<Ticket>,
        graph: Option<Option<Graph>>,
    ) {
        let blocks = self.shared.options.comm.blocking == Blocking::Yes;
        let mut is_connected = |key| {
            let latest = Some(key);
            if state.latest_connected == latest {
                return true;
            }
            let is_connected = state.connected.contains(&key);
            if is_connected {
                state.latest_connected = latest;
            }
            is_connected
        };
        let is_known = !blocks || ticket.check_op(|op| ConnectionKey::all(op, &mut is_connected));
        if is_known {
            ticket.launch(|op, call| self.enqueue(op, call, graph));
            return;
        }
        match self.launch_on_thread(ticket, graph) {
            Ok(()) if ticket.is_enqueued() => {
                ticket.check_op(|op| {
                    ConnectionKey::all(op, &mut |key| {
                        state.connected.insert(key);
                        true
                    })
                });
            }
            Ok(()) => {}
            Err(error) => {
                // If the thread was started, it may still be inside the library's call.
                state.stage = Stage::Broken(error.clone());
                ticket.fail(error);
            }
        }
    }

    /// Launches an operation on a separate thread, and waits for the launch.
    ///
    /// # Errors
    /// `Io` if no thread can be started; those of [`wait_for_thread`](Self::wait_for_thread).
    fn launch_on_thread(&self, ticket: &Arc<Ticket>, graph: Option<Option<Graph>>) -> Result<()> {
        let on_thread = ticket.clone();
        let mut launched = ForeignCall::begin("rcomm/nccl-connect", move || {
            let queue = on_thread.queue().clone();
            match queue.shared.device.enter() {
                Ok(_entered) => {
                    on_thread.launch(|op, call| queue.enqueue(op, call, graph));
                }
                Err(error) => on_thread.fail(error),
            }
        })?;
        self.wait_for_thread(&mut launched, ticket.deadline())
    }

    /// Waits for the result of a separate thread.
    ///
    /// # Errors
    /// `Timeout` if there is no result by the deadline; the error of an abort. The thread continues.
    pub(super) fn wait_for_thread<T: Send + 'static>(
        &self,
        call: &mut ForeignCall<T>,
        deadline: Deadline,
    ) -> Result<T> {
        /// The interval of the checks for an abort.
        const POLL_INTERVAL: Duration = Duration::from_millis(20);
        let deadline = deadline.started();
        loop {
            if let Some(done) = call.wait(POLL_INTERVAL.min(deadline.remaining()))? {
                return Ok(done);
            }
            if let Some(error) = self.shared.aborted.get() {
                return Err(error.clone());
            }
            if deadline.has_passed() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "NCCL did not finish the call, which may have to connect to other ranks, before the deadline",
                ));
            }
        }
    }
}

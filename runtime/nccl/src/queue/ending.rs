//! Ends queues: closes them together with the other ranks, or stops them on this rank only. Buffers that the device may
//! still use are kept or leaked.
//!
//! All queues of a group end together. To free a communicator, NCCL waits for the kernels of all communicators of its
//! device, so that a hung communicator would delay the end of the others. So all communicators get the abort flag
//! before the first is freed.

use super::{CommQueue, Stage};
use crate::comm::members::Scope;
use crate::comm::{Comm, CommStatus};
use crate::context::Shared;
use crate::cuda::event::Mark;
use crate::cuda::graph::GraphNumbers;
use crate::library::foreign_call::ForeignCall;
use rcomm_core::Deadline;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::OpType;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

/// The memory of an operation that was given up, until the device has finished with it.
pub(super) struct AbandonedOp {
    op: OpType,
    memory: Box<dyn Send>,
    end: Mark,
}

impl CommQueue {
    /// The limit of each wait of an abort: for locks, for revocations, and for the device to release buffers.
    pub(crate) const CLEAN_UP: Duration = Duration::from_secs(5);

    /// How long to wait until the driver has released what a destroyed graph held.
    const RELEASE: Duration = Duration::from_secs(2);

    /// Keeps the buffers of an abandoned operation until the device has finished with them.
    pub(crate) fn keep_until(&self, op: OpType, memory: Box<dyn Send>, end: Mark) {
        self.abandoned().push(AbandonedOp { op, memory, end });
    }

    fn abandoned(&self) -> MutexGuard<'_, Vec<AbandonedOp>> {
        self.abandoned
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the buffers of abandoned operations that the device has finished with, and the deferred memory of the
    /// device. Returns whether no abandoned operation is left.
    pub(super) fn free_finished(&self) -> bool {
        self.shared.device.free_deferred();
        let mut abandoned = self.abandoned();
        if abandoned.is_empty() {
            return true;
        }
        match self.shared.device.enter() {
            // Buffers whose state cannot be queried are kept.
            Ok(_entered) => abandoned.retain(|op| !matches!(op.end.is_done(), Ok(true))),
            Err(error) => tracing::warn!(%error, "buffers of aborted operations are kept"),
        }
        abandoned.is_empty()
    }

    /// The number of graphs that hold operations of this communicator.
    pub(crate) fn live_graphs(&self) -> usize {
        self.live.count()
    }

    /// The numbers of the graphs that hold operations of these communicators.
    pub(crate) fn graph_numbers<'a>(
        queues: impl IntoIterator<Item = &'a Arc<Self>>,
    ) -> GraphNumbers {
        let mut numbers = GraphNumbers::default();
        for queue in queues {
            queue.live.collect(&mut numbers);
        }
        numbers
    }

    /// Works as [`graph_numbers`](Self::graph_numbers), but first waits until there are no such graphs, at most for
    /// [`RELEASE`](Self::RELEASE) and until `deadline`. The driver releases on a thread of its own what a graph held,
    /// some time after the program has destroyed the graph.
    fn graphs_that_stay<'a>(
        queues: impl IntoIterator<Item = &'a Arc<Self>> + Clone,
        deadline: Deadline,
    ) -> GraphNumbers {
        let (deadline, release) = (deadline.started(), Deadline::In(Self::RELEASE).started());
        loop {
            let graphs = Self::graph_numbers(queues.clone());
            if graphs.is_empty() || deadline.has_passed() || release.has_passed() {
                return graphs;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Fails the operations that wait for the ranks to join, and leaves the communicators that all ranks have joined as
    /// they are. A communicator that is still joining is aborted.
    pub(crate) fn abandon_all(queues: &[Arc<Self>]) {
        let deadline = Deadline::In(Self::CLEAN_UP).started();
        queues.iter().for_each(|queue| queue.fail_waiting(deadline));
    }

    /// Stops pending work, and ends the communicators on this rank. Then waits for at most
    /// [`CLEAN_UP`](Self::CLEAN_UP), for all queues together, until other calls have returned and the device has
    /// released buffers. If the library can revoke and shrink, the group's own communicator is kept, so that it can be
    /// shrunk to the remaining ranks.
    ///
    /// If the library does not free the communicators in time, kernels of other groups may be in the way:
    /// `stop_others` is called, as by [`abort_together`](Self::abort_together).
    ///
    /// # Blocking
    /// Until the library has stopped the kernels, which may never happen: a kernel cannot end while a kernel of the
    /// program before it does not end.
    pub(crate) fn end_all(queues: &[Arc<Self>], stop_others: &mut dyn FnMut() -> bool) {
        let Some(shared) = queues.first().map(|queue| queue.shared.clone()) else {
            return;
        };
        // The operations fail before the call into the library, which may not return.
        queues
            .iter()
            .for_each(|queue| queue.fail_waiting(Deadline::In(Duration::ZERO)));
        match shared.device.enter() {
            Ok(_entered) => Self::stop_all(&shared, queues, stop_others),
            Err(error) => tracing::warn!(%error, "communicators could not be ended"),
        }
        let deadline = Deadline::In(Self::CLEAN_UP).started();
        queues.iter().for_each(|queue| queue.fail_waiting(deadline));
        // `&`, not `&&`: each iteration frees the buffers of all queues.
        while !queues
            .iter()
            .fold(true, |clean, queue| queue.free_finished() & clean)
            && !deadline.has_passed()
        {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// After an abort: makes the queue unusable, and fails the operations that wait for the ranks to join. Does nothing
    /// if another call holds the lock until `deadline`: the next progress check of these operations then finds that the
    /// group was aborted.
    fn fail_waiting(&self, deadline: Deadline) {
        let Some(error) = self.shared.aborted.get() else {
            return;
        };
        let Ok(mut state) = self.lock(deadline) else {
            return;
        };
        for ticket in state.waiting.drain(..) {
            ticket.fail(error.clone());
        }
        // This drops a communicator that is still joining, and so aborts it.
        state.stage = Stage::Broken(error.clone());
    }

    /// Revokes all communicators in one group of calls, if the library can revoke and shrink. Then aborts all
    /// communicators in a second group, except the group's own one if it was revoked, and those with live graphs: each
    /// of these is aborted on a separate thread. The context must be current.
    fn stop_all(shared: &Arc<Shared>, queues: &[Arc<Self>], stop_others: &mut dyn FnMut() -> bool) {
        let table = shared.library.table();
        let is_revocable = table.comm_revoke.is_some() && table.comm_shrink.is_some();
        let mut to_abort: Vec<&Arc<Self>> = queues.iter().collect();
        if is_revocable {
            to_abort = Self::revoke_all(shared, queues);
        }
        let mut comms = Vec::new();
        let mut under_graphs = Vec::new();
        for queue in to_abort {
            let Some(comm) = queue.comm.get().filter(|comm| comm.is_live()) else {
                continue;
            };
            if queue.live_graphs() == 0 {
                comms.push(comm.clone());
            } else {
                queue.abort_under_graphs(comm.clone());
                under_graphs.push(queue);
            }
        }
        let no_deadline = Deadline::In(Duration::MAX);
        if let Err(error) = Self::abort_together(shared, comms, stop_others, no_deadline, ()) {
            tracing::warn!(%error, "communicators could not be aborted");
        }
        let graphs = Self::graphs_that_stay(under_graphs, no_deadline);
        if !graphs.is_empty() {
            tracing::error!(
                %graphs,
                "CUDA graphs hold operations of an aborted communicator: NCCL frees it when they are destroyed"
            );
        }
    }

    /// Frees the communicators of queues that are not needed any more: those that an abort has revoked and kept for a
    /// shrink, and those of a group that was not aborted. Leaves communicators with live graphs as they are.
    ///
    /// If the library does not free them in time, kernels of other groups may be in the way: `stop_others` is called,
    /// as by [`abort_together`](Self::abort_together).
    ///
    /// # Blocking
    /// For at most [`RELEASE`](Self::RELEASE) and the time that [`Ends::begin`](crate::context::ends::Ends::begin)
    /// returns. After that, the call is left to its thread.
    pub(crate) fn free_all(queues: &[Arc<Self>], stop_others: &mut dyn FnMut() -> bool) {
        let Some(shared) = queues.first().map(|queue| &queue.shared) else {
            return;
        };
        Self::graphs_that_stay(queues, Deadline::In(Self::RELEASE));
        let free = queues.iter().filter(|queue| queue.live_graphs() == 0);
        let comms = free.filter_map(|queue| queue.comm.get().filter(|comm| comm.is_live()));
        let comms: Vec<Arc<Comm>> = comms.cloned().collect();
        if comms.is_empty() {
            return;
        }
        let (end, limit) = shared.ends.begin();
        let freed = Self::abort_together(shared, comms, stop_others, Deadline::In(limit), end);
        if let Err(error) = freed {
            tracing::error!(%error, "communicators could not be freed: they are left to the library");
        }
    }

    /// Aborts communicators in one group of calls, on a separate thread, which keeps `kept` until the library has
    /// returned. To free communicators, the library waits for all kernels of the device. If that takes longer than
    /// [`CLEAN_UP`](Self::CLEAN_UP), kernels of other groups may block it: `stop_others` is called, and again every 500
    /// ms for as long as it returns true.
    ///
    /// # Blocking
    /// Until the library has returned, or the deadline.
    ///
    /// # Errors
    /// `Timeout`: the call is left to its thread. `Io` if no thread can be started; those of [`Comm::abort_all`].
    fn abort_together(
        shared: &Arc<Shared>,
        comms: Vec<Arc<Comm>>,
        stop_others: &mut dyn FnMut() -> bool,
        deadline: Deadline,
        kept: impl Send + 'static,
    ) -> Result<()> {
        const PAUSE: Duration = Duration::from_millis(500);
        if comms.is_empty() {
            return Ok(());
        }
        let deadline = deadline.started();
        let context = shared.clone();
        let mut call = ForeignCall::begin("rcomm/nccl-free", move || {
            let _kept = kept;
            let _entered = context.device.enter()?;
            Comm::abort_all(&context.library, &comms)
        })?;
        let mut pause = Self::CLEAN_UP;
        loop {
            if let Some(aborted) = call.wait(pause.min(deadline.remaining()))? {
                return aborted;
            }
            if deadline.has_passed() {
                let message = "NCCL has not freed communicators in time";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            pause = match stop_others() {
                true => PAUSE,
                false => Duration::MAX,
            };
        }
    }

    /// Stops pending work on all communicators. Returns the queues whose communicator must be aborted: the queues of
    /// pairs of ranks, and those whose communicator could not be revoked.
    fn revoke_all<'a>(shared: &Shared, queues: &'a [Arc<Self>]) -> Vec<&'a Arc<Self>> {
        let mut to_abort = Vec::new();
        let mut revoked = Vec::new();
        let group = match shared.library.group() {
            Ok(group) => group,
            Err(error) => {
                tracing::warn!(%error, "communicators could not be revoked: they are aborted");
                return queues.iter().collect();
            }
        };
        let calls = Deadline::In(Comm::CALL).started();
        for queue in queues {
            match queue.comm.get().map(|comm| (comm, comm.revoke(calls))) {
                Some((comm, Ok(()))) => revoked.push((queue, comm)),
                Some((_, Err(error))) if error.kind() != ErrorKind::Closed => {
                    tracing::warn!(%error, "a communicator could not be revoked: it is aborted");
                    to_abort.push(queue);
                }
                Some(_) | None => {}
            }
        }
        // The result is ignored: the state of each communicator, read below, shows it.
        let _ = group.end();
        let deadline = Deadline::In(Self::CLEAN_UP).started();
        for (queue, comm) in revoked {
            match Self::wait_until_revoked(comm, deadline) {
                Ok(()) if queue.scope == Scope::Group => {}
                Ok(()) => to_abort.push(queue),
                Err(error) => {
                    tracing::warn!(%error, "a communicator could not be revoked: it is aborted");
                    to_abort.push(queue);
                }
            }
        }
        to_abort
    }

    /// Waits until the library has stopped the pending work of a communicator that was revoked.
    fn wait_until_revoked(comm: &Comm, deadline: Deadline) -> Result<()> {
        loop {
            match comm.status() {
                CommStatus::Ready | CommStatus::Gone => return Ok(()),
                CommStatus::Failed(error) => return Err(error),
                CommStatus::InProgress | CommStatus::InUse if deadline.has_passed() => {
                    let message = "the library did not stop pending work";
                    return Err(Error::new(ErrorKind::Timeout, message));
                }
                CommStatus::InProgress | CommStatus::InUse => {
                    std::thread::sleep(Duration::from_millis(1))
                }
            }
        }
    }

    /// Aborts a communicator whose operations are part of graphs, on a separate thread. Its kernels are stopped at
    /// once, and it is freed when the program has destroyed the last of the graphs.
    fn abort_under_graphs(&self, comm: Arc<Comm>) {
        let shared = self.shared.clone();
        let abort = move || {
            let aborted = shared
                .device
                .enter()
                .and_then(|_entered| Comm::abort_all(&shared.library, &[comm]));
            if let Err(error) = aborted {
                tracing::warn!(%error, "a communicator could not be aborted: its kernels may still run");
            }
        };
        if let Err(error) = on_thread("rcomm/nccl-graphs", abort) {
            tracing::error!(%error, "a communicator could not be aborted: its kernels may still run");
        }
    }

    /// Waits until all submitted operations have ended.
    ///
    /// # Errors
    /// `Timeout` if some operation has not ended by the deadline; the error of the communicator, or of an abort.
    /// The failure of a single operation is reported by that operation.
    pub(crate) fn drain(&self, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        let timed_out = || {
            Error::new(
                ErrorKind::Timeout,
                "operations of the group have not ended in time",
            )
        };
        let mut pause = Duration::from_micros(20);
        let mut wait = || {
            if deadline.has_passed() {
                return Err(timed_out());
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
            Ok(())
        };
        while !self.lock(deadline)?.waiting.is_empty() {
            self.try_progress();
            wait()?;
        }
        let end = {
            let _entered = self.shared.device.enter()?;
            self.shared.sync_events.mark(&self.stream)?
        };
        loop {
            let _entered = self.shared.device.enter()?;
            if end.is_done()? {
                return Ok(());
            }
            if let Some(error) = self.async_error() {
                return Err(error);
            }
            wait()?;
        }
    }

    /// Closes the communicators together with the other ranks, after [`drain`](Self::drain).
    ///
    /// # Blocking
    /// Until the library has closed them, or the deadline.
    ///
    /// # Errors
    /// `InvalidArgument` if CUDA graphs hold operations of a communicator, which is then left open: NCCL waits for the
    /// graphs. `Timeout` if the library has not closed the communicators by the deadline, for example since other ranks
    /// do not close theirs. `Io` if no thread can be started.
    pub(crate) fn close_all(queues: &[Arc<Self>], deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        let graphs = Self::graphs_that_stay(queues, deadline);
        let free = queues.iter().filter(|queue| queue.live_graphs() == 0);
        let free: Vec<Arc<Self>> = free.cloned().collect();
        // The close runs on a separate thread, since the library may never return.
        let close = move || Self::try_close_all(&free, deadline);
        let mut call = ForeignCall::begin("rcomm/nccl-close", close)?;
        match call.wait(deadline.remaining())? {
            Some(closed) => closed?,
            None => {
                let message = "NCCL did not close the communicators before the deadline";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
        }
        if !graphs.is_empty() {
            let message = format!(
                "CUDA graphs ({graphs}) hold operations of this group: destroy them first; the communicators that \
                 they use stay open until then"
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        Ok(())
    }

    /// Closes the communicators of these queues, in the calling thread.
    ///
    /// # Errors
    /// `Timeout`; those of the context. Other errors are logged, and their communicators are aborted.
    fn try_close_all(queues: &[Arc<Self>], deadline: Deadline) -> Result<()> {
        let with_comm = |queue: &Arc<Self>| Some((queue.clone(), queue.comm.get()?.clone()));
        let open: Vec<(Arc<Self>, Arc<Comm>)> = queues.iter().filter_map(with_comm).collect();
        // All finalizations begin before any is waited for, since the other ranks may have their queues in another
        // order.
        let begin = |(queue, comm): &(Arc<Self>, Arc<Comm>)| {
            let _entered = queue.shared.device.enter()?;
            comm.finalize()
        };
        let begun: Vec<Result<()>> = open.iter().map(begin).collect();
        let mut failed = Vec::new();
        for ((queue, comm), begun) in open.iter().zip(begun) {
            match begun.and_then(|()| queue.wait_until_connected(comm, deadline)) {
                Ok(()) => queue.destroy(comm),
                Err(error) if error.kind() == ErrorKind::Timeout => return Err(error),
                Err(error) => {
                    log_close_error(&error);
                    failed.push(comm.clone());
                }
            }
        }
        // After an error, communicators are aborted and never destroyed.
        if let (Some(queue), false) = (queues.first(), failed.is_empty()) {
            let _entered = queue.shared.device.enter()?;
            if let Err(error) = Comm::abort_all(&queue.shared.library, &failed) {
                log_close_error(&error);
            }
        }
        Ok(())
    }

    /// Frees a communicator that was closed, on a separate thread: if the call fails, the library leaves a group of
    /// calls open on its thread.
    fn destroy(&self, comm: &Arc<Comm>) {
        let (shared, comm) = (self.shared.clone(), comm.clone());
        let destroyed = on_thread("rcomm/nccl-close", move || {
            let _entered = shared.device.enter()?;
            comm.destroy()
        });
        match destroyed.map(std::thread::JoinHandle::join) {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) | Err(error) => log_close_error(&error),
            Ok(Err(_)) => tracing::error!("the thread that frees a communicator panicked"),
        }
    }

    /// Aborts the communicator. Leaks it if [`Shared::is_abandoned`] or if a graph holds operations of it. Returns
    /// whether the communicator has ended.
    fn end_or_leak(&self, comm: Arc<Comm>) -> bool {
        if self.shared.is_abandoned() || self.live_graphs() > 0 {
            comm.abandon();
            return false;
        }
        let (end, limit) = self.shared.ends.begin();
        Arc::into_inner(comm).is_some_and(|mut comm| comm.abort_on_thread(limit, end))
    }
}

/// Starts a thread.
///
/// # Errors
/// `Io` if no thread can be started.
fn on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<std::thread::JoinHandle<T>> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread
        .spawn(work)
        .map_err(|error| Error::io(format!("cannot start the thread {name}"), error))
}

/// Logs an error of a close, for example if another rank has exited without closing its communicator. All operations
/// have ended, so the error has no effect on their results.
fn log_close_error(error: &Error) {
    tracing::debug!(%error, "a communicator could not be closed cleanly");
}

impl Drop for CommQueue {
    fn drop(&mut self) {
        // The communicator is dropped before the objects that it uses. If it has not ended by then (it is leaked,
        // another reference keeps it alive, or the library fails or does not return), those objects are leaked as well.
        if let Some(comm) = self.comm.take()
            && !self.end_or_leak(comm)
        {
            self.registry.leak();
            let staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget((self.stream.clone(), self.barrier.clone(), staging.clone()));
        }
        if self.free_finished() {
            return;
        }
        for abandoned in self.abandoned().drain(..) {
            self.shared.leak(abandoned.op, abandoned.memory);
        }
    }
}

impl Shared {
    /// Leaks memory that a device may still use, since reusing it would corrupt data.
    pub(crate) fn leak(&self, op: OpType, memory: Box<dyn Send>) {
        std::mem::forget(memory);
        let leaked = self.leaked.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::warn!(
            %op,
            leaked,
            "it is unknown when the device is done with the buffers of a failed operation: they are never freed"
        );
    }
}

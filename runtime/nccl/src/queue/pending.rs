//! An operation that was submitted to a queue: a [`Pending`] whose state follows from events of the device.

use crate::context::doubt::Doubt;
use crate::cuda::event::Mark;
use crate::cuda::stream::CudaStream;
use crate::queue::{CommQueue, Enqueued, IncompleteCall, RemainingWork};
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::backend::{Done, Pending, Progress, Stream};
use rcomm_core::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// What a queue stores of the call that issued an operation.
#[derive(Clone, Copy)]
pub(crate) struct OpCall {
    /// The sequence number under which the group records the operation.
    pub(crate) seq: u64,
    pub(crate) deadline: Deadline,
    pub(crate) issued: Instant,
}

/// One operation of a queue.
pub(crate) struct Ticket {
    queue: Arc<CommQueue>,
    call: OpCall,
    /// The operation, locked while it is being launched; `None` after it was reclaimed.
    op: Mutex<Option<Op<'static>>>,
    /// Where the operation is on the device.
    placed: Mutex<Placed>,
    /// Set if the operation is part of a graph: it runs when the graph is launched.
    captured: AtomicBool,
    /// What an operation that could not be launched completely may have left on the device.
    failed_launch: OnceLock<RemainingWork>,
    outcome: OnceLock<Result<Done>>,
    /// Set before the launch: from then on work of the operation may be on the device. `placed`, `captured` or
    /// `failed_launch` has the result of the launch.
    may_be_on_device: AtomicBool,
    /// Whether the operation's progress was queried after it was put on the device.
    was_polled: AtomicBool,
    /// Whether the end that the device reports can be believed.
    doubt: Mutex<Doubt>,
}

/// Where an operation is on the device.
enum Placed {
    /// The operation is not on the device, or was not put there completely.
    No,
    /// The device runs the operation between this start and this end.
    Between(Start, Mark),
    /// The device has passed the operation's end, and its events were released for other operations.
    Passed,
}

/// The point at which the device starts an operation.
pub(crate) enum Start {
    /// The operation starts when this event is complete.
    Marked(Mark),
    /// The operation starts when the operation before it has ended, and the work on other streams that it waits for is
    /// done.
    Follows(Option<Mark>, Marks),
}

/// Some events, mostly one.
#[derive(Default)]
pub(crate) struct Marks {
    first: Option<Mark>,
    /// The list is nearly always empty, and then allocates nothing.
    others: Vec<Mark>,
}

impl Marks {
    pub(super) fn push(&mut self, mark: Mark) {
        match &self.first {
            None => self.first = Some(mark),
            Some(_) => self.others.push(mark),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Mark> {
        self.first.iter().chain(&self.others)
    }
}

impl Start {
    /// Whether the device has reached this point. The context must be current.
    fn is_done(&self) -> Result<bool> {
        match self {
            Self::Marked(mark) => mark.is_done(),
            Self::Follows(former, sync_events) => {
                for mark in former.iter().chain(sync_events.iter()) {
                    if !mark.is_done()? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }
}

impl Ticket {
    pub(crate) fn new(
        queue: Arc<CommQueue>,
        op: Op<'static>,
        seq: u64,
        deadline: Deadline,
    ) -> Arc<Self> {
        let issued = Instant::now();
        Arc::new(Self {
            queue,
            call: OpCall {
                seq,
                deadline,
                issued,
            },
            op: Mutex::new(Some(op)),
            placed: Mutex::new(Placed::No),
            captured: AtomicBool::new(false),
            failed_launch: OnceLock::new(),
            outcome: OnceLock::new(),
            may_be_on_device: AtomicBool::new(false),
            was_polled: AtomicBool::new(false),
            doubt: Mutex::new(Doubt::of_op_issued(issued)),
        })
    }

    fn op(&self) -> MutexGuard<'_, Option<Op<'static>>> {
        self.op.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn placed(&self) -> MutexGuard<'_, Placed> {
        self.placed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_captured(&self) -> bool {
        self.captured.load(Ordering::Acquire)
    }

    fn is_placed(&self) -> bool {
        !matches!(*self.placed(), Placed::No)
    }

    /// Puts the operation on the device, unless it has already failed.
    pub(crate) fn launch(
        self: &Arc<Self>,
        enqueue: impl FnOnce(&Op<'static>, &OpCall) -> Result<Enqueued, IncompleteCall>,
    ) {
        let op = self.op();
        let Some(op) = op.as_ref().filter(|_| self.outcome.get().is_none()) else {
            return;
        };
        self.may_be_on_device.store(true, Ordering::Release);
        // A ticket is launched once, so each of the cells below is set for the first time.
        match enqueue(op, &self.call) {
            Ok(Enqueued::Between(start, end)) => {
                *self.placed() = Placed::Between(start, end);
                self.queue.on_device.push(self);
            }
            Ok(Enqueued::Captured(graph)) => {
                self.queue.note_captured(graph, self.call.seq);
                self.captured.store(true, Ordering::Release);
                // The operation counts as complete, since the host does not see when the graph is launched.
                let done = Done {
                    graph_id: Some(graph),
                    ..Done::default()
                };
                let _ = self.outcome.set(Ok(done));
            }
            Err(IncompleteCall { error, left }) => {
                let _ = self.failed_launch.set(left);
                self.fail(error);
            }
        }
    }

    pub(crate) fn queue(&self) -> &Arc<CommQueue> {
        &self.queue
    }

    pub(crate) fn deadline(&self) -> Deadline {
        self.call.deadline
    }

    /// Returns `condition` of the operation; `true` if the operation was reclaimed.
    pub(crate) fn check_op(&self, condition: impl FnOnce(&Op<'static>) -> bool) -> bool {
        self.op().as_ref().is_none_or(condition)
    }

    /// Whether the operation was put on the device, or into a graph, completely.
    pub(crate) fn is_enqueued(&self) -> bool {
        self.is_placed() || self.is_captured()
    }

    /// Ends the operation with an error, if it has not ended.
    pub(crate) fn fail(&self, error: Error) {
        // Only the first outcome is kept.
        let _ = self.outcome.set(Err(error));
    }

    fn doubt(&self) -> MutexGuard<'_, Doubt> {
        self.doubt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides on the end that the device reports; `None` while the group's store is asked.
    fn judge(&self) -> Option<Result<()>> {
        match self.queue.shared.notes.get() {
            Some(notes) => self.doubt().judge(notes, self.call.deadline),
            None => Some(Ok(())),
        }
    }

    fn outcome(&self) -> Option<Progress> {
        Some(match self.outcome.get()? {
            Ok(done) => Progress::Completed(*done),
            Err(error) => Progress::Failed(error.clone()),
        })
    }

    /// Queries the device: `None` if the operation is not on the device or has not started.
    fn poll(&self) -> Result<Option<Progress>> {
        let mut placed = self.placed();
        let Placed::Between(start, end) = &*placed else {
            return Ok(None);
        };
        let _entered = self.queue.shared.device.enter()?;
        if !end.is_done()? {
            let has_started = start.is_done()?;
            if !has_started {
                self.doubt().note_idle();
            }
            return Ok(has_started.then_some(Progress::Started));
        }
        self.settle(&mut placed);
        Ok(Some(self.outcome().unwrap_or(Progress::Started)))
    }

    /// Whether the device has passed the end of the operation. The context must be current.
    pub(crate) fn has_passed_end(&self) -> bool {
        match &*self.placed() {
            Placed::No => false,
            Placed::Between(_, end) => matches!(end.is_done(), Ok(true)),
            Placed::Passed => true,
        }
    }

    /// Notes that the device has passed the end of the operation, and releases its events. The context must be current.
    pub(crate) fn note_passed_end(&self) {
        self.settle(&mut self.placed());
    }

    /// Decides on the outcome of an operation whose end the device has passed, and then releases its events; while the
    /// group's store is asked, there is no outcome yet. The context must be current.
    fn settle(&self, placed: &mut Placed) {
        let Placed::Between(start, end) = &*placed else {
            return;
        };
        let duration = match start {
            Start::Marked(start) => start.until(end),
            Start::Follows(..) => None,
        };
        let done = Done {
            duration,
            ..Done::default()
        };
        let aborted = &self.queue.shared.aborted;
        // An abort on another rank may also end the work of this rank, so the end may have to be checked.
        let believed = match aborted.get() {
            Some(_) => Ok(()),
            None => match self.judge() {
                None => return,
                Some(believed) => believed,
            },
        };
        // The abort is checked after the event: work that an abort stops also reaches its end. It is checked after the
        // store was asked, too: once this rank has aborted the group, the answer says nothing.
        let outcome = match aborted.get() {
            Some(error) => Err(error.clone()),
            None => believed.map(|()| done),
        };
        // Only the first outcome is kept.
        let _ = self.outcome.set(outcome);
        *placed = Placed::Passed;
    }

    /// Whether it is certain that the device has finished with the buffers.
    fn is_free(&self) -> bool {
        let placed = self.placed();
        let end = match (&*placed, self.failed_launch.get()) {
            (Placed::Passed, _) => return true,
            (Placed::Between(_, end), _) | (Placed::No, Some(RemainingWork::Until(end))) => end,
            (Placed::No, Some(RemainingWork::Nothing)) => return true,
            (Placed::No, Some(RemainingWork::Unknown)) => return false,
            // An operation that was never launched is not on the device; one in a graph is kept by the graph.
            (Placed::No, None) => {
                return !self.may_be_on_device.load(Ordering::Acquire) || self.is_captured();
            }
        };
        let entered = self.queue.shared.device.enter();
        entered.is_ok() && matches!(end.is_done(), Ok(true))
    }
}

impl Pending for Ticket {
    fn progress(&self) -> Progress {
        if let Some(outcome) = self.outcome() {
            return outcome;
        }
        if !self.is_placed() {
            self.queue.try_progress();
        } else if !self.was_polled.swap(true, Ordering::Relaxed) {
            // The first query comes right after the launch. The operation has rarely ended by then, and a query costs a
            // call of the driver.
            return Progress::Queued;
        }
        let progress = match self.poll() {
            Ok(progress) => progress.unwrap_or(Progress::Queued),
            Err(error) => {
                self.fail(error);
                Progress::Queued
            }
        };
        if !progress.has_ended()
            && let Some(error) = self.queue.async_error()
        {
            self.fail(error);
        }
        self.outcome().unwrap_or(progress)
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        /// Short operations end within this time; a sleep would take longer.
        const SPIN: Duration = Duration::from_micros(50);
        const LONGEST_PAUSE: Duration = Duration::from_micros(500);
        let deadline = deadline.started();
        let start_time = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            let progress = self.progress();
            if progress.has_ended() || deadline.has_passed() {
                return progress;
            }
            if start_time.elapsed() < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(pause.min(deadline.remaining()));
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    fn wait_stream(&self, stream: &dyn Stream) -> Result<()> {
        let Some(stream) = stream.as_any().downcast_ref::<CudaStream>() else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the operation runs on a CUDA stream, and {stream:?} is not one"),
            ));
        };
        let mut pause = Duration::from_micros(20);
        loop {
            match &*self.placed() {
                Placed::No => {}
                Placed::Between(_, end) => {
                    let _entered = self.queue.shared.device.enter()?;
                    return stream.wait_for(end);
                }
                Placed::Passed => return Ok(()),
            }
            if self.is_captured() {
                return self.queue.make_stream_wait(stream);
            }
            if let Some(Err(error)) = self.outcome.get() {
                return Err(error.clone());
            }
            // The operation is not launched yet: it waits for the ranks to join.
            if self.call.deadline.has_passed() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "the operation was not enqueued on the device before its deadline",
                ));
            }
            self.queue.try_progress();
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn reclaim(&self) -> Option<Op<'static>> {
        let mut op = lock_ended(&self.op, self.outcome.get()?)?;
        if !self.is_free() {
            return None;
        }
        op.take()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let is_free = self.is_free();
        let op = self.op.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(op) = op.take().filter(|_| !is_free) else {
            return;
        };
        let placed = self.placed.get_mut();
        let placed = std::mem::replace(placed.unwrap_or_else(PoisonError::into_inner), Placed::No);
        match (placed, self.failed_launch.take()) {
            (Placed::Between(_, end), _) | (_, Some(RemainingWork::Until(end))) => {
                self.queue.keep_until(op.op_type(), Box::new(op), end);
            }
            (Placed::No | Placed::Passed, _) => {
                self.queue.shared.leak(op.op_type(), Box::new(op));
            }
        }
    }
}

/// Locks an operation that has ended with `outcome`; `None` if a thread may still be inside the call that launches it.
fn lock_ended<'a, T>(op: &'a Mutex<T>, outcome: &Result<Done>) -> Option<MutexGuard<'a, T>> {
    if outcome.is_ok() {
        // The call that launched the operation has returned, so its thread unlocks the operation at once.
        return Some(op.lock().unwrap_or_else(PoisonError::into_inner));
    }
    match op.try_lock() {
        Ok(op) => Some(op),
        Err(TryLockError::Poisoned(op)) => Some(op.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_completed_operation_is_waited_for_and_a_failed_one_is_not() {
        let op = Mutex::new(());
        let launching = op.lock().unwrap();
        let failed = Err(Error::new(ErrorKind::Timeout, "late"));
        assert!(lock_ended(&op, &failed).is_none());
        std::thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            let op = &op;
            scope.spawn(move || {
                let locked = lock_ended(op, &Ok(Done::default()));
                sender.send(locked.is_some()).unwrap();
            });
            let early = receiver.recv_timeout(Duration::from_millis(200));
            assert!(early.is_err(), "locked while it was launched: {early:?}");
            drop(launching);
            assert!(receiver.recv().unwrap());
        });
    }
}

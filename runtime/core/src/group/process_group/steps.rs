//! Operations that consist of messages. Each *step* is a message, or several that are sent together; it follows from
//! the step before it. Steps are issued one after the other, without blocking a caller.
//!
//! The caller issues the first step, unless the operation has to wait in a queue. The thread
//! `rcomm/steps/<group>` issues all others, and waits for no peer. The thread that sees a step end (the
//! backend's, a caller's, the watchdog) may hold locks that issuing needs, so it only queues a job for
//! `rcomm/steps/<group>`.
//! Receive operations with the same peer and tag wait in a queue, so that none takes a message that belongs
//! to another.

use super::composite::Share;
use super::worker::Worker;
use crate::backend::{Done, Observer, Pending, Progress};
use crate::group::in_flight::InFlightOp;
use crate::op::Op;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// The continuation of an operation after one of its steps has ended.
pub(crate) enum Next<R> {
    /// Another step.
    Issue(Op<'static>),
    /// The step was the last one; this is the operation's result.
    Done(R),
}

/// The peer and the tag of a queue of receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QueueKey {
    pub(crate) peer: u32,
    pub(crate) tag: u32,
}

/// The thread and the queues of one group's operations that consist of steps.
pub(super) struct StepSequencer {
    thread: Worker,
    /// The operations of each queue, of which the first is under way.
    queues: Mutex<HashMap<QueueKey, VecDeque<Arc<dyn QueuedSteps>>>>,
}

impl StepSequencer {
    pub(super) fn new() -> Self {
        Self {
            thread: Worker::new("steps"),
            queues: Mutex::default(),
        }
    }

    /// Starts the thread, if it is not running yet.
    pub(super) fn start(&self, group: &str) -> Result<()> {
        self.thread.start(group)
    }

    /// Waits until all operations that consist of steps have ended, or until the deadline; returns whether they have
    /// ended.
    pub(super) fn drain(&self, deadline: Deadline) -> bool {
        self.thread.drain(deadline)
    }

    /// Appends an operation to a queue; returns whether it is the first there.
    fn enter(&self, key: QueueKey, steps: Arc<dyn QueuedSteps>) -> bool {
        let mut queues = lock(&self.queues);
        let queue = queues.entry(key).or_default();
        queue.push_back(steps);
        queue.len() == 1
    }

    /// Removes the first operation of a queue, which has ended; returns the one that is now first.
    fn leave(&self, key: QueueKey) -> Option<Arc<dyn QueuedSteps>> {
        let mut queues = lock(&self.queues);
        let queue = queues.get_mut(&key)?;
        queue.pop_front();
        let next = queue.front().cloned();
        if next.is_none() {
            queues.remove(&key);
        }
        next
    }
}

/// An operation in a queue.
trait QueuedSteps: Send + Sync {
    fn issue_first(&self);
}

/// Gets a step that has completed, with its buffers, and returns how the operation continues.
type Then<R> = Box<dyn FnMut(Op<'static>) -> Result<Next<R>> + Send>;

/// One operation that consists of steps, as its caller and the watchdog see it.
pub(super) struct Steps<R> {
    this: Weak<Self>,
    share: Share,
    queue: Option<QueueKey>,
    stage: Mutex<Stage>,
    ended: Condvar,
    then: Mutex<Then<R>>,
    result: Mutex<Option<R>>,
    /// `None` after the end, since the observer also holds this operation: a cycle would never be freed.
    observer: Mutex<Option<Arc<dyn Observer>>>,
}

/// How far an operation that consists of steps is.
enum Stage {
    /// Its first step is not issued yet; `None` while it is being issued.
    Waiting(Option<Op<'static>>),
    /// In the step with this handle; `None` between two steps.
    UnderWay(Option<Arc<dyn Pending>>),
    Ended(Progress),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<R: Send + 'static> Steps<R> {
    /// An operation that has not yet been started by [`enter`](Self::enter).
    pub(super) fn new(
        share: Share,
        in_flight: &Arc<InFlightOp>,
        queue: Option<QueueKey>,
        first: Op<'static>,
        then: impl FnMut(Op<'static>) -> Result<Next<R>> + Send + 'static,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            share,
            queue,
            stage: Mutex::new(Stage::Waiting(Some(first))),
            ended: Condvar::new(),
            then: Mutex::new(Box::new(then)),
            result: Mutex::new(None),
            observer: Mutex::new(Some(in_flight.clone())),
        })
    }

    /// Enters the operation in its queue, if it has one. Issues the first step unless another operation is
    /// before it in the queue.
    pub(super) fn enter(self: &Arc<Self>) {
        self.sequencer().thread.hold();
        let queue = self.queue;
        if queue.is_none_or(|queue| self.sequencer().enter(queue, self.clone())) {
            self.issue_first();
        }
    }

    /// The operation's result; `None` before its end, after an error, and after the first call that returned
    /// it.
    pub(super) fn take(&self) -> Option<R> {
        lock(&self.result).take()
    }

    fn sequencer(&self) -> &StepSequencer {
        self.share.group().sequencer()
    }

    /// Issues a step. An error ends the operation.
    fn issue(&self, op: Op<'static>) {
        let Some(this) = self.this.upgrade() else {
            return;
        };
        match self.share.issue(op, this) {
            Err(error) => self.end(Progress::Failed(error)),
            Ok(pending) => {
                *lock(&self.stage) = Stage::UnderWay(Some(pending));
                // The step may have ended before its handle was stored, and its notice had no effect: poll once.
                self.poll_step();
            }
        }
    }

    /// If the current step has ended, asks the thread to continue the operation. Returns the operation's progress.
    /// Never blocks.
    fn poll_step(&self) -> Progress {
        let step = match &*lock(&self.stage) {
            Stage::Waiting(_) => return Progress::Queued,
            Stage::UnderWay(step) => step.clone(),
            Stage::Ended(progress) => return progress.clone(),
        };
        match step.map(|step| step.progress()) {
            Some(Progress::Queued) => Progress::Queued,
            Some(Progress::Completed(_) | Progress::Failed(_)) => {
                self.queue_continuation();
                Progress::Started
            }
            Some(Progress::Started) | None => Progress::Started,
        }
    }

    /// Asks the thread `rcomm/steps/<group>` to continue the operation.
    fn queue_continuation(&self) {
        if let Some(this) = self.this.upgrade() {
            self.sequencer()
                .thread
                .push(Box::new(move || this.continue_operation()));
        }
    }

    /// If the current step has ended, issues the next one; after the last step or an error, ends the operation. Called
    /// on the thread `rcomm/steps/<group>` only.
    fn continue_operation(&self) {
        let step = match &*lock(&self.stage) {
            Stage::UnderWay(Some(step)) => step.clone(),
            _ => return,
        };
        let next = match step.progress() {
            Progress::Queued | Progress::Started => return,
            Progress::Completed(_) => match step.reclaim() {
                Some(op) => lock(&self.then)(op),
                None => Err(Error::new(
                    ErrorKind::Backend,
                    "the backend kept the buffers of a completed operation",
                )),
            },
            Progress::Failed(error) => Err(error),
        };
        *lock(&self.stage) = Stage::UnderWay(None);
        match next {
            Ok(Next::Issue(op)) => self.issue(op),
            Ok(Next::Done(result)) => {
                *lock(&self.result) = Some(result);
                self.end(Progress::Completed(Done::default()));
            }
            Err(error) => self.end(Progress::Failed(error)),
        }
    }

    /// Ends the operation, and lets the next one in its queue begin.
    fn end(&self, progress: Progress) {
        *lock(&self.stage) = Stage::Ended(progress);
        self.ended.notify_all();
        let observer = lock(&self.observer).take();
        if let Some(observer) = observer {
            observer.ended();
        }
        if let Some(next) = self.queue.and_then(|queue| self.sequencer().leave(queue)) {
            // `issue_first` is queued, not called: after an abort it fails at once and ends its operation, so
            // direct calls would nest as deep as the queue is long.
            self.sequencer()
                .thread
                .push(Box::new(move || next.issue_first()));
        }
        self.sequencer().thread.release();
    }
}

impl<R: Send + 'static> QueuedSteps for Steps<R> {
    fn issue_first(&self) {
        let first = match &mut *lock(&self.stage) {
            Stage::Waiting(first) => first.take(),
            _ => None,
        };
        if let Some(first) = first {
            self.issue(first);
        }
    }
}

impl<R: Send + 'static> Observer for Steps<R> {
    fn started(&self) {
        let observer = lock(&self.observer).clone();
        if let Some(observer) = observer {
            observer.started();
        }
    }

    fn ended(&self) {
        self.queue_continuation();
    }
}

impl<R: Send + 'static> Pending for Steps<R> {
    fn progress(&self) -> Progress {
        self.poll_step()
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        let deadline = deadline.started();
        let stage = lock(&self.stage);
        let waited = self
            .ended
            .wait_timeout_while(stage, deadline.remaining(), |stage| {
                !matches!(stage, Stage::Ended(_))
            });
        drop(waited);
        self.poll_step()
    }

    /// Always `None`: the operation owns no buffers, and its caller gets the result by `take`.
    fn reclaim(&self) -> Option<Op<'static>> {
        None
    }
}

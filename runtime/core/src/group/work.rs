//! [`Work`]: an operation under way, for its caller.

use super::in_flight::InFlightOp;
use super::spare::SpareOps;
use crate::backend::{Done, Stream};
use crate::op::Op;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::info::WorkStatus;
use crate::watch::watched::{WatchedGroup, WatchedOperation};
use rcomm_recorder::model::OpType;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

/// Makes the result of an operation that has ended without an error.
type Unpack<T> = Box<dyn FnOnce(&InFlightOp, Done) -> Result<T> + Send>;

/// An operation under way, which holds `T` (in most cases the buffers) and returns it.
///
/// If the handle is dropped, the operation continues: the watchdog polls it, and the buffers are freed once
/// the backend no longer uses them. The handle is also a `Future`, for any executor, with the result of
/// [`wait`](Self::wait).
///
/// # Thread safety
/// May be moved to any thread. Several threads may wait by [`join`](Self::join) or ask for the status at the same time.
#[must_use = "an operation that is never waited for fails unnoticed"]
pub struct Work<T> {
    in_flight: Arc<InFlightOp>,
    /// The mutex is never locked: it makes `Work` `Sync`, though the closure is only `Send`.
    unpack: Mutex<Option<Unpack<T>>>,
}

impl<T> Work<T> {
    pub(crate) fn new(
        in_flight: Arc<InFlightOp>,
        unpack: impl FnOnce(Op<'static>, Done) -> Result<T> + Send + 'static,
    ) -> Self {
        Self {
            in_flight,
            // If `unpack` captures nothing, the closure has no size, and its box allocates nothing.
            unpack: Mutex::new(Some(Box::new(|in_flight, done| {
                unpack(in_flight.reclaim()?, done)
            }))),
        }
    }

    /// An operation whose result is not in its buffers; `take` reads it after the end.
    pub(crate) fn with_result(
        in_flight: Arc<InFlightOp>,
        take: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> Self {
        Self {
            in_flight,
            unpack: Mutex::new(Some(Box::new(|_, _| take().ok_or_else(taken)))),
        }
    }

    /// The same operation, with its result converted by `then`.
    pub(crate) fn and_then<U>(
        mut self,
        then: impl FnOnce(T) -> Result<U> + Send + 'static,
    ) -> Work<U>
    where
        T: 'static,
    {
        let unpack = self.take_unpack();
        Work {
            in_flight: self.in_flight.clone(),
            unpack: Mutex::new(unpack.map(|unpack| -> Unpack<U> {
                Box::new(|in_flight, done| then(unpack(in_flight, done)?))
            })),
        }
    }

    /// Gives the handle up, on a thread that must not wait. If no other handle of the group is left, dropping this one
    /// would end the group on the caller's thread, which may take long. This ends it on a separate thread instead.
    pub fn release(self) {
        let Self { in_flight, unpack } = self;
        // The closure may hold the group.
        drop(unpack);
        in_flight.release();
    }

    fn take_unpack(&mut self) -> Option<Unpack<T>> {
        let unpack = self.unpack.get_mut();
        unpack.unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Waits for the end and returns the result, in most cases the buffers.
    ///
    /// # Blocking
    /// Until the operation ends. If it ends with an error such as a time-out, also until the watchdog has
    /// made the dump and asked the other ranks for their status.
    ///
    /// # Errors
    /// `Timeout` names group, operation, sequence number, and the ranks that had and had not arrived.
    /// `Aborted`, `PeerLost` and `Mismatch` likewise describe what happened. After an error the buffers are
    /// freed as soon as the backend no longer uses them; [`finish`](Self::finish) returns them instead.
    pub fn wait(mut self) -> Result<T> {
        let done = self.until_end()?;
        self.unpack(done)
    }

    /// Like [`wait`](Self::wait), and keeps the memory of the operation for a later one, unless it ended with an error.
    pub(crate) fn wait_keeping(mut self, spare: &mut SpareOps) -> Result<T> {
        let done = self.until_end()?;
        let result = self.unpack(done)?;
        spare.keep(self.in_flight);
        Ok(result)
    }

    /// Like [`wait`](Self::wait), but returns the operation and its buffers after an error too, if the backend no
    /// longer uses them.
    pub fn finish(self) -> (Result<()>, Option<Op<'static>>) {
        let result = self.until_end().map(|_| ());
        let pending = self.in_flight.pending.get();
        (result, pending.and_then(|pending| pending.reclaim()))
    }

    /// Waits for the end and leaves the buffers in the operation, which several threads may wait for.
    ///
    /// # Blocking
    /// Same as [`wait`](Self::wait).
    ///
    /// # Errors
    /// Same as [`wait`](Self::wait).
    pub fn join(&self) -> Result<Done> {
        self.until_end()
    }

    /// Waits for the end, but for at most `timeout`; returns the state. An operation that has not ended by then
    /// continues.
    pub fn wait_timeout(&self, timeout: Duration) -> WorkStatus {
        let _waiting = self.in_flight.begin_wait();
        self.in_flight.wait(Deadline::In(timeout))
    }

    /// Makes a stream of the device wait for the end of the operation: what is enqueued on the stream from
    /// now on runs after it. The host does not wait for the end. While the stream is captured, this joins the
    /// operation to the captured graph, and is the only way to wait for it.
    ///
    /// # Blocking
    /// Until the operation is enqueued on the device; not at all once its communicator exists.
    ///
    /// # Errors
    /// `Unsupported` if the operation runs on no stream, or on one of another kind; the operation's own error
    /// if it has already failed.
    pub fn wait_stream(&self, stream: &dyn Stream) -> Result<()> {
        let in_flight = &self.in_flight;
        let waited = match in_flight.pending.get() {
            Some(pending) => pending.wait_stream(stream),
            None => Err(gave_up()),
        };
        waited.map_err(|error| in_flight.group.explain(&in_flight.op_info, error))
    }

    /// The operation's current state. Does not wait.
    pub fn status(&self) -> WorkStatus {
        self.in_flight.poll_state()
    }

    /// Whether the operation has ended, with or without an error. Does not wait.
    pub fn is_completed(&self) -> bool {
        matches!(self.status(), WorkStatus::Completed | WorkStatus::Failed)
    }

    /// Whether the operation has ended without an error. Does not wait.
    pub fn is_success(&self) -> bool {
        self.status() == WorkStatus::Completed
    }

    /// The error, if the operation has failed. Does not wait.
    pub fn error(&self) -> Option<Error> {
        self.in_flight.poll_state();
        match self.in_flight.outcome()? {
            Ok(_) => None,
            Err(error) => Some(
                self.in_flight
                    .group
                    .explain(&self.in_flight.op_info, error.clone()),
            ),
        }
    }

    /// How long the operation ran, without the wait for its turn; `None` until its end was seen, or if neither the
    /// backend nor the group ([`set_timing`](crate::ProcessGroup::set_timing)) measures that.
    pub fn duration(&self) -> Option<Duration> {
        self.in_flight.outcome()?.as_ref().ok()?.duration
    }

    /// The time from the issue of the operation until its end was seen, including its waits for its turn and for other
    /// ranks; `None` before. The CPU backend sees the end at once.
    pub fn elapsed(&self) -> Option<Duration> {
        match self.in_flight.elapsed.load(Ordering::Relaxed) {
            0 => None,
            elapsed => Some(Duration::from_nanos(elapsed)),
        }
    }

    /// The type of the operation.
    pub fn op(&self) -> OpType {
        self.in_flight.op_info.op
    }

    /// The operation's sequence number in the group: `collective_seq_id`, or `p2p_seq_id` of a send or receive.
    pub fn seq(&self) -> u64 {
        self.in_flight.op_info.seq
    }

    /// The number of the operation's record in this rank's recorder; 0 for a block without operations, which has none.
    pub fn record_id(&self) -> u64 {
        self.in_flight.op_info.record_id
    }

    /// Calls `callback` when the operation ends, or now if it has ended. An error that aborts the group is
    /// announced only after the dump.
    ///
    /// The callback runs on the thread that sees the end first: the backend's, the watchdog's, or one that
    /// waits, asks for the status or registers it. The callback must be short, and must not wait for an operation of
    /// the group.
    pub fn on_completion(&self, callback: impl FnOnce(&Result<Done>) + Send + 'static) {
        self.in_flight.waiters().callbacks.push(Box::new(callback));
        // If the operation ended before the push, no other thread would call the callback.
        if self.in_flight.is_announced() {
            self.in_flight.notify_waiters();
        }
    }

    /// The moment at which waiting stops even if the backend ignores deadlines. By then the watchdog has had time to
    /// see that the deadline has passed, to make its dump, and to abort.
    fn latest(&self) -> Deadline {
        Deadline::At(self.in_flight.due() + self.in_flight.group.cleanup_time())
    }

    /// Waits for the end; after an error that makes the group unusable, also until the watchdog has aborted the group.
    fn until_end(&self) -> Result<Done> {
        let _waiting = self.in_flight.begin_wait();
        self.in_flight.wait(self.latest());
        self.wait_result()
    }

    /// The outcome for the caller; `Timeout` if the operation has not ended.
    ///
    /// # Blocking
    /// After an error that makes the group unusable: until the watchdog has aborted the group.
    fn wait_result(&self) -> Result<Done> {
        let in_flight = &self.in_flight;
        match in_flight.poll_state() {
            WorkStatus::Completed | WorkStatus::Failed => {}
            WorkStatus::Queued | WorkStatus::Started => {
                return Err(in_flight.group.explain(&in_flight.op_info, gave_up()));
            }
        }
        match in_flight.outcome() {
            Some(Ok(done)) => Ok(*done),
            Some(Err(error)) => Err(in_flight
                .group
                .settle_error(&in_flight.op_info, error.clone())),
            None => Err(gave_up()),
        }
    }

    fn take_result(&mut self) -> Result<T> {
        let done = self.wait_result()?;
        self.unpack(done)
    }

    fn unpack(&mut self, done: Done) -> Result<T> {
        let unpack = self.take_unpack().ok_or_else(taken)?;
        unpack(&self.in_flight, done)
    }
}

/// The error of a caller that no longer waits for the operation.
fn gave_up() -> Error {
    Error::new(
        ErrorKind::Timeout,
        "the backend did not end the operation after its deadline",
    )
}

/// The error of a second call for the same result.
fn taken() -> Error {
    Error::new(ErrorKind::Closed, "the result was taken before")
}

impl<T> Future for Work<T> {
    type Output = Result<T>;

    /// # Panics
    /// Never. A poll after the one that was ready returns the error `Closed`.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.in_flight.poll_state();
        if !self.in_flight.is_announced() {
            let mut waiters = self.in_flight.waiters();
            if !waiters.wakers.iter().any(|w| w.will_wake(context.waker())) {
                waiters.wakers.push(context.waker().clone());
            }
            drop(waiters);
            // The operation may have ended before the waker was added.
            if !self.in_flight.is_announced() {
                return Poll::Pending;
            }
        }
        Poll::Ready(self.take_result())
    }
}

impl<T> Unpin for Work<T> {}

impl<T> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("op", &self.op())
            .field("seq", &self.seq())
            .field("status", &self.status())
            .finish()
    }
}

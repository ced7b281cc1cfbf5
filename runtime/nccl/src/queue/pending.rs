//! An operation that was given to a queue, as its group sees it: [`Pending`] from a pair of events.

use crate::cuda::event::Mark;
use crate::cuda::stream::CudaStream;
use crate::queue::{CommQueue, Enqueued};
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::backend::{Done, Pending, Progress, Stream};
use rcomm_core::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// One operation of a queue.
pub(crate) struct Ticket {
    queue: Arc<CommQueue>,
    /// By which the group's record knows it.
    seq: u64,
    deadline: Deadline,
    /// Locked while it is put on the device; `None` after it was reclaimed.
    op: Mutex<Option<Op<'static>>>,
    /// Start and end, once it is on the device.
    marks: OnceLock<(Start, Arc<Mark>)>,
    /// It is part of a graph, and happens when that is launched.
    captured: OnceLock<()>,
    /// The end of what may be on the device of an operation that could not be launched whole.
    debris: OnceLock<Debris>,
    outcome: OnceLock<Result<Done>>,
    /// Something may have been put on the device; `marks` or `debris` holds what, once that is known.
    touched: OnceLock<()>,
    /// Its progress was asked for since it is on the device.
    was_asked: AtomicBool,
}

/// Where an operation starts.
pub(crate) enum Start {
    /// At this mark.
    Marked(Arc<Mark>),
    /// When the operation before it has ended, and what it waits for on other streams is done.
    Follows(Option<Arc<Mark>>, Vec<Mark>),
}

impl Start {
    /// Whether the device has reached this point. The context is current.
    fn is_done(&self) -> Result<bool> {
        match self {
            Self::Marked(mark) => mark.is_done(),
            Self::Follows(former, joints) => {
                let former = former.iter().map(|mark| &**mark);
                for mark in former.chain(joints) {
                    if !mark.is_done()? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }
}

/// What a failed launch has left on the device.
enum Debris {
    /// Nothing after this mark.
    Until(Arc<Mark>),
    /// Perhaps something, and it is unknown when the device is done with it.
    Unknown,
}

impl Ticket {
    pub(crate) fn new(
        queue: Arc<CommQueue>,
        op: Op<'static>,
        seq: u64,
        deadline: Deadline,
    ) -> Arc<Self> {
        Arc::new(Self {
            queue,
            seq,
            deadline,
            op: Mutex::new(Some(op)),
            marks: OnceLock::new(),
            captured: OnceLock::new(),
            debris: OnceLock::new(),
            outcome: OnceLock::new(),
            touched: OnceLock::new(),
            was_asked: AtomicBool::new(false),
        })
    }

    fn op(&self) -> MutexGuard<'_, Option<Op<'static>>> {
        self.op.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts it on the device, unless it was given up before.
    pub(crate) fn launch(
        &self,
        enqueue: impl FnOnce(&Op<'static>, Deadline) -> Result<Enqueued, (Error, Option<Arc<Mark>>)>,
    ) {
        let op = self.op();
        let Some(op) = op.as_ref().filter(|_| self.outcome.get().is_none()) else {
            return;
        };
        let _ = self.touched.set(());
        match enqueue(op, self.deadline) {
            // All are set once: a ticket is launched once.
            Ok(Enqueued::Between(start, end)) => {
                let _ = self.marks.set((start, end));
            }
            Ok(Enqueued::Captured(graph)) => {
                self.queue.note_captured(graph, self.seq);
                let _ = self.captured.set(());
                // As far as the host is concerned it is over: nothing here watches a graph.
                let done = Done {
                    graph_id: Some(graph),
                    ..Done::default()
                };
                let _ = self.outcome.set(Ok(done));
            }
            Err((error, mark)) => {
                let debris = mark.map_or(Debris::Unknown, Debris::Until);
                let _ = self.debris.set(debris);
                self.fail(error);
            }
        }
    }

    pub(crate) fn queue(&self) -> &Arc<CommQueue> {
        &self.queue
    }

    pub(crate) fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Asks something of the operation; `true` if it was reclaimed.
    pub(crate) fn look_at(&self, ask: impl FnOnce(&Op<'static>) -> bool) -> bool {
        self.op().as_ref().is_none_or(ask)
    }

    /// Whether it was put on the device, or into a graph, whole.
    pub(crate) fn is_on_its_way(&self) -> bool {
        self.marks.get().is_some() || self.captured.get().is_some()
    }

    /// Ends it with an error, if it has not ended.
    pub(crate) fn fail(&self, error: Error) {
        // The first outcome is the one that counts.
        let _ = self.outcome.set(Err(error));
    }

    fn outcome(&self) -> Option<Progress> {
        Some(match self.outcome.get()? {
            Ok(done) => Progress::Completed(*done),
            Err(error) => Progress::Failed(error.clone()),
        })
    }

    /// Looks at the device alone.
    fn poll(&self) -> Result<Option<Progress>> {
        let Some((start, end)) = self.marks.get() else {
            return Ok(None);
        };
        let _entered = self.queue.shared.device.enter()?;
        if !end.is_done()? {
            let has_started = start.is_done()?;
            return Ok(has_started.then_some(Progress::Started));
        }
        let duration = match start {
            Start::Marked(start) => start.until(end),
            Start::Follows(..) => None,
        };
        let done = Done {
            duration,
            ..Done::default()
        };
        // Asked after the mark: what an abort stops comes to its end as well.
        let outcome = match self.queue.shared.aborted.get() {
            Some(error) => Err(error.clone()),
            None => Ok(done),
        };
        // The first outcome is the one that counts.
        let _ = self.outcome.set(outcome);
        Ok(self.outcome())
    }

    /// Whether the device is provably through with the buffers.
    fn is_free(&self) -> bool {
        let end = match (self.marks.get(), self.debris.get()) {
            (Some((_, end)), _) | (None, Some(Debris::Until(end))) => end,
            (None, Some(Debris::Unknown)) => return false,
            // It never came to the device, and never will: it has an outcome. Or it is the graph's.
            (None, None) => return self.touched.get().is_none() || self.captured.get().is_some(),
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
        if self.marks.get().is_none() {
            self.queue.pump();
        } else if !self.was_asked.swap(true, Ordering::Relaxed) {
            // Asked as it is issued: the device has only just been given it, and a look costs as much as a launch.
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
            && let Some(error) = self.queue.trouble()
        {
            self.fail(error);
        }
        self.outcome().unwrap_or(progress)
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        /// Short operations end within this time; to sleep would take longer.
        const SPIN: Duration = Duration::from_micros(50);
        const LONGEST_PAUSE: Duration = Duration::from_micros(500);
        let deadline = deadline.started();
        let begun = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            let progress = self.progress();
            if progress.has_ended() || deadline.has_passed() {
                return progress;
            }
            if begun.elapsed() < SPIN {
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
                format!("the operation runs on a CUDA stream, and {stream:?} is none"),
            ));
        };
        let mut pause = Duration::from_micros(20);
        loop {
            if let Some((_, end)) = self.marks.get() {
                let _entered = self.queue.shared.device.enter()?;
                return stream.wait_for(end);
            }
            if self.captured.get().is_some() {
                return self.queue.lead(stream);
            }
            if let Some(Err(error)) = self.outcome.get() {
                return Err(error.clone());
            }
            // The communicator is not there yet.
            if self.deadline.has_passed() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "it did not come to the device before its deadline",
                ));
            }
            self.queue.pump();
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn reclaim(&self) -> Option<Op<'static>> {
        self.outcome.get()?;
        // Held while a thread is in the library's call that launches it.
        let mut op = match self.op.try_lock() {
            Ok(op) => op,
            Err(TryLockError::Poisoned(op)) => op.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
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
        match (self.marks.take(), self.debris.take()) {
            (Some((_, end)), _) | (None, Some(Debris::Until(end))) => {
                self.queue.keep(op.op_type(), Box::new(op), end);
            }
            (None, _) => self.queue.shared.leak(op.op_type(), Box::new(op)),
        }
    }
}

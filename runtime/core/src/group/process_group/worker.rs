//! The thread `rcomm/worker/<group>`: runs a group's queued jobs, one after the other.
//!
//! These jobs are operations that no backend can issue, since they consist of several collectives, or use a window
//! or the store. [`steps`](super::steps) uses a second such thread. A thread starts with the first job, and is
//! joined when the group is dropped, unless it drops the group itself.

use crate::backend::{Done, Observer, Pending, Progress};
use crate::op::Op;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::monitor::{Monitor, Shared};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

#[cfg(test)]
#[path = "worker_model.rs"]
mod model;

type Job = Box<dyn FnOnce() + Send>;

/// A job queue of one group, and the thread that runs its jobs.
pub(super) struct Worker {
    /// The middle part of the thread's name, `rcomm/<kind>/<group>`.
    kind: &'static str,
    job_queue: Arc<JobQueue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The queue, shared with the thread. `S` is a [`Monitor`], or in tests its model.
#[derive(Default)]
struct JobQueue<S = Monitor<QueueState>>(S);

/// What [`JobQueue`] guards.
#[derive(Default)]
struct QueueState {
    jobs: VecDeque<Job>,
    /// How many jobs are queued, running, or [held](Worker::hold).
    unfinished: usize,
    closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker {
    /// An empty queue. Its thread will be named `rcomm/<kind>/<group>`.
    pub(super) fn new(kind: &'static str) -> Self {
        Self {
            kind,
            job_queue: Arc::default(),
            thread: Mutex::default(),
        }
    }

    /// Starts the thread, if it is not running yet.
    pub(super) fn start(&self, group: &str) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_some() {
            return Ok(());
        }
        let job_queue = self.job_queue.clone();
        let started = std::thread::Builder::new()
            .name(format!("rcomm/{}/{group}", self.kind))
            .spawn(move || job_queue.work());
        *thread = Some(started.map_err(|error| {
            let what = format!("cannot start the thread `rcomm/{}/{group}`", self.kind);
            Error::io(what, error)
        })?);
        Ok(())
    }

    /// Queues a job.
    pub(super) fn push(&self, job: Job) {
        self.job_queue.push(job);
    }

    /// Makes [`drain`](Self::drain) wait for work outside of the queue, until [`release`](Self::release).
    pub(super) fn hold(&self) {
        self.job_queue.hold();
    }

    /// Ends one [`hold`](Self::hold).
    pub(super) fn release(&self) {
        self.job_queue.end_one();
    }

    /// Waits until all jobs and holds have ended, or until the deadline; returns whether they have ended.
    pub(super) fn drain(&self, deadline: Deadline) -> bool {
        self.job_queue.drain(Some(deadline.started().remaining()))
    }
}

impl Drop for Worker {
    /// Joins the thread, unless the thread itself drops the group: then it held the last reference to the group, and
    /// ends soon.
    fn drop(&mut self) {
        self.job_queue.close();
        let thread = lock(&self.thread).take();
        let own_id = std::thread::current().id();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != own_id) {
            // A panic of the thread was already reported when it happened.
            let _ = thread.join();
        }
    }
}

impl<S: Shared<QueueState>> JobQueue<S> {
    fn push(&self, job: Job) {
        self.0.with(|queue| {
            queue.unfinished += 1;
            queue.jobs.push_back(job);
        });
        self.0.wake_all();
    }

    fn hold(&self) {
        self.0.with(|queue| queue.unfinished += 1);
    }

    /// Ends one job, or one hold.
    fn end_one(&self) {
        self.0.with(|queue| queue.unfinished -= 1);
        self.0.wake_all();
    }

    /// Waits until all jobs and holds have ended, for at most `limit` if there is one; returns whether they have
    /// ended.
    fn drain(&self, limit: Option<Duration>) -> bool {
        let is_done = |queue: &QueueState| queue.unfinished == 0;
        self.0.when(limit, is_done, |queue| is_done(queue))
    }

    /// Ends the thread once it has run the jobs that are queued.
    fn close(&self) {
        self.0.with(|queue| queue.closed = true);
        self.0.wake_all();
    }

    /// Runs jobs until the queue is closed and empty.
    fn work(&self) {
        let is_ready = |queue: &QueueState| !queue.jobs.is_empty() || queue.closed;
        let next = || self.0.when(None, is_ready, |queue| queue.jobs.pop_front());
        while let Some(job) = next() {
            // A panic, which was reported when it happened, ends its job alone: later ones are other operations.
            let _ = catch_unwind(AssertUnwindSafe(job));
            self.end_one();
        }
    }
}

/// One queued operation, as its caller and the watchdog see it.
pub(super) struct PendingJob {
    progress: Mutex<Progress>,
    ended: Condvar,
    /// Taken when the job begins, since the observer also holds this operation: a cycle would never be freed.
    observer: Mutex<Option<Arc<dyn Observer>>>,
}

impl PendingJob {
    pub(super) fn new(observer: Arc<dyn Observer>) -> Arc<Self> {
        Arc::new(Self {
            progress: Mutex::new(Progress::Queued),
            ended: Condvar::new(),
            observer: Mutex::new(Some(observer)),
        })
    }

    /// Runs `body`, and notifies the observer of its start and end. A panic in `body`, which may run code of the
    /// program that reads an object, ends the operation with an error.
    pub(super) fn run(&self, body: impl FnOnce() -> Result<()>) {
        *lock(&self.progress) = Progress::Started;
        let observer = lock(&self.observer).take();
        if let Some(observer) = &observer {
            observer.started();
        }
        let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
            let message = "this rank's part of the operation has panicked: the message is on the standard error";
            Err(Error::new(ErrorKind::Backend, message))
        });
        *lock(&self.progress) = match result {
            Ok(()) => Progress::Completed(Done::default()),
            Err(error) => Progress::Failed(error),
        };
        self.ended.notify_all();
        if let Some(observer) = observer {
            observer.ended();
        }
    }
}

impl Pending for PendingJob {
    fn progress(&self) -> Progress {
        lock(&self.progress).clone()
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        let deadline = deadline.started();
        let progress = lock(&self.progress);
        let waited = self
            .ended
            .wait_timeout_while(progress, deadline.remaining(), |progress| {
                !progress.has_ended()
            });
        let (progress, _) = waited.unwrap_or_else(PoisonError::into_inner);
        progress.clone()
    }

    /// Always `None`: the operation owns no buffers, and its caller gets the result from its `Work`.
    fn reclaim(&self) -> Option<Op<'static>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_job_that_panics_ends_alone() {
        let worker = Worker::new("worker");
        let (ran, has_run) = channel();
        worker.push(Box::new(|| panic!("on purpose")));
        worker.push(Box::new(move || ran.send(()).unwrap()));
        worker.start("test").unwrap();
        let limit = Duration::from_secs(60);
        has_run.recv_timeout(limit).unwrap();
        assert!(worker.drain(Deadline::In(limit)));
    }
}

//! Threads that complete PyTorch's futures and run the callbacks of `rcomm.Work`.
//!
//! The program's callbacks may wait for other operations. So they run neither on the threads that carry operations out,
//! nor one after the other: if all threads are busy, one more starts.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long an idle thread is kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct JobQueue {
    jobs: VecDeque<Job>,
    /// The number of threads that wait for a job.
    idle: usize,
}

/// A set of threads that grows on demand.
#[derive(Default)]
pub(crate) struct Callbacks {
    state: Mutex<JobQueue>,
    wake: Condvar,
}

impl Callbacks {
    fn lock(&self) -> MutexGuard<'_, JobQueue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `job` soon, on another thread; on the calling one, at once, if no thread can be started.
    pub(crate) fn run(self: &Arc<Self>, job: Job) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        let is_covered = state.idle >= state.jobs.len();
        drop(state);
        if is_covered {
            self.wake.notify_one();
            return;
        }
        let thread = std::thread::Builder::new().name("rcomm/futures".to_owned());
        let this = self.clone();
        if thread.spawn(move || this.serve()).is_err() {
            while let Some(job) = self.next() {
                job();
            }
        }
    }

    fn next(&self) -> Option<Job> {
        self.lock().jobs.pop_front()
    }

    /// Runs jobs until none has come for [`IDLE_TIMEOUT`].
    fn serve(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let (woken, waited) = self
                .wake
                .wait_timeout(state, IDLE_TIMEOUT)
                .unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.jobs.is_empty() {
                return;
            }
        }
    }
}

//! Operations under way, until they are seen to end.
//!
//! Each keeps its `Work`, which the hooks of later operations poll, and a thread 20 times a second. A wait for it that
//! has returned shows its end as well. No call to Python is made under the lock: such a call may give the interpreter
//! to a thread that wants the lock.

use crate::hooks::{Ending, RecordedGroup, UnderWay};
use pyo3::intern;
use pyo3::prelude::*;
use rcomm_recorder_capi::ForkGuarded;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most operations that are watched; if there are more, the oldest is no longer watched.
const MOST: usize = 8_192;

/// An operation under way.
pub(crate) struct Watched {
    pub(crate) group: Arc<RecordedGroup>,
    pub(crate) operation: UnderWay,
    pub(crate) work: Py<PyAny>,
    /// Whether its tensors are in the host's memory, so that it has ended when a wait for it returns.
    pub(crate) on_host: bool,
    /// Whether its Work may have a future, which holds errors.
    pub(crate) future: bool,
}

impl Watched {
    /// Whether a later operation proved that no member is missing in this one, whose end was not seen.
    fn has_passed(&self) -> bool {
        self.operation.deferred && !self.group.is_deferred(self.operation.ticket)
    }
}

/// All operations under way.
#[derive(Default)]
pub(crate) struct Pending {
    watched: Mutex<VecDeque<Watched>>,
    count: AtomicUsize,
}

impl Pending {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    pub(crate) fn push(&self, watched: Watched) {
        let dropped = {
            let mut all = self.lock();
            all.push_back(watched);
            let dropped = (all.len() > MOST).then(|| all.pop_front()).flatten();
            self.count.store(all.len(), Ordering::Relaxed);
            dropped
        };
        if let Some(dropped) = dropped {
            dropped.group.ended(dropped.operation, Ending::Unwatched);
        }
    }

    /// Polls the oldest `most` operations that are not deferred, and records those that ended. Deferred operations that
    /// a later one has passed are no longer watched.
    pub(crate) fn sweep(&self, py: Python<'_>, ring: &ForkGuarded, most: usize) {
        if self.len() == 0 || ring.get().is_none() {
            return;
        }
        let mut passed = VecDeque::new();
        let works: Vec<(Py<PyAny>, bool)> = {
            let mut all = self.lock();
            if all.iter().any(Watched::has_passed) {
                let (gone, left) = all.drain(..).partition(Watched::has_passed);
                (passed, *all) = (gone, left);
                self.count.store(all.len(), Ordering::Relaxed);
            }
            let oldest = all.iter().filter(|one| !one.operation.deferred).take(most);
            oldest
                .map(|one| (one.work.clone_ref(py), one.future))
                .collect()
        };
        // Dropped outside of the lock: a Work may be the last owner of tensors.
        drop(passed);
        for (work, future) in works {
            let work = work.bind(py);
            let ended = work
                .call_method0(intern!(py, "is_completed"))
                .and_then(|ended| ended.is_truthy());
            match ended {
                Ok(false) => {}
                Ok(true) if future && future_failed(work) => self.end(work, Ending::Failed),
                Ok(true) => self.end(work, Ending::Completed),
                // The state of such a Work is unknown from now on.
                Err(_) => self.end(work, Ending::Unwatched),
            }
        }
    }

    /// Notes that a wait for this Work returned, or raised.
    pub(crate) fn waited(&self, py: Python<'_>, work: &Bound<'_, PyAny>, has_returned: bool) {
        let on_host = {
            let all = self.lock();
            let mut newest_first = all.iter().rev();
            newest_first
                .find(|one| one.work.is(work))
                .map(|one| one.on_host)
        };
        let Some(on_host) = on_host else {
            return;
        };
        let ended = |work: &Bound<'_, PyAny>| {
            let asked = work.call_method0(intern!(py, "is_completed"));
            asked.and_then(|ended| ended.is_truthy()).unwrap_or(false)
        };
        match has_returned {
            // On a device, a wait returns as soon as the stream is set to wait.
            true if on_host || ended(work) => self.end(work, Ending::Completed),
            true => {}
            false => self.end(work, Ending::Failed),
        }
    }

    fn end(&self, work: &Bound<'_, PyAny>, how: Ending) {
        let taken = {
            let mut all = self.lock();
            let at = all.iter().position(|one| one.work.is(work));
            let taken = at.and_then(|at| all.remove(at));
            self.count.store(all.len(), Ordering::Relaxed);
            taken
        };
        // Dropped here, outside of the lock: the Work may be the last owner of tensors.
        if let Some(taken) = taken {
            taken.group.ended(taken.operation, how);
        }
    }
}

/// Whether the future of a Work that has ended holds an error. The call neither waits nor synchronizes a stream.
fn future_failed(work: &Bound<'_, PyAny>) -> bool {
    let py = work.py();
    let Ok(future) = work.call_method0(intern!(py, "get_future")) else {
        // Some Works have no future: those of gloo's sends, receives and reduce_scatter.
        return false;
    };
    let done = future
        .call_method0(intern!(py, "done"))
        .and_then(|done| done.is_truthy());
    matches!(done, Ok(true)) && future.call_method0(intern!(py, "value")).is_err()
}

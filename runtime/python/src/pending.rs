//! Operations under way, until they are seen to end.
//!
//! Each operation is kept with its `Work`. The hooks of later operations poll it, and so does a thread, 20 times a
//! second. A wait for the operation shows the end as well, when it returns or raises. No call to Python is made under
//! the lock: such a call may give the interpreter to a thread that wants the lock.

use crate::hooks::{Ending, RecordedGroup, UnderWay};
use pyo3::intern;
use pyo3::prelude::*;
use rcomm_recorder_capi::ForkGuarded;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most operations that are watched; if there are more, the oldest is no longer watched.
const MAX_WATCHED: usize = 8_192;

/// An operation under way.
pub(crate) struct Watched {
    pub(crate) group: Arc<RecordedGroup>,
    pub(crate) operation: UnderWay,
    pub(crate) work: Py<PyAny>,
    /// Whether the tensors are in the host's memory, so that the operation has ended when a wait for it returns.
    pub(crate) on_host: bool,
    /// Whether the Work may have a future, which holds errors.
    pub(crate) has_future: bool,
}

impl Watched {
    /// Whether this operation is deferred and need not be watched any more: a later operation proved that all members
    /// have issued it, or too many deferred ones came after it.
    fn has_passed(&self) -> bool {
        self.operation.is_deferred && !self.group.is_deferred(self.operation.ticket)
    }
}

/// All operations under way.
#[derive(Default)]
pub(crate) struct Pending {
    watched: Mutex<VecDeque<Watched>>,
    /// The number of operations in `watched`, which is read without the lock.
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
            let mut pending = self.lock();
            pending.push_back(watched);
            let is_full = pending.len() > MAX_WATCHED;
            let dropped = is_full.then(|| pending.pop_front()).flatten();
            self.count.store(pending.len(), Ordering::Relaxed);
            dropped
        };
        if let Some(dropped) = dropped {
            dropped.group.ended(dropped.operation, Ending::Unwatched);
        }
    }

    /// Polls the oldest `most` operations that are not deferred, and records those that ended. Removes deferred ones
    /// that need not be watched any more.
    pub(crate) fn sweep(&self, py: Python<'_>, ring: &ForkGuarded, most: usize) {
        if self.len() == 0 || ring.get().is_none() {
            return;
        }
        let mut passed = VecDeque::new();
        let works: Vec<(Py<PyAny>, bool)> = {
            let mut pending = self.lock();
            if pending.iter().any(Watched::has_passed) {
                let (removed, kept) = pending.drain(..).partition(Watched::has_passed);
                (passed, *pending) = (removed, kept);
                self.count.store(pending.len(), Ordering::Relaxed);
            }
            let polled = pending
                .iter()
                .filter(|watched| !watched.operation.is_deferred);
            polled
                .take(most)
                .map(|watched| (watched.work.clone_ref(py), watched.has_future))
                .collect()
        };
        // Dropped outside of the lock: a Work may be the last owner of tensors.
        drop(passed);
        for (work, has_future) in works {
            let work = work.bind(py);
            let ended = work
                .call_method0(intern!(py, "is_completed"))
                .and_then(|ended| ended.is_truthy());
            match ended {
                Ok(false) => {}
                Ok(true) if has_future && future_failed(work) => self.end(work, Ending::Failed),
                Ok(true) => self.end(work, Ending::Completed),
                // The state of such a Work is unknown from now on.
                Err(_) => self.end(work, Ending::Unwatched),
            }
        }
    }

    /// Called when a wait for this Work has returned or raised: records the operation's end, unless the wait returned
    /// and the operation, on a device, still runs.
    pub(crate) fn waited(&self, py: Python<'_>, work: &Bound<'_, PyAny>, has_returned: bool) {
        let on_host = {
            let pending = self.lock();
            let mut newest_first = pending.iter().rev();
            newest_first
                .find(|watched| watched.work.is(work))
                .map(|watched| watched.on_host)
        };
        let Some(on_host) = on_host else {
            return;
        };
        let has_ended = |work: &Bound<'_, PyAny>| {
            let is_completed = work.call_method0(intern!(py, "is_completed"));
            let is_completed = is_completed.and_then(|completed| completed.is_truthy());
            is_completed.unwrap_or(false)
        };
        match has_returned {
            // On a device, a wait returns as soon as the stream is set to wait for the operation.
            true if on_host || has_ended(work) => self.end(work, Ending::Completed),
            true => {}
            false => self.end(work, Ending::Failed),
        }
    }

    fn end(&self, work: &Bound<'_, PyAny>, ending: Ending) {
        let taken = {
            let mut pending = self.lock();
            let index = pending.iter().position(|watched| watched.work.is(work));
            let taken = index.and_then(|index| pending.remove(index));
            self.count.store(pending.len(), Ordering::Relaxed);
            taken
        };
        // Dropped here, outside of the lock: the Work may be the last owner of tensors.
        if let Some(taken) = taken {
            taken.group.ended(taken.operation, ending);
        }
    }
}

/// Whether the future of a Work that has ended holds an error. Neither waits nor synchronizes a stream.
fn future_failed(work: &Bound<'_, PyAny>) -> bool {
    let py = work.py();
    let Ok(future) = work.call_method0(intern!(py, "get_future")) else {
        // Some Works have no future: those of gloo's sends, receives and reduce_scatter.
        return false;
    };
    let is_done = future
        .call_method0(intern!(py, "done"))
        .and_then(|done| done.is_truthy());
    matches!(is_done, Ok(true)) && future.call_method0(intern!(py, "value")).is_err()
}

//! An operation that waits for a signal from a peer.

use crate::backend::{BackendWindow, Done, Pending, Progress};
use crate::op::Op;
use crate::op::deadline::Deadline;
use crate::op::error::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Consumes one signal from a peer as soon as a caller or the watchdog polls or waits for it.
pub(super) struct SignalWait {
    pub(super) window: Arc<dyn BackendWindow>,
    pub(super) peer: u32,
    /// A waiting thread holds this lock while it waits, so that no other thread consumes a second signal for
    /// this operation.
    pub(super) progress: Mutex<Progress>,
}

impl Pending for SignalWait {
    fn progress(&self) -> Progress {
        let mut progress: MutexGuard<'_, Progress> = match self.progress.try_lock() {
            Ok(progress) => progress,
            Err(TryLockError::WouldBlock) => return Progress::Started,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        if !progress.has_ended() {
            match self.window.take_signal(self.peer) {
                Ok(true) => *progress = Progress::Completed(Done::default()),
                Ok(false) => {}
                Err(error) => *progress = Progress::Failed(error),
            }
        }
        progress.clone()
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if !progress.has_ended() {
            match self.window.wait_signal(self.peer, deadline) {
                Ok(()) => *progress = Progress::Completed(Done::default()),
                // Only this wait has timed out; the watchdog enforces the time-out of the operation.
                Err(error) if error.kind() == ErrorKind::Timeout => {}
                Err(error) => *progress = Progress::Failed(error),
            }
        }
        progress.clone()
    }

    /// Always `None`: the wait has no buffers.
    fn reclaim(&self) -> Option<Op<'static>> {
        None
    }
}

//! The count of a window's asynchronous calls that have not ended: closing the window waits for them.

use crate::op::deadline::Deadline;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// How many asynchronous calls of one window have not ended.
#[derive(Default)]
pub(super) struct OutstandingCalls {
    open: Mutex<usize>,
    ended: Condvar,
}

/// A call that counts as not ended until this value is dropped.
pub(super) struct OutstandingCall(Arc<OutstandingCalls>);

impl OutstandingCalls {
    pub(super) fn begin(self: &Arc<Self>) -> OutstandingCall {
        *self.lock() += 1;
        OutstandingCall(self.clone())
    }

    /// Waits until no call is open, or until the deadline; returns whether none is.
    pub(super) fn wait(&self, deadline: Deadline) -> bool {
        let deadline = deadline.started();
        let open = self.lock();
        let waited = self
            .ended
            .wait_timeout_while(open, deadline.remaining(), |open| *open > 0);
        let (open, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *open == 0
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OutstandingCall {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.ended.notify_all();
    }
}

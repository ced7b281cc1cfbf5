//! [`Backend::run`] for backends that only issue: over copies of the caller's memory.

use super::{Backend, Call, Done, Observer, Pending, Progress};
use crate::op::Op;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Issues a copy of `op`, waits for its end, and copies the results back.
pub(super) fn run<B: Backend + ?Sized>(
    backend: &B,
    op: &mut Op<'_>,
    call: Call,
    observer: &dyn Observer,
) -> Result<Done> {
    let deadline = call.deadline.started();
    let copy = op.to_owned()?;
    let waiter = Arc::new(StartWaiter::default());
    let pending = backend.issue(copy, Call { deadline, ..call }, waiter.clone())?;
    if waiter.wait_for_start(&*pending, deadline) {
        observer.started();
    }
    match pending.wait(deadline) {
        Progress::Completed(done) => {
            let filled = pending.reclaim().ok_or_else(|| {
                Error::new(
                    ErrorKind::Backend,
                    format!(
                        "backend {} kept the buffers of a completed operation",
                        backend.name()
                    ),
                )
            })?;
            op.copy_outputs_from(&filled)?;
            Ok(done)
        }
        Progress::Failed(error) => Err(error),
        Progress::Queued | Progress::Started => Err(Error::new(
            ErrorKind::Timeout,
            "the operation did not end before its deadline",
        )),
    }
}

/// Wakes a caller that waits for an operation to leave the queue.
#[derive(Default)]
struct StartWaiter {
    has_changed: Mutex<bool>,
    wake: Condvar,
}

impl StartWaiter {
    /// Longest sleep between two polls of a backend that reports nothing.
    const POLL_INTERVAL: Duration = Duration::from_millis(10);

    fn notify(&self) {
        *self
            .has_changed
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.wake.notify_all();
    }

    /// Waits until the operation leaves the queue; `false` if the deadline passed before.
    fn wait_for_start(&self, pending: &dyn Pending, deadline: Deadline) -> bool {
        let mut has_changed = self
            .has_changed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        while !*has_changed && matches!(pending.progress(), Progress::Queued) {
            let rest = deadline.remaining();
            if rest.is_zero() {
                return false;
            }
            let (guard, _) = self
                .wake
                .wait_timeout(has_changed, rest.min(Self::POLL_INTERVAL))
                .unwrap_or_else(PoisonError::into_inner);
            has_changed = guard;
        }
        true
    }
}

impl Observer for StartWaiter {
    fn started(&self) {
        self.notify();
    }

    fn ended(&self) {
        self.notify();
    }
}

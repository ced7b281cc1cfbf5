//! The latest operation of a queue, by which an abort of another group finds out whether this queue hangs.

use super::pending::OpCall;
use super::{CommQueue, LatestOp};
use crate::context::Shared;
use crate::cuda::event::Mark;
use rcomm_core::Op;
use rcomm_recorder::model::text;
use std::fmt;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

impl LatestOp {
    /// Makes the value for an operation that has just been put on the device.
    pub(super) fn new(op: &Op<'_>, call: &OpCall, end: Mark) -> Self {
        Self {
            end,
            op: op.op_type(),
            seq: call.seq,
            issued: call.issued,
        }
    }

    /// The event at the end of the operation.
    pub(super) fn end(&self) -> &Mark {
        &self.end
    }

    /// Whether the device may still be busy with the operation. The context must be current.
    pub(crate) fn is_pending(&self) -> bool {
        // If the event cannot be queried, the context is unusable, and nothing waits for the operation.
        matches!(self.end.is_done(), Ok(false))
    }

    /// How long ago the operation was issued.
    pub(crate) fn age(&self) -> Duration {
        self.issued.elapsed()
    }
}

impl fmt::Display for LatestOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let age = text::duration(self.age());
        write!(f, "{} #{}, issued {age} ago", self.op, self.seq)
    }
}

impl CommQueue {
    /// Whether kernels of these queues may be on the device. If not, an end of the communicators stops no kernel.
    pub(crate) fn may_run(shared: &Shared, queues: &[Arc<Self>]) -> bool {
        let Ok(_entered) = shared.device.enter() else {
            return true;
        };
        queues.iter().any(|queue| {
            // A launch in progress has the lock. The driver does not show whether a graph runs.
            queue.try_lock().is_none()
                || queue.live_graphs() > 0
                || queue.latest_op().is_some_and(|latest| latest.is_pending())
        })
    }

    pub(super) fn latest(&self) -> MutexGuard<'_, Option<LatestOp>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The latest operation on the stream, which may have ended.
    pub(crate) fn latest_op(&self) -> Option<LatestOp> {
        self.latest().clone()
    }
}

//! The other groups of this process that use the device of a group that was aborted.
//!
//! To free a communicator, NCCL waits for all kernels of the device (`commReclaim`, init.cc), also for those of other
//! communicators. If one of these hangs, the end of the aborted group waits for the end of the other one, whose own
//! deadline may be far away. c10d therefore aborts all communicators of a process in one group of calls
//! (`_abort_process_group`). Here a group that works is left alone: another group is aborted only if the library has
//! not returned after some seconds, and an operation of this other group was pending when the abort began, is still
//! pending, and has taken longer than the time-out of the aborted group.

use super::NcclBackend;
use crate::context::Shared;
use crate::queue::{CommQueue, LatestOp};
use rcomm_core::backend::{AbortReason, Backend};
use rcomm_core::{Error, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// The backends of this process, of all worlds, since those of one device wait for one another.
static BACKENDS: Mutex<Vec<Weak<NcclBackend>>> = Mutex::new(Vec::new());

fn backends() -> MutexGuard<'static, Vec<Weak<NcclBackend>>> {
    BACKENDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a backend to those that aborts consider, and removes those that have ended.
pub(super) fn enter(backend: &Arc<NcclBackend>) {
    let mut backends = backends();
    backends.retain(|it| it.strong_count() > 0);
    backends.push(Arc::downgrade(backend));
}

/// A group that was aborted, whose end other groups may delay.
pub(super) struct AbortedGroup {
    this: Weak<NcclBackend>,
    shared: Arc<Shared>,
    name: String,
    reason: AbortReason,
}

/// The operations of other groups that were pending on the device when an abort began.
pub(super) struct OtherGroups {
    aborted: AbortedGroup,
    pending: Vec<(Weak<NcclBackend>, LatestOp)>,
}

impl AbortedGroup {
    pub(super) fn new(backend: &NcclBackend, reason: &AbortReason) -> Self {
        let info = &backend.group.info;
        let name = match info.desc.as_str() {
            "" | "undefined" => &info.name,
            desc => desc,
        };
        Self {
            this: backend.this.clone(),
            shared: backend.shared.clone(),
            name: name.to_owned(),
            reason: reason.clone(),
        }
    }

    /// Finds the operations of other groups that are pending on the device now.
    pub(super) fn others(self) -> OtherGroups {
        let others: Vec<Weak<NcclBackend>> = backends()
            .iter()
            .filter(|other| !other.ptr_eq(&self.this))
            .cloned()
            .collect();
        let mut pending = Vec::new();
        if let Ok(_entered) = self.shared.device.enter() {
            for other in others {
                let Some(backend) = other.upgrade().filter(|it| self.can_abort(it)) else {
                    continue;
                };
                let queues = backend.queues();
                let latest = queues.iter().filter_map(|queue| queue.latest_op());
                let latest = latest.filter(LatestOp::is_pending);
                pending.extend(latest.map(|latest| (other.clone(), latest)));
            }
        }
        OtherGroups {
            aborted: self,
            pending,
        }
    }

    /// Whether the kernels of a group may delay the end of this one, and an abort would stop them.
    fn can_abort(&self, other: &NcclBackend) -> bool {
        let shared = &other.shared;
        shared.device.place() == self.shared.device.place()
            && shared.aborted.get().is_none()
            && shared.options.error_handling.cleans_up()
    }

    /// How long an operation of another group may take before it counts as one that hangs.
    fn patience(&self) -> Duration {
        patience(self.reason.timeout)
    }

    fn reason_for(&self, latest: &LatestOp) -> AbortReason {
        let cause = &self.reason.error;
        let failed = match (cause.op(), cause.seq()) {
            (Some(op), Some(seq)) => format!("after its {op} #{seq} had failed"),
            _ => "after an error".to_owned(),
        };
        let message = format!(
            "the group was aborted on this rank: its {latest}, has not ended, and NCCL waits for all kernels of the \
             device before it frees the communicators of group {}, which was aborted {failed}",
            self.name
        );
        AbortReason {
            error: Error::new(ErrorKind::Aborted, message),
            timeout: self.reason.timeout,
        }
    }
}

impl OtherGroups {
    /// Aborts the groups whose operations hang. Returns whether operations are left that may turn out to hang.
    pub(super) fn stop_those_that_hang(&mut self) -> bool {
        let aborted = &self.aborted;
        let Ok(_entered) = aborted.shared.device.enter() else {
            return false;
        };
        self.pending.retain(|(backend, latest)| {
            let Some(backend) = backend.upgrade().filter(|it| aborted.can_abort(it)) else {
                return false;
            };
            if !latest.is_pending() {
                return false;
            }
            if latest.age() < aborted.patience() {
                return true;
            }
            let reason = aborted.reason_for(latest);
            tracing::error!(error = %reason.error, "another group is aborted");
            backend.abort(&reason);
            false
        });
        !self.pending.is_empty()
    }
}

/// As long as the aborted group allows its own operations, but at least as long as the library may take to free
/// communicators. Without a time-out no operation counts as one that hangs.
fn patience(timeout: Option<Duration>) -> Duration {
    timeout.map_or(Duration::MAX, |timeout| timeout.max(CommQueue::CLEAN_UP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_groups_have_the_time_that_the_aborted_group_has_and_at_least_five_seconds() {
        let seconds = Duration::from_secs;
        assert_eq!(patience(Some(seconds(60))), seconds(60));
        assert_eq!(patience(Some(seconds(1))), seconds(5));
        assert_eq!(patience(None), Duration::MAX);
    }
}

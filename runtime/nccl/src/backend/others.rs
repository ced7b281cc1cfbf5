//! The other groups of this process that use the device of a group that was aborted.
//!
//! To free a communicator, NCCL waits for all kernels of the device (`commReclaim`, init.cc), also for those of other
//! communicators. If a kernel of another group hangs, the end of the aborted group waits for the end of the other
//! group, whose deadline may be far away. c10d therefore aborts all communicators of a process in one group of calls
//! (`_abort_process_group`). Here, a group that works is left alone. Another group is aborted only if the library has
//! not returned after some seconds, and an operation of that group was pending when the abort began, is still pending,
//! and has taken longer than the time-out of the aborted group.
//!
//! Operations in CUDA graphs cannot be observed: the driver does not tell the host that a graph is launched or how far
//! it has run, and an event that is recorded in a capture cannot be queried. If none of the seen operations is in the
//! way, the groups with graphs on the device are named in the log and in dumps. They are left alone, since nothing
//! shows that one of their graphs hangs.

use super::NcclBackend;
use crate::context::Shared;
use crate::queue::{CommQueue, LatestOp};
use rcomm_core::backend::{AbortReason, Backend};
use rcomm_core::{Error, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// The backends of this process, of all worlds: the backends of one device wait for one another.
static BACKENDS: Mutex<Vec<Weak<NcclBackend>>> = Mutex::new(Vec::new());

fn backends() -> MutexGuard<'static, Vec<Weak<NcclBackend>>> {
    BACKENDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a backend to those that aborts consider, and removes those that have ended.
pub(super) fn enter(backend: &Arc<NcclBackend>) {
    let mut backends = backends();
    backends.retain(|backend| backend.strong_count() > 0);
    backends.push(Arc::downgrade(backend));
}

/// A group that was aborted, whose end other groups may delay.
pub(super) struct AbortedGroup {
    /// Its backend.
    this: Weak<NcclBackend>,
    shared: Arc<Shared>,
    name: String,
    reason: AbortReason,
}

/// The name of a group in messages: the description if there is one.
fn name_of(backend: &NcclBackend) -> &str {
    let info = &backend.group.info;
    match info.desc.as_str() {
        "" | "undefined" => &info.name,
        desc => desc,
    }
}

/// The name of a group for a reader of another group. If the two groups are of different worlds, whose groups may have
/// the same names, the name includes the group's world.
fn full_name(name: &str, group: &Shared, reader: &Shared) -> String {
    match group.world == reader.world {
        true => name.to_owned(),
        false => format!("{name} of {}", group.world),
    }
}

/// The operations of other groups that were pending on the device when an abort began.
pub(super) struct OtherGroups {
    aborted: AbortedGroup,
    pending: Vec<(Weak<NcclBackend>, LatestOp)>,
    /// Whether groups with graphs are to be named: once, and not if another group was aborted.
    names_graphs: bool,
}

impl AbortedGroup {
    pub(super) fn new(backend: &NcclBackend, reason: &AbortReason) -> Self {
        Self {
            this: backend.this.clone(),
            shared: backend.shared.clone(),
            name: name_of(backend).to_owned(),
            reason: reason.clone(),
        }
    }

    /// Finds the operations of other groups that are pending on the device now.
    pub(super) fn others(self) -> OtherGroups {
        let mut pending = Vec::new();
        if let Ok(_entered) = self.shared.device.enter() {
            for backend in self.abortable() {
                let queues = backend.queues();
                let latest = queues.iter().filter_map(|queue| queue.latest_op());
                let latest = latest.filter(LatestOp::is_pending);
                pending.extend(latest.map(|latest| (backend.this.clone(), latest)));
            }
        }
        OtherGroups {
            aborted: self,
            pending,
            names_graphs: true,
        }
    }

    /// The other groups that [`can_abort`](Self::can_abort) accepts.
    fn abortable(&self) -> Vec<Arc<NcclBackend>> {
        // The list is unlocked before a reference is dropped: if it was the last one, the backend ends, and locks the
        // list. The aborted group's own backend is left out: its end would wait for this thread.
        let mut others: Vec<Arc<NcclBackend>> = backends()
            .iter()
            .filter(|other| !other.ptr_eq(&self.this))
            .filter_map(Weak::upgrade)
            .collect();
        others.retain(|other| self.can_abort(other));
        others
    }

    /// Whether the kernels of another group may delay the end of this one, and an abort of that group would stop them.
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

    /// Names the groups with graphs on the device, one of which may delay this group's end.
    fn name_graphs(&self) {
        let mut suspects = Vec::new();
        for other in self.abortable() {
            let graphs = CommQueue::graph_numbers(&other.queues());
            if !graphs.is_empty() {
                let name = full_name(name_of(&other), &other.shared, &self.shared);
                suspects.push(format!("{name} ({graphs})"));
            }
        }
        if suspects.is_empty() {
            return;
        }
        let suspects = suspects.join(", ");
        tracing::error!(
            group = self.name,
            graphs = suspects,
            "NCCL has not freed the communicators of an aborted group, and none of the operations that other groups have \
             issued is in the way: a CUDA graph that is launched and hangs may be. Abort its group"
        );
        // The first names are kept: this runs once more when revoked communicators are freed later.
        let _ = self.shared.graphs_in_the_way.set(suspects);
    }

    /// Returns the reason with which another group is aborted because of its operation `latest`.
    fn reason_for(&self, other: &Shared, latest: &LatestOp) -> AbortReason {
        let cause = &self.reason.error;
        let failed = match (cause.op(), cause.seq()) {
            (Some(op), Some(seq)) => format!("after its {op} #{seq} had failed"),
            _ => "after an error".to_owned(),
        };
        let message = format!(
            "the group was aborted on this rank: its {latest}, has not ended, and NCCL waits for all kernels of the \
             device before it frees the communicators of group {}, which was aborted {failed}",
            full_name(&self.name, &self.shared, other)
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
        let Self {
            aborted,
            pending,
            names_graphs,
        } = self;
        let Ok(_entered) = aborted.shared.device.enter() else {
            return false;
        };
        pending.retain(|(backend, latest)| {
            let backend = backend.upgrade();
            let Some(backend) = backend.filter(|backend| aborted.can_abort(backend)) else {
                return false;
            };
            if !latest.is_pending() {
                return false;
            }
            if latest.age() < aborted.patience() {
                return true;
            }
            let reason = aborted.reason_for(&backend.shared, latest);
            tracing::error!(error = %reason.error, "another group is aborted");
            backend.abort(&reason);
            *names_graphs = false;
            false
        });
        if pending.is_empty() && std::mem::take(names_graphs) {
            aborted.name_graphs();
        }
        !pending.is_empty()
    }
}

/// How long an operation of another group may take: as long as the aborted group allows its own operations, but at
/// least as long as the library may take to free communicators. Without a time-out, no operation counts as one that
/// hangs.
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

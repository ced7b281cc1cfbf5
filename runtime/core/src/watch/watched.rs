//! The traits through which the watchdog, the failure broadcast and the world use groups and operations.

use crate::backend::{CommState, Done};
use crate::op::deadline::Deadline;
use crate::op::error::{Error, Result};
use crate::op::info::{OpInfo, WorkStatus};
use crate::watch::running::Running;
use rcomm_recorder::model::{ProcessGroupInfo, ProcessGroupStatus, Rank};
use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A group. No function but [`shut_down`](Self::shut_down) takes a lock that a stuck call could hold.
// Invariant 5 of docs/ARCHITECTURE.md
pub(crate) trait WatchedGroup: Send + Sync {
    fn info(&self) -> &ProcessGroupInfo;

    /// The number that distinguishes the group on shared connections; the same on all members.
    fn wire_id(&self) -> u64;

    /// The group's name in errors and logs.
    fn label(&self) -> &str;

    /// This process's rank in the world.
    fn global_rank(&self) -> Rank;

    /// The group's progress on this rank.
    fn status(&self) -> ProcessGroupStatus;

    /// The state of the communicators of the group's backends, for a dump. Takes at most a second for each backend.
    fn comm_state(&self) -> Vec<CommState>;

    /// Records the number of the group's communicator, once a backend knows it.
    fn note_communicator(&self) {}

    /// The group's blocking calls in flight.
    fn running(&self) -> &Running;

    /// How long after the deadline the group's backends may take to end an overdue operation; zero if they leave
    /// the end to the watchdog.
    fn overdue_time(&self) -> Duration;

    /// Whether the group has failed or was aborted, so that the error for its waiters is decided.
    fn has_failed(&self) -> bool;

    /// The error with which further operations are refused; `None` while the group is open.
    fn refusal(&self) -> Option<&Error>;

    /// Adds group, operation and sequence number to an error that lacks them.
    fn explain(&self, op_info: &OpInfo, error: Error) -> Error;

    /// Records that the group ends with this error in this operation. Only the first call has an effect.
    fn record_end(&self, op_info: Option<&OpInfo>, error: &Error);

    /// Ends pending operations and refuses later ones with this error.
    fn close(&self, op_info: Option<&OpInfo>, error: Error);

    /// Tells the group's backends that another rank has reported a failure of the group.
    fn failed_elsewhere(&self) {}

    /// Refuses new operations, waits for pending ones until the deadline, and closes the backends.
    ///
    /// # Errors
    /// `Timeout` if an operation is still pending at the deadline; otherwise the errors of the backends.
    fn shut_down(&self, deadline: Deadline) -> Result<()>;

    /// Whether one of the group's backends requires that the process ends after a failure.
    fn ends_process(&self) -> bool;

    /// Gives this reference up. If it is the last one, the group ends on a separate thread: the end of its backends and
    /// of its threads may take long, and the caller's thread must not wait for it.
    fn release(self: Arc<Self>);
}

/// References to groups that exist, for a loop over them. They are given up together at the end, as
/// [`WatchedGroup::release`] gives up each. One of them may be the last of its group by then, and a thread that answers
/// requests, runs callbacks or watches others must not wait for the end of a group.
pub(crate) struct Held<G: WatchedGroup + ?Sized>(Vec<Arc<G>>);

impl<G: WatchedGroup + ?Sized> Held<G> {
    /// Holds the groups that still exist.
    pub(crate) fn of(groups: &[Weak<G>]) -> Self {
        Self(groups.iter().filter_map(Weak::upgrade).collect())
    }
}

impl<G: WatchedGroup + ?Sized> Deref for Held<G> {
    type Target = [Arc<G>];

    fn deref(&self) -> &[Arc<G>] {
        &self.0
    }
}

impl<G: WatchedGroup + ?Sized> Drop for Held<G> {
    fn drop(&mut self) {
        self.0.drain(..).for_each(WatchedGroup::release);
    }
}

/// An issued operation.
pub(crate) trait WatchedOperation: Send + Sync {
    fn op_info(&self) -> &OpInfo;

    fn group(&self) -> &dyn WatchedGroup;

    /// Polls the operation and stores its outcome if it has ended. Does not wait.
    fn poll_state(&self) -> WorkStatus;

    /// The result of the operation; `None` until it has ended.
    fn outcome(&self) -> Option<&Result<Done>>;

    /// The moment at which the operation's time-out has passed.
    fn due(&self) -> Instant;

    /// Whether the call to the backend that starts the operation has returned.
    fn is_issued(&self) -> bool;

    /// Whether the backend rejected the operation. The issuing thread then handles its end.
    fn was_rejected(&self) -> bool;

    /// Records the failure and wakes the waiters. Called once the dump is made and the group's error is
    /// decided.
    fn announce_failure(&self);

    /// Records that the watchdog no longer watches the operation.
    fn retire(&self);

    /// Gives this reference up, and that to the group as [`WatchedGroup::release`] does.
    fn release(self: Arc<Self>);
}

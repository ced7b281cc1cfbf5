//! The traits through which the watchdog, the failure broadcast and the world use groups and operations.

use crate::backend::{CommState, Done};
use crate::op::deadline::Deadline;
use crate::op::error::{Error, Result};
use crate::op::info::{OpInfo, WorkStatus};
use crate::watch::watchdog::Running;
use rcomm_recorder::model::{ProcessGroupInfo, ProcessGroupStatus, Rank};
use std::time::{Duration, Instant};

/// A group. No function takes a lock that a stuck call could hold.
// invariant 5
pub(crate) trait WatchedGroup: Send + Sync {
    fn info(&self) -> &ProcessGroupInfo;

    /// Distinguishes the group on shared connections, equal on all members.
    fn wire_id(&self) -> u64;

    /// The group's name in errors and logs.
    fn label(&self) -> &str;

    /// This process's rank in the world.
    fn global_rank(&self) -> Rank;

    fn status(&self) -> ProcessGroupStatus;

    /// The state of its backends' communicators.
    fn comm_state(&self) -> Vec<CommState>;

    /// Its blocking calls in flight.
    fn running(&self) -> &Running;

    /// The longest time after the deadline in which its backends end an overdue operation themselves.
    fn overdue_time(&self) -> Duration;

    /// Whether the group has failed or was aborted, and the error for its waiters is decided.
    fn has_failed(&self) -> bool;

    /// The error that refuses further operations, if the group takes no more.
    fn refusal(&self) -> Option<&Error>;

    /// Adds group, operation and sequence number to an error that lacks them.
    fn explain(&self, op_info: &OpInfo, error: Error) -> Error;

    /// Records, once, that the group ends with this error in this operation.
    fn record_end(&self, op_info: Option<&OpInfo>, error: &Error);

    /// Ends everything pending and refuses everything later, with this error.
    fn close(&self, op_info: Option<&OpInfo>, error: Error);

    /// Refuses new operations, waits for pending ones until the deadline, and closes the backends.
    fn shut_down(&self, deadline: Deadline) -> Result<()>;

    /// Whether the process is to end after a failure.
    fn ends_process(&self) -> bool;
}

/// An issued operation.
pub(crate) trait WatchedOperation: Send + Sync {
    fn op_info(&self) -> &OpInfo;

    fn group(&self) -> &dyn WatchedGroup;

    /// Polls the operation and settles it if it has ended. Never waits.
    fn poll_state(&self) -> WorkStatus;

    /// How it ended, if it has.
    fn outcome(&self) -> Option<&Result<Done>>;

    /// When it is overdue.
    fn due(&self) -> Instant;

    /// Whether the backend's call that starts it has returned.
    fn is_issued(&self) -> bool;

    /// Whether the issuing thread handles its end, since the backend rejected it.
    fn was_rejected(&self) -> bool;

    /// Records the failure and wakes the waiters, once the dump is made and the verdict is known.
    fn announce_failure(&self);

    /// Records that the watchdog no longer watches the operation.
    fn retire(&self);
}

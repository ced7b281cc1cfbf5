//! [`OperationHook`]: a program's own view of the operations of a group.

use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::OpType;
use std::sync::Arc;
use std::time::Duration;

/// One operation, as an [`OperationHook`] sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HookedOperation<'a> {
    /// The name of the group.
    pub group: &'a str,
    /// The type of the operation.
    pub op: OpType,
    /// Its sequence number: `collective_seq_id`, or `p2p_seq_id` of a send or receive.
    pub seq: u64,
    /// Whether it is a send or a receive, or a block of these.
    pub is_p2p: bool,
    /// The number of its record in this rank's recorder.
    pub record_id: u64,
    /// Its time-out.
    pub timeout: Duration,
}

/// Called for each operation of a group.
///
/// `begun` is called on the thread that issues the operation, while the group takes no other operation. `ended` is
/// called on the thread that sees the end: the caller's, the backend's or the watchdog's. So both must be short, must
/// not wait, and must not call the group.
pub trait OperationHook: Send + Sync {
    /// An operation has its number and its record. It has not been sent.
    fn begun(&self, operation: &HookedOperation<'_>) {
        let _ = operation;
    }

    /// An operation has ended, with this error or without one. A caller that waits for it may continue meanwhile.
    fn ended(&self, operation: &HookedOperation<'_>, error: Option<&Error>) {
        let _ = (operation, error);
    }
}

impl ProcessGroup {
    /// Sets the hook that is called for the operations of this group. An operation that is under way now may have no
    /// `begun`, but its end calls `ended`. The hook stays until the group is dropped, which may be after the world has
    /// ended: while an operation or a [`Work`](crate::Work) of the group refers to it.
    ///
    /// # Errors
    /// `InvalidArgument` if the group has one.
    pub fn set_hook(&self, hook: Arc<dyn OperationHook>) -> Result<()> {
        self.group.hook.set(hook).map_err(|_| {
            let message = "the group has an operation hook, which cannot be replaced";
            Error::new(ErrorKind::InvalidArgument, message).in_group(self.desc())
        })
    }
}

//! The identity and the state of an operation of a group.

use rcomm_recorder::model::OpType;
use std::time::Duration;

/// The state of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkStatus {
    /// The operation was issued and has not started.
    Queued,
    /// The operation runs.
    Started,
    /// The operation ended without an error.
    Completed,
    /// The operation ended with an error.
    Failed,
}

/// The identity of an operation in its group, and how its order, its deadline and its duration are watched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpInfo {
    pub(crate) record_id: u64,
    pub(crate) op: OpType,
    pub(crate) seq: u64,
    pub(crate) is_p2p: bool,
    /// The index of the lane in which it takes a turn: the collectives of a lane happen in order of issue. `None` for
    /// messages, and for operations that are not a single [`Op`](crate::op::Op) of a backend.
    pub(crate) turn_lane: Option<usize>,
    /// Whether the operation checks its deadline itself: the watchdog never treats it as overdue.
    pub(crate) ends_itself: bool,
    /// Whether the group measures how long it runs: it runs on the host, and timing was on when it was issued.
    pub(crate) is_timed: bool,
    /// How long it may take, from the moment at which it was issued.
    pub(crate) timeout: Duration,
}

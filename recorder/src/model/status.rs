//! Progress of a rank and of each of its groups.

use serde::{Deserialize, Serialize};

/// The progress of one group on one rank.
///
/// -1 = none yet. What is counted depends on the recorder: PyTorch's NCCL recorder and rcomm's count collective
/// sequence numbers; PyTorch's hook and its gloo recorder count operation ids, and leave `last_started` at -1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessGroupStatus {
    /// The newest collective that was issued.
    pub last_enqueued: i64,
    /// The newest collective that was seen to start.
    pub last_started: i64,
    /// The newest collective that was seen to complete.
    pub last_completed: i64,
    /// The group's current time-out in ms; 0 if not recorded. The record of an operation has the time-out that applied
    /// to it.
    #[serde(default)]
    pub timeout_ms: u64,
}

impl Default for ProcessGroupStatus {
    fn default() -> Self {
        Self {
            last_enqueued: -1,
            last_started: -1,
            last_completed: -1,
            timeout_ms: 0,
        }
    }
}

/// The status that a rank reports about itself, independent of operations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStatus {
    /// The phase that the program set last (`world.phase("load data")`); empty if it set none.
    pub phase: String,
    /// When the phase began, wall clock, ns since the epoch; 0 if the program set none.
    pub phase_since_ns: i64,
    /// The step that the program set last; -1 if it set none.
    pub step: i64,
    /// When the watchdog last made a round, wall clock, ns since the epoch; 0 if never.
    pub heartbeat_ns: i64,
    /// Number of records that the recorder could not keep, and of those that could not be read from its ring.
    pub dropped: u64,
    /// How the process ended by itself; `None` if it lives, was killed, or did not note it.
    // Summaries hold it in a part of its own.
    #[serde(skip)]
    pub exit: Option<ProcessExit>,
}

impl RankStatus {
    /// The beginning of the phase that a recorder notes for an exception that has left the program. No name that a
    /// program gives to a phase is recorded with this beginning. The reason of an abort for such an exception begins
    /// with it, too.
    pub const RAISED: &str = "raised ";
    /// The phase that the recorder for PyTorch notes before the program destroys all its groups, and at the end of a
    /// program that no exception ends: the rank issues nothing more.
    pub const LEFT: &str = "left its process groups";
}

/// The end of a process that ended by itself, as the process noted it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessExit {
    /// When the process noted its exit code, wall clock, ns since the epoch.
    pub time_ns: i64,
    /// The exit code, 0 to 255.
    pub code: u8,
}

/// How long the threads that issue and run a rank's operations were ready to run and had no processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessorWait {
    /// Since when the waits are counted, wall clock, ns since the epoch: one to two minutes before the watchdog's last
    /// round. In a younger process, since the watchdog's first round after a thread issued or ran operations.
    pub since_ns: i64,
    /// The waits of all these threads together, ns.
    pub waited_ns: u64,
}

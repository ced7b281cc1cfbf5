//! Faults outside the operations: processes, links, the store and the watchdog.

pub(super) mod exits;
mod hidden_sizes;
pub(super) mod rank_failed;
pub(super) mod rank_frozen;
pub(super) mod recorded_failure;
pub(super) mod store_lost;
mod timed_out;
pub(super) mod unreachable;
pub(super) mod watchdog_stalled;

//! Faults that the waits show: ranks that did not arrive, messages without a peer, cycles.

pub(super) mod all_arrived_stuck;
mod at_work;
pub(super) mod cross_group_deadlock;
pub(super) mod left_the_ring;
pub(super) mod missing_dump;
pub(super) mod not_joined;
mod not_posted;
pub(super) mod p2p_unmatched;
mod reopened;
mod tags;
mod undated;

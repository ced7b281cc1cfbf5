//! Groups of ranks: [`ProcessGroup`](process_group::ProcessGroup), its operations, and the handles of issued
//! operations ([`Work`](work::Work)).

pub(crate) mod agreement;
pub(crate) mod coalescing;
pub(crate) mod collectives;
pub(crate) mod hook;
pub(crate) mod in_flight;
pub(crate) mod maker;
pub(crate) mod monitored_barrier;
pub(crate) mod objects;
mod p2p;
pub(crate) mod process_group;
pub(crate) mod spare;
pub(crate) mod sparse;
mod split;
pub(crate) mod window;
pub(crate) mod work;

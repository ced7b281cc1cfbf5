//! Supervision of a world: the watchdog, the propagation of failures, dumps, the monitor of the watchdog's
//! heartbeat, and the endpoint.

pub(crate) mod dump_writer;
#[cfg(feature = "endpoint")]
pub(crate) mod endpoint;
pub(crate) mod failure_broadcast;
pub(crate) mod heartbeat;
pub(crate) mod pipe;
pub(crate) mod running;
pub(crate) mod status_exchange;
pub(crate) mod wait_counters;
pub(crate) mod watchdog;
pub(crate) mod watched;

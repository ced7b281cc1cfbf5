//! A host program that simulates NCCL: its loader, the calling thread and the proxy thread, in versions 3 to 6 of the
//! profiler interface, with real processes. It needs no GPU and no NCCL, and loads the plug-in as NCCL does.
//!
//! The order of events and the lives of communicators are those of NCCL 2.26 to 2.30, according to the sources of
//! 2.26.2, 2.27.7, 2.28.3 and 2.30.7:
//!
//! - An event is reported only if the mask of events asks for it, or for an event below it.
//! - Up to 2.27 an operation is reported only if its plan has a handle. Since 2.28 its call is its parent.
//! - Calls come before plans, and the order of plans is not that of the calls. The event of a call may be a parent also
//!   after it was stopped.
//! - The proxy thread starts and stops the events of channels. A message of a rank to itself has none.
//! - A context ends when all events of its communicator have ended, or when the communicator was aborted.

mod deepening;
mod devices;
mod faults;
mod job;
mod joins;
mod library;
mod life;
mod loader;
mod neighbors;
mod network;
mod old_rings;
mod orders;
mod races;
mod random;
mod recorded;
mod second_name;
mod torch_jobs;
mod unreported;
mod views;

/// Not a test by itself: the other tests start it as a rank.
#[test]
#[ignore = "the other tests run it as a separate process"]
fn a_rank_of_a_job() {
    job::rank();
}

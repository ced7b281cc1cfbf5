//! A host program that simulates NCCL: its loader, the calling thread and the proxy thread, in versions 3 to 6 of the
//! profiler interface, with real processes. It needs no GPU and no NCCL; it loads the plug-in as NCCL does.
//!
//! Orders and life cycles are those of NCCL 2.26 to 2.30, as its sources of 2.26.2, 2.27.7, 2.28.3 and 2.30.7 have
//! them: an event is reported only if the mask of events asks for it, or for one below it; operations up to 2.27 only
//! if their plan has a handle, since 2.28 with their call as the parent; calls come before plans, which are built in
//! another order than the calls; handles of calls serve as parents after they were stopped; the proxy thread starts and
//! stops the events of channels, of which messages to the own rank have none; a context ends when all events of its
//! communicator have ended, or when it was aborted.

mod deepening;
mod devices;
mod faults;
mod job;
mod joins;
mod library;
mod life;
mod neighbors;
mod network;
mod orders;
mod races;
mod recorded;
mod views;

/// Not a test by itself: the other tests start it as a rank.
#[test]
#[ignore = "the other tests run it as a separate process"]
fn a_rank_of_a_job() {
    job::rank();
}

//! A host program that simulates NCCL: its loader, the calling thread and the proxy thread, in versions 3 to 6 of the
//! profiler interface, with real processes. It needs no GPU and no NCCL; it loads the plug-in as NCCL does.
//!
//! Orders and life cycles are those of NCCL 2.26 to 2.30: calls come before plans, which are built in another order
//! than the calls; handles of calls serve as parents after they were stopped; the proxy thread starts and stops the
//! events of channels; a context ends when all events of its communicator have ended, or when it was aborted.

mod faults;
mod job;
mod joins;
mod library;
mod life;
mod neighbors;
mod orders;
mod views;

/// Not a test by itself: the other tests start it as a rank.
#[test]
#[ignore = "the other tests run it as a separate process"]
fn a_rank_of_a_job() {
    job::rank();
}

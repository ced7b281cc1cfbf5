//! A host program that plays NCCL: its loader, the thread that calls it and its proxy thread, in the versions 3 to 6 of
//! its profiler interface, with real processes. No GPU, no NCCL, and no rcomm in the program.
//!
//! Orders and life times are those of NCCL 2.26 to 2.30: calls come before plans, which are put together in another
//! order than calls were made; handles of calls serve as parents after they were stopped; the proxy thread starts and
//! stops what belongs to channels; contexts end when everything of a communicator has, or was aborted.

mod faults;
mod job;
mod library;
mod life;

/// Not a test: what the others start as ranks.
#[test]
#[ignore = "the other tests run it as a process of theirs"]
fn a_rank_of_a_job() {
    job::rank();
}

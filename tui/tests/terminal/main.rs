//! Runs the program on a pseudo-terminal and in scripts: what it shows, what its keys do, and that it leaves the
//! terminal as it was.

mod ends;
mod job;
mod looks;
mod rings;
mod script;
mod session;
mod torch;

use job::run_as_a_rank;

/// Runs a rank of the jobs in [`job`]: their program is this test program.
#[test]
#[ignore = "a rank of the jobs of other tests"]
fn a_rank() {
    run_as_a_rank();
}

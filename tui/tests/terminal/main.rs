//! The program on a terminal: started, looked at, quit, and the terminal left as it was.

mod ends;
mod job;
mod looks;
mod rings;
mod script;
mod session;
mod torch;

use job::run_as_a_rank;

/// What the programs of the jobs in [`job`] run: this test program again.
#[test]
#[ignore = "a rank of the jobs of other tests"]
fn a_rank() {
    run_as_a_rank();
}

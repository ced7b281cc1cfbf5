//! The matrix of how jobs live and end. Each row describes a job of real processes under a launcher, with at most one
//! fault and one intervention from outside. The job runs over each transport. It is judged live while it runs, and from
//! its files after its end.
//!
//! | file | holds |
//! |---|---|
//! | `table` | the rows, with the answers that are right for each |
//! | `rank` | what the ranks of these jobs do |
//! | `job` | a job under its launcher, and what is done to it from outside |
//! | `look` | the judgments of live rings, of the rings that a job has left, and of dumps |
//! | `run` | the run of one row, and the check of all its answers |

mod job;
mod look;
mod rank;
mod run;
mod table;

pub use look::{Answer, Source};
pub use run::{Cell, TimedAnswer, run};
pub use table::{Expected, ROWS, Row, Transport};

use rcomm_tools::launch;
use std::process::ExitCode;

/// Number of ranks of each job. Ranks 0 and 1 form one tensor-parallel pair, ranks 2 and 3 the other.
pub(crate) const RANKS: u32 = 4;

/// Runs a rank of a job if the command line says `rank …`, or the launcher if it says `launch …`. Blocks until the rank
/// or the launcher has ended, and returns its exit code; returns `None` at once if the command line says anything else.
/// `args[0]` is the program.
///
/// A program that runs this matrix calls this function first, because the processes of the jobs run that program too.
#[allow(clippy::print_stderr, reason = "the log of the job")]
pub fn part_of_a_job(args: &[String]) -> Option<ExitCode> {
    use clap::Parser as _;
    match args.get(1).map(String::as_str) {
        Some("rank") => Some(rank::main(&args[2..])),
        Some("launch") => {
            if let Err(error) = job::enter_group() {
                eprintln!("the control group of the row cannot be entered: {error:#}");
                return Some(ExitCode::FAILURE);
            }
            Some(launch::run(&launch::Options::parse_from(&args[1..])))
        }
        _ => None,
    }
}

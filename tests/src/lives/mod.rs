//! The matrix of how jobs live and end. Each row is a job of real processes under a launcher, to which one thing
//! happens. The job is run over each transport, and is judged live while it runs and afterwards from its files.
//!
//! | file | holds |
//! |---|---|
//! | `table` | the rows, and what a judgment of each may say |
//! | `rank` | what the ranks of these jobs do |
//! | `job` | a job under its launcher, and what is done to it from outside |
//! | `look` | the judgments: live, of rings, of dumps |
//! | `run` | one row from start to end, and the answers on the way |

mod job;
mod look;
mod rank;
mod run;
mod table;

pub use look::{Answer, Source};
pub use rank::main as rank;
pub use run::{Cell, TimedAnswer, run};
pub use table::{Expected, ROWS, Row, Transport};

use rcomm_tools::launch;
use std::process::ExitCode;

/// Number of ranks of each job. Ranks 2 and 3 form one of its tensor-parallel groups.
pub(crate) const RANKS: u32 = 4;

/// Runs the part of a job that the command line asks for, `rank …` or `launch …`; `None` for any other command
/// line. A program that runs this matrix calls it first, since the jobs consist of processes of that program.
#[allow(clippy::print_stderr, reason = "the log of the job")]
pub fn part_of_a_job(args: &[String]) -> Option<ExitCode> {
    use clap::Parser as _;
    match args.get(1).map(String::as_str) {
        Some("rank") => Some(rank::main(&args[2..])),
        Some("launch") => {
            if let Err(error) = job::enter_group() {
                eprintln!("the control group cannot be entered: {error}");
                return Some(ExitCode::FAILURE);
            }
            Some(launch::run(&launch::Options::parse_from(&args[1..])))
        }
        _ => None,
    }
}

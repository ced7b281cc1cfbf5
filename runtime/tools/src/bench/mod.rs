//! Measures the latency and bandwidth of collectives: `rcomm-bench`, used like nccl-tests.
//!
//! Sizes are those of nccl-tests: the buffer for all_reduce, reduce and broadcast, the whole output
//! for all_gather and gather, the whole input for reduce_scatter and scatter, one rank's whole buffer
//! for all_to_all, the message for send_recv. `algbw` is size over time; `busbw` multiplies it by what
//! the busiest link carries per byte (nccl-tests, `doc/PERFORMANCE.md`).

mod cli;
mod measure;
mod operation;
mod print;
mod ranks;
mod tune;

pub use cli::Args;

use clap::Parser as _;
use std::ffi::OsString;
use std::process::ExitCode;

/// The program's name.
const NAME: &str = "rcomm-bench";

/// Runs the program `rcomm-bench` with these arguments, the first of which is its name, and returns its exit code.
/// Blocks until the measurements have ended. Ends the process if the arguments are wrong or ask for help.
#[allow(clippy::print_stderr, reason = "a program prints its errors")]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    let args = Args::parse_from(&arguments);
    run(&args, arguments.get(1..).unwrap_or_default()).unwrap_or_else(|error| {
        eprintln!("rcomm-bench: {error:#}");
        ExitCode::from(2)
    })
}

/// Runs the measurements of `args` and prints them: starts the ranks, with these arguments, or runs as one of them.
/// Blocks until the measurements have ended. Returns exit code 1 if a checked result was wrong.
fn run(args: &Args, arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    if let Some(cli::Command::Tune(args)) = &args.command {
        return tune::run(args).map(|()| ExitCode::SUCCESS);
    }
    measure::check(args)?;
    match args.ranks {
        Some(count) if !ranks::is_child() => ranks::start(count.get(), args.bind, arguments),
        _ => measure::run(args).map(|errors| {
            if errors == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(1)
            }
        }),
    }
}

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

use std::process::ExitCode;

/// Runs the measurements of `args` and prints them: starts the ranks, or runs as one of them. Blocks until the
/// measurements have ended. Returns exit code 1 if a checked result was wrong.
///
/// # Errors
/// A sentence that names what prevented the measurement.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(cli::Command::Tune(args)) = &args.command {
        return tune::run(args).map(|()| ExitCode::SUCCESS);
    }
    measure::check(args)?;
    match args.ranks {
        Some(count) if !ranks::is_child() => ranks::start(count.get(), args.bind),
        _ => measure::run(args).map(|errors| {
            if errors == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(1)
            }
        }),
    }
}

//! `rcomm-bench`: how long collectives take and how many bytes they move, used like nccl-tests.
//!
//! Sizes are those of nccl-tests: the buffer for all_reduce, reduce and broadcast, the whole output
//! for all_gather and gather, the whole input for reduce_scatter and scatter, one rank's whole buffer
//! for all_to_all, the message for send_recv. `algbw` is size over time; `busbw` multiplies it by what
//! the busiest link carries per byte (nccl-tests, `doc/PERFORMANCE.md`).
#![forbid(unsafe_code)]

mod cli;
mod measure;
mod operation;
mod print;
mod ranks;

use clap::Parser;
use std::process::ExitCode;

#[allow(clippy::print_stderr, reason = "a program tells its errors")]
fn main() -> ExitCode {
    let args = cli::Args::parse();
    let result = match args.ranks {
        Some(count) if !ranks::is_child() => ranks::start(count.get(), args.bind),
        _ => measure::run(&args).map(|errors| {
            if errors == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(1)
            }
        }),
    };
    result.unwrap_or_else(|error| {
        eprintln!("rcomm-bench: {error:#}");
        ExitCode::from(2)
    })
}

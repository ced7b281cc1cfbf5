//! `rcomm-bench OPERATION…`: measures the latency and bandwidth of collectives. See `rcomm_tools::bench`.

#![forbid(unsafe_code)]

use clap::Parser;
use rcomm_tools::bench::{Args, run};
use std::process::ExitCode;

#[allow(clippy::print_stderr, reason = "a program prints its errors")]
fn main() -> ExitCode {
    run(&Args::parse()).unwrap_or_else(|error| {
        eprintln!("rcomm-bench: {error:#}");
        ExitCode::from(2)
    })
}

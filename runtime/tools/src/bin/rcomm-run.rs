//! `rcomm-run -n N PROGRAM ARGS…`: starts the ranks of a job on this host, and exits with their result.
//! `rcomm-run demo KIND`: starts a job to look at.

#![forbid(unsafe_code)]

use rcomm_tools::demo::{self, Demo};
use rcomm_tools::launch::{self, Options};
use std::process::ExitCode;

#[allow(clippy::print_stderr, reason = "a program prints its errors")]
fn main() -> ExitCode {
    match Demo::from_command_line() {
        Some(demo) => demo::run(&demo).unwrap_or_else(|error| {
            eprintln!("rcomm-run: {error:#}");
            ExitCode::FAILURE
        }),
        None => launch::run(&Options::from_command_line()),
    }
}

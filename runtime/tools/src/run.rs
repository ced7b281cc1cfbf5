//! The program `rcomm-run`, which starts a job of any program ([`launch`]) or a demonstration ([`demo`]).

use crate::demo::{self, Demo};
use crate::launch::{self, Options};
use std::ffi::OsString;
use std::process::ExitCode;

/// Runs the program `rcomm-run` with these arguments, the first of which is its name, and returns its exit code. Blocks
/// until the job has ended. Ends the process if the arguments are wrong or ask for help.
#[allow(clippy::print_stderr, reason = "a program prints its errors")]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    match Demo::from_arguments(&arguments) {
        Some(demo) => demo::run(&demo).unwrap_or_else(|error| {
            eprintln!("rcomm-run: {error:#}");
            ExitCode::FAILURE
        }),
        None => launch::run(&Options::from_arguments(arguments)),
    }
}

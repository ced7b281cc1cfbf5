//! `rcomm-run -n N PROGRAM ARGS…`: starts the ranks of a job on this host, and exits with their result.

#![forbid(unsafe_code)]

use rcomm_tools::launch::{Options, run};
use std::process::ExitCode;

fn main() -> ExitCode {
    run(&Options::from_command_line())
}

//! `rcomm-run -n N PROGRAM ARGS…`: starts the ranks of a job on this host, and exits with their result.
//! `rcomm-run demo KIND`: starts a demonstration. See `rcomm_tools::run`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rcomm_tools::run::main(std::env::args_os().collect())
}

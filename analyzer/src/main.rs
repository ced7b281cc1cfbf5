//! `rcomm-fr` reads flight recorder dumps and names the rank at fault. The program itself is in `rcomm_analyzer::cli`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rcomm_analyzer::cli::main(std::env::args_os().collect())
}

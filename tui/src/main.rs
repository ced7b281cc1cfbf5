//! `rcomm-top`: see the library of the same name.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rcomm_top::start::main(std::env::args_os().collect())
}

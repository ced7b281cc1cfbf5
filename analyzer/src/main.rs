//! `rcomm-fr` reads flight recorder dumps and names the rank at fault. The program itself is in [`cli`].
#![forbid(unsafe_code)]

mod cli;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = cli::Cli::parse_from(cli::with_sub_command(std::env::args_os().collect()));
    let color = cli.color.into();
    match cli::run(cli) {
        Ok(code) => code,
        Err(failure) => {
            failure.show(color);
            failure.exit_code()
        }
    }
}

//! `rcomm-fr`: flight recorder dumps in, the rank at fault out.
//!
//! This file only joins the pieces: [`cli`] says what can be asked, [`command`] does it, one file a
//! sub-command, and [`failure`] says how a failure is shown and with which exit code.
#![forbid(unsafe_code)]

mod cli;
mod command;
mod failure;
mod output;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    let color = cli.color.into();
    match command::run(cli) {
        Ok(code) => code,
        Err(failure) => {
            failure.show(color);
            failure.exit_code()
        }
    }
}

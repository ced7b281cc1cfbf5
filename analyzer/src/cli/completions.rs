//! `rcomm-fr completions SHELL`: prints a completion script.

use crate::cli::args::{Cli, CompletionsArgs};
use crate::cli::failure::Failure;
use crate::cli::output;
use clap::CommandFactory;
use std::process::ExitCode;

pub(super) fn run(
    args: &CompletionsArgs,
    color: anstream::ColorChoice,
) -> Result<ExitCode, Failure> {
    // Generate in memory first: the generator panics on a broken pipe.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "rcomm-fr", &mut script);
    output::write_to(None, color, |out| out.write_all(&script))?;
    Ok(ExitCode::SUCCESS)
}

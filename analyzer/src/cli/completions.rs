//! `rcomm-fr completions SHELL`.

use crate::cli::args::{Cli, CompletionsArgs};
use crate::cli::failure::Failure;
use crate::cli::output;
use clap::CommandFactory;
use std::process::ExitCode;

pub(super) fn run(
    args: &CompletionsArgs,
    color: anstream::ColorChoice,
) -> Result<ExitCode, Failure> {
    // Into memory first: the generator takes a broken pipe for a bug.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "rcomm-fr", &mut script);
    output::write_to(None, color, |out| out.write_all(&script))?;
    Ok(ExitCode::SUCCESS)
}

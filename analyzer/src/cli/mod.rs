//! The program `rcomm-fr`: command line, sub-commands, output and exit codes.
//!
//! `args` defines the command line, `failure` maps errors to messages and exit codes, `output` writes to files and
//! terminals, `progress` shows the progress of long work. `judge` judges records for several sub-commands, and
//! `on_node` finds further records of their jobs on this node. `look` runs if there is no sub-command. Every other file
//! is a sub-command; it takes its arguments and returns an exit code.

mod analyze;
mod args;
mod collect;
mod completions;
mod diff;
mod dump;
mod explain;
mod failure;
mod judge;
mod look;
mod man;
mod nccl_plugin;
mod on_node;
mod output;
mod progress;
#[cfg(feature = "tables")]
mod query;
mod rings;
mod summarize;
mod trends;
mod watch;

use args::{Cli, Command};
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};
use failure::Failure;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

/// Runs the program `rcomm-fr` with these arguments, the first of which is its name, and returns its exit code. Blocks
/// until the command has ended. Ends the process if the arguments are wrong, or ask for help or the version.
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    let cli = Cli::parse_from(with_sub_command(arguments));
    if cli.verbose && cli.command.is_some() {
        let text = "--verbose before a sub-command has no effect: write it after the sub-command";
        Cli::command()
            .error(ErrorKind::ArgumentConflict, text)
            .exit();
    }
    let color = cli.color.into();
    run(cli).unwrap_or_else(|failure| {
        failure.show(color);
        // Inconclusive: a script must not mistake an error for a finding.
        ExitCode::from(2)
    })
}

/// Inserts the sub-command `analyze` if the first argument is no sub-command, but `-`, an existing path, or a name that
/// only a path can have: one with a `/` or a `.`. Options and the value of `--color` do not count as the first
/// argument.
fn with_sub_command(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let mut rest = arguments.iter().skip(1);
    let first = loop {
        match rest.next() {
            Some(value) if value == "--color" => {
                rest.next();
            }
            Some(value) if value != "-" && value.as_encoded_bytes().starts_with(b"-") => {}
            other => break other,
        }
    };
    let names_a_record = first.is_some_and(|first| {
        let is_sub_command = || Cli::command().find_subcommand(first).is_some();
        let bytes = first.as_encoded_bytes();
        let can_only_be_a_path = first == "-" || bytes.contains(&b'/') || bytes.contains(&b'.');
        !is_sub_command() && (can_only_be_a_path || Path::new(first).exists())
    });
    if names_a_record {
        arguments.insert(1, "analyze".into());
    }
    arguments
}

/// The command line of `rcomm-fr`, for manual pages and completions.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the sub-command and returns the exit code. Without a sub-command, judges the newest records of this node.
fn run(cli: Cli) -> Result<ExitCode, Failure> {
    let color = cli.color.into();
    let Some(command) = cli.command else {
        return look::run(cli.verbose, color);
    };
    match command {
        Command::Analyze(args) => analyze::run(&args, color),
        Command::Watch(args) => watch::run(&args, color),
        Command::Diff(args) => diff::run(&args, color),
        Command::Collect(args) => collect::run(&args, color),
        Command::Summarize(args) => summarize::run(&args, color),
        Command::Rings(args) => rings::run(&args, color),
        Command::Dump(args) => dump::run(&args, color),
        #[cfg(feature = "tables")]
        Command::Query(args) => query::run(&args),
        #[cfg(not(feature = "tables"))]
        Command::Query { .. } => Err(Failure::NoTables),
        Command::Explain(args) => explain::run(&args, color),
        Command::Trends(args) => trends::run(&args, color),
        Command::NcclPlugin(args) => nccl_plugin::run(&args, color),
        Command::Completions(args) => completions::run(&args, color),
        Command::Man(args) => man::run(&args, color),
    }
}

//! The command line: what can be asked, in one place. The help, the man page and the completions are
//! all made from here.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

/// What `--help` says about exit codes; the same for every program of the project.
const EXIT_CODES: &str = "\
Exit codes:
  0  healthy or running; notes alone are healthy
  1  at least one error or warning was found
  2  could not tell: wrong usage, no readable input, output not writable";

/// Reads flight recorder dumps and rings, and says which rank is at fault.
#[derive(Debug, Parser)]
#[command(name = "rcomm-fr", version, after_help = EXIT_CODES, max_term_width = 100)]
#[command(disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// When to colour the output; `auto` obeys NO_COLOR and CLICOLOR_FORCE.
    #[arg(long, value_enum, global = true, default_value_t = Color::Auto, value_name = "WHEN")]
    pub(crate) color: Color,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// When to colour.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Color {
    /// On a terminal.
    Auto,
    /// Also into files and pipes.
    Always,
    /// Not at all.
    Never,
}

impl From<Color> for anstream::ColorChoice {
    fn from(color: Color) -> Self {
        match color {
            Color::Auto => Self::Auto,
            Color::Always => Self::Always,
            Color::Never => Self::Never,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Collect(CollectArgs),
    Explain(ExplainArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Gather the records of this node, or of a list of hosts, into one archive.
///
/// The archive is a tar file (.rcap) whose last member, manifest.json, lists every record and every
/// absence. `rcomm-fr analyze` reads it as it is.
///
/// In a folder only records are taken; a file named outright is taken whatever it is.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 all there; 1 something is absent and named; 2 nothing could be gathered.

Example, over ssh:
  rcomm-fr collect -o job.rcap --hosts-from hosts.txt \\
    --command 'ssh {host} rcomm-fr collect -o - /tmp/dumps'")]
pub(crate) struct CollectArgs {
    /// Files and folders on this node.
    #[arg(value_name = "PATH", required_unless_present_any = ["host", "hosts_from"])]
    pub(crate) paths: Vec<PathBuf>,
    /// Where the archive goes; `-` is standard output.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Ask this host too; may be given again, or hold several with commas.
    #[arg(long, value_name = "HOST", value_delimiter = ',', requires = "command")]
    pub(crate) host: Vec<String>,
    /// Ask the hosts in this file too, one a line.
    #[arg(long, value_name = "FILE", requires = "command")]
    pub(crate) hosts_from: Option<PathBuf>,
    /// What to run for a host: prints that host's archive. `{host}` becomes its name; no shell is
    /// involved.
    #[arg(long, value_name = "COMMAND")]
    pub(crate) command: Option<String>,
    /// How long one host may take.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = humantime::parse_duration)]
    pub(crate) timeout: Duration,
    /// How many hosts are asked at once.
    #[arg(long, value_name = "N", default_value = "16")]
    pub(crate) jobs: NonZeroUsize,
}

/// Say what a code means, where it usually comes from and what to do.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// A code or its name (`E101`, `not_joined`); without one, all codes in a line each.
    #[arg(value_name = "CODE")]
    pub(crate) codes: Vec<String>,
}

/// Print a completion script for a shell.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// For which shell.
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// Print the man page (roff), or write one page a command into a folder.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Write the pages of all commands into this folder, which is made if need be.
    #[arg(long, value_name = "DIR")]
    pub(crate) out_dir: Option<PathBuf>,
}

//! The command line: what can be asked, in one place. The help, the man page and the completions are
//! all made from here.

use clap::{Args, Parser, Subcommand, ValueEnum};

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
    Explain(ExplainArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
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
    pub(crate) out_dir: Option<std::path::PathBuf>,
}

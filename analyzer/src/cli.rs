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
    Rings(RingsArgs),
    Dump(DumpArgs),
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

/// List, show or clear the rings of this node: the records of jobs that run, hang, or died.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct RingsArgs {
    #[command(subcommand)]
    pub(crate) action: Option<RingsAction>,
    #[command(flatten)]
    pub(crate) list: RingPlace,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RingsAction {
    /// List every ring, and whether its process lives (what `rings` alone does).
    List(RingPlace),
    /// Show what one rank's ring holds: where it stands, what is pending, what it did last.
    Show(ShowArgs),
    /// Remove the rings whose processes are gone. They are the record of what happened: dump or
    /// analyze them first.
    RemoveStale(RemoveStaleArgs),
}

/// Which rings.
#[derive(Debug, Args)]
pub(crate) struct RingPlace {
    /// Where the rings are [default: /dev/shm/rcomm-<uid>].
    #[arg(
        long,
        value_name = "DIR",
        env = "RCOMM_RING_DIR",
        hide_env_values = true
    )]
    pub(crate) dir: Option<PathBuf>,
    /// Only those of this job.
    #[arg(long, value_name = "JOB")]
    pub(crate) job: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A ring file, or the number of a rank.
    #[arg(value_name = "RING")]
    pub(crate) ring: String,
    /// Show every operation that the ring holds.
    #[arg(short, long)]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) place: RingPlace,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveStaleArgs {
    /// Only say what would be removed.
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) place: RingPlace,
}

/// Write the rings of this node as dump files, which other flight recorder tools read as well.
///
/// Files are DIR/<job>/rank_<N> (JSON: rank_<N>.json); none is ever overwritten. Reading disturbs no
/// process: a ring can be dumped while its job runs, hangs, or is gone.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 all written; 1 a ring could not be read; 2 nothing was written."
)]
pub(crate) struct DumpArgs {
    /// Ring files; without one, all rings in the directory.
    #[arg(value_name = "RING")]
    pub(crate) rings: Vec<PathBuf>,
    /// Where the dumps go; made if need be.
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// In which form.
    #[arg(long, value_enum, default_value_t = DumpFormat::Pickle)]
    pub(crate) format: DumpFormat,
    #[command(flatten)]
    pub(crate) place: RingPlace,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DumpFormat {
    /// What PyTorch writes and torchfrtrace reads; holds no code, only data.
    Pickle,
    /// The same as text.
    Json,
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

//! The command line.

use crate::theme::{Depth, ThemeName};
use clap::{Args, Parser, Subcommand};
use rcomm_analyzer::filter::parse_duration_ms;
use rcomm_analyzer::source::{HostPort, HttpAddress, RAS_ADDRESS, WorkerAddress};
use rcomm_recorder::publish::EndpointAddress;
use std::path::PathBuf;
use std::time::Duration;

const EXIT_CODES: &str = "\
Exit codes of --once and --json:
  0  healthy or running; notes alone are healthy
  1  at least one error or warning was found
  2  could not tell: wrong usage, no job, no readable input";

/// Shows a job's collectives live: is it stuck, who, since when.
///
/// Without a command: the newest job with rings on this node. No process of the job has to cooperate;
/// frozen and dead ones are read as well.
#[derive(Debug, Parser)]
#[command(name = "rcomm-top", version, after_help = EXIT_CODES, max_term_width = 100)]
#[command(
    args_conflicts_with_subcommands = false,
    disable_help_subcommand = true
)]
pub struct Cli {
    /// What to look at instead.
    #[command(subcommand)]
    pub command: Option<What>,
    /// What to look at.
    #[command(flatten)]
    pub from: From,
    /// How to show it.
    #[command(flatten)]
    pub view: View,
}

/// What to look at: the rings of this node unless something else is named; several at once if several are.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Sources")]
pub struct From {
    /// Where rings are looked for [default: RCOMM_RING_DIR, else /dev/shm/rcomm-UID]
    #[arg(long, value_name = "DIR", env = "RCOMM_RING_DIR")]
    pub ring_dir: Option<PathBuf>,
    /// The job whose rings are read [default: the newest]
    #[arg(long, value_name = "NAME")]
    pub job: Option<String>,
    /// Read this node's rings beside the other sources
    #[arg(long)]
    pub rings: bool,
    /// The endpoint of any rank: unix:PATH or tcp:ADDRESS:PORT; it knows the others
    #[arg(long, value_name = "ADDRESS")]
    pub endpoint: Vec<EndpointAddress>,
    /// The job's store, which knows the endpoints of all ranks
    #[arg(long, value_name = "HOST:PORT")]
    pub store: Vec<HostPort>,
    /// The store of a PyTorch job whose ranks called start_debug_server(): MASTER_ADDR:MASTER_PORT
    #[arg(long, value_name = "HOST:PORT")]
    pub torch_store: Vec<HostPort>,
    /// A PyTorch worker server, http://HOST:PORT or unix:PATH; without RANK=, its place in the list
    #[arg(long, value_name = "[RANK=]ADDRESS")]
    pub worker_server: Vec<WorkerAddress>,
    /// NCCL's RAS service; one process answers for the whole job
    #[arg(
        long,
        value_name = "HOST:PORT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = RAS_ADDRESS
    )]
    pub ras: Vec<HostPort>,
    /// A collector (rcomm-web), http://HOST:PORT, that watches the job
    #[arg(long, value_name = "ADDRESS")]
    pub collector: Vec<HttpAddress>,
    /// Ranks of the job, where nothing else tells
    #[arg(long, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub world_size: Option<u32>,
    /// The token of collectors, and of endpoints over TCP
    #[arg(
        long,
        value_name = "TOKEN",
        env = "RCOMM_TOP_TOKEN",
        hide_env_values = true
    )]
    pub token: Option<String>,
}

/// What to look at instead of the rings of this node, or to do.
#[derive(Debug, Subcommand)]
pub enum What {
    /// Look at dumps, or at a recording of --record, on the very same screens
    Replay {
        /// Folders, files and archives of dumps, or one recording
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// The dumps are a look at a running job: what is young and pending is no finding
        #[arg(long)]
        snapshot: bool,
    },
    /// Look at a job that does not exist
    Demo {
        /// healthy, stuck, deadlock, mismatch, straggler or silent
        #[arg(default_value = "stuck", value_parser = situation)]
        situation: rcomm_analyzer::simulate::Situation,
        /// Its ranks, eight to a host
        #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=65536))]
        ranks: u32,
    },
    /// Print the configuration file with every default
    GenConfig,
    /// Print a completion script for a shell
    Completions {
        /// For which shell
        shell: clap_complete::Shell,
    },
}

/// How to show it.
#[derive(Debug, Args)]
pub struct View {
    /// Print the first screen once and exit with its verdict
    #[arg(long, global = true)]
    pub once: bool,
    /// Print the report as JSON once and exit with its verdict
    #[arg(long, global = true)]
    pub json: bool,
    /// Record what is seen, to be looked at again with replay
    #[arg(long, global = true, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Between two looks at a source [default: 1s]
    #[arg(long, global = true, env = "RCOMM_TOP_REFRESH", value_parser = duration)]
    pub refresh: Option<Duration>,
    /// From which age on a pending operation counts as stuck; from half of its own time-out on, where
    /// that is shorter [default: 5s]
    #[arg(long, global = true, env = "RCOMM_TOP_OVERDUE", value_parser = duration)]
    pub overdue: Option<Duration>,
    /// Show only what passes this filter, as typed after / in the view
    #[arg(long, global = true)]
    pub filter: Option<String>,
    /// The colours [default: dark]
    #[arg(long, global = true, env = "RCOMM_TOP_THEME")]
    pub theme: Option<ThemeName>,
    /// How many colours [default: what the terminal has; NO_COLOR is obeyed]
    #[arg(long, global = true, env = "RCOMM_TOP_COLOURS")]
    pub colours: Option<Depth>,
    /// Characters of ASCII only
    #[arg(long, global = true, env = "RCOMM_TOP_ASCII")]
    pub ascii: bool,
    /// Listen to the mouse: wheel and clicks
    #[arg(long, global = true, env = "RCOMM_TOP_MOUSE")]
    pub mouse: bool,
    /// Allow actions that write: the records of all ranks to a folder
    #[arg(long, global = true)]
    pub allow_actions: bool,
    /// The configuration file [default: $XDG_CONFIG_HOME/rcomm/top.toml]
    #[arg(long, global = true, env = "RCOMM_TOP_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
}

fn situation(name: &str) -> Result<rcomm_analyzer::simulate::Situation, String> {
    use rcomm_analyzer::simulate::Situation;
    Situation::from_name(name).ok_or_else(|| {
        let known: Vec<_> = Situation::ALL.iter().map(|(_, name)| *name).collect();
        format!("expected one of {}", known.join(", "))
    })
}

/// Reads a duration: `500ms`, `5s`, `2m`.
///
/// # Errors
///
/// What was expected.
pub fn duration(text: &str) -> Result<Duration, String> {
    let ms = parse_duration_ms(text)?;
    match Duration::try_from_secs_f64(ms / 1e3) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(format!("`{text}` is not a time that one could wait")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn several_sources_are_named_at_once() {
        let line = [
            "rcomm-top",
            "--torch-store",
            "n0:29500",
            "--worker-server",
            "http://n0:1",
            "--worker-server",
            "7=http://n1:1",
            "--ras",
            "--ras=n1:28028",
            "--collector",
            "127.0.0.1:9200",
            "--rings",
        ];
        let from = Cli::try_parse_from(line).expect("all are known").from;
        assert_eq!(from.worker_server[1].rank, Some(7));
        let ras: Vec<String> = from.ras.iter().map(ToString::to_string).collect();
        assert_eq!(ras, [RAS_ADDRESS, "n1:28028"]);
        assert!(from.rings && from.collector.len() == 1 && from.torch_store.len() == 1);
    }

    #[test]
    fn view_options_stand_before_or_after_the_command() {
        for line in [
            &["rcomm-top", "--json", "replay", "d"][..],
            &["rcomm-top", "replay", "--once", "--json", "d"],
        ] {
            let cli = Cli::try_parse_from(line).expect("both are usual");
            assert!(cli.view.json);
        }
        assert!(Cli::try_parse_from(["rcomm-top", "--refresh", "0s"]).is_err());
        assert!(Cli::try_parse_from(["rcomm-top", "demo", "bored"]).is_err());
    }
}

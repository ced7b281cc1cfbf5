//! The command line.

use crate::page::theme::{Depth, ThemeName};
use clap::{Args, Parser, Subcommand};
use rcomm_analyzer::filter::parse_duration_ms;
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::source::{HttpAddress, NetworkSources};
use std::path::PathBuf;
use std::time::Duration;

const EXIT_CODES: &str = "\
Exit codes of --once and --json:
  0  healthy, running or ended, or cancelled with nothing wrong before;
     notes do not count
  1  at least one error or warning was found, or the job crashed
  2  inconclusive, or nothing to judge: wrong usage, no job, no readable input
Without them:
  0  the view was left
  2  the view could not be shown: wrong usage, no terminal";

/// Shows a job's collectives live: whether it is stuck, which rank is the cause, and since when.
///
/// Without a command it shows a job of this node: one that is in trouble, else the newest. The job does not have to
/// cooperate: the rings of frozen and dead processes are read as well. Inside, `?` lists the keys and `q` quits.
#[derive(Debug, Parser)]
#[command(name = "rcomm-top", version, after_help = EXIT_CODES, max_term_width = 100)]
#[command(
    args_conflicts_with_subcommands = false,
    disable_help_subcommand = true
)]
pub struct Cli {
    /// The command; a live view of the sources if none is given.
    #[command(subcommand)]
    pub command: Option<CliCommand>,
    /// The sources of the live view.
    #[command(flatten)]
    pub from: SourceOptions,
    /// What is shown, and how.
    #[command(flatten)]
    pub view: ViewOptions,
}

/// Sources of the live view; the jobs of this node if none is given. Several can be combined.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Sources")]
pub struct SourceOptions {
    /// Directory of the rings [default: /dev/shm/rcomm-UID]
    #[arg(long, value_name = "DIR", env = "RCOMM_RING_DIR")]
    pub ring_dir: Option<PathBuf>,
    /// Job whose rings to read [default: one that is in trouble, else the newest]
    #[arg(long, value_name = "NAME")]
    pub job: Option<String>,
    /// Read this node's rings in addition to the other sources
    #[arg(long)]
    pub rings: bool,
    /// Sources over the network.
    #[command(flatten)]
    pub network: NetworkSources,
    /// Collector (rcomm-web) that watches the job, http://HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub collector: Vec<HttpAddress>,
    /// Token for collectors and for endpoints over TCP
    #[arg(
        long,
        value_name = "TOKEN",
        env = "RCOMM_TOP_TOKEN",
        hide_env_values = true
    )]
    pub token: Option<String>,
}

/// Commands other than the live view.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Show dumps, or a recording made with --record, on the same screens
    #[command(after_help = EXIT_CODES)]
    Replay {
        /// Directories, files or archives of dumps, or one recording
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// The dumps are a snapshot of a running job: do not report recent pending operations
        #[arg(long)]
        snapshot: bool,
    },
    /// Show a simulated job
    #[command(after_help = EXIT_CODES)]
    Demo {
        /// What is wrong with the job
        #[arg(default_value = "stuck")]
        situation: Situation,
        /// Number of simulated ranks, at most eight per host
        #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=65536))]
        ranks: u32,
    },
    /// Print the configuration file with every setting
    #[command(help_template = "{about-with-newline}\n{usage-heading} {usage}")]
    GenConfig,
    /// Print a completion script for a shell
    #[command(
        help_template = "{about-with-newline}\n{usage-heading} {usage}\n\nArguments:\n{positionals}"
    )]
    Completions {
        /// Shell to complete for
        shell: clap_complete::Shell,
    },
}

/// What is shown, and how.
#[derive(Debug, Args)]
#[command(next_help_heading = "View")]
pub struct ViewOptions {
    /// Print the first screen once; the exit code is its verdict
    #[arg(long, global = true)]
    pub once: bool,
    /// Print the report as JSON once; the exit code is its verdict
    #[arg(long, global = true)]
    pub json: bool,
    /// Record the session to FILE; replay shows it again
    #[arg(long, global = true, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Interval between two reads of a source [default: 1s]
    #[arg(long, global = true, value_name = "DURATION", env = "RCOMM_TOP_REFRESH", value_parser = duration)]
    pub refresh: Option<Duration>,
    /// Age from which a pending operation is overdue; half of its own time-out if that is shorter [default: 5s]
    #[arg(long, global = true, value_name = "DURATION", env = "RCOMM_TOP_OVERDUE", value_parser = duration)]
    pub overdue: Option<Duration>,
    /// Show only rows that match this filter, as typed after / in the view
    #[arg(long, global = true)]
    pub filter: Option<String>,
    /// Color theme [default: light on a light background, else dark]
    #[arg(long, global = true, env = "RCOMM_TOP_THEME")]
    pub theme: Option<ThemeName>,
    /// Color depth [default: what the terminal supports; NO_COLOR is honored]
    #[arg(
        long,
        visible_alias = "colors",
        global = true,
        env = "RCOMM_TOP_COLOURS"
    )]
    pub colours: Option<Depth>,
    /// Draw with ASCII characters only
    #[arg(long, global = true, env = "RCOMM_TOP_ASCII")]
    pub ascii: bool,
    /// Use the mouse: wheel and clicks; hold shift to select text [default: on]
    #[arg(
        long,
        global = true,
        env = "RCOMM_TOP_MOUSE",
        value_name = "ON",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        hide_possible_values = true,
        value_parser = clap::builder::BoolishValueParser::new()
    )]
    pub mouse: Option<bool>,
    /// Allow actions that write: save all ranks' records, request dumps
    #[arg(long, global = true)]
    pub allow_actions: bool,
    /// Configuration file [default: $XDG_CONFIG_HOME/rcomm/top.toml]
    #[arg(long, global = true, env = "RCOMM_TOP_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Parses a duration: `500ms`, `5s`, `2m`.
///
/// # Errors
///
/// If `text` is not a duration, or is zero; the error describes the expected form.
pub fn duration(text: &str) -> Result<Duration, String> {
    let ms = parse_duration_ms(text)?;
    match Duration::try_from_secs_f64(ms / 1e3) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(format!(
            "`{text}` is not a usable duration; write 500ms, 5s or 2m"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use rcomm_analyzer::source::RAS_ADDRESS;

    #[test]
    fn the_help_of_the_program_and_its_views_ends_with_the_exit_codes() {
        let program = Cli::command();
        let views = program.get_subcommands().filter(|command| {
            let name = command.get_name();
            name == "replay" || name == "demo"
        });
        let views: Vec<clap::Command> = views.cloned().collect();
        assert_eq!(views.len(), 2);
        for mut command in views.into_iter().chain([program]) {
            let help = command.render_long_help().to_string();
            let (_, codes) = help
                .split_once("Exit codes of --once and --json:\n")
                .expect(&help);
            let codes: Vec<&str> = codes
                .lines()
                .filter_map(|line| line.strip_prefix("  ")?.split_once("  "))
                .map(|(code, _)| code)
                .filter(|code| !code.is_empty())
                .collect();
            assert_eq!(codes, ["0", "1", "2", "0", "2"], "{help}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn several_sources_can_be_combined() {
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
        let from = Cli::try_parse_from(line)
            .expect("all options are known")
            .from;
        let network = &from.network;
        assert_eq!(network.worker_server[1].rank, Some(7));
        let ras: Vec<String> = network.ras.iter().map(ToString::to_string).collect();
        assert_eq!(ras, [RAS_ADDRESS, "n1:28028"]);
        assert!(from.rings && from.collector.len() == 1 && network.torch_store.len() == 1);
    }

    #[test]
    fn view_options_are_allowed_before_and_after_the_command() {
        for line in [
            &["rcomm-top", "--json", "replay", "d"][..],
            &["rcomm-top", "replay", "--once", "--json", "d"],
        ] {
            let cli = Cli::try_parse_from(line).expect("options may come before and after");
            assert!(cli.view.json);
        }
        let mouse = |option| {
            let line = Cli::try_parse_from(["rcomm-top", option, "replay", "d"]);
            line.map(|cli| cli.view.mouse).ok().flatten()
        };
        assert_eq!(mouse("--mouse"), Some(true));
        assert_eq!(mouse("--mouse=off"), Some(false));
        assert_eq!(mouse("--mouse=no-way"), None);
        assert!(Cli::try_parse_from(["rcomm-top", "--refresh", "0s"]).is_err());
        assert!(Cli::try_parse_from(["rcomm-top", "demo", "bored"]).is_err());
    }
}

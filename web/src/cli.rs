//! The command line.

use clap::Parser;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

const HELP: &str = "\
Exit codes:
  0  stopped by a signal
  2  could not start: wrong usage, the address is taken";

/// Shows a job's collectives in a browser, and gives its numbers to Prometheus.
///
/// Without a path it reads the rings of this node; with paths, dumps.
#[derive(Debug, Parser)]
#[command(name = "rcomm-web", version, after_help = HELP, max_term_width = 100)]
pub(crate) struct Cli {
    /// Dump files, folders or archives to show instead of this node's rings.
    #[arg(value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
    /// Where to listen; port 0 takes any free one.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8765")]
    pub(crate) listen: SocketAddr,
    /// Only the rings of this job; otherwise the newest.
    #[arg(long, value_name = "NAME")]
    pub(crate) job: Option<String>,
    /// Folder of the rings.
    #[arg(long, value_name = "DIR", env = "RCOMM_RING_DIR")]
    pub(crate) ring_dir: Option<PathBuf>,
    /// File with the token that requests must bring; otherwise one is made at every start.
    #[arg(long, value_name = "FILE", conflicts_with = "no_token")]
    pub(crate) token_file: Option<PathBuf>,
    /// Ask for no token. Only on a loopback address.
    #[arg(long)]
    pub(crate) no_token: bool,
    /// Answer also under this host name; may be given again.
    #[arg(long, value_name = "NAME")]
    pub(crate) host_name: Vec<String>,
    /// Between two looks at the records.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = humantime::parse_duration)]
    pub(crate) refresh: Duration,
    /// From which age on a pending operation counts as stuck.
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = humantime::parse_duration)]
    pub(crate) overdue: Duration,
}

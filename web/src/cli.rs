//! The command line of `rcomm-web`.

use clap::{ArgGroup, Parser, ValueEnum};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::source::HostPort;
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
#[command(group = ArgGroup::new("directory").args(["nodes_dns", "nodes_store"]))]
pub struct Cli {
    /// Dump files, folders or archives to show instead of this node's rings.
    #[arg(value_name = "PATH", conflicts_with = "demo")]
    pub paths: Vec<PathBuf>,
    /// Where to listen; port 0 takes any free one. Beyond loopback it takes a token of yours and TLS.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8765")]
    pub listen: SocketAddr,
    /// Only the rings of this job; otherwise the newest.
    #[arg(long, value_name = "NAME")]
    pub job: Option<String>,
    /// Folder of the rings.
    #[arg(long, value_name = "DIR", env = "RCOMM_RING_DIR")]
    pub ring_dir: Option<PathBuf>,
    /// A job that does not exist: healthy, stuck, deadlock, mismatch, straggler, silent.
    #[arg(long, value_name = "SITUATION", value_parser = situation)]
    pub demo: Option<Situation>,
    /// Ranks of the job that does not exist.
    #[arg(long, value_name = "N", default_value_t = 16, requires = "demo", value_parser = clap::value_parser!(u32).range(2..=8192))]
    pub ranks: u32,
    /// A collector: show the job of these instances of rcomm-web, one a node; may be given again.
    #[arg(long, value_name = "URL", conflicts_with_all = ["paths", "demo"])]
    pub node: Vec<String>,
    /// A collector over all addresses that this name stands for (a headless service).
    #[arg(long, value_name = "NAME", conflicts_with_all = ["paths", "demo", "node"])]
    pub nodes_dns: Option<String>,
    /// A collector over the hosts that are in this job's store (the address of a TCPStore), one instance
    /// on each.
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["paths", "demo", "node", "nodes_dns"])]
    pub nodes_store: Option<HostPort>,
    /// On which port the nodes behind that name, or on those hosts, listen.
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 8765,
        requires = "directory"
    )]
    pub nodes_port: u16,
    /// Those nodes speak TLS.
    #[arg(long, requires = "directory")]
    pub nodes_tls: bool,
    /// File with the token that the nodes want.
    #[arg(long, value_name = "FILE")]
    pub nodes_token_file: Option<PathBuf>,
    /// The ranks whose endpoints are in this job's store (the address of a TCPStore).
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["paths", "demo", "node", "nodes_dns", "nodes_store"])]
    pub store: Option<HostPort>,
    /// File with the token that the ranks' endpoints want over TCP.
    #[arg(long, value_name = "FILE", requires = "store")]
    pub endpoint_token_file: Option<PathBuf>,
    /// File with the token that requests must bring (or the variable RCOMM_WEB_TOKEN); otherwise one is
    /// made at every start.
    #[arg(long, value_name = "FILE", conflicts_with = "no_token")]
    pub token_file: Option<PathBuf>,
    /// Ask for no token. Only on a loopback address.
    #[arg(long)]
    pub no_token: bool,
    /// PEM file with the certificate to show, and those that vouch for it.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Speak plain HTTP beyond loopback: something in front of this program speaks TLS.
    #[arg(long, conflicts_with = "tls_cert")]
    pub plain_http: bool,
    /// Answer also under this host name; may be given again.
    #[arg(long, value_name = "NAME")]
    pub host_name: Vec<String>,
    /// Connections at a time.
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_connections: usize,
    /// Bytes of an upload, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    pub upload_limit: u64,
    /// Between two looks at the records.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = humantime::parse_duration)]
    pub refresh: Duration,
    /// From which age on a pending operation counts as stuck; from half of its own time-out on, where
    /// that is shorter.
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = humantime::parse_duration)]
    pub overdue: Duration,
    /// How the log on standard error is written; RCOMM_LOG chooses what is (`info`, `rcomm_web=debug`).
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// How a log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

fn situation(name: &str) -> Result<Situation, String> {
    let known: Vec<_> = Situation::ALL.iter().map(|(_, name)| *name).collect();
    Situation::from_name(name).ok_or_else(|| format!("expected one of {}", known.join(", ")))
}

//! The command line of `rcomm-web`.

use clap::{ArgGroup, Parser, ValueEnum};
use rcomm_analyzer::parse_duration;
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::source::{HostPort, NetworkSources};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

const HELP: &str = "\
Exit codes:
  0  stopped by a signal
  2  an error: wrong usage, or the address is in use, for example";

/// Shows a job's collectives in a browser and exports their metrics to Prometheus.
///
/// Without a path it reads the rings of this node; with paths, dumps. It prints the address to open, which contains the
/// access token. With OTEL_EXPORTER_OTLP_ENDPOINT set, it also sends traces, metrics and logs.
#[derive(Debug, Parser)]
#[command(name = "rcomm-web", version, after_help = HELP, max_term_width = 100)]
#[command(group = ArgGroup::new("directory").args(["nodes_dns", "nodes_store"]))]
pub struct Cli {
    /// Dump files, directories or archives to show instead of this node's rings.
    #[arg(value_name = "PATH", conflicts_with_all = ["demo", "network"])]
    pub paths: Vec<PathBuf>,
    /// Address to listen on; port 0 picks a free one. Unless it is a loopback address, a token (--token-file or
    /// RCOMM_WEB_TOKEN) and TLS or --plain-http are required.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8765", value_parser = address)]
    pub listen: SocketAddr,
    /// Read only the rings of this job [default: one that is in trouble, else the newest].
    #[arg(long, value_name = "NAME")]
    pub job: Option<String>,
    /// Directory of the rings [default: /dev/shm/rcomm-UID].
    #[arg(long, value_name = "DIR", env = "RCOMM_RING_DIR")]
    pub ring_dir: Option<PathBuf>,
    /// Show a simulated job.
    #[arg(long, value_name = "SITUATION", conflicts_with = "network")]
    pub demo: Option<Situation>,
    /// Number of ranks of the simulated job.
    #[arg(long, value_name = "N", default_value_t = 16, requires = "demo", value_parser = clap::value_parser!(u32).range(2..=8192))]
    pub ranks: u32,
    /// Collect from this rcomm-web instance (one per node) instead of reading rings; repeatable.
    #[arg(long, value_name = "URL", conflicts_with_all = ["paths", "demo", "network"], value_parser = url)]
    pub node: Vec<String>,
    /// Collect from every address that this DNS name resolves to (a headless service).
    #[arg(long, value_name = "NAME", conflicts_with_all = ["paths", "demo", "node", "network"])]
    pub nodes_dns: Option<String>,
    /// Collect from one instance on each host listed in this job's store (the address of a TCPStore).
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["paths", "demo", "node", "nodes_dns", "network"])]
    pub nodes_store: Option<HostPort>,
    /// Port of the instances found by --nodes-dns or --nodes-store.
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 8765,
        requires = "directory"
    )]
    pub nodes_port: u16,
    /// Connect to those instances with TLS.
    #[arg(long, requires = "directory")]
    pub nodes_tls: bool,
    /// File with the token for the instances to collect from.
    #[arg(long, value_name = "FILE")]
    pub nodes_token_file: Option<PathBuf>,
    /// Sources over the network instead of this node's rings.
    #[command(flatten)]
    pub network: NetworkSources,
    /// File with the token for the ranks' endpoints over TCP.
    #[arg(long, value_name = "FILE", requires = "network")]
    pub endpoint_token_file: Option<PathBuf>,
    /// File with the token that requests must carry (or set RCOMM_WEB_TOKEN); by default a new one is
    /// generated at every start.
    #[arg(long, value_name = "FILE", conflicts_with = "no_token")]
    pub token_file: Option<PathBuf>,
    /// Require no token; allowed on a loopback address only.
    #[arg(long)]
    pub no_token: bool,
    /// PEM file with the server's certificate chain.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Serve plain HTTP on other than loopback addresses, for use behind a proxy that terminates TLS.
    #[arg(long, conflicts_with = "tls_cert")]
    pub plain_http: bool,
    /// Accept requests for this host name as well; repeatable.
    #[arg(long, value_name = "NAME")]
    pub host_name: Vec<String>,
    /// Maximum number of concurrent connections.
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_connections: usize,
    /// Maximum size of an upload, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    pub upload_limit: u64,
    /// Interval between two reads of the records.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = interval)]
    pub refresh: Duration,
    /// Age from which a pending operation is overdue; half of its own time-out if that is shorter.
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_duration)]
    pub overdue: Duration,
    /// Format of the log on standard error; RCOMM_LOG sets its level (`info`, `rcomm_web=debug`).
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// Format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Plain text.
    Text,
    /// One JSON object per line.
    Json,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| "not an address and a port: write 127.0.0.1:8765, or [::1]:8765".to_owned())
}

fn url(text: &str) -> Result<String, String> {
    let host = text
        .strip_prefix("http://")
        .or_else(|| text.strip_prefix("https://"));
    match host {
        Some(host) if !host.is_empty() => Ok(text.to_owned()),
        _ => Err("not the URL of an rcomm-web instance: write http://n07:8765".to_owned()),
    }
}

/// Parses a duration that is not zero.
fn interval(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err("the time between two reads must be longer than zero".to_owned()),
        interval => Ok(interval),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_help_ends_with_the_exit_codes() {
        let help = Cli::command().render_long_help().to_string();
        assert!(help.trim_end().ends_with(HELP), "{help}");
        assert!(HELP.starts_with("Exit codes:\n  0  ") && HELP.contains("\n  2  "));
    }
}

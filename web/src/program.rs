//! The program `rcomm-web`: the library with a command line.

use crate::cli::{Cli, LogFormat};
use crate::{
    Access, Jobs, Limits, NodeSource, Nodes, OtelSettings, Server, SnapshotStore, Telemetry, Tls,
    is_loopback,
};
use anyhow::{Context, bail, ensure};
use clap::Parser;
use rcomm_analyzer::simulate::Simulation;
use rcomm_analyzer::source::{
    FileSource, JobChoice, LocalSource, RingSource, SimulatedSource, Source,
};
use rcomm_analyzer::{Anchor, LiveOptions, NodeJobs, Pace};
use rcomm_recorder::publish::EndpointToken;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Runs the program `rcomm-web` with these arguments, the first of which is its name, and returns its exit code. Blocks
/// until SIGTERM or SIGINT ends the server, or it cannot serve. Ends the process if the arguments are wrong or ask for
/// help. Sets the process's `tracing` subscriber: call it at most once.
#[allow(clippy::print_stderr, reason = "a program prints its errors")]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    let cli = Cli::parse_from(arguments);
    log(cli.log_format);
    match serve(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rcomm-web: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Makes the process's log go to standard error, at the level of `RCOMM_LOG`; if that is not set or not valid, the log
/// has warnings, and information from this crate.
fn log(format: LogFormat) {
    let wanted = std::env::var("RCOMM_LOG").unwrap_or_default();
    let filter = EnvFilter::try_new(&wanted)
        .ok()
        .filter(|_| !wanted.is_empty());
    let log = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_env_filter(filter.unwrap_or_else(|| EnvFilter::new("warn,rcomm_web=info")));
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
}

/// The access rules, and the query string that carries the token; empty with `--no-token`.
fn access(cli: &Cli) -> anyhow::Result<(Access, String)> {
    let beyond_loopback = !is_loopback(&cli.listen);
    if beyond_loopback && cli.tls_cert.is_none() && !cli.plain_http {
        bail!(
            "{} can be reached from other machines: give --tls-cert and --tls-key, or --plain-http if \
             TLS is terminated in front of it",
            cli.listen
        );
    }
    if cli.no_token {
        ensure!(
            !beyond_loopback,
            "{} can be reached from other machines: --no-token is for loopback addresses only",
            cli.listen
        );
        return Ok((Access::open(), String::new()));
    }
    let token = match &cli.token_file {
        Some(path) => token_in(path)?,
        None => match std::env::var("RCOMM_WEB_TOKEN") {
            Ok(token) => token,
            Err(_) if beyond_loopback => bail!(
                "{} can be reached from other machines: pass --token-file, or set RCOMM_WEB_TOKEN",
                cli.listen
            ),
            Err(_) => Access::random_token().context("failed to generate a token")?,
        },
    };
    if token.is_empty()
        || !token
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte))
    {
        bail!(
            "the token is empty or has other characters than letters, digits, '-', '_', '.' and '~'"
        );
    }
    ensure!(
        !beyond_loopback || token.len() >= 16,
        "{} can be reached from other machines: the token needs at least 16 characters",
        cli.listen
    );
    let query = format!("?token={token}");
    Ok((Access::with_token(token), query))
}

/// The token in a file, without the white space around it.
fn token_in(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("failed to read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

fn ring_directory(cli: &Cli) -> PathBuf {
    rcomm_analyzer::source::ring_directory(cli.ring_dir.as_deref())
}

/// Whether the rings of this node are the source.
fn shows_rings(cli: &Cli) -> bool {
    let nodes = !cli.node.is_empty() || cli.nodes_dns.is_some() || cli.nodes_store.is_some();
    !nodes && cli.network.is_empty() && cli.demo.is_none() && cli.paths.is_empty()
}

/// The sources, and how their records are analyzed.
fn sources(cli: &Cli) -> anyhow::Result<(Vec<Box<dyn Source>>, LiveOptions)> {
    let (port, scheme) = (
        cli.nodes_port,
        if cli.nodes_tls { "https" } else { "http" }.to_owned(),
    );
    let nodes = match (&cli.nodes_dns, &cli.nodes_store) {
        (Some(name), _) => Some(Nodes::Dns {
            name: name.clone(),
            port,
            scheme,
        }),
        (None, Some(store)) => Some(Nodes::Store {
            store: store.clone(),
            port,
            scheme,
        }),
        (None, None) => (!cli.node.is_empty()).then(|| Nodes::List(cli.node.clone())),
    };
    if let Some(nodes) = nodes {
        let token = cli.nodes_token_file.as_deref().map(token_in).transpose()?;
        let nodes =
            NodeSource::all(nodes, token.as_deref()).context("failed to look up the nodes")?;
        return Ok((nodes, LiveOptions::default()));
    }
    if !cli.network.is_empty() {
        let file = cli.endpoint_token_file.as_deref();
        let token = file.map(token_in).transpose()?;
        let token = token.map(EndpointToken::new).transpose()?;
        let mut options = LiveOptions::default();
        options.policy.world_size = cli.network.world_size;
        return Ok((cli.network.sources(token.as_ref()), options));
    }
    if let Some(situation) = cli.demo {
        let anchor = Anchor::now();
        let now = move || anchor.moment().wall_ns;
        // The fault happens a few seconds after start-up, so that the healthy state is seen first.
        let simulation = Simulation::new(situation, cli.ranks, now() - 4_000_000_000);
        let demo = SimulatedSource::new(simulation, now);
        return Ok((vec![Box::new(demo)], LiveOptions::default()));
    }
    if cli.paths.is_empty() {
        let (directory, choice) = (ring_directory(cli), JobChoice::of(cli.job.clone()));
        NodeJobs::begin(directory.clone(), &choice, Anchor::now());
        // A directory that comes from the environment holds the rings of some jobs of this node, not of all.
        let environment_directory = std::env::var_os("RCOMM_RING_DIR").map(PathBuf::from);
        let only_rings = cli.ring_dir.is_some() && cli.ring_dir != environment_directory;
        let source: Box<dyn Source> = match only_rings {
            true => Box::new(RingSource::showing(directory, choice)),
            false => Box::new(LocalSource::new(directory, choice)),
        };
        return Ok((vec![source], LiveOptions::default()));
    }
    // Dumps are read once, so a path that is missing now stays missing.
    let is_pattern = |path: &Path| path.to_string_lossy().contains(['*', '?', '[']);
    let may_be_there = |path: &PathBuf| path.metadata().is_ok() || is_pattern(path);
    if let (Some(path), false) = (cli.paths.first(), cli.paths.iter().any(may_be_there))
        && let Err(error) = path.metadata()
    {
        bail!("{}: {error}", path.display());
    }
    let dumps = FileSource::new(cli.paths.clone());
    Ok((vec![Box::new(dumps)], LiveOptions::post_mortem()))
}

/// Serves until SIGTERM or SIGINT ends the server.
#[allow(clippy::print_stdout, reason = "the program prints its address")]
fn serve(cli: &Cli) -> anyhow::Result<()> {
    let (access, query) = access(cli)?;
    let tls = match (&cli.tls_cert, &cli.tls_key) {
        (Some(cert), Some(key)) => {
            Some(Tls::from_files(cert, key).context("failed to load the certificate")?)
        }
        _ => None,
    };
    let (sources, mut options) = sources(cli)?;
    options.policy.overdue = cli.overdue;
    let pace = Pace {
        refresh: cli.refresh,
        ..Pace::default()
    };
    let jobs = shows_rings(cli).then(|| Jobs::new(ring_directory(cli), options.clone(), pace));
    let (store, watch) =
        SnapshotStore::watch(sources, options, pace).context("failed to start watching")?;
    let telemetry =
        match OtelSettings::from_environment().context("invalid OpenTelemetry settings")? {
            Some(settings) => {
                Some(Telemetry::start(&store, settings).context("failed to start the exporter")?)
            }
            None => None,
        };
    let limits = Limits {
        connections: cli.max_connections,
        upload: cli.upload_limit.saturating_mul(1 << 20),
        ..Limits::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("rcomm/web")
        .enable_all()
        .build()
        .context("failed to start the server's threads")?;
    let served = runtime.block_on(async {
        let (scheme, access) = match tls {
            Some(_) => ("https", access.over_tls()),
            None => ("http", access),
        };
        let server = Server::bind(
            cli.listen,
            store,
            access.with_host_names(cli.host_name.clone()),
        )
        .await
        .with_context(|| format!("failed to listen on {}", cli.listen))?
        .limits(limits);
        let server = match tls {
            Some(tls) => server.tls(tls),
            None => server,
        };
        let server = match jobs {
            Some(jobs) => server.jobs(jobs),
            None => server,
        };
        let server = match &telemetry {
            Some(telemetry) => server.telemetry(telemetry),
            None => server,
        };
        // The token is printed for the user and never logged.
        println!("{scheme}://{}/{query}", server.address());
        tracing::info!(address = %server.address(), scheme, "serving");
        server.run(stopped()?).await.context("failed to serve")
    });
    runtime.shutdown_background();
    drop(telemetry);
    watch.stop();
    tracing::info!("stopped");
    served
}

/// Returns a future that completes when this program receives SIGTERM or SIGINT.
fn stopped() -> anyhow::Result<impl Future<Output = ()> + Send + 'static> {
    let mut terminate =
        signal(SignalKind::terminate()).context("failed to install the SIGTERM handler")?;
    let mut interrupt =
        signal(SignalKind::interrupt()).context("failed to install the SIGINT handler")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

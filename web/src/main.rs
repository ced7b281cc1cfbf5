//! `rcomm-web`: see the library.
#![forbid(unsafe_code)]

mod cli;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use cli::Cli;
use rcomm_analyzer::source::{FileSource, RingSource, Source};
use rcomm_analyzer::{LiveOptions, Pace};
use rcomm_recorder::record::default_directory;
use rcomm_web::{Access, Board, Server, is_loopback};
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

#[allow(clippy::print_stderr, reason = "a program tells its errors")]
fn main() -> ExitCode {
    let cli = Cli::parse();
    match serve(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rcomm-web: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// What requests must bring, and the part of the address that brings it.
fn access(cli: &Cli) -> anyhow::Result<(Access, String)> {
    if cli.no_token {
        ensure!(
            is_loopback(&cli.listen),
            "{} can be reached from other machines: --no-token is for loopback addresses only",
            cli.listen
        );
        return Ok((Access::open(), String::new()));
    }
    let token = match &cli.token_file {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("failed to read {}", path.display()))?;
            text.trim().to_owned()
        }
        None => match std::env::var("RCOMM_WEB_TOKEN") {
            Ok(token) => token,
            Err(_) => Access::random_token().context("failed to make a token")?,
        },
    };
    if token.is_empty()
        || !token
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte))
    {
        bail!("the token must be letters, digits, '-', '_', '.' and '~', at least one");
    }
    let query = format!("?token={token}");
    Ok((Access::with_token(token), query))
}

#[allow(clippy::print_stdout, reason = "the address is this program's answer")]
fn serve(cli: &Cli) -> anyhow::Result<()> {
    let (access, query) = access(cli)?;
    let (source, mut options): (Box<dyn Source>, _) = if cli.paths.is_empty() {
        let directory = cli.ring_dir.clone().unwrap_or_else(default_directory);
        let rings = RingSource::new(directory, cli.job.clone());
        (Box::new(rings), LiveOptions::default())
    } else {
        let dumps = FileSource::new(cli.paths.clone());
        (Box::new(dumps), LiveOptions::post_mortem())
    };
    options.policy.overdue = cli.overdue;
    let pace = Pace {
        refresh: cli.refresh,
        ..Pace::default()
    };
    let (board, watch) =
        Board::watch(vec![source], options, pace).context("failed to start watching")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("rcomm/web")
        .enable_all()
        .build()
        .context("failed to start the server's threads")?;
    let served = runtime.block_on(async {
        let server = Server::bind(cli.listen, board, access.also_as(cli.host_name.clone()))
            .await
            .with_context(|| format!("failed to listen on {}", cli.listen))?;
        println!("http://{}/{query}", server.address());
        server
            .run(stopped()?)
            .await
            .context("the server's socket broke")
    });
    runtime.shutdown_background();
    watch.stop();
    served
}

/// Ready when a signal asks this program to end.
fn stopped() -> anyhow::Result<impl Future<Output = ()> + Send + 'static> {
    let mut terminate = signal(SignalKind::terminate()).context("failed to watch for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to watch for SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

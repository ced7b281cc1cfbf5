//! The sources that the command line selects.

use crate::app::writer::RequestTargets;
use crate::start::cli::{Cli, CliCommand, SourceOptions};
use anyhow::Context as _;
use rcomm_analyzer::simulate::Simulation;
use rcomm_analyzer::source::{
    CollectorSource, EndpointDumps, EndpointSource, FileSource, JobChoice, RasSource, RingDumps,
    RingSource, RingThreads, SimulatedSource, WorkerServerDumps, WorkerServerSource,
    WorkerServerStacks,
};
use rcomm_analyzer::{Anchor, LiveOptions, Source};
use rcomm_recorder::publish::EndpointToken;
use rcomm_recorder::record::default_directory;
use std::path::PathBuf;

/// The sources on the command line; without any, the rings of this node's newest job.
pub(crate) fn of(
    cli: &Cli,
    anchor: Anchor,
    job: &JobChoice,
) -> anyhow::Result<Vec<Box<dyn Source>>> {
    match &cli.command {
        Some(CliCommand::Demo { situation, ranks }) => {
            let now = anchor.moment().wall_ns;
            // The number of entries that the analysis can keep for one rank.
            let window = LiveOptions::default().entry_budget / *ranks as usize;
            let simulation =
                Simulation::new(*situation, *ranks, 0).with_window(window.clamp(64, 256));
            // Start ten seconds before the fault, so that the healthy state is seen; in a script, start long after the
            // fault.
            let lead = if cli.view.once || cli.view.json {
                -60
            } else {
                10
            };
            let start = now + lead * 1_000_000_000 - simulation.fault_ns();
            let simulation = simulation.begun_at(start);
            let source = SimulatedSource::new(simulation, move || anchor.moment().wall_ns);
            Ok(vec![Box::new(source)])
        }
        Some(CliCommand::Replay { paths, .. }) => {
            Ok(vec![Box::new(FileSource::new(paths.clone()))])
        }
        _ => live(&cli.from, job),
    }
}

/// The ranks that can be asked for dumps and call stacks, and the choice of the job if rings are read. Empty for a
/// replay or a demo.
pub(crate) fn asked(cli: &Cli, job: &JobChoice) -> anyhow::Result<RequestTargets> {
    let from = &cli.from;
    let mut asked = RequestTargets::default();
    if cli.command.is_some() {
        return Ok(asked);
    }
    for source in endpoints(from)? {
        asked.dumps.push(Box::new(EndpointDumps::new(source)));
    }
    for source in worker_servers(from) {
        asked.dumps.push(Box::new(WorkerServerDumps::new(source)));
    }
    for source in worker_servers(from) {
        asked.stacks.push(Box::new(WorkerServerStacks::new(source)));
    }
    if let Some(source) = rings(from, job) {
        asked.dumps.push(Box::new(RingDumps::new(source)));
    }
    if let Some(source) = rings(from, job) {
        asked.stacks.push(Box::new(RingThreads::new(source)));
        asked.job = Some(job.clone());
    }
    Ok(asked)
}

fn live(from: &SourceOptions, job: &JobChoice) -> anyhow::Result<Vec<Box<dyn Source>>> {
    let mut sources: Vec<Box<dyn Source>> = Vec::new();
    for source in endpoints(from)? {
        sources.push(Box::new(source));
    }
    for source in worker_servers(from) {
        sources.push(Box::new(source));
    }
    for address in &from.ras {
        sources.push(Box::new(RasSource::new(address.clone())));
    }
    for address in &from.collector {
        let source = CollectorSource::new(address.clone(), token(from)?);
        sources.push(Box::new(source));
    }
    if let Some(source) = rings(from, job) {
        sources.push(Box::new(source));
    }
    Ok(sources)
}

fn token(from: &SourceOptions) -> anyhow::Result<Option<EndpointToken>> {
    let token = from.token.clone().map(EndpointToken::new).transpose();
    token.context("--token")
}

fn endpoints(from: &SourceOptions) -> anyhow::Result<Vec<EndpointSource>> {
    let token = token(from)?;
    let given = (!from.endpoint.is_empty())
        .then(|| EndpointSource::new(from.endpoint.clone(), token.clone()));
    let stores = from.store.iter();
    let stores = stores.map(|store| EndpointSource::in_store(store.clone(), token.clone()));
    Ok(given.into_iter().chain(stores).collect())
}

fn worker_servers(from: &SourceOptions) -> impl Iterator<Item = WorkerServerSource> {
    let stores = from.torch_store.iter();
    let found = stores.map(|store| WorkerServerSource::in_store(store.clone(), from.world_size));
    let given = (!from.worker_server.is_empty())
        .then(|| WorkerServerSource::at(from.worker_server.clone()));
    found.chain(given)
}

/// The rings of this node, if requested (`--rings`, `--job`) or if there is no other source.
fn rings(from: &SourceOptions, job: &JobChoice) -> Option<RingSource> {
    let nothing = from.endpoint.is_empty()
        && from.store.is_empty()
        && from.torch_store.is_empty()
        && from.worker_server.is_empty()
        && from.ras.is_empty()
        && from.collector.is_empty();
    (nothing || from.rings || from.job.is_some())
        .then(|| RingSource::showing(ring_directory(from), job.clone()))
}

/// Directory of the rings of this node's jobs.
pub(crate) fn ring_directory(from: &SourceOptions) -> PathBuf {
    from.ring_dir.clone().unwrap_or_else(default_directory)
}

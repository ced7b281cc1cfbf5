//! From the command line to what is looked at.

use crate::cli::{Cli, From, What};
use anyhow::Context as _;
use rcomm_analyzer::simulate::Simulation;
use rcomm_analyzer::source::{
    CollectorSource, EndpointSource, FileSource, RasSource, RingSource, SimulatedSource,
    WorkerServerDumps, WorkerServerSource,
};
use rcomm_analyzer::{Anchor, Source};
use rcomm_recorder::publish::EndpointToken;
use rcomm_recorder::record::default_directory;
use std::sync::Arc;

/// The sources that the command line names; the newest rings of this node where it names none.
pub(crate) fn of(cli: &Cli, anchor: Anchor) -> anyhow::Result<Vec<Box<dyn Source>>> {
    match &cli.command {
        Some(What::Demo { situation, ranks }) => {
            let now = anchor.moment().wall_ns;
            let simulation = Simulation::new(*situation, *ranks, 0);
            // Ten seconds before things go wrong, so that one sees it happen; for a script, long after.
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
        Some(What::Replay { paths, .. }) => Ok(vec![Box::new(FileSource::new(paths.clone()))]),
        _ => live(&cli.from),
    }
}

/// Ranks that can be asked to write their dumps themselves.
pub(crate) fn asked(cli: &Cli) -> Arc<[WorkerServerDumps]> {
    let from = &cli.from;
    let stores = from.torch_store.iter();
    let found = stores.map(|store| WorkerServerSource::in_store(store.clone(), from.world_size));
    let given = (!from.worker_server.is_empty() && cli.command.is_none())
        .then(|| WorkerServerSource::at(from.worker_server.clone()));
    found.chain(given).map(WorkerServerDumps::new).collect()
}

fn live(from: &From) -> anyhow::Result<Vec<Box<dyn Source>>> {
    let token = from.token.clone().map(EndpointToken::new).transpose();
    let token = token.context("--token")?;
    let mut sources: Vec<Box<dyn Source>> = Vec::new();
    if !from.endpoint.is_empty() {
        let source = EndpointSource::new(from.endpoint.clone(), token.clone());
        sources.push(Box::new(source));
    }
    for store in &from.store {
        let source = EndpointSource::in_store(store.clone(), token.clone());
        sources.push(Box::new(source));
    }
    for store in &from.torch_store {
        let source = WorkerServerSource::in_store(store.clone(), from.world_size);
        sources.push(Box::new(source));
    }
    if !from.worker_server.is_empty() {
        let source = WorkerServerSource::at(from.worker_server.clone());
        sources.push(Box::new(source));
    }
    for address in &from.ras {
        sources.push(Box::new(RasSource::new(address.clone())));
    }
    for address in &from.collector {
        let source = CollectorSource::new(address.clone(), token.clone());
        sources.push(Box::new(source));
    }
    if sources.is_empty() || from.rings || from.job.is_some() {
        let directory = from.ring_dir.clone().unwrap_or_else(default_directory);
        sources.push(Box::new(RingSource::new(directory, from.job.clone())));
    }
    Ok(sources)
}

//! The sources that the command line selects.

use crate::app::writer::RequestTargets;
use crate::start::cli::{Cli, CliCommand, SourceOptions};
use anyhow::Context as _;
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{
    CollectorSource, FileSource, JobChoice, LocalDumps, LocalSource, ProcessStacks, RingDumps,
    RingProcessFacts, RingSource, RingThreads, SimulatedSource,
};
use rcomm_analyzer::{Anchor, LiveOptions, NodeJobs, Source};
use rcomm_recorder::publish::EndpointToken;
use std::path::PathBuf;

/// The sources that the command line selects: a simulated job, files, or live sources. If it names none: the rings of a
/// job of this node that is in trouble, else of the newest; or, if no process with a ring is alive, the living
/// processes of a job without rings. The only error is an invalid token.
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
            let start = now + lead_ns(cli) - simulation.fault_ns();
            let simulation = simulation.begun_at(start);
            let source = SimulatedSource::new(simulation, move || anchor.moment().wall_ns);
            Ok(vec![Box::new(source)])
        }
        Some(CliCommand::Replay { paths, .. }) => {
            Ok(vec![Box::new(FileSource::new(paths.clone()))])
        }
        _ => live(&cli.from, anchor, job),
    }
}

/// Time from the start of the program to the fault of a simulated job, ns: a few seconds, so that the healthy state is
/// seen; negative in a script, where the fault is long past.
fn lead_ns(cli: &Cli) -> i64 {
    let is_script = cli.view.once || cli.view.json;
    if is_script {
        -60_000_000_000
    } else {
        4_000_000_000
    }
}

/// When the fault of the simulated job begins, wall clock, ns since the epoch; `None` without such a job or fault.
pub(crate) fn simulated_fault_ns(cli: &Cli, anchor: Anchor) -> Option<i64> {
    match &cli.command {
        Some(CliCommand::Demo { situation, .. }) if *situation != Situation::Healthy => {
            Some(anchor.moment().wall_ns + lead_ns(cli))
        }
        _ => None,
    }
}

/// The ranks that can be asked for dumps and call stacks and, if rings are read, the reader of facts about processes
/// and the choice of the job. Empty for a replay or a demo. The only error is an invalid token.
pub(crate) fn request_targets(cli: &Cli, job: &JobChoice) -> anyhow::Result<RequestTargets> {
    let from = &cli.from;
    let mut targets = RequestTargets::default();
    if cli.command.is_some() {
        return Ok(targets);
    }
    targets.dumps = from.network.dump_requests(token(from)?.as_ref());
    targets.stacks = from.network.stack_requests();
    let asks_for_rings = asks_for_rings(from);
    if let Some(source) = rings(from, job) {
        targets.dumps.push(match asks_for_rings {
            true => Box::new(RingDumps::new(source)),
            false => Box::new(LocalDumps::new(source, job.clone())),
        });
    }
    if let Some(source) = rings(from, job) {
        targets.stacks.push(Box::new(RingThreads::new(source)));
        if !asks_for_rings {
            targets
                .stacks
                .push(Box::new(ProcessStacks::new(job.clone())));
        }
        targets.job = Some(job.clone());
    }
    if let Some(source) = rings(from, job) {
        targets.process_facts = Some(RingProcessFacts::new(source));
    }
    Ok(targets)
}

/// The sources of a running job: those over the network that the command line names, and this node's, if the command
/// line asks for them or names no other.
fn live(
    from: &SourceOptions,
    anchor: Anchor,
    job: &JobChoice,
) -> anyhow::Result<Vec<Box<dyn Source>>> {
    let mut sources = from.network.sources(token(from)?.as_ref());
    for address in &from.collector {
        let source = CollectorSource::new(address.clone(), token(from)?);
        sources.push(Box::new(source));
    }
    if rings(from, job).is_some() {
        NodeJobs::begin(ring_directory(from), job, anchor);
    }
    if sources.is_empty() && !asks_for_rings(from) {
        sources.push(Box::new(LocalSource::new(
            ring_directory(from),
            job.clone(),
        )));
    } else if let Some(source) = rings(from, job) {
        sources.push(Box::new(source));
    }
    Ok(sources)
}

fn token(from: &SourceOptions) -> anyhow::Result<Option<EndpointToken>> {
    let token = from.token.clone().map(EndpointToken::new).transpose();
    token.context("--token")
}

/// Whether this node is read by its rings only, not by processes without rings: the user asks for that, or names the
/// directory of the rings. A directory that comes from the environment holds the rings of some jobs of this node, not
/// of all.
fn asks_for_rings(from: &SourceOptions) -> bool {
    let environment_directory = std::env::var_os("RCOMM_RING_DIR").map(PathBuf::from);
    from.rings || (from.ring_dir.is_some() && from.ring_dir != environment_directory)
}

/// The rings of this node, if requested (`--rings`, `--ring-dir`, `--job`) or if there is no other source.
fn rings(from: &SourceOptions, job: &JobChoice) -> Option<RingSource> {
    let no_other_source = from.network.is_empty() && from.collector.is_empty();
    (no_other_source || asks_for_rings(from) || from.job.is_some())
        .then(|| RingSource::showing(ring_directory(from), job.clone()))
}

/// Directory of the rings of this node's jobs.
pub(crate) fn ring_directory(from: &SourceOptions) -> PathBuf {
    rcomm_analyzer::source::ring_directory(from.ring_dir.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[test]
    fn a_named_directory_of_rings_is_read_besides_other_sources() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let directory = directory.path().display().to_string();
        let is_read = |arguments: &[&str]| {
            let arguments = ["rcomm-top"].iter().chain(arguments);
            let cli = Cli::try_parse_from(arguments).expect("the arguments are valid");
            let job = JobChoice::of(cli.from.job.clone());
            rings(&cli.from, &job).is_some()
        };
        let network = ["--endpoint", "tcp:127.0.0.1:9"];
        assert!(!is_read(&network));
        assert!(is_read(
            &[&network[..], &["--ring-dir", &directory]].concat()
        ));
    }
}

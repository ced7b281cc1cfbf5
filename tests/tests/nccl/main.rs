//! Runs jobs on device memory, each rank a process, over the simulator of NCCL and the CUDA driver: jobs that succeed,
//! and jobs with faults.
#![allow(clippy::unwrap_used)]

mod bench;
mod communicators;
mod cudarc;
mod ends;
mod groups;
mod late;
mod libraries;
mod profiled;
mod registered;
mod trouble;
mod windows;

use rcomm_recorder::publish::Dump;
use rcomm_tests::process::{Ended, Job};
use rcomm_tests::simulator;
use std::path::Path;
use std::process::Command;

const RANKS: u32 = 4;

/// Starts the ranks of a scenario; `change` may add to a rank's command.
fn start(scenario: &str, change: impl Fn(u32, &mut Command)) -> Job {
    start_of(RANKS, scenario, change)
}

/// Works as [`start`], with this number of ranks.
fn start_of(ranks: u32, scenario: &str, change: impl Fn(u32, &mut Command)) -> Job {
    let simulator = simulator::path();
    let program = env!("CARGO_BIN_EXE_device_rank");
    Job::start_as(program, ranks, scenario, |rank, command| {
        over(&simulator, command);
        command
            .env("RCOMM_INIT_TIMEOUT_MS", "20000")
            .env("RCOMM_NCCL_RAS", "0");
        change(rank, command);
    })
}

/// Makes a rank load this file both as NCCL and as the CUDA driver, since the two share the simulated devices.
fn over(library: &Path, command: &mut Command) {
    command
        .env("RCOMM_NCCL_LIB", library)
        .env("RCOMM_CUDA_LIB", library);
}

/// Runs a scenario that succeeds, however busy the machine is, and returns the output of each rank.
fn run(scenario: &str, change: impl Fn(u32, &mut Command)) -> (Job, Vec<String>) {
    let mut job = start(scenario, |rank, command| {
        command
            .env("RCOMM_TIMEOUT_MS", "60000")
            .env("RCOMM_INIT_TIMEOUT_MS", "60000");
        change(rank, command);
    });
    let ended: Vec<Ended> = (0..RANKS).map(|rank| job.wait(rank)).collect();
    // All ranks are printed: the first rank that fails is seldom the one that the others lost.
    assert!(
        ended.iter().all(|ended| ended.status.success()),
        "{scenario}: {ended:#?}"
    );
    (job, ended.into_iter().map(|ended| ended.stderr).collect())
}

/// The scenarios that succeed with any number of ranks.
const FOR_ALL: [&str; 12] = [
    "train",
    "streams",
    "graph",
    "lists",
    "memory",
    "pool",
    "windows",
    "windows_beside_launches",
    "register_during_launches",
    "deregister_used",
    "late_zeros",
    "burst",
];
/// The scenarios that need an even number of ranks.
const FOR_PAIRS: [&str; 5] = ["split", "pairs", "suspension", "estimates", "store_keys"];

/// Runs scenarios, each of which must succeed on all of these ranks.
fn run_all<'a>(ranks: u32, scenarios: impl IntoIterator<Item = &'a str>) {
    for scenario in scenarios {
        let mut job = start_of(ranks, scenario, |_, command| {
            command
                .env("RCOMM_TIMEOUT_MS", "60000")
                .env("RCOMM_INIT_TIMEOUT_MS", "60000");
            if scenario == "estimates" {
                // Only communicators that block give estimates.
                command.env("RCOMM_NCCL_BLOCKING", "1");
            }
        });
        for rank in 0..ranks {
            let ended = job.wait(rank);
            assert!(
                ended.status.success(),
                "{scenario}, rank {rank} of {ranks}: {ended:?}"
            );
        }
    }
}

#[test]
fn scenarios_succeed_with_1_rank() {
    run_all(1, FOR_ALL);
}

#[test]
fn scenarios_succeed_with_2_ranks() {
    run_all(2, FOR_ALL.into_iter().chain(FOR_PAIRS));
}

#[test]
fn scenarios_succeed_with_8_ranks() {
    run_all(8, FOR_ALL.into_iter().chain(FOR_PAIRS));
}

/// Waits for these ranks of a job, each of which must end with an error; returns the job, and how each rank ended.
fn fail(mut job: Job, ranks: impl Iterator<Item = u32>) -> (Job, Vec<(u32, Ended)>) {
    let ended = ranks.map(|rank| {
        let ended = job.wait(rank);
        assert!(!ended.status.success(), "rank {rank}: {ended:?}");
        (rank, ended)
    });
    let ended = ended.collect();
    (job, ended)
}

/// The values of this fact, in the order of a dump's communicators.
fn facts(dump: &Dump, name: &str) -> Vec<String> {
    let facts = dump.nccl_comm_state.iter().flat_map(|(_, facts)| facts);
    facts
        .filter(|(fact, _)| fact == name)
        .map(|(_, value)| value.clone())
        .collect()
}

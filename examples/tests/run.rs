//! The examples that check themselves, run as jobs of several processes.
#![allow(clippy::unwrap_used)]

use rcomm_tests::process::Job;
use std::path::PathBuf;

/// Cargo builds examples before tests, beside them.
fn program(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let build = tests.ancestors().nth(2).unwrap();
    build.join("examples").join(name)
}

/// What each rank printed, after all have ended well.
fn run(name: &str, ranks: u32) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let printed = |rank: u32| folder.path().join(rank.to_string());
    let program = program(name);
    let mut job = Job::start_as(program.to_str().unwrap(), ranks, name, |rank, command| {
        let file = std::fs::File::create(printed(rank)).unwrap();
        command.stdout(file).env("RCOMM_TIMEOUT_MS", "30000");
    });
    for rank in 0..ranks {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "{name}, rank {rank}: {ended:?}");
    }
    (0..ranks)
        .map(|rank| std::fs::read_to_string(printed(rank)).unwrap())
        .collect()
}

#[test]
fn training_on_several_ranks_follows_the_curve_of_one_process() {
    for ranks in [1, 3, 4] {
        let said = run("ddp", ranks);
        assert!(said[0].contains("the curves differ by"), "{said:?}");
    }
}

#[test]
fn a_pipeline_over_ranks_learns_what_one_process_learns() {
    let said = run("pipeline", 3);
    assert!(said[2].contains("as in one process"), "{said:?}");
}

#[test]
fn a_backend_of_the_programs_own_is_found_by_name() {
    let said = run("custom_backend", 2);
    assert_eq!(said[1], "rank 1: 2 operations, 8000 bytes\n");
}

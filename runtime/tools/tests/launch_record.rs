//! Tests the launcher's record of how its ranks end, with real processes.
#![allow(clippy::unwrap_used)]

use rcomm_recorder::publish::{LaunchRecord, LaunchedRank};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const TIME_LIMIT: Duration = Duration::from_secs(120);

fn launch(folder: &Path, script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rcomm-run"));
    command
        .args(["-n", "2", "--job-id", "a job", "--linger", "0"])
        .args(["sh", "-c", script])
        .env("RCOMM_RING_DIR", folder)
        .env_remove("RCOMM_JOB_SECRET")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn read(folder: &Path) -> Option<LaunchRecord> {
    LaunchRecord::of_job(folder, "a job").pop()
}

/// Runs the script on two ranks until both have ended. Checks the record's times and the mode of its file, and returns
/// the record.
fn run(script: &str) -> LaunchRecord {
    let folder = tempfile::tempdir().unwrap();
    launch(folder.path(), script).status().unwrap();
    let record = read(folder.path()).unwrap();
    assert!(record.started_ns > 0 && record.ended_ns >= record.started_ns);
    let path = LaunchRecord::path(folder.path(), "a job", 0);
    let mode = std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    record
}

/// The exit code and the signal with which the rank ended.
fn end(rank: &LaunchedRank) -> (Option<i32>, Option<i32>) {
    let end = rank.end.unwrap();
    assert!(end.time_ns > 0);
    (end.exit_code, end.signal)
}

fn signals(rank: &LaunchedRank) -> Vec<i32> {
    rank.sent.iter().map(|sent| sent.signal).collect()
}

#[test]
fn ranks_that_succeed_are_recorded_as_such() {
    let record = run("exit 0");
    assert_eq!((record.world_size, record.received.len()), (2, 0));
    for (index, rank) in record.ranks.iter().enumerate() {
        assert_eq!(rank.rank as usize, index);
        assert_eq!(end(rank), (Some(0), None));
        assert!(rank.end.unwrap().is_success() && rank.sent.is_empty());
    }
}

#[test]
fn the_first_failure_and_the_ranks_ended_by_the_launcher_are_recorded() {
    let record = run("if [ $RANK = 1 ]; then exit 3; fi; sleep 1000");
    assert_eq!(end(&record.ranks[1]), (Some(3), None));
    assert!(signals(&record.ranks[1]).is_empty());
    assert_eq!(end(&record.ranks[0]), (None, Some(15)));
    assert_eq!(signals(&record.ranks[0]), [15]);
    assert!(record.ranks[0].end.unwrap().time_ns >= record.ranks[1].end.unwrap().time_ns);
}

#[test]
fn a_rank_that_kills_itself_is_not_recorded_as_killed_by_the_launcher() {
    let record = run("if [ $RANK = 0 ]; then kill -9 $$; fi; sleep 1000");
    assert_eq!(end(&record.ranks[0]), (None, Some(9)));
    assert!(signals(&record.ranks[0]).is_empty());
    // The rank was not killed for lack of memory, or that is unknown because the kernel's count cannot be read.
    assert_ne!(record.ranks[0].end.unwrap().out_of_memory, Some(true));
}

#[test]
fn a_signal_to_the_launcher_is_recorded_as_received_and_as_sent() {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = launch(folder.path(), "sleep 1000").spawn().unwrap();
    let until = Instant::now() + TIME_LIMIT;
    let running = loop {
        assert!(Instant::now() < until, "there is no record");
        match read(folder.path()) {
            Some(record) => break record,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    assert_eq!(running.launcher_pid, launcher.id());
    assert!(running.ended_ns == 0 && running.ranks.iter().all(|rank| rank.end.is_none()));
    kill_process(Pid::from_child(&launcher), Signal::TERM).unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(128 + 15));
    let record = read(folder.path()).unwrap();
    let received = record.received.iter().map(|received| received.signal);
    let received: Vec<i32> = received.collect();
    assert_eq!(received, [15]);
    for rank in &record.ranks {
        assert_eq!(signals(rank), [15]);
        assert_eq!(end(rank), (None, Some(15)));
        assert!(rank.sent[0].time_ns <= rank.end.unwrap().time_ns);
    }
}

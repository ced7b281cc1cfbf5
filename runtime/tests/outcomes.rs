//! An operation that fails on one rank fails on every rank, over both transports, and every surviving rank records the
//! failure in its ring.
//!
//! Ranks are processes: this program starts itself once for each rank.
#![allow(clippy::unwrap_used)]

use rcomm::{Config, ReduceOp, World};
use rcomm_recorder::model::{Failure, FailureKind};
use rcomm_recorder::publish::RingReader;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const RANKS: u32 = 3;
/// Much longer than a test takes.
const WAIT_LIMIT: Duration = Duration::from_secs(120);
/// A time-out that no operation may reach: only the tested event may end it.
const UNREACHED: Duration = Duration::from_secs(100);
const SCENARIO: &str = "OUTCOMES_SCENARIO";
const FOLDER: &str = "OUTCOMES_FOLDER";

fn wait_until(event: &str, mut has_happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT_LIMIT;
    while !has_happened() {
        assert!(Instant::now() < deadline, "waited in vain for {event}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn result_path(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("result.{rank}"))
}

/// The body of a rank's process; does nothing when the tests are run.
#[test]
fn rank_process() {
    let Ok(scenario) = std::env::var(SCENARIO) else {
        return;
    };
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let world = World::init(Config::from_environment().unwrap()).unwrap();
    let (rank, group) = (world.rank(), world.group());
    group.barrier().unwrap();
    let mut data = vec![1.0_f32; 4];
    let sum =
        |within: Duration, data: &mut [f32]| group.within(within).all_reduce(data, ReduceOp::Sum);
    let result = match (scenario.as_str(), rank) {
        ("late", 1) => {
            wait_until("the others to time out", || {
                [0, 2]
                    .iter()
                    .all(|&rank| result_path(&folder, rank).exists())
            });
            sum(Duration::from_secs(1), &mut data)
        }
        ("late", _) => sum(Duration::from_secs(1), &mut data),
        ("abort", 0) => {
            group.abort("loss is not a number");
            sum(UNREACHED, &mut data)
        }
        ("kill", 1) => {
            let pid = rustix::process::getpid();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            Ok(())
        }
        ("mismatch", 0) => sum(UNREACHED, &mut data[..3]),
        _ => sum(UNREACHED, &mut data),
    };
    let text = result.map_or_else(|error| error.to_string(), |()| "completed".to_owned());
    let unfinished = folder.join(format!("unfinished.{rank}"));
    std::fs::write(&unfinished, text).unwrap();
    std::fs::rename(&unfinished, result_path(&folder, rank)).unwrap();
    // No rank exits before all have their result, since the exit of a rank would itself end operations.
    let survivors: &[u32] = if scenario == "kill" {
        &[0, 2]
    } else {
        &[0, 1, 2]
    };
    wait_until("all results", || {
        survivors
            .iter()
            .all(|&rank| result_path(&folder, rank).exists())
    });
    world.shutdown().ok();
}

/// Returns a port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Most processes have ended by themselves.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs a scenario. Returns for each rank what its operation returned (empty if the rank was killed) and the failures
/// in its ring.
fn run_scenario(scenario: &str, transport: &str) -> Vec<(String, Vec<Failure>)> {
    let folder = tempfile::tempdir().unwrap();
    let job = format!("outcomes-{scenario}-{transport}");
    let port = free_port().to_string();
    let ranks = (0..RANKS).map(|rank| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank_process", "--nocapture"])
            .env(SCENARIO, scenario)
            .env(FOLDER, folder.path())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .env("TORCHELASTIC_RUN_ID", &job)
            .env("RCOMM_TRANSPORT", transport)
            .env("RCOMM_SIGNAL_INTERVAL_MS", "100")
            .env("RCOMM_RING_DIR", folder.path().join("rings"))
            .env("RCOMM_DUMP_DIR", folder.path().join("dumps"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    });
    let mut ranks = Ranks(ranks.collect());
    for child in &mut ranks.0 {
        wait_until("a rank to end", || child.try_wait().unwrap().is_some());
    }
    let outcome_of = |rank: u32| {
        let ring = folder
            .path()
            .join("rings")
            .join(&job)
            .join(format!("{rank}.0.ring"));
        let ring = RingReader::attach(ring).unwrap().snapshot();
        let result = std::fs::read_to_string(result_path(folder.path(), rank));
        // The shutdown of a world closes its ring, even after an operation has failed. A killed rank writes no result,
        // and its ring stays open.
        assert_eq!(ring.closed_ns != 0, result.is_ok(), "rank {rank}");
        (result.unwrap_or_default(), ring.failures)
    };
    (0..RANKS).map(outcome_of).collect()
}

/// The first recorded failure of a rank, which ended the group's operation there.
fn first_failure((result, failures): &(String, Vec<Failure>)) -> &Failure {
    let failure = failures.first();
    let failure = failure.unwrap_or_else(|| panic!("no failure is recorded: {result}"));
    assert!(
        failure.time_ns > 0 && failure.group == Some(0),
        "{failure:?}"
    );
    failure
}

fn check_that_a_late_rank_fails_too(transport: &str) {
    let outcomes = run_scenario("late", transport);
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_ne!(
            outcome.0, "completed",
            "rank {rank} over {transport}: {outcomes:?}"
        );
        let failure = first_failure(outcome);
        assert_eq!(failure.operation.unwrap().seq, 2, "{failure:?}");
        assert!(!failure.text.is_empty());
    }
    let seen: Vec<_> = [0, 2]
        .iter()
        .map(|&rank| first_failure(&outcomes[rank]))
        .collect();
    assert!(
        seen.iter()
            .any(|failure| failure.kind == FailureKind::Timeout && failure.ranks == [1]),
        "{outcomes:?}"
    );
    assert_ne!(first_failure(&outcomes[1]).seen_by, 1, "{outcomes:?}");
}

#[test]
fn a_rank_that_arrives_after_the_time_out_fails_too_over_shared_memory() {
    check_that_a_late_rank_fails_too("shm");
}

#[test]
fn a_rank_that_arrives_after_the_time_out_fails_too_over_tcp() {
    check_that_a_late_rank_fails_too("tcp");
}

#[test]
fn the_reason_of_an_abort_reaches_every_rank() {
    for transport in ["shm", "tcp"] {
        let outcomes = run_scenario("abort", transport);
        for rank in [1, 2] {
            let expected = "rank 0 aborted the group: loss is not a number";
            assert!(
                outcomes[rank].0.contains(expected),
                "{transport}: {outcomes:?}"
            );
        }
        for outcome in &outcomes {
            let failure = first_failure(outcome);
            assert_eq!(
                failure.kind,
                FailureKind::Abort,
                "{transport}: {outcomes:?}"
            );
            assert_eq!((&failure.ranks[..], failure.seen_by), (&[0][..], 0));
            assert_eq!(failure.text, "loss is not a number");
        }
    }
}

#[test]
fn survivors_record_which_rank_was_killed() {
    for transport in ["shm", "tcp"] {
        let outcomes = run_scenario("kill", transport);
        for rank in [0, 2] {
            let failure = first_failure(&outcomes[rank]);
            assert_eq!(
                failure.kind,
                FailureKind::PeerGone,
                "{transport}: {outcomes:?}"
            );
            assert_eq!(failure.ranks, [1], "{transport}: {outcomes:?}");
        }
        assert!(outcomes[1].1.is_empty(), "{outcomes:?}");
    }
}

#[test]
fn ranks_that_disagree_record_a_mismatch() {
    for transport in ["shm", "tcp"] {
        let outcomes = run_scenario("mismatch", transport);
        for outcome in &outcomes {
            assert_eq!(
                first_failure(outcome).kind,
                FailureKind::Mismatch,
                "{transport}: {outcomes:?}"
            );
        }
    }
}

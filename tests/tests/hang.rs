//! Jobs that hang leave records, whose analysis names the culprit.
#![allow(clippy::unwrap_used)]

#[path = "../../recorder/tests/certificates/mod.rs"]
mod certificates;

use certificates::Ca;
use rcomm_analyzer::{Policy, Report, analyze};
use rcomm_recorder::model::EntryState;
use rcomm_tests::fault::Fault;
use rcomm_tests::process::{CULPRIT, Job, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::io::Write;
use std::time::{Duration, Instant};

const RANKS: u32 = 4;

fn start(fault: Fault) -> Job {
    Job::start(env!("CARGO_BIN_EXE_rank"), RANKS, fault, |_, command| {
        // The end of a process is detected by its connection, so no rank may time out before.
        if matches!(fault, Fault::None | Fault::Kill) {
            command.env("RCOMM_TIMEOUT_MS", "60000");
        }
    })
}

/// Waits until all ranks but the culprit have failed, and returns their standard error.
fn wait_for_the_others(job: &mut Job) -> Vec<(u32, String)> {
    let others = (0..RANKS).filter(|&rank| rank != CULPRIT);
    others
        .map(|rank| {
            let ended = job.wait(rank);
            assert_eq!(ended.status.code(), Some(1), "rank {rank}: {ended:?}");
            (rank, ended.stderr)
        })
        .collect()
}

fn judge(job: &Job) -> Report {
    analyze(&job.records(), &Policy::default())
}

fn assert_blames_the_culprit(report: &Report) {
    let first = report.findings.first().expect("a finding");
    assert_eq!(first.culprit_ranks, [CULPRIT], "{}", first.sentence);
    assert!(first.sentence.contains("load data"), "{}", first.sentence);
    assert_eq!(first.seq, Some(4), "{}", first.sentence);
}

#[test]
fn a_healthy_job_leaves_nothing_behind() {
    let mut job = start(Fault::None);
    for rank in 0..RANKS {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
    }
    // The last rank to end removes the rings of all.
    for rank in 0..RANKS {
        let ring = job.ring_path(rank);
        assert!(!ring.exists(), "the ring of rank {rank} is left");
        let socket = ring.with_extension("sock");
        assert!(!socket.exists(), "the endpoint of rank {rank} is left");
    }
    assert!(job.dumps().is_empty());
}

#[test]
fn a_rank_that_stops_joining_is_named_by_errors_and_analysis() {
    let mut job = start(Fault::StopJoining);
    for (rank, error) in wait_for_the_others(&mut job) {
        assert!(error.starts_with("all_reduce #4 on group "), "{error}");
        assert!(error.contains("after its issue"), "{error}");
        assert!(error.contains(&format!("arrived: rank {rank};")), "{error}");
        assert!(error.contains("dump: "), "{error}");
        // Rank 1 waits for rank 3, which waits for the culprit: its error may name rank 3 instead.
        if rank != 1 {
            let missing = "not arrived: rank 2 (last collective here is #3, in phase \"load data\"";
            assert!(error.contains(missing), "{error}");
        }
    }
    // The culprit is alive and has received the alarm: it left a dump as well.
    let dumps = wait_until("the dump of the culprit", || {
        let dumps = job.dumps();
        (dumps.len() == RANKS as usize).then_some(dumps)
    });
    for (path, dump) in &dumps {
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(path).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);
        let mut entries = dump.entries.iter();
        let has_failed = entries.any(|entry| entry.state == EntryState::Failed);
        assert!(
            !has_failed,
            "{} was made only after an operation had failed",
            path.display()
        );
    }
    assert_blames_the_culprit(&judge(&job));
}

#[test]
fn the_ring_of_a_killed_rank_has_its_last_phase_and_step() {
    let mut job = start(Fault::Kill);
    for (_, error) in wait_for_the_others(&mut job) {
        assert!(error.contains("is gone"), "{error}");
    }
    job.wait(CULPRIT);
    let ring = job.ring(CULPRIT);
    assert!(!ring.is_alive());
    assert!(!ring.is_closed());
    let record = ring.snapshot();
    let status = record.status.expect("a ring of rcomm has a status");
    assert_eq!((status.phase.as_str(), status.step), ("load data", 3));
    assert_eq!(record.entries.len(), 6);
    let report = judge(&job);
    assert_blames_the_culprit(&report);
    let sentence = &report.findings[0].sentence;
    assert!(sentence.contains("process of rank 2 is gone"), "{sentence}");
}

#[test]
fn the_ring_of_a_frozen_rank_has_its_phase_and_step() {
    let mut job = start(Fault::Freeze);
    for (rank, error) in wait_for_the_others(&mut job) {
        // Rank 1 waits for rank 3, which waits for the culprit: its error may name rank 3 instead.
        if rank != 1 {
            assert!(error.contains("no answer: rank 2"), "{error}");
        }
    }
    let ring = job.ring(CULPRIT);
    assert!(ring.is_alive());
    let status = ring
        .snapshot()
        .status
        .expect("a ring of rcomm has a status");
    assert_eq!((status.phase.as_str(), status.step), ("load data", 3));
    assert_blames_the_culprit(&judge(&job));
    let pid = i32::try_from(job.pid(CULPRIT)).ok().and_then(Pid::from_raw);
    kill_process(pid.unwrap(), Signal::CONT).unwrap();
}

#[test]
fn a_rank_that_is_seen_to_be_frozen_is_not_waited_for() {
    let began = Instant::now();
    let mut job = Job::start(
        env!("CARGO_BIN_EXE_rank"),
        RANKS,
        Fault::Freeze,
        |_, command| {
            // Ranks whose answers may still come are waited for this long.
            command.env("RCOMM_STATUS_WAIT_MS", "240000");
        },
    );
    // Rank 0 serves the store: after its error it waits for the others to leave.
    for rank in [1, 3] {
        let ended = job.wait(rank);
        assert_eq!(ended.status.code(), Some(1), "rank {rank}: {ended:?}");
        let took = began.elapsed();
        assert!(took < Duration::from_secs(120), "{took:?}: {ended:?}");
    }
    assert_blames_the_culprit(&judge(&job));
}

#[test]
fn a_killed_and_a_frozen_rank_on_hosts_with_tls_are_named_as_without() {
    let folder = tempfile::tempdir().unwrap();
    let files = Ca::new().issue(folder.path(), "rank");
    for fault in [Fault::Kill, Fault::Freeze] {
        let program = env!("CARGO_BIN_EXE_rank");
        let mut job = Job::start(program, RANKS, fault, |rank, command| {
            command
                .env("RCOMM_TLS_CERT", &files.certificate)
                .env("RCOMM_TLS_KEY", &files.key)
                .env("RCOMM_TLS_CA", &files.ca)
                .env("RCOMM_TRANSPORT", "tcp")
                .env("RCOMM_HOST_ID", (rank / 2).to_string());
            // The end of a process is detected by its connection, so no rank may time out before.
            if fault == Fault::Kill {
                command.env("RCOMM_TIMEOUT_MS", "60000");
            }
        });
        for (rank, error) in wait_for_the_others(&mut job) {
            match fault {
                Fault::Kill => assert!(error.contains("is gone"), "{error}"),
                _ if rank != 1 => assert!(error.contains("no answer: rank 2"), "{error}"),
                _ => {}
            }
        }
        assert_blames_the_culprit(&judge(&job));
    }
}

#[test]
fn the_ring_of_a_rank_stuck_in_teardown_has_its_last_phase() {
    let mut job = start(Fault::StickInTeardown);
    wait_for_the_others(&mut job);
    let status = job.ring(CULPRIT).snapshot().status;
    assert_eq!(
        status.expect("a ring of rcomm has a status").phase,
        "load data"
    );
    assert_blames_the_culprit(&judge(&job));
}

#[test]
fn a_dump_that_cannot_be_written_is_noted_in_the_error_of_the_operation() {
    let no_directory = tempfile::NamedTempFile::new().unwrap();
    let change = |_: u32, command: &mut std::process::Command| {
        command.env("RCOMM_DUMP_DIR", no_directory.path());
    };
    let mut job = Job::start(
        env!("CARGO_BIN_EXE_rank"),
        RANKS,
        Fault::StopJoining,
        change,
    );
    for (_, error) in wait_for_the_others(&mut job) {
        assert!(
            error.contains("no dump: failed to create dump directory "),
            "{error}"
        );
        assert!(error.starts_with("all_reduce #4 on group "), "{error}");
    }
}

#[test]
fn a_byte_in_the_pipe_makes_a_dump_of_a_running_rank() {
    let pipes = tempfile::tempdir().unwrap();
    for variable in ["RCOMM_DUMP_PIPE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] {
        let stem = pipes.path().join(variable);
        let change = |_: u32, command: &mut std::process::Command| {
            command
                .env(variable, &stem)
                .env("RCOMM_TIMEOUT_MS", "60000");
        };
        let job = Job::start(
            env!("CARGO_BIN_EXE_rank"),
            RANKS,
            Fault::StopJoining,
            change,
        );
        let path = pipes.path().join(format!("{variable}{CULPRIT}.pipe"));
        let mut pipe = wait_until("the FIFO", || {
            std::fs::OpenOptions::new().write(true).open(&path).ok()
        });
        pipe.write_all(b"1").unwrap();
        let (_, dump) = wait_until("the dump", || job.dumps().pop());
        assert_eq!(dump.identity.rank, Some(CULPRIT));
        assert!(
            dump.identity.reason.contains("requested by"),
            "{:?}",
            dump.identity
        );
    }
}

//! A job continues after one of its processes was killed: without it, or with another process in its place.
#![allow(clippy::unwrap_used)]

use rcomm::store::TcpStoreServer;
use rcomm_analyzer::load::{LoadOptions, load_all};
use rcomm_analyzer::{Policy, analyze};
use rcomm_recorder::publish::RingReader;
use rcomm_tests::process::{CULPRIT, Job, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::net::Ipv4Addr;
use std::process::Command;

const RANKS: u32 = 4;

#[test]
fn the_remaining_ranks_of_a_job_continue_without_a_restart() {
    for transport in ["shm", "tcp"] {
        let program = env!("CARGO_BIN_EXE_rank");
        let mut job = Job::start_as(program, RANKS, "shrink", |_, command| {
            command
                .env("RCOMM_TRANSPORT", transport)
                // The end of the process is detected by the connection.
                .env("RCOMM_TIMEOUT_MS", "60000");
        });
        for rank in (0..RANKS).filter(|&rank| rank != CULPRIT) {
            let ended = job.wait(rank);
            assert!(
                ended.status.success(),
                "{transport}, rank {rank}: {ended:?}"
            );
            let output = &ended.stderr;
            assert!(output.contains("lost: all_reduce #4 on group "), "{output}");
            assert!(output.contains("absent: [2]"), "{output}");
            assert!(output.contains("sum: 3 of ranks [0, 1, 3]"), "{output}");
        }
        assert!(!job.wait(CULPRIT).status.success());
        // The rings of the other processes stay beside that of the killed one, and show that they ended in order.
        let is_closed = |rank| RingReader::attach(job.ring_path(rank)).unwrap().is_closed();
        assert!([0, 1, 3].into_iter().all(is_closed) && !is_closed(CULPRIT));
        // The remaining ranks wrote dumps at the failure.
        assert!(job.dumps().len() >= 3, "{transport}");
    }
}

#[test]
fn an_issued_monitored_barrier_names_a_killed_process_and_its_group_stays_usable() {
    let program = env!("CARGO_BIN_EXE_rank");
    let mut job = Job::start_as(program, RANKS, "monitored-barrier", |_, command| {
        command.env("RCOMM_TIMEOUT_MS", "60000");
    });
    for rank in (0..RANKS).filter(|&rank| rank != CULPRIT) {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        let output = &ended.stderr;
        assert!(
            output.contains("missed: monitored_barrier #1 on"),
            "{output}"
        );
        assert!(output.contains("rank 2 did not arrive within"), "{output}");
        let number = format!("number: {}", if rank == 1 { 0 } else { rank });
        assert!(output.contains(&number), "{output}");
    }
}

/// Starts a job whose culprit is killed, and starts another process in its place once that process has ended.
fn replace_the_culprit(argument: &str, change: impl Fn(&mut Command)) -> Job {
    let program = env!("CARGO_BIN_EXE_rank");
    let mut job = Job::start_as(program, RANKS, argument, |_, command| change(command));
    assert!(!job.wait(CULPRIT).status.success());
    job.join(CULPRIT, RANKS, change);
    job
}

#[test]
fn a_job_goes_on_with_a_process_in_place_of_one_that_was_killed() {
    for transport in ["shm", "tcp"] {
        let mut job = replace_the_culprit("grow", |command| {
            command
                .env("RCOMM_TRANSPORT", transport)
                // The end of the process is detected by the connection.
                .env("RCOMM_TIMEOUT_MS", "60000");
        });
        for rank in 0..RANKS {
            let ended = job.wait(rank);
            assert!(
                ended.status.success(),
                "{transport}, rank {rank}: {ended:?}"
            );
            let output = &ended.stderr;
            let sum = "sum: 10 of ranks [0, 1, 2, 3] in attempt 1";
            assert!(output.contains(sum), "{transport}, rank {rank}: {output}");
            assert_eq!(
                output.contains("lost: barrier #4"),
                rank != CULPRIT,
                "{output}"
            );
        }
        // The job has ended well: no ring is left, not even of the first attempt.
        wait_until("the rings to be removed", || {
            (0..RANKS)
                .all(|rank| !job.ring_path(rank).exists())
                .then_some(())
        });
        assert!(job.dumps().len() >= 3, "{transport}");
    }
}

#[test]
fn the_records_of_a_job_that_was_made_anew_show_its_newest_hang_alone() {
    let mut job = replace_the_culprit("grow-and-hang", |command| {
        command.env("RCOMM_TIMEOUT_MS", "4000");
    });
    for rank in [0, 2, 3] {
        let ended = job.wait(rank);
        let output = &ended.stderr;
        assert_eq!(ended.status.code(), Some(1), "rank {rank}: {ended:?}");
        let missed = "not arrived: rank 1";
        assert!(output.lines().last().unwrap().contains(missed), "{output}");
    }
    let rings = job.folder().join("rings");
    for paths in [vec![rings.clone()], vec![rings, job.folder().join("dumps")]] {
        let (dumps, _) = load_all(&paths, &LoadOptions::default()).unwrap();
        let dumps: Vec<_> = dumps.into_iter().map(|loaded| loaded.dump).collect();
        assert!(dumps.iter().any(|dump| dump.identity.attempt == 0));
        let report = analyze(&dumps, &Policy::default());
        let first = report.findings.first().unwrap();
        assert_eq!(first.culprit_ranks, [1], "{}", first.sentence);
        assert!(first.sentence.contains("load data"), "{}", first.sentence);
        // No finding accuses another rank, nor the process that was killed in the first attempt.
        let accused = |rank| {
            report
                .findings
                .iter()
                .any(|finding| finding.culprit_ranks.contains(&rank))
        };
        assert!(
            ![0, CULPRIT, 3].into_iter().any(accused),
            "{:?}",
            report.findings
        );
    }
}

#[test]
fn a_second_replacement_that_no_round_asks_for_leaves_the_record_of_the_first() {
    // The store outlives the ranks, as a launcher's does.
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let port = server.port().to_string();
    let change = |command: &mut Command| {
        command
            .env("MASTER_PORT", &port)
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env("RCOMM_TIMEOUT_MS", "60000");
    };
    let mut job = replace_the_culprit("grow-and-hang", change);
    let first_path = job
        .ring_path(CULPRIT)
        .with_file_name(format!("{CULPRIT}.1.ring"));
    let first_pid = job.pid(CULPRIT);
    let has_operations = || {
        let ring = RingReader::attach(&first_path).ok()?;
        (ring.records() > 0).then_some(())
    };
    wait_until("the first replacement to work", has_operations);
    let pid = Pid::from_raw(first_pid.try_into().unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    assert!(!job.wait(CULPRIT).status.success());
    // The newest round still has a place for this rank, to which the first replacement came.
    job.join(CULPRIT, RANKS, |command| {
        change(command);
        command.env("RCOMM_INIT_TIMEOUT_MS", "3000");
    });
    let ended = job.wait(CULPRIT);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let sentence = "its ranks wanted a world of 4 with the processes of ranks 0, 1, 3, to which another process came as \
                    rank 2 before this one, and nothing else within 3.0 s";
    assert!(ended.stderr.contains(sentence), "{}", ended.stderr);
    let ring = RingReader::attach(&first_path).unwrap();
    assert!(ring.records() > 0);
    assert_eq!(ring.identity().pid, first_pid);
    // This is the ring of the process that was killed in attempt 0.
    let first_ring = RingReader::attach(job.ring_path(CULPRIT)).unwrap();
    assert!(first_ring.records() > 0 && !first_ring.is_closed());
}

#[test]
fn ranks_that_no_process_joins_learn_who_did_not_come_and_go_on_without_it() {
    let program = env!("CARGO_BIN_EXE_rank");
    let mut job = Job::start_as(program, RANKS, "grow-in-vain", |_, command| {
        command.env("RCOMM_TIMEOUT_MS", "60000");
    });
    for rank in [0, 1, 3] {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        let output = &ended.stderr;
        let missing = "vain: not all 4 ranks arrived in time: missing rank 2";
        assert!(output.contains(missing), "rank {rank}: {output}");
        let sum = "sum: 7 of ranks [0, 1, 3] in attempt 0";
        assert!(output.contains(sum), "rank {rank}: {output}");
    }
}

#[test]
fn a_process_that_no_job_asks_for_says_so() {
    let program = env!("CARGO_BIN_EXE_rank");
    let mut job = Job::start_as(program, 2, "grow-and-hang", |rank, command| {
        let (joins, limit) = if rank == 1 {
            ("1", "5000")
        } else {
            ("0", "60000")
        };
        command
            .env("RCOMM_JOIN", joins)
            .env("RCOMM_INIT_TIMEOUT_MS", limit);
    });
    let ended = job.wait(1);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let sentence = "its ranks did not call World::grow within 5.0 s";
    assert!(ended.stderr.contains(sentence), "{}", ended.stderr);
}

//! A job that continues after one of its processes was killed.
#![allow(clippy::unwrap_used)]

use rcomm_tests::process::{CULPRIT, Job};

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
        // The job ended well, so that rings were removed; the failure before that was dumped.
        assert!(!job.ring_path(0).exists());
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
        assert!(output.contains("these did not arrive: rank 2"), "{output}");
        let number = format!("number: {}", if rank == 1 { 0 } else { rank });
        assert!(output.contains(&number), "{output}");
    }
}

//! Registers and deregisters memory while operations are in progress.

use super::groups::lines;
use super::{RANKS, run, start};

#[test]
fn memory_can_be_registered_while_launches_are_not_finished() {
    for blocking in ["0", "1"] {
        let (_job, outputs) = run("register_during_launches", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_SIM", "launch_delay_ms=5");
        });
        for output in outputs {
            assert!(output.contains("registered "), "{output}");
        }
    }
}

#[test]
fn memory_that_an_operation_uses_is_deregistered_after_it() {
    for blocking in ["0", "1"] {
        let (_job, outputs) = run("deregister_used", |_, command| {
            command.env("RCOMM_NCCL_BLOCKING", blocking);
        });
        for output in outputs {
            assert!(
                output.contains("deregistered after the operation"),
                "{output}"
            );
        }
    }
}

#[test]
fn memory_that_an_aborted_operation_uses_stays_registered() {
    let mut job = start("deregister_hung", |_, command| {
        command
            // Two operations end: a broadcast when the communicator is made, and an all-reduce.
            .env("RCOMM_SIM", "hang_after=2")
            .env("RCOMM_TIMEOUT_MS", "3000");
    });
    for rank in 0..RANKS {
        let ended = job.wait(rank);
        let output = &ended.stderr;
        assert!(ended.status.success(), "rank {rank}: {output}");
        let refused = lines(output, "refused:");
        assert!(refused[0].contains("all_reduce #2"), "{output}");
    }
}

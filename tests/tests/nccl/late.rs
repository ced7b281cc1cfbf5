//! Tests memory that the program drops before the device, or the library, has used it, and ranks that come late to an
//! operation or an abort.

use super::groups::lines;
use super::{RANKS, fail, run, start};
use rcomm_tests::process::CULPRIT;

#[test]
fn operations_succeed_although_memory_was_dropped_before_it_was_zeroed() {
    let (_job, outputs) = run("late_zeros", |_, _| {});
    for output in outputs {
        assert!(output.contains("given up and written"), "{output}");
    }
}

#[test]
fn buffers_of_an_operation_that_the_library_still_launches_are_never_freed() {
    let (_job, outputs) = run("late_launch", |_, command| {
        command
            .env("RCOMM_NCCL_BLOCKING", "0")
            .env("RCOMM_SIM", "launch_delay_ms=3000")
            .env("RCOMM_NCCL_ERROR_HANDLING", "none");
    });
    for output in outputs {
        let error = lines(&output, "given up:")[0];
        assert!(error.contains("aborted by the program"), "{output}");
    }
}

#[test]
fn a_group_of_calls_of_which_one_is_refused_returns_its_buffers() {
    for blocking in ["0", "1"] {
        let (_job, outputs) = run("late_group", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                // Two calls succeed: the communicator's own broadcast, and the first of the list.
                .env("RCOMM_SIM", "call_error_after=2")
                .env("RCOMM_NCCL_ERROR_HANDLING", "none");
        });
        for output in outputs {
            let error = lines(&output, "refused:")[0];
            assert!(error.contains("ncclBroadcast failed"), "{output}");
        }
    }
}

#[test]
fn an_operation_that_an_abort_has_stopped_is_not_reported_as_completed() {
    let (_job, outputs) = run("late_poll", |_, command| {
        command.env("RCOMM_SIM", "hang_after=1");
    });
    for output in outputs {
        assert!(output.contains("stopped: stopped by the test"), "{output}");
    }
}

#[test]
fn a_rank_that_comes_when_the_others_have_given_up_gets_an_error_and_no_wrong_data() {
    for blocking in ["0", "1"] {
        let mut job = start("after_the_others", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_TIMEOUT_MS", "4000");
        });
        for rank in 0..RANKS {
            let ended = job.wait(rank);
            assert!(ended.status.success(), "rank {rank}: {ended:?}");
            let error = lines(&ended.stderr, "lost:")[0];
            let cause = "gave the group up, which can end operations of the other ranks";
            assert!(rank != CULPRIT || error.contains(cause), "{error}");
        }
    }
}

#[test]
fn an_operation_that_ends_because_another_rank_aborts_its_group_does_not_succeed() {
    for blocking in ["0", "1"] {
        let mut job = start("aborted_elsewhere", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_TIMEOUT_MS", "60000");
        });
        for rank in 0..RANKS {
            let ended = job.wait(rank);
            assert!(ended.status.success(), "rank {rank}: {ended:?}");
            let lost = lines(&ended.stderr, "lost:");
            let caused = lost.iter().filter(|error| error.contains("on purpose"));
            assert_eq!(
                caused.count(),
                usize::from(rank != CULPRIT),
                "rank {rank}: {ended:?}"
            );
        }
    }
}

#[test]
fn a_window_is_not_closed_while_the_library_may_still_put() {
    let mut job = start("late_put", |rank, command| {
        command
            .env("RCOMM_TIMEOUT_MS", "60000")
            .env("RCOMM_NCCL_ERROR_HANDLING", "none");
        if rank == CULPRIT {
            command.env("RCOMM_SIM", "put_delay_ms=6000");
        }
    });
    for rank in 0..RANKS {
        let ended = job.wait(rank);
        let output = &ended.stderr;
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        let refused = lines(output, "not closed:")[0];
        if rank == CULPRIT {
            let sentence =
                "NCCL did not finish the call, which may have to connect to other ranks,";
            assert!(lines(output, "put:")[0].contains(sentence), "{output}");
            let closed = "the group was aborted before: put #1";
            assert!(lines(output, "after:")[0].contains(closed), "{output}");
            assert!(refused.contains(sentence), "{output}");
        } else {
            assert!(refused.contains("did not arrive: rank 2"), "{output}");
        }
    }
}

#[test]
fn ranks_end_although_a_kernel_that_hangs_uses_their_buffers() {
    let job = start("train", |rank, command| {
        command.env("RCOMM_NCCL_ERROR_HANDLING", "none");
        if rank == CULPRIT {
            command.env("RCOMM_SIM", "hang_after=4");
        }
    });
    // Freeing memory waits for the kernel, which never ends.
    for (rank, ended) in fail(job, 0..RANKS).1 {
        assert_eq!(ended.status.code(), Some(1), "rank {rank}: {ended:?}");
    }
}

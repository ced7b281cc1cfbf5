//! Memory that was freed before the device, or the library, used it.

use super::groups::lines;
use super::{RANKS, fail, run, start};
use rcomm_tests::process::CULPRIT;

#[test]
fn memory_that_is_given_up_before_it_is_zeroed_stays_until_then() {
    let (_job, said) = run("late_zeros", |_, _| {});
    for said in said {
        assert!(said.contains("given up and written"), "{said}");
    }
}

#[test]
fn buffers_of_an_operation_that_the_library_is_still_at_are_never_freed() {
    let (_job, said) = run("late_launch", |_, command| {
        command
            .env("RCOMM_NCCL_BLOCKING", "0")
            .env("RCOMM_SIM", "launch_delay_ms=3000")
            .env("RCOMM_NCCL_ERROR_HANDLING", "none");
    });
    for said in said {
        let error = lines(&said, "given up:")[0];
        assert!(error.contains("aborted by the program"), "{said}");
    }
}

#[test]
fn a_group_of_calls_of_which_one_is_refused_gives_its_buffers_back() {
    for blocking in ["0", "1"] {
        let (_job, said) = run("late_group", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                // The communicator's own broadcast, and the first of the list.
                .env("RCOMM_SIM", "call_error_after=2")
                .env("RCOMM_NCCL_ERROR_HANDLING", "none");
        });
        for said in said {
            let error = lines(&said, "refused:")[0];
            assert!(error.contains("ncclBroadcast failed"), "{said}");
        }
    }
}

#[test]
fn an_operation_that_an_abort_has_stopped_is_not_taken_for_done() {
    let (_job, said) = run("late_look", |_, command| {
        command.env("RCOMM_SIM", "hang_after=1");
    });
    for said in said {
        assert!(said.contains("stopped: stopped by the test"), "{said}");
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
        let said = &ended.stderr;
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        let refused = lines(said, "not closed:")[0];
        if rank == CULPRIT {
            let sentence = "did not connect to the other ranks before the deadline";
            assert!(lines(said, "put:")[0].contains(sentence), "{said}");
            let closed = "the group was aborted before: put #1";
            assert!(lines(said, "after:")[0].contains(closed), "{said}");
            assert!(refused.contains(sentence), "{said}");
        } else {
            assert!(refused.contains("did not arrive: rank 2"), "{said}");
        }
    }
}

#[test]
fn what_is_left_to_the_library_is_not_freed_under_it() {
    let job = start("train", |rank, command| {
        command.env("RCOMM_NCCL_ERROR_HANDLING", "none");
        if rank == CULPRIT {
            command.env("RCOMM_SIM", "hang_after=4");
        }
    });
    // They end, although a kernel never does and freeing memory waits for it.
    for (rank, ended) in fail(job, 0..RANKS).1 {
        assert_eq!(ended.status.code(), Some(1), "rank {rank}: {ended:?}");
    }
}

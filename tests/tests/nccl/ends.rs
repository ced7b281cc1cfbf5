//! Communicators that end while they are in use, and the host's cost of an operation.

use super::groups::lines;
use super::libraries::without;
use super::{RANKS, over, run, start};

/// The scenario's ranks all succeed and report that their communicators have ended.
fn end_in_time(scenario: &str, change: impl Fn(u32, &mut std::process::Command)) {
    let mut job = start(scenario, change);
    for rank in 0..RANKS {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        assert!(
            ended.stderr.contains("ended in time"),
            "rank {rank}: {ended:?}"
        );
    }
}

#[test]
fn two_communicators_that_hang_are_aborted_together() {
    // Without a revoke, an abort frees memory, which waits for the kernels of the other one.
    let (_folder, old) = without(&["ncclCommRevoke"]);
    for library in [rcomm_tests::simulator::path(), old] {
        end_in_time("two_hung", |_, command| {
            over(&library, command);
            // Two broadcasts as the communicators are made, and one message.
            command.env("RCOMM_SIM", "hang_after=3");
        });
    }
}

#[test]
fn the_events_of_a_burst_of_operations_are_not_all_kept() {
    let (_job, said) = run("burst", |_, _| {});
    for said in said {
        let most = lines(&said, "events: ")[0];
        let most = most.split(' ').next().and_then(|most| most.parse().ok());
        // Else the test would not need the limit.
        assert!(most.is_some_and(|most: u64| most > 9_000), "{said}");
    }
}

#[test]
fn a_graph_that_is_still_there_is_named_by_the_shutdown() {
    let mut job = start("graph_at_shutdown", |_, command| {
        command.env("RCOMM_TIMEOUT_MS", "60000");
    });
    for rank in 0..RANKS {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        let error = lines(&ended.stderr, "shutdown:")[0];
        assert!(
            error.contains("1 CUDA graphs hold operations of this group: destroy them first"),
            "{error}"
        );
    }
}

#[test]
fn a_graph_that_is_still_there_does_not_hold_up_an_abort() {
    let (_folder, old) = without(&["ncclCommRevoke"]);
    for library in [rcomm_tests::simulator::path(), old] {
        end_in_time("graph_at_abort", |_, command| {
            over(&library, command);
            // A broadcast as the communicator is made, an all-reduce, and the one in the graph.
            command.env("RCOMM_SIM", "hang_after=3");
        });
    }
}

#[test]
fn memory_and_nan_checks_do_not_wait_for_a_kernel_that_hangs() {
    let mut job = start("beside_hung", |_, command| {
        command
            .env("RCOMM_TIMEOUT_MS", "10000")
            .env("RCOMM_NAN_CHECK", "1")
            // A broadcast as the communicator is made, and the all-reduce before.
            .env("RCOMM_SIM", "hang_after=2");
    });
    for rank in 0..RANKS {
        let ended = job.wait(rank);
        let said = &ended.stderr;
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        assert!(
            said.contains("went on while it hung"),
            "rank {rank}: {said}"
        );
    }
}

#[test]
fn a_reduction_that_the_device_cannot_do_is_refused_and_the_group_goes_on() {
    for blocking in ["0", "1"] {
        let (_job, said) = run("refused_first", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_SIM", "capability=8");
        });
        for said in said {
            let refused = lines(&said, "refused:")[0];
            assert!(refused.contains("compute capability 9.0"), "{said}");
        }
    }
}

#[test]
fn memory_is_registered_beside_launches_that_are_not_finished() {
    for blocking in ["0", "1"] {
        let (_job, said) = run("register_beside", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_SIM", "launch_delay_ms=5");
        });
        for said in said {
            assert!(said.contains("registered "), "{said}");
        }
    }
}

#[test]
fn an_operation_makes_so_many_calls_of_the_driver_and_no_more() {
    for blocking in ["0", "1"] {
        let (_job, said) = run("driver_calls", |_, command| {
            command.env("RCOMM_NCCL_BLOCKING", blocking);
        });
        for said in said {
            // Context in and out, capture mode twice, one look at the stream, two records, one wait. The last three
            // are one where the program works on the group's own stream.
            assert_eq!(
                lines(&said, "calls on "),
                [
                    "a stream of the program's: 800 for 100 operations",
                    "the group's stream: 600 for 100 operations"
                ],
                "{said}"
            );
        }
    }
}

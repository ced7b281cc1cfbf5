//! Tests communicators that end while they are in use, how many events a burst of operations keeps, and how many calls
//! of the driver an operation makes.

use super::groups::lines;
use super::libraries::without;
use super::{RANKS, over, run, start};
use rcomm_tests::process::CULPRIT;

/// Asserts that all ranks of the scenario succeed and report that their communicators have ended in time.
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
    // Without a revoke, an abort frees memory, which waits for the kernels of the other communicator too.
    let (_folder, old) = without(&["ncclCommRevoke"]);
    for library in [rcomm_tests::simulator::path(), old] {
        end_in_time("two_hung", |_, command| {
            over(&library, command);
            // Three operations end: two broadcasts as the communicators are made, and one message.
            command.env("RCOMM_SIM", "hang_after=3");
        });
    }
}

#[test]
fn two_communicators_that_wait_for_a_missing_rank_are_aborted_together() {
    let (_folder, old) = without(&["ncclCommRevoke"]);
    for library in [rcomm_tests::simulator::path(), old] {
        let mut job = start("two_absent", |_, command| {
            over(&library, command);
            command.env("RCOMM_TIMEOUT_MS", "5000");
        });
        for rank in (0..RANKS).filter(|&rank| rank != CULPRIT) {
            let ended = job.wait(rank);
            assert!(ended.status.success(), "rank {rank}: {ended:?}");
            let lost = lines(&ended.stderr, "lost:");
            assert_eq!(lost.len(), 2, "rank {rank}: {ended:?}");
            assert!(
                ended.stderr.contains("ended in time"),
                "rank {rank}: {ended:?}"
            );
        }
    }
}

#[test]
fn an_abort_stops_an_operation_of_another_group_that_hangs_and_is_in_its_way() {
    let (_folder, old) = without(&["ncclCommRevoke"]);
    let libraries = [rcomm_tests::simulator::path(), old];
    let mut jobs = Vec::new();
    for scenario in ["other_group_hung", "other_world_hung"] {
        let modes = |library| [(library, "0"), (library, "1")];
        for (library, blocking) in libraries.iter().flat_map(modes) {
            // All jobs wait most of the time, so they run at once.
            let job = start(scenario, |_, command| {
                over(library, command);
                command
                    .env("RCOMM_NCCL_BLOCKING", blocking)
                    .env("RCOMM_TIMEOUT_MS", "600000")
                    .env("RCOMM_INIT_TIMEOUT_MS", "60000");
            });
            jobs.push((scenario, job));
        }
    }
    for (scenario, mut job) in jobs {
        let mut named = 0;
        for rank in (0..RANKS).filter(|&rank| rank != CULPRIT) {
            let ended = job.wait(rank);
            let output = &ended.stderr;
            assert!(ended.status.success(), "{scenario}, rank {rank}: {output}");
            assert!(
                output.contains("ended in time"),
                "{scenario}, rank {rank}: {output}"
            );
            let other = lines(output, "other:");
            let cause = "NCCL waits for all kernels of the device";
            let mut causes = other.iter().filter(|line| line.contains(cause));
            if scenario == "other_world_hung" {
                // Both worlds have a group of this name.
                let label = "the communicators of group default_pg of job ";
                assert!(
                    causes
                        .clone()
                        .all(|line| line.contains(label) && line.contains("-second")),
                    "{output}"
                );
            }
            named += usize::from(causes.next().is_some());
        }
        // A rank may also learn from the library that another rank has aborted.
        assert!(named > 0, "{scenario}: no rank names the cause");
    }
}

#[test]
fn an_abort_that_a_replayed_graph_may_delay_names_the_group_of_the_graph() {
    let (_folder, old) = without(&["ncclCommRevoke"]);
    let mut job = start("other_graph_hung", |_, command| {
        over(&old, command);
        command
            .env("RCOMM_TIMEOUT_MS", "60000")
            .env("RCOMM_INIT_TIMEOUT_MS", "60000");
    });
    for rank in (0..RANKS).filter(|&rank| rank != CULPRIT) {
        let ended = job.wait(rank);
        let output = &ended.stderr;
        assert!(ended.status.success(), "rank {rank}: {output}");
        let named = lines(output, "in the way:");
        assert!(named[0].starts_with("default_pg (1: "), "{output}");
        assert!(output.contains("ended in time"), "{output}");
    }
}

#[test]
fn an_abort_leaves_another_group_alone_that_is_idle_or_only_slow() {
    let (_folder, old) = without(&["ncclCommRevoke"]);
    let mut jobs = Vec::new();
    for scenario in ["other_group_idle", "other_group_slow"] {
        for library in [&rcomm_tests::simulator::path(), &old] {
            let job = start(scenario, |_, command| {
                over(library, command);
                command
                    .env("RCOMM_TIMEOUT_MS", "60000")
                    .env("RCOMM_INIT_TIMEOUT_MS", "60000");
            });
            jobs.push((scenario, job));
        }
    }
    for (scenario, mut job) in jobs {
        for rank in 0..RANKS {
            let ended = job.wait(rank);
            let output = &ended.stderr;
            assert!(ended.status.success(), "{scenario}, rank {rank}: {output}");
            let losses = usize::from(rank != CULPRIT);
            assert_eq!(lines(output, "lost:").len(), losses, "{output}");
        }
    }
}

#[test]
fn a_rank_that_is_killed_while_it_captures_ends_the_others() {
    let mut job = start("kill_capturing", |_, command| {
        command.env("RCOMM_TIMEOUT_MS", "60000");
    });
    for rank in 0..RANKS {
        let ended = job.wait(rank);
        assert_eq!(ended.status.success(), rank != CULPRIT, "{rank}: {ended:?}");
        if rank != CULPRIT {
            assert!(
                ended.stderr.contains("lost: all_reduce") && ended.stderr.contains("ended in time"),
                "rank {rank}: {ended:?}"
            );
        }
    }
}

#[test]
fn communicators_of_all_pairs_that_hang_are_aborted_together() {
    let (_folder, old) = without(&["ncclCommRevoke"]);
    for library in [rcomm_tests::simulator::path(), old] {
        end_in_time("many_hung", |_, command| {
            over(&library, command);
            // Thirteen operations end: a broadcast for each of the seven communicators, and six messages.
            command.env("RCOMM_SIM", "hang_after=13");
        });
    }
}

#[test]
fn a_burst_of_operations_keeps_a_limited_number_of_events() {
    let (_job, outputs) = run("burst", |_, _| {});
    for output in outputs {
        let peak = lines(&output, "events: ")[0];
        let peak = peak.split(' ').next().and_then(|peak| peak.parse().ok());
        // With fewer events in use at once, the limit would not be reached.
        assert!(peak.is_some_and(|peak: u64| peak > 9_000), "{output}");
    }
}

#[test]
fn shutdown_reports_graphs_that_still_hold_operations() {
    let mut job = start("graph_at_shutdown", |_, command| {
        command.env("RCOMM_TIMEOUT_MS", "60000");
    });
    for rank in 0..RANKS {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        let error = lines(&ended.stderr, "shutdown:")[0];
        assert!(
            error.contains("CUDA graphs (1: ")
                && error.contains(") hold operations of this group: destroy them first"),
            "{error}"
        );
        let facts = lines(&ended.stderr, "communicator ")[0];
        assert!(facts.contains("(\"live_graphs\", \"1: "), "{facts}");
    }
}

#[test]
fn a_graph_that_still_holds_operations_does_not_delay_an_abort() {
    let (_folder, old) = without(&["ncclCommRevoke"]);
    for library in [rcomm_tests::simulator::path(), old] {
        end_in_time("graph_at_abort", |_, command| {
            over(&library, command);
            // Three operations end: a broadcast as the communicator is made, an all-reduce, and the one in the graph.
            command.env("RCOMM_SIM", "hang_after=3");
        });
    }
}

#[test]
fn ranks_that_wait_for_a_missing_rank_abort_in_time_although_a_graph_exists() {
    for blocking in ["0", "1"] {
        let mut job = start("graph_absent", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_TIMEOUT_MS", "5000");
        });
        for rank in (0..RANKS).filter(|&rank| rank != CULPRIT) {
            let ended = job.wait(rank);
            assert!(ended.status.success(), "rank {rank}: {ended:?}");
            assert!(ended.stderr.contains("ended in time"), "{ended:?}");
        }
    }
}

#[test]
fn aborts_that_never_return_are_waited_for_together() {
    // Where the library can revoke a communicator, the call that never returns is the one that frees it afterwards.
    let (_folder, old) = without(&["ncclCommRevoke"]);
    for library in [rcomm_tests::simulator::path(), old] {
        end_in_time("three_stuck", |_, command| {
            over(&library, command);
            command.env("RCOMM_SIM", "abort_hangs=1");
        });
    }
}

#[test]
fn groups_that_are_dropped_and_never_end_are_waited_for_together() {
    end_in_time("three_dropped", |_, command| {
        command.env("RCOMM_SIM", "abort_hangs=1");
    });
}

#[test]
fn memory_and_nan_checks_do_not_wait_for_a_kernel_that_hangs() {
    let mut job = start("while_hung", |_, command| {
        command
            .env("RCOMM_TIMEOUT_MS", "10000")
            .env("RCOMM_NAN_CHECK", "1")
            // Two operations end: a broadcast as the communicator is made, and the first all-reduce.
            .env("RCOMM_SIM", "hang_after=2");
    });
    for rank in 0..RANKS {
        let ended = job.wait(rank);
        let output = &ended.stderr;
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        assert!(
            output.contains("went on while it hung"),
            "rank {rank}: {output}"
        );
    }
}

#[test]
fn a_reduction_that_the_device_cannot_do_is_refused_and_the_group_stays_usable() {
    for blocking in ["0", "1"] {
        let (_job, outputs) = run("refused_first", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_SIM", "capability=8");
        });
        for output in outputs {
            let refused = lines(&output, "refused:")[0];
            assert!(refused.contains("compute capability 9.0"), "{output}");
        }
    }
}

#[test]
fn an_operation_makes_5_to_9_driver_calls_and_2_allocations() {
    for (blocking, timing) in [("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")] {
        let (_job, outputs) = run("host_cost", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_NCCL_TIMING", timing);
        });
        // An operation asks which context is current, switches the capture mode twice, asks whether the stream is
        // captured and whether it has pending work, and records its own end. If the stream has pending work, the
        // operation also records the end of that and waits for it; then only one operation of 64 asks for pending work.
        // The group's own stream is not asked. A thread without the context pushes and pops it. With timing on, one
        // more event is recorded. The allocations are shared objects: the operation as the group has it and as the
        // queue has it.
        let calls = match timing {
            "0" => [600, 701, 500, 800],
            _ => [700, 801, 600, 900],
        };
        let streams = [
            "an idle stream of the program",
            "a busy stream of the program",
            "the group's stream",
            "a thread without context",
        ];
        let expected: Vec<String> = std::iter::zip(streams, calls)
            .map(|(stream, calls)| {
                format!("{stream}: {calls} calls, 200 allocations for 100 operations")
            })
            .collect();
        for output in outputs {
            assert_eq!(lines(&output, "cost on "), expected, "{output}");
        }
    }
}

#[test]
fn timing_is_switched_on_and_off_while_a_job_runs_and_costs_nothing_while_it_is_off() {
    let (_job, outputs) = run("switched_timing", |_, command| {
        command.env("RCOMM_NCCL_TIMING", "0");
    });
    for output in outputs {
        let calls = [600, 700, 600].map(|calls| {
            format!("the program's stream: {calls} calls, 200 allocations for 100 operations")
        });
        assert_eq!(lines(&output, "cost on "), calls, "{output}");
        let timed = ["[false, false]", "[true, true]", "[false, false]"];
        assert_eq!(lines(&output, "timed: "), timed, "{output}");
        // The operation that was issued while timing was off has no time, also if timing is on when it starts.
        let issued = lines(&output, "issued while on and off: ");
        assert_eq!(issued, ["[true, false]"], "{output}");
    }
}

/// Runs bursts of operations whose ends only the issuing thread could look for: the watchdog's interval is longer than
/// the test.
fn bursts(timing: &str) -> Vec<String> {
    let (_job, outputs) = run("bursts", |_, command| {
        command
            .env("RCOMM_NCCL_TIMING", timing)
            .env("RCOMM_WATCHDOG_INTERVAL_MS", "600000");
    });
    outputs
}

#[test]
fn operations_that_have_ended_give_their_events_to_later_ones_though_no_thread_asks_for_them() {
    for output in bursts("0") {
        let made = lines(&output, "events: ")[0];
        let made = made.split(' ').next().and_then(|made| made.parse().ok());
        // 2,000 operations use two events each.
        assert!(made.is_some_and(|made: u64| made < 1_000), "{output}");
    }
}

#[test]
fn the_thread_that_issues_operations_reads_no_times() {
    for output in bursts("1") {
        assert_eq!(lines(&output, "times read: "), ["0"], "{output}");
    }
}

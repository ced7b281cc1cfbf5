//! Tests what a program asks of communicators besides operations (memory, the order of launches, estimates, tags,
//! algorithms), and which communicators are refused.

use super::groups::lines;
use super::libraries::without;
use super::trouble::on_culprit;
use super::{RANKS, fail, over, run, start};
use rcomm_tests::process::CULPRIT;

#[test]
fn the_memory_of_communicators_is_released_and_restored() {
    for blocking in ["0", "1"] {
        let (_job, outputs) = run("suspension", |_, command| {
            command.env("RCOMM_NCCL_BLOCKING", blocking);
        });
        for output in outputs {
            let refused = lines(&output, "refused:");
            assert_eq!(refused.len(), 3, "{output}");
            assert!(
                refused[0].contains("all_reduce")
                    && refused[0].contains("call `resume` on all its ranks first")
                    && refused[0].contains("suspended already"),
                "{output}"
            );
            assert!(refused[2].contains("not suspended"), "{output}");
        }
    }
}

#[test]
fn the_release_of_memory_is_refused_with_the_name_of_the_missing_function() {
    let (_folder, library) = without(&["ncclCommSuspend", "ncclCommMemStats"]);
    let (_job, outputs) = run("no_suspension", |_, command| over(&library, command));
    for output in outputs {
        let refused = lines(&output, "refused:");
        let sentence = "needs ncclCommSuspend (NCCL 2.29.7); this library is 2.30.7";
        assert!(refused[0].contains(sentence), "{output}");
        assert!(refused[1].contains("ncclCommMemStats"), "{output}");
    }
}

#[test]
fn launches_that_are_ordered_cannot_wait_for_each_other_on_a_device_that_holds_one_kernel() {
    let begin = |order: &str, timeout: &str| {
        start("shared_device", |_, command| {
            command
                .env("RCOMM_SIM", "kernels_at_once=1")
                .env("RCOMM_TIMEOUT_MS", timeout)
                .env("RCOMM_INIT_TIMEOUT_MS", "60000")
                .env("RCOMM_NCCL_LAUNCH_ORDER", order);
        })
    };
    // Both jobs run at once, since one waits most of the time.
    let (mut unordered, mut ordered) = (begin("library", "5000"), begin("implicit", "60000"));
    let mut lost = 0;
    for rank in 0..RANKS {
        let ended = ordered.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        assert!(ended.stderr.contains("both are done"), "{ended:?}");
        let ended = unordered.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        lost += lines(&ended.stderr, "lost:").len();
    }
    // A rank that gives up frees its device, and another may get through then.
    assert!(
        lost > 0,
        "no launch without an order has waited for another"
    );
}

#[test]
fn an_order_of_launches_is_refused_where_the_library_lacks_it_or_the_environment_disables_it() {
    let cases = [
        ("version=22505", None, "NCCL 2.26.0 and later"),
        (
            "",
            Some("0"),
            "NCCL_LAUNCH_ORDER_IMPLICIT is \"0\" in the environment, and must be 1",
        ),
    ];
    for (faults, variable, sentence) in cases {
        let job = start("train", |_, command| {
            command
                .env("RCOMM_SIM", faults)
                .env("RCOMM_NCCL_LAUNCH_ORDER", "implicit");
            if let Some(value) = variable {
                command.env("NCCL_LAUNCH_ORDER_IMPLICIT", value);
            }
        });
        for (_, ended) in fail(job, 0..1).1 {
            assert!(ended.stderr.contains(sentence), "{ended:?}");
        }
    }
}

#[test]
fn the_time_of_a_collective_is_estimated_and_nothing_runs() {
    let (_job, outputs) = run("estimates", |_, command| {
        command.env("RCOMM_NCCL_BLOCKING", "1");
    });
    for output in outputs {
        assert_eq!(lines(&output, "estimate:").len(), 6, "{output}");
        let refused = lines(&output, "refused:");
        let [message, exchange, block, root] = refused[..] else {
            panic!("{output}");
        };
        for refused in [message, exchange, block] {
            let sentence = "NCCL estimates the time of one collective on single buffers";
            assert!(refused.contains(sentence), "{refused}");
        }
        assert!(root.contains("broadcast"), "{root}");
    }
}

#[test]
fn an_estimate_is_refused_where_the_library_or_the_communicator_has_none() {
    let (_folder, old) = without(&["ncclGroupSimulateEnd"]);
    let cases: [(&str, &str, &str); 3] = [
        // On communicators that do not block, a simulated end of a group of calls launches the operation.
        ("", "0", "only on communicators that block"),
        (
            "no_estimate=1",
            "1",
            "NCCL has no estimate of this operation's time",
        ),
        // Two operations connect as the communicator is made and used. The library connects again for the estimate, and
        // hangs.
        (
            "connect_hangs_after=2",
            "1",
            "NCCL did not finish the call, which may have to connect to other ranks, before the deadline",
        ),
    ];
    for (faults, blocking, sentence) in cases {
        let mut job = start("no_estimates", |_, command| {
            command
                .env("RCOMM_SIM", faults)
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_TIMEOUT_MS", "60000");
        });
        for rank in 0..RANKS {
            let ended = job.wait(rank);
            let refused = lines(&ended.stderr, "refused:");
            assert!(
                !refused.is_empty() && refused.iter().all(|refusal| refusal.contains(sentence)),
                "{sentence}: {ended:?}"
            );
            // After a time-out the world cannot be shut down.
            assert!(ended.status.success() || refused.len() == 2, "{ended:?}");
        }
    }
    let (_job, outputs) = run("no_estimates", |_, command| {
        over(&old, command);
        command.env("RCOMM_NCCL_BLOCKING", "1");
    });
    for output in outputs {
        let sentence = "an estimate of times needs ncclGroupSimulateEnd (NCCL 2.22)";
        assert!(lines(&output, "refused:")[0].contains(sentence), "{output}");
    }
}

#[test]
fn collectives_pass_their_number_to_a_profiler_plug_in_if_the_environment_names_one() {
    // If the plug-in cannot be loaded, NCCL goes on without it.
    let (_job, outputs) = run("tags", |_, command| {
        command.env("NCCL_PROFILER_PLUGIN", "/nowhere/libnccl-profiler.so");
    });
    for output in outputs {
        let tags = lines(&output, "tag:");
        let expected = ["1 of #1", "2 of #2", "3 of #3"];
        assert_eq!(tags, expected, "{output}");
    }
    let (_folder, old) = without(&["ncclAllReduceConfig"]);
    for library in [Some(old), None] {
        let (_job, outputs) = run("tags", |_, command| {
            command.env_remove("NCCL_PROFILER_PLUGIN");
            if let Some(library) = &library {
                over(library, command);
                command.env("NCCL_PROFILER_PLUGIN", "/nowhere/libnccl-profiler.so");
            }
        });
        for output in outputs {
            assert_eq!(
                lines(&output, "tag:"),
                ["0 of #1", "0 of #2", "0 of #3"],
                "{output}"
            );
        }
    }
}

#[test]
fn gather_and_scatter_succeed_where_calls_have_a_configuration() {
    let (_job, outputs) = run("lists", |_, command| {
        command.env("NCCL_PROFILER_PLUGIN", "/nowhere/libnccl-profiler.so");
    });
    for output in outputs {
        assert!(output.contains("gathered and scattered"), "{output}");
    }
}

#[test]
fn a_pair_of_ranks_has_two_communicators_or_one() {
    for (number, made) in [(None, 4), (Some("2"), 4), (Some("1"), 2)] {
        let (_job, outputs) = run("pairs", |_, command| {
            if let Some(number) = number {
                command.env("RCOMM_NCCL_COMMS_PER_PAIR", number);
            }
        });
        for output in outputs {
            let expected = [0, 1].map(|round| format!("{made} after round {round}"));
            assert_eq!(lines(&output, "pairs:"), expected, "{number:?}: {output}");
        }
    }
}

#[test]
fn ranks_that_both_send_first_need_a_communicator_for_each_direction() {
    for (number, timeout_ms, sentence) in [("2", "60000", "exchanged"), ("1", "5000", "lost: ")] {
        let (_job, outputs) = run("both_send_first", |_, command| {
            command
                .env("RCOMM_NCCL_COMMS_PER_PAIR", number)
                .env("RCOMM_TIMEOUT_MS", timeout_ms);
        });
        for output in outputs {
            assert!(output.contains(sentence), "{number}: {output}");
        }
    }
}

#[test]
fn a_communicator_is_not_destroyed_after_an_error_that_no_operation_has_seen() {
    for blocking in ["0", "1"] {
        let (_job, outputs) = run("broken_at_the_end", |_, command| {
            command.env("RCOMM_NCCL_BLOCKING", blocking);
        });
        for output in outputs {
            assert!(
                output.contains("closed, 0 destroyed after an error"),
                "{output}"
            );
        }
    }
}

#[test]
fn a_communicator_that_the_library_has_made_without_ranks_is_refused() {
    // The program's own thread makes a communicator only where calls do not block and the group cannot be split off.
    let (_folder, library) = without(&["ncclCommSplit"]);
    let (_job, outputs) = run("open_group_of_calls", |_, command| {
        over(&library, command);
        command.env("RCOMM_NCCL_BLOCKING", "0");
    });
    for output in outputs {
        let refused = lines(&output, "refused:");
        let sentence = "NCCL has made a communicator of 0 ranks instead of 4";
        assert!(refused[0].contains(sentence), "{output}");
    }
}

#[test]
fn a_communicator_without_ranks_is_refused_where_it_is_made_at_the_first_operation() {
    let (_job, outputs) = run("open_group_of_calls_lazily", |_, command| {
        command
            .env("RCOMM_NCCL_LAZY", "1")
            .env("RCOMM_NCCL_BLOCKING", "0");
    });
    for output in outputs {
        // A rank may learn of the refusal from another one first.
        let refused = lines(&output, "refused:");
        let sentence = "NCCL has made a communicator of 0 ranks instead of 4";
        assert!(refused[0].contains(sentence), "{output}");
    }
}

#[test]
fn the_rings_of_a_communicator_that_is_split_off_connect_under_the_deadline() {
    for blocking in ["0", "1"] {
        let mut job = start("split_connects", |rank, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_TIMEOUT_MS", "60000")
                .env("RCOMM_INIT_TIMEOUT_MS", "10000");
            // Two operations connect first: a broadcast as the communicator is made, and an all-reduce.
            on_culprit("connect_hangs_after=2")(rank, command);
        });
        let ended = job.wait(CULPRIT);
        let output = &ended.stderr;
        let split = lines(output, "split:");
        let sentence = "the ranks did not all take part in time";
        assert!(split[0].contains(sentence), "{blocking}: {output}");
    }
}

#[test]
fn a_group_exists_once_its_first_broadcast_has_ended_on_the_device() {
    for blocking in ["0", "1"] {
        let job = start("train", |_, command| {
            command
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_TIMEOUT_MS", "60000")
                .env("RCOMM_INIT_TIMEOUT_MS", "5000")
                .env("RCOMM_SIM", "hang_after=0");
        });
        let sentence = "the broadcast that connects the communicator's rings did not end on the device in time";
        for (rank, ended) in fail(job, 0..RANKS).1 {
            // A rank may learn of the failure from another one first.
            let error = ended.stderr;
            assert!(error.contains(sentence), "rank {rank}: {error}");
            assert!(!error.contains("all_reduce"), "rank {rank}: {error}");
        }
    }
}

#[test]
fn no_key_of_a_communicator_or_a_window_stays_in_the_store() {
    for blocking in ["0", "1"] {
        let (_job, outputs) = run("store_keys", |_, command| {
            command.env("RCOMM_NCCL_BLOCKING", blocking);
        });
        for output in outputs {
            assert!(output.contains("end of keys"), "{output}");
            assert!(lines(&output, "key:").is_empty(), "{output}");
        }
    }
}

#[test]
fn segments_of_a_pool_are_registered_with_its_groups_until_they_are_freed() {
    for blocking in ["0", "1"] {
        let (_job, outputs) = run("pool", |_, command| {
            command.env("RCOMM_NCCL_BLOCKING", blocking);
        });
        for output in outputs {
            assert!(output.contains("the pool is empty"), "{output}");
            for (refused, sentence) in [
                (
                    "a group that is not registered",
                    "is not registered with this group",
                ),
                ("a segment that is gone", "has no segment at 0x"),
                ("no bytes", "a segment cannot have 0 bytes"),
                (
                    "a second pool of the device",
                    "another pool is installed for cuda:",
                ),
            ] {
                let reasons = lines(&output, &format!("refused {refused}:"));
                assert!(reasons[0].contains(sentence), "{output}");
            }
        }
    }
}

#[test]
fn a_pool_is_refused_with_the_name_of_the_missing_function() {
    for function in ["ncclMemAlloc", "ncclCommRegister"] {
        let (_folder, library) = without(&[function]);
        let (_job, outputs) = run("no_pool", |_, command| over(&library, command));
        for output in outputs {
            let sentence = format!("a pool of memory needs {function} (NCCL 2.19)");
            assert!(output.contains(&sentence), "{output}");
        }
    }
}

#[test]
fn collectives_are_limited_to_the_algorithms_that_are_selected() {
    // The simulator's bits: tree 1, ring 2; 0 if the call is not limited.
    const RING: &str = "2";
    const TREE_AND_RING: &str = "3";
    const NOT_LIMITED: &str = "0";
    // If none of the selected algorithms is available, the library chooses by itself.
    for (selection, used) in [
        ("ring", RING),
        ("^tree", RING),
        ("Tree,RING", TREE_AND_RING),
        ("nvls", NOT_LIMITED),
    ] {
        let (_job, outputs) = run("algorithms", |_, command| {
            command.env("RCOMM_NCCL_ALGORITHMS", selection);
        });
        for output in outputs {
            assert_eq!(
                lines(&output, "algorithms:"),
                [used],
                "{selection}: {output}"
            );
        }
    }
}

#[test]
fn a_selection_of_algorithms_is_refused_where_ranks_differ_or_the_library_has_none() {
    let job = start("algorithms", |rank, command| {
        let selection = if rank == CULPRIT { "tree" } else { "ring" };
        command
            .env("RCOMM_NCCL_ALGORITHMS", selection)
            // Each rank stays until all have reported their status.
            .env("RCOMM_STATUS_WAIT_MS", "20000");
    });
    for (_, ended) in fail(job, 0..RANKS).1 {
        let error = ended.stderr;
        let sentence = "different algorithms: rank 0 has ring, rank 2 has tree";
        assert!(error.contains(sentence), "{error}");
    }
    let (_folder, old) = without(&["ncclAllReduceConfig"]);
    let job = start("algorithms", |_, command| {
        over(&old, command);
        command.env("RCOMM_NCCL_ALGORITHMS", "ring");
    });
    for (_, ended) in fail(job, 0..1).1 {
        let error = ended.stderr;
        let sentence = "a selection of algorithms needs ncclAllReduceConfig (NCCL 2.32)";
        assert!(error.contains(sentence), "{error}");
    }
}

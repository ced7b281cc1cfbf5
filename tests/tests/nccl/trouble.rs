//! Runs jobs with faults that the simulator injects.

use super::libraries::without;
use super::{RANKS, facts, fail, over, run, start, start_of};
use rcomm_recorder::publish::Dump;
use rcomm_tests::process::{CULPRIT, wait_until};
use rcomm_tests::simulator;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

/// Injects a fault on the culprit only.
pub(super) fn on_culprit(faults: &str) -> impl Fn(u32, &mut Command) {
    move |rank, command| {
        if rank == CULPRIT {
            command.env("RCOMM_SIM", faults);
        }
    }
}

fn others() -> impl Iterator<Item = u32> {
    (0..RANKS).filter(|&rank| rank != CULPRIT)
}

#[test]
fn a_rank_that_hangs_in_a_kernel_ends_in_a_time_out_a_dump_and_an_abort() {
    let job = start("train", on_culprit("hang_after=4"));
    let (job, ended) = fail(job, 0..RANKS);
    for (rank, ended) in &ended {
        let error = &ended.stderr;
        assert_eq!(ended.status.code(), Some(1), "rank {rank}: {error}");
        assert!(
            error.contains("all_reduce #4 on group default_pg"),
            "{error}"
        );
        assert!(error.contains("dump: "), "{error}");
    }
    let dumps = job.dumps();
    assert_eq!(dumps.len(), RANKS as usize);
    for (path, dump) in &dumps {
        let path = path.display();
        // The dump was made before the clean-up: the communicator is as it was when it hung.
        assert_eq!(facts(dump, "stage"), ["ready"], "{path}");
        assert_eq!(facts(dump, "launched"), ["4"], "{path}");
        assert_eq!(facts(dump, "n_ranks"), ["4"], "{path}");
        assert_eq!(facts(dump, "nccl_version"), ["2.30.7"], "{path}");
        let rank = dump.identity.rank.unwrap();
        assert_eq!(facts(dump, "device"), [format!("cuda:{rank}")], "{path}");
        assert!(facts(dump, "stream")[0].starts_with("0x"), "{path}");
        let (id, _) = &dump.nccl_comm_state[0];
        assert_eq!(
            id, &dumps[0].1.nccl_comm_state[0].0,
            "ranks have different ids of the communicator"
        );
    }
}

#[test]
fn a_ring_has_the_number_of_a_communicator_however_the_group_is_made() {
    for lazy in ["0", "1"] {
        let job = start("train", |rank, command| {
            command.env("RCOMM_NCCL_LAZY", lazy);
            on_culprit("hang_after=4")(rank, command);
        });
        let (job, _) = fail(job, 0..RANKS);
        let ids = |dump: &Dump| -> Vec<String> {
            let ids = dump.nccl_comm_state.iter().map(|(id, _)| id.clone());
            ids.collect()
        };
        let (_, dump) = &job.dumps()[0];
        let expected = ids(dump);
        assert!(expected[0].starts_with("0x"), "{expected:?}");
        for rank in 0..RANKS {
            let ring = job.ring(rank).snapshot();
            assert_eq!(ids(&ring), expected, "rank {rank}");
            assert_eq!(facts(&ring, "group"), facts(dump, "group"), "rank {rank}");
        }
    }
}

/// Injects faults on the last of this many ranks, which must end with an error that has the sentence. Every other rank
/// must end.
fn end_with_faults(ranks: u32, faults: &[(&str, &str)]) {
    for (faults, sentence) in faults {
        let mut job = start_of(ranks, "train", |rank, command| {
            command.env("RCOMM_TIMEOUT_MS", "5000");
            if rank == ranks - 1 {
                command.env("RCOMM_SIM", faults);
            }
        });
        for rank in 0..ranks {
            let ended = job.wait(rank);
            let error = &ended.stderr;
            assert!(
                rank != ranks - 1 || !ended.status.success() && error.contains(sentence),
                "{faults}, rank {rank} of {ranks}: {ended:?}"
            );
        }
    }
}

/// Faults that also end a rank which is alone in its group, with the sentence of its error.
const LONE_FAULTS: [(&str, &str); 3] = [
    ("async_error_after=4", "requested by RCOMM_SIM"),
    ("launch_error_after=4", "Cuda failure 999"),
    ("no_memory_after=2", "CUDA_ERROR_OUT_OF_MEMORY"),
];

/// Faults that need peers.
const PEER_FAULTS: [(&str, &str); 3] = [
    // The first operation is the broadcast that connects the ranks.
    ("hang_after=4", "all_reduce #4 on group default_pg"),
    ("connect_hangs_after=1", "all_reduce #1 on group default_pg"),
    ("hang_after=0", "did not end on the device in time"),
];

#[test]
fn faults_end_a_rank_that_is_alone() {
    // No broadcast connects a rank that is alone.
    end_with_faults(1, &[("hang_after=4", "all_reduce #5 on group default_pg")]);
    end_with_faults(1, &LONE_FAULTS);
}

#[test]
fn faults_of_the_last_rank_end_2_ranks() {
    end_with_faults(2, &LONE_FAULTS);
    end_with_faults(2, &PEER_FAULTS);
}

#[test]
fn faults_of_the_last_rank_end_8_ranks() {
    end_with_faults(8, &LONE_FAULTS);
    end_with_faults(8, &PEER_FAULTS);
}

/// The watchdog's message for an operation that the library is still starting.
const STUCK: &str = "all_reduce #1 on group default_pg: not done after 2.0 s; rank 2 is still inside the \
                     library's call that starts it";

#[test]
fn a_first_operation_that_never_connects_ends_at_its_deadline() {
    let job = start("train", on_culprit("connect_hangs_after=1"));
    let (job, ended) = fail(job, 0..RANKS);
    for (rank, ended) in &ended {
        let error = &ended.stderr;
        assert_eq!(ended.status.code(), Some(1), "rank {rank}: {error}");
        let sentence = match *rank {
            CULPRIT => STUCK,
            // A rank that reaches the operation late sees the others leave before its own time-out.
            _ => "all_reduce #1 on group default_pg",
        };
        assert!(error.contains(sentence), "rank {rank}: {error}");
        assert!(error.contains("dump: "), "rank {rank}: {error}");
    }
    let dumps = job.dumps();
    let culprit = dumps
        .iter()
        .find(|(_, dump)| dump.identity.rank == Some(CULPRIT));
    let (_, dump) = culprit.expect("the dump of the rank that hangs");
    // The dump was made during the call.
    assert_eq!(facts(dump, "stage"), ["inside a call"]);
}

#[test]
fn a_first_operation_that_never_connects_returns_although_nothing_is_aborted() {
    let job = start("train", |rank, command| {
        command.env("RCOMM_NCCL_ERROR_HANDLING", "none");
        on_culprit("connect_hangs_after=1")(rank, command);
    });
    for (rank, ended) in fail(job, 0..RANKS).1 {
        let error = ended.stderr;
        assert!(
            error.contains("all_reduce #1 on group default_pg"),
            "rank {rank}: {error}"
        );
    }
}

#[test]
fn a_call_that_blocks_forever_is_dumped_and_ends_the_process_if_that_is_wanted() {
    let job = start("train", |rank, command| {
        command.env("RCOMM_NCCL_ERROR_HANDLING", "skip_clean_up");
        on_culprit("connect_hangs_after=1")(rank, command);
    });
    let (job, ended) = fail(job, 0..RANKS);
    let (_, culprit) = &ended[CULPRIT as usize];
    assert!(culprit.stderr.contains(STUCK), "{culprit:?}");
    const SIGABRT: i32 = 6;
    assert_eq!(culprit.status.signal(), Some(SIGABRT), "{culprit:?}");
    assert_eq!(job.dumps().len(), RANKS as usize);
}

#[test]
fn an_abort_returns_although_the_library_never_does() {
    // The first library stops pending operations, and hangs when it frees the communicator; the second hangs at once.
    let (_folder, old) = without(&["ncclCommRevoke"]);
    for library in [simulator::path(), old] {
        let job = start("train", |rank, command| {
            let faults = match rank {
                CULPRIT => "hang_after=4,abort_hangs=1",
                _ => "abort_hangs=1",
            };
            over(&library, command);
            command.env("RCOMM_SIM", faults);
        });
        for (_, ended) in fail(job, 0..RANKS).1 {
            assert_eq!(ended.status.code(), Some(1), "{ended:?}");
            assert!(ended.stderr.contains("all_reduce #4"), "{ended:?}");
        }
    }
}

#[test]
fn an_asynchronous_error_has_the_librarys_text() {
    let job = start("train", on_culprit("async_error_after=4"));
    let (_job, ended) = fail(job, 0..RANKS);
    let (_, culprit) = &ended[CULPRIT as usize];
    let error = &culprit.stderr;
    assert!(
        error.contains("remote process exited or there was a network error (code 6)"),
        "{error}"
    );
    assert!(error.contains("requested by RCOMM_SIM"), "{error}");
}

#[test]
fn a_launch_that_fails_has_the_librarys_text() {
    let job = start("train", on_culprit("launch_error_after=4"));
    let (_job, ended) = fail(job, 0..RANKS);
    let error = &ended[CULPRIT as usize].1.stderr;
    assert!(error.contains("failed: unhandled cuda error"), "{error}");
    assert!(error.contains("Cuda failure 999"), "{error}");
    assert!(error.contains("dump: "), "{error}");
}

#[test]
fn a_device_without_memory_is_named_on_all_ranks() {
    let job = start("train", |rank, command| {
        // Each rank stays until all have reported their status.
        command.env("RCOMM_STATUS_WAIT_MS", "20000");
        on_culprit("no_memory_after=0")(rank, command);
    });
    let (_job, ended) = fail(job, 0..RANKS);
    for (rank, ended) in ended {
        let error = ended.stderr;
        assert!(
            error.contains("CUDA_ERROR_OUT_OF_MEMORY"),
            "rank {rank}: {error}"
        );
        if rank != CULPRIT {
            assert!(
                error.contains("rank 2 could not join"),
                "rank {rank}: {error}"
            );
        }
    }
}

#[test]
fn an_allocation_that_fails_is_the_error_of_the_rank_that_asked_for_it() {
    // The first allocation is the group's own, the second that of the first step; the third fails.
    let job = start("train", on_culprit("no_memory_after=2"));
    let (_job, ended) = fail(job, std::iter::once(CULPRIT));
    let error = &ended[0].1.stderr;
    assert!(
        error.contains("cuMemAllocAsync failed: CUDA_ERROR_OUT_OF_MEMORY (code 2)"),
        "{error}"
    );
    assert!(error.contains("1024 bytes on cuda:2"), "{error}");
}

#[test]
fn a_rank_that_dies_as_it_joins_is_named_by_all_others() {
    let job = start("train", |rank, command| {
        command.env("RCOMM_INIT_TIMEOUT_MS", "10000");
        on_culprit("die_in_init=1")(rank, command);
    });
    let (_job, ended) = fail(job, others());
    for (rank, ended) in ended {
        let error = ended.stderr;
        assert!(
            error.contains("arrived and has not reported since: rank 2"),
            "rank {rank}: {error}"
        );
    }
}

#[test]
fn a_slow_start_is_waited_for_and_a_start_too_slow_is_named() {
    run("train", on_culprit("init_delay_ms=1500"));
    let job = start("train", |rank, command| {
        command.env("RCOMM_INIT_TIMEOUT_MS", "10000");
        on_culprit("init_delay_ms=60000")(rank, command);
    });
    let (_job, ended) = fail(job, 0..RANKS);
    for (rank, ended) in ended {
        let error = ended.stderr;
        assert!(
            error.contains("did not all join the communicator in time")
                || error.contains("could not join"),
            "rank {rank}: {error}"
        );
    }
}

#[test]
fn an_error_of_one_rank_ends_what_is_pending_on_the_others_if_that_is_wanted() {
    for variable in ["RCOMM_NCCL_PROPAGATE_ERROR", "TORCH_NCCL_PROPAGATE_ERROR"] {
        let job = start("linger", |rank, command| {
            // No rank times out.
            command.env("RCOMM_TIMEOUT_MS", "80000").env(variable, "1");
            on_culprit("launch_error_after=4")(rank, command);
        });
        let (job, ended) = fail(job, 0..RANKS);
        for (rank, ended) in ended {
            let error = ended.stderr;
            let sentence = match rank {
                CULPRIT => "failed: unhandled cuda error",
                _ => "cancelled: rank 2 failed: all_reduce #4 on group default_pg",
            };
            assert!(error.contains(sentence), "{variable}, rank {rank}: {error}");
        }
        assert_eq!(job.dumps().len(), RANKS as usize);
    }
}

#[test]
fn an_operation_that_waits_for_a_stuck_stream_times_out_with_a_dump_and_an_abort() {
    let (job, outputs) = run("stuck", |_, command| {
        command.env("RCOMM_TIMEOUT_MS", "2000");
    });
    for output in outputs {
        assert!(
            output.contains("stuck: all_reduce #1 on group default_pg"),
            "{output}"
        );
    }
    assert_eq!(job.dumps().len(), RANKS as usize);
}

#[test]
fn a_rank_that_does_not_join_a_split_is_named_and_the_others_end() {
    let mut job = start("late_split", |_, command| {
        command.env("RCOMM_INIT_TIMEOUT_MS", "10000");
    });
    for rank in others() {
        let ended = job.wait(rank);
        let output = &ended.stderr;
        // Rank 3 waits for its partner before it calls NCCL.
        let sentence = match rank {
            3 => "group pair: waited for rank 2 until the deadline",
            _ => "did not arrive at the split of the group: rank 2",
        };
        assert!(output.contains(sentence), "rank {rank}: {output}");
        assert!(output.contains("after: "), "rank {rank}: {output}");
        assert!(ended.status.code().is_some(), "rank {rank}: {ended:?}");
    }
}

#[test]
fn a_driver_call_that_does_not_return_is_reported_by_the_monitor() {
    let job = start("train", |rank, command| {
        command.env("RCOMM_HEARTBEAT_TIMEOUT_MS", "1000");
        // The other ranks must not time out first.
        command.env("RCOMM_TIMEOUT_MS", "60000");
        on_culprit("query_hangs_after=3")(rank, command);
    });
    let dumps = wait_until("the dumps of all ranks", || {
        let dumps = job.dumps();
        (dumps.len() == RANKS as usize).then_some(dumps)
    });
    for (path, dump) in dumps {
        let reason = dump.identity.reason;
        assert!(
            reason.contains("the watchdog is stuck"),
            "{}: {reason}",
            path.display()
        );
    }
}

#[test]
fn the_modes_of_error_handling_end_the_process_or_do_not() {
    for (torch_mode, rcomm_mode, dies) in [
        ("0", "none", false),
        ("1", "tear_down", true),
        ("2", "clean_up_only", false),
        ("3", "skip_clean_up", true),
    ] {
        let job = start("train", |rank, command| {
            if rank % 2 == 0 {
                command.env("TORCH_NCCL_ASYNC_ERROR_HANDLING", torch_mode);
            } else {
                command.env("RCOMM_NCCL_ERROR_HANDLING", rcomm_mode);
                command.env("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2");
            }
            on_culprit("hang_after=4")(rank, command);
        });
        let (job, ended) = fail(job, 0..RANKS);
        for (rank, ended) in ended {
            const SIGABRT: i32 = 6;
            let signal = ended.status.signal();
            assert_eq!(
                signal == Some(SIGABRT),
                dies,
                "{rcomm_mode}, rank {rank}: {ended:?}"
            );
            assert!(
                ended.stderr.contains("all_reduce #4"),
                "{rcomm_mode}, rank {rank}: {ended:?}"
            );
        }
        assert_eq!(job.dumps().len(), RANKS as usize, "{rcomm_mode}");
    }
}

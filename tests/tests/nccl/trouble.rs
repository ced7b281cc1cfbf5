//! Runs jobs with faults that the simulator injects.

use super::libraries::without;
use super::{RANKS, facts, fail, over, run, start, start_of};
use rcomm_analyzer::{Policy, analyze};
use rcomm_recorder::model::EntryState;
use rcomm_recorder::publish::Dump;
use rcomm_tests::process::{CULPRIT, Job, wait_until};
use rcomm_tests::simulator;
use std::collections::BTreeSet;
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

/// A fault of the last rank of a job, and what follows from it.
#[derive(Clone, Copy)]
struct LastRankFault {
    /// What the simulator does on the last rank.
    faults: &'static str,
    /// The time-out of operations.
    timeout_ms: &'static str,
    /// The error of the last rank has this sentence.
    sentence: &'static str,
    /// What the errors of all other ranks have in common.
    others: Others,
    /// The number of the operation that no rank completes; `None` if the group is never made.
    operation: Option<u64>,
    /// Whether the last rank writes a dump. All others do if there is an operation.
    is_dumped: bool,
    /// Whether the records show that the last rank is at fault. They never show that another one is.
    is_blamed: bool,
}

/// What the errors of the ranks without the fault say.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Others {
    /// That the last rank has reported its failure before.
    Reported,
    /// That the last rank has not arrived, or does not answer.
    Missing,
    /// That all ranks have arrived: the fault is on the device of the last rank, and no other rank can see it.
    AllArrived,
    /// That the broadcast which connects the ranks has not ended, or which rank has given up for that reason.
    NotConnected,
}

/// Long enough that no operation times out.
const LONG: &str = "120000";

/// Faults that also end a rank which is alone in its group.
const LONE_FAULTS: [LastRankFault; 3] = [
    LastRankFault {
        faults: "async_error_after=4",
        timeout_ms: LONG,
        sentence: "requested by RCOMM_SIM",
        others: Others::Reported,
        operation: Some(4),
        is_dumped: true,
        is_blamed: false,
    },
    LastRankFault {
        faults: "launch_error_after=4",
        timeout_ms: LONG,
        sentence: "Cuda failure 999",
        others: Others::Reported,
        operation: Some(4),
        is_dumped: true,
        is_blamed: true,
    },
    LastRankFault {
        faults: "no_memory_after=2",
        timeout_ms: LONG,
        sentence: "CUDA_ERROR_OUT_OF_MEMORY",
        others: Others::Missing,
        operation: Some(2),
        is_dumped: false,
        is_blamed: false,
    },
];

/// Faults that need peers.
const PEER_FAULTS: [LastRankFault; 3] = [
    LastRankFault {
        // The first operation is the broadcast that connects the ranks.
        faults: "hang_after=4",
        timeout_ms: "5000",
        sentence: "all_reduce #4 on group default_pg",
        others: Others::AllArrived,
        operation: Some(4),
        is_dumped: true,
        is_blamed: false,
    },
    LastRankFault {
        faults: "connect_hangs_after=1",
        timeout_ms: "5000",
        sentence: "is still inside the library's call that starts it",
        others: Others::AllArrived,
        operation: Some(1),
        is_dumped: true,
        is_blamed: false,
    },
    LastRankFault {
        faults: "hang_after=0",
        timeout_ms: "5000",
        sentence: "did not end on the device in time",
        others: Others::NotConnected,
        operation: None,
        is_dumped: false,
        is_blamed: false,
    },
];

impl LastRankFault {
    /// Runs a job of this many ranks, and checks the error and the record of each.
    fn check(&self, ranks: u32) {
        let last = ranks - 1;
        let mut job = start_of(ranks, "train", |rank, command| {
            command
                .env("RCOMM_TIMEOUT_MS", self.timeout_ms)
                // Each rank stays until all have reported their status.
                .env("RCOMM_STATUS_WAIT_MS", "20000");
            if rank == last {
                command.env("RCOMM_SIM", self.faults);
            }
        });
        let ended: Vec<_> = (0..ranks).map(|rank| job.wait(rank)).collect();
        let context = format!("{}, {ranks} ranks: {ended:#?}", self.faults);
        for (rank, ended) in (0..ranks).zip(&ended) {
            assert_eq!(ended.status.code(), Some(1), "rank {rank}: {context}");
            match rank == last {
                true => assert!(ended.stderr.contains(self.sentence), "{context}"),
                false => self.check_other(rank, &ended.stderr, last, &context),
            }
            let says_stuck = ended.stderr.contains("is still inside the library's call");
            assert!(!says_stuck || rank == last, "rank {rank}: {context}");
        }
        self.check_records(&job, ranks, &context);
    }

    /// Checks the error of a rank that has no fault.
    fn check_other(&self, rank: u32, error: &str, last: u32, context: &str) {
        let (missing, silent) = (format!("not arrived: rank {last}"), "no answer: ");
        let is_right = match self.others {
            Others::Reported => error.contains(&format!("reported before by rank {last}: ")),
            Others::Missing => {
                error.contains(&missing) || error.contains(&format!("{silent}rank {last} "))
            }
            Others::AllArrived => {
                let all: Vec<String> = (0..=last).map(|rank| rank.to_string()).collect();
                error.contains(&format!("arrived: ranks {}", all.join(", ")))
                    && !error.contains("not arrived: ")
                    && !error.contains(silent)
            }
            Others::NotConnected => {
                let has_cause = error.contains("did not end on the device in time");
                has_cause && !error.contains("did not arrive: ")
            }
        };
        assert!(is_right, "rank {rank}: {context}");
        if let Some(operation) = self.operation {
            let name = format!("all_reduce #{operation} on group default_pg");
            assert!(error.contains(&name), "rank {rank}: {context}");
        }
    }

    /// Checks the dump, or else the ring, of each rank: the operation is there on each rank that issued it and is not
    /// completed, and the analysis blames no other rank than the last.
    fn check_records(&self, job: &Job, ranks: u32, context: &str) {
        let dumps = job.dumps();
        let (mut records, mut dumped) = (Vec::new(), 0);
        for rank in 0..ranks {
            let rank_dump = dumps
                .iter()
                .find(|(_, dump)| dump.identity.rank == Some(rank));
            dumped += usize::from(rank_dump.is_some());
            let record =
                rank_dump.map_or_else(|| job.ring(rank).snapshot(), |(_, dump)| dump.clone());
            let entry = record
                .entries
                .iter()
                .find(|entry| Some(entry.collective_seq_id) == self.operation);
            let is_issued = self.operation.is_some() && (rank != ranks - 1 || self.is_dumped);
            assert_eq!(entry.is_some(), is_issued, "rank {rank}: {context}");
            let is_completed = entry.is_some_and(|entry| entry.state == EntryState::Completed);
            assert!(!is_completed, "rank {rank}: {entry:?}, {context}");
            records.push(record);
        }
        let others = self.operation.map_or(0, |_| ranks - 1);
        let expected = others + u32::from(self.is_dumped);
        assert_eq!(dumped, expected as usize, "{context}");
        let policy = Policy {
            world_size: Some(ranks),
            ..Policy::default()
        };
        let report = analyze(&records, &policy);
        let blamed = report
            .findings
            .iter()
            .flat_map(|finding| &finding.culprit_ranks);
        let blamed: BTreeSet<u32> = blamed.copied().collect();
        let last = BTreeSet::from([ranks - 1]);
        assert!(blamed.is_subset(&last), "{:#?}, {context}", report.findings);
        assert!(
            !self.is_blamed || blamed == last,
            "{:#?}, {context}",
            report.findings
        );
    }
}

#[test]
fn faults_end_a_rank_that_is_alone() {
    // No broadcast connects a rank that is alone, so a fault that counts launches strikes one operation later.
    let hang = LastRankFault {
        sentence: "all_reduce #5 on group default_pg",
        ..PEER_FAULTS[0]
    };
    for fault in [hang].into_iter().chain(LONE_FAULTS) {
        let operation = fault.operation.map(|it| it + u64::from(fault.is_dumped));
        LastRankFault { operation, ..fault }.check(1);
    }
}

#[test]
fn faults_of_the_last_rank_end_2_ranks_and_no_other_is_blamed() {
    let faults = LONE_FAULTS.iter().chain(&PEER_FAULTS);
    faults.for_each(|fault| fault.check(2));
}

#[test]
fn faults_of_the_last_rank_end_8_ranks_and_no_other_is_blamed() {
    let faults = LONE_FAULTS.iter().chain(&PEER_FAULTS);
    faults.for_each(|fault| fault.check(8));
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
            // The rank that serves the store may end before the others.
            error.contains("arrived and has not reported since: rank 2")
                || error
                    .contains("arrived and had not reported when the store last answered: rank 2"),
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

use super::*;
use rcomm_verdict::logs::{Absent, Ended, TimedOut};

fn read_text(text: &str) -> Log {
    read("job.log", None, text.as_bytes()).expect("reading from memory does not fail")
}

const TIMEOUT: &str = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, \
     OpType=ALLREDUCE, NumelIn=11, NumelOut=11, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.";

fn timed_out(log: &Log) -> Option<(Option<Rank>, &TimedOut)> {
    log.facts().find_map(|fact| match &fact.event {
        Event::TimedOut(timed_out) => Some((fact.rank, timed_out)),
        _ => None,
    })
}

#[test]
fn a_line_is_read_after_every_kind_of_label() {
    for label in [
        "",
        "[rank3]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] ",
        "[default3]:[rank3]:[E ProcessGroupNCCL.cpp:563] ",
        "3: [rank3]:[E702 12:22:50.103110475 ProcessGroupNCCL.cpp:629] ",
        "2024-08-23T22:22:51.874Z [rank3]:[E ProcessGroupNCCL.cpp:577] ",
        "  | 2024-08-23T22:22:51.874Z | [rank3]:[E ProcessGroupNCCL.cpp:577] ",
        "2024-08-23T22:22:51.874123456Z stderr F [rank3]:[E ProcessGroupNCCL.cpp:577] ",
        "[2024-08-21 03:38:02] [rank3]:[E ProcessGroupNCCL.cpp:563] ",
        "(RayWorkerVllm pid=409241) [E ProcessGroupNCCL.cpp:474] ",
        "\u{1b}[36m(RayWorkerWrapper pid=4009)\u{1b}[0m [rank3]:[E ProcessGroupNCCL.cpp:563] ",
        "[36m(RayWorkerWrapper pid=4009) [rank3]:[E ProcessGroupNCCL.cpp:563] ",
        "[80747] [rank3]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] ",
        "[pod/train-0-3/main] [rank3]:[E ProcessGroupNCCL.cpp:563] ",
        "[rank 3] ",
        "Epoch 0:  95%|██▊ | 8692/9188 [30:57<01:45,  4.68it/s][rank3]:[E ProcessGroupNCCL.cpp:563] ",
    ] {
        let log = read_text(&format!("{label}{TIMEOUT}\n"));
        let (rank, event) = timed_out(&log).unwrap_or_else(|| panic!("{label}: {log:?}"));
        let is_named = label.contains("ank3]") || label.contains("rank 3]");
        assert_eq!(rank, is_named.then_some(3), "{label}");
        assert_eq!(event.in_group, Some(3), "{label}");
        assert_eq!((event.seq, event.timeout_ms), (Some(7), 600_000), "{label}");
        assert_eq!(event.elements, [Some(11), Some(11)], "{label}");
    }
    let wrapped = serde_json::json!({"log": format!("{TIMEOUT}\n"), "stream": "stderr"});
    let log = read_text(&format!("{wrapped}\n"));
    assert!(timed_out(&log).is_some(), "{log:?}");
}

#[test]
fn a_watchdog_line_of_a_smaller_group_does_not_state_the_global_rank() {
    let line =
        format!("[PG ID 2 PG GUID 9 Rank 3] Process group watchdog thread terminated: {TIMEOUT}");
    let log = read_text(&line);
    let (rank, event) = timed_out(&log).expect("the line is a time-out");
    assert_eq!((rank, event.group.as_deref()), (None, Some("9")));
    let labeled = read_text(&format!("[rank11]:{line}"));
    assert_eq!(timed_out(&labeled).and_then(|(rank, _)| rank), Some(11));
    // In the prefix of the default group, the rank within the group is the global rank. A bare `[Rank 3]` in the
    // message itself is the rank within some group of the process, so it does not count.
    for line in [
        format!("[PG ID 0 PG GUID 0(default_pg) Rank 7] Process group watchdog: {TIMEOUT}"),
        TIMEOUT.replace("[Rank 3]", "[PG GUID 0 Rank 7]"),
    ] {
        let log = read_text(&line);
        assert_eq!(
            timed_out(&log).and_then(|(rank, _)| rank),
            Some(7),
            "{line}"
        );
    }
}

#[test]
fn every_form_of_a_rank_s_progress_is_read() {
    for (line, group, failed) in [
        (
            "[PG 1 Rank 0] Exception (either an error or timeout) detected by watchdog at work: 1580, last \
             enqueued NCCL work: 1582, last completed NCCL work: 1579.",
            "1",
            Some(1580),
        ),
        (
            "[PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected by watchdog at work sequence id: 1580 \
             PG status: last enqueued work: 1582, last completed work: 1579",
            "0(default_pg)",
            Some(1580),
        ),
        (
            "[PG 0 (default_pg) Rank 3] Timeout at NCCL work: 1580, last enqueued NCCL work: 1582, last \
             completed NCCL work: 1579.",
            "0 (default_pg)",
            Some(1580),
        ),
        (
            "[PG ID 0 PG GUID 0(default_pg) Rank 0] Received a dump signal due to a collective timeout from \
             rank 1 and we will try our best to dump the debug info. Last enqueued NCCL work: 1582, last \
             completed NCCL work: 1579.This is most likely",
            "0(default_pg)",
            None,
        ),
    ] {
        let log = read_text(&format!("[rank1]:{line}"));
        let Some(Event::Progress(progress)) = log.facts().next().map(|fact| &fact.event) else {
            panic!("{line}: {log:?}");
        };
        assert_eq!(progress.group, group);
        assert_eq!(progress.failed, failed);
        assert_eq!(
            (progress.enqueued, progress.completed),
            (Some(1582), Some(1579))
        );
    }
}

#[test]
fn the_ends_that_launchers_report_are_read() {
    let ends = |text: &str| -> Vec<(Option<Rank>, Ended)> {
        let log = read_text(text);
        let ends = log.facts().cloned().filter_map(|fact| match fact.event {
            Event::Ended(end) => Some((fact.rank, end)),
            _ => None,
        });
        ends.collect()
    };
    let torchrun = "============\ntrain.py FAILED\n------------\nFailures:\n[1]:\n  time      : 2026-09-07_13:03:29\n  \
        host      : localhost\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 14689)\n------------\nRoot \
        Cause (first observed failure):\n[0]:\n  rank      : 9 (local_rank: 1)\n  exitcode  : 1 (pid: 14690)\n  \
        error_file: <N/A>\n============\n";
    let found = ends(torchrun);
    assert_eq!(found.len(), 2);
    let (rank, root) = &found[1];
    assert_eq!((*rank, root.code, root.first), (Some(9), 1, true));
    assert_eq!((root.local_rank, root.pid), (Some(1), Some(14690)));
    let slurm = ends("srun: error: node07: task 3: Killed\n");
    assert_eq!((slurm[0].0, slurm[0].1.code), (Some(3), -9));
    let killed = ends("rcomm-run: rank 3 (process 812) was killed by SIGKILL (9) after 1.2 s\n");
    assert_eq!((killed[0].0, killed[0].1.code), (Some(3), -9));
    let exited = ends("rcomm-run: rank 2 (process 811) exited with 3 after 1.2 s\n");
    assert_eq!((exited[0].0, exited[0].1.code), (Some(2), 3));
}

#[test]
fn a_line_of_an_nccl_process_gets_the_rank_of_its_largest_communicator() {
    let log = read_text(
        "n1:534:1763 [3] NCCL INFO ncclCommInitRank comm 0x7f rank 3 nranks 8 cudaDev 3 - Init COMPLETE\n\
         n1:534:1763 [3] NCCL INFO ncclCommInitRank comm 0x7e rank 1 nranks 2 cudaDev 3 - Init COMPLETE\n\
         n1:534:1900 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n",
    );
    let [attempt] = log.attempts.as_slice() else {
        panic!("the log has one attempt: {log:?}");
    };
    assert_eq!(attempt.world_size, Some(8));
    assert_eq!(attempt.facts.len(), 1);
    assert_eq!(attempt.facts[0].rank, Some(3));
}

#[test]
fn an_exception_counts_only_with_a_label_and_if_it_is_no_consequence() {
    let raised = |text: &str| {
        read_text(text)
            .facts()
            .any(|fact| matches!(fact.event, Event::Raised(_)))
    };
    assert!(raised("[rank2]: ValueError: too many values\n"));
    assert!(raised(
        "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    ));
    for no_cause in [
        "ValueError: of a program that prints\n",
        "[rank2]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1\n",
        "[rank2]: RuntimeError: [../third_party/gloo/pair.cc:534] Connection closed by peer [1.2.3.4]:5\n",
        "[rank2]:     raise ValueError: indented\n",
        "[rank2]: RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0]\n",
    ] {
        assert!(!raised(no_cause), "{no_cause}");
    }
}

#[test]
fn mismatches_and_barriers_of_a_smaller_group_do_not_state_global_ranks() {
    let pair = "Detected mismatch between collectives on ranks. Rank 1 is running collective: \
                CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE, TensorShape=[4]), but Rank 0 is \
                running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=REDUCE, TensorShape=[4]).";
    assert_eq!(
        read_text(&format!("[rank1]: RuntimeError: {pair}"))
            .facts()
            .count(),
        1
    );
    let of_another = read_text(&format!("[rank5]: RuntimeError: {pair}"));
    assert_eq!(of_another.facts().count(), 0);
    let missed = "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 30000 ms";
    let log = read_text(missed);
    assert_eq!(
        log.attempts[0].facts[0].event,
        Event::BarrierMissed(vec![1, 3])
    );
    assert_eq!(read_text(&format!("[rank4]: {missed}")).facts().count(), 0);
}

#[test]
fn a_long_line_is_cut_and_facts_beyond_the_limit_are_only_counted() {
    let long = "x".repeat(MAX_LINE * 3);
    let log = read_text(&format!("{long}\n[rank0]:{TIMEOUT}\n"));
    assert_eq!((log.lines, log.facts().count()), (2, 1));
    let many = format!("[rank0]:{TIMEOUT}\n").repeat(MAX_FACTS + 7);
    let log = read_text(&many);
    assert_eq!((log.facts().count(), log.left_out), (MAX_FACTS, 7));
}

/// Random numbers that are the same in every run.
fn noise(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn no_bytes_make_the_reader_panic() {
    let lines = include_str!("../../../../tests/fixtures/logs/pytorch-152623.log").to_owned()
        + include_str!("../../../../tests/fixtures/logs/ms-swift-9443.log")
        + include_str!("../../../../tests/fixtures/logs/cosyvoice-180.log")
        + include_str!("../../../../tests/fixtures/logs/nccl-969.log")
        + "Root Cause (first observed failure):\n[0]:\n  rank : 0 (local_rank: 0)\n  exitcode : -9 (pid: 1)\n"
        + "srun: error: n: task 3: Killed\n#3 started ranks:\n[0, 1] started ALLREDUCE\n"
        + "a:1:2 [0] NCCL INFO comm 0x1 rank 3 nranks 4 cudaDev\nnot arrived: rank 2 (last collective here is #4)\n";
    let seed = lines.as_bytes();
    let mut state = 0x9e37_79b9_7f4a_7c15;
    for _ in 0..3000 {
        let mut bytes = seed.to_vec();
        for _ in 0..=noise(&mut state) % 24 {
            let index = noise(&mut state) as usize % bytes.len();
            match noise(&mut state) % 4 {
                0 => bytes[index] = noise(&mut state) as u8,
                1 => bytes.truncate(index.max(1)),
                2 => bytes.insert(index, b"[]()#:- 9\xff\n"[noise(&mut state) as usize % 11]),
                _ => {
                    let start = noise(&mut state) as usize % bytes.len();
                    let piece = bytes[start..(start + 40).min(bytes.len())].to_vec();
                    bytes.splice(index..index, piece);
                }
            }
        }
        let log =
            read("noise", Some(1), bytes.as_slice()).expect("reading from memory does not fail");
        let mut report = rcomm_verdict::analyze::<rcomm_recorder::publish::Dump>(
            &[],
            &rcomm_verdict::Policy::default(),
        );
        rcomm_verdict::logs::join(&mut report, &[log]);
    }
}

/// For each attempt, the ranks of its facts.
fn attempts(text: &str) -> Vec<Vec<Option<Rank>>> {
    let ranks = |facts: &[Fact]| facts.iter().map(|fact| fact.rank).collect();
    let log = read_text(text);
    let attempts = log.attempts.iter();
    attempts.map(|attempt| ranks(&attempt.facts)).collect()
}

#[test]
fn a_restart_begins_a_new_attempt() {
    let failed = |rank: u32| format!("[rank{rank}]:{TIMEOUT}\n");
    let between = |sign: &str| attempts(&(failed(1) + sign + "\n" + &failed(2)));
    let two = vec![vec![Some(1)], vec![Some(2)]];
    for sign in [
        "I0213 12:07:20.086000 870572 torch/distributed/elastic/agent/server/api.py:889] [default] Worker group \
         FAILED. 3/3 attempts left; will restart worker group",
        "INFO:torch.distributed.elastic.agent.server.api:[default] Detected 1 new nodes from group_rank=0; will \
         restart worker group",
        "W0213 12:07:20.1 870572 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for \
         each process to be 1 in default",
    ] {
        assert_eq!(between(sign), two, "{sign}");
    }
    assert_eq!(between("step 1"), [[Some(1), Some(2)]]);
    // All agents of a job log the restart.
    let sign = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group\n";
    assert_eq!(attempts(&(failed(1) + sign + sign + &failed(2))), two);
    assert_eq!(attempts(&(failed(1) + sign)), [vec![Some(1)], vec![]]);
    // A rank that creates its default group again is another process.
    let start = "[rank1]:[I PG.cpp:959] [PG ID 0 PG GUID 0 Rank 1] ProcessGroupNCCL initialization options: size: 4\n";
    let text = start.to_owned() + &failed(1) + start + &failed(2);
    assert_eq!(attempts(&text), two);
    assert_eq!(read_text(&text).attempts[1].world_size, Some(4));
    assert_eq!(attempts(&(failed(1) + start + &failed(2))).len(), 1);
}

#[test]
fn a_second_failure_at_one_agent_and_a_lower_counter_show_a_restart() {
    let failed = |agent: u32, pid: u32| {
        format!(
            "E0213 12:07:20.086000 {agent} torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: \
             1) local_rank: 0 (pid: {pid}) of binary: /usr/bin/python\n"
        )
    };
    let counter = |enqueued: u64, completed: u64| {
        format!(
            "[rank1]:[PG ID 0 PG GUID 0(default_pg) Rank 1] failure detected by watchdog at work sequence id: \
             {enqueued} PG status: last enqueued work: {enqueued}, last completed work: {completed}\n"
        )
    };
    let lengths = |text: String| -> Vec<usize> { attempts(&text).iter().map(Vec::len).collect() };
    // The same agent lost another worker after it had started all of them again.
    assert_eq!(lengths(failed(7, 10) + &failed(7, 20)), [1, 1]);
    let three = failed(7, 10) + &failed(7, 20) + &failed(7, 30);
    assert_eq!(lengths(three), [1, 1, 1]);
    assert_eq!(lengths(failed(7, 10) + &failed(8, 20)), [2]);
    // The same holds once an attempt has `MAX_FACTS` facts, after which more are only counted: the second attempt
    // begins after the agent's first report.
    let many = format!("[rank1]:{TIMEOUT}\n").repeat(MAX_FACTS);
    let between = failed(7, 10) + &many + &failed(7, 20);
    assert_eq!(lengths(between), [1, MAX_FACTS]);
    assert_eq!(
        lengths(many + &failed(7, 10) + &failed(7, 20)),
        [MAX_FACTS, 1]
    );
    // A counter that went back is that of another process, which began after the report of the first one's end.
    let text = counter(41, 40) + &failed(7, 10) + &format!("[rank1]:{TIMEOUT}\n") + &counter(9, 8);
    assert_eq!(lengths(text), [2, 2]);
    assert_eq!(lengths(counter(41, 40) + &counter(9, 8)), [1, 1]);
    assert_eq!(lengths(counter(41, 40) + &counter(42, 40)), [2]);
}

#[test]
fn every_absent_rank_is_read_with_its_own_last_collective() {
    let log = read_text(
        "[rank0]: all_reduce #41 on group dp: timed out; arrived: rank 0; not arrived: rank 2 (last collective here \
         is #40, in phase \"load ), rank 9 (data\" for 6.1 s), rank 3 (has called no collective here yet), rank 5 \
         (last collective here is #38); no answer: rank 6 (4 of 5 members answered)\n",
    );
    let absent = |rank, after| Absent { rank, after };
    let listed = vec![absent(2, Some(40)), absent(3, None), absent(5, Some(38))];
    let fact = &log.attempts[0].facts[0];
    assert_eq!(fact.event, Event::NotJoined(listed));
}

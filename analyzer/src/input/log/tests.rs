use super::*;
use rcomm_verdict::logs::{Ended, TimedOut};

fn read_text(text: &str) -> Log {
    read("job.log", None, text.as_bytes()).expect("memory")
}

const TIMEOUT: &str = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, \
     OpType=ALLREDUCE, NumelIn=11, NumelOut=11, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.";

fn timed_out(log: &Log) -> Option<(Option<Rank>, &TimedOut)> {
    log.facts.iter().find_map(|fact| match &fact.event {
        Event::TimedOut(what) => Some((fact.rank, what)),
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
        let (rank, what) = timed_out(&log).unwrap_or_else(|| panic!("{label}: {log:?}"));
        assert_eq!(rank, Some(3), "{label}");
        assert_eq!((what.seq, what.timeout_ms), (Some(7), 600_000), "{label}");
        assert_eq!(what.elements, [Some(11), Some(11)], "{label}");
    }
    let wrapped = serde_json::json!({"log": format!("{TIMEOUT}\n"), "stream": "stderr"});
    let log = read_text(&format!("{wrapped}\n"));
    assert!(timed_out(&log).is_some(), "{log:?}");
}

#[test]
fn a_rank_within_a_smaller_group_is_no_rank_of_the_world() {
    let line =
        format!("[PG ID 2 PG GUID 9 Rank 3] Process group watchdog thread terminated: {TIMEOUT}");
    let log = read_text(&line);
    let (rank, what) = timed_out(&log).expect("a time-out");
    assert_eq!((rank, what.group.as_deref()), (None, Some("9")));
    let labelled = read_text(&format!("[rank11]:{line}"));
    assert_eq!(timed_out(&labelled).and_then(|(rank, _)| rank), Some(11));
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
        let Some(Event::Progress(progress)) = log.facts.first().map(|fact| &fact.event) else {
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
fn launchers_name_the_first_failure() {
    let ends = |text: &str| -> Vec<(Option<Rank>, Ended)> {
        let log = read_text(text);
        let ends = log.facts.into_iter().filter_map(|fact| match fact.event {
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
    let own = ends("rcomm-run: rank 3 (process 812) was killed by SIGKILL (9) after 1.2 s\n");
    assert_eq!((own[0].0, own[0].1.code), (Some(3), -9));
    let own = ends("rcomm-run: rank 2 (process 811) exited with 3 after 1.2 s\n");
    assert_eq!((own[0].0, own[0].1.code), (Some(2), 3));
}

#[test]
fn nccl_s_processes_lead_to_ranks() {
    let log = read_text(
        "n1:534:1763 [3] NCCL INFO ncclCommInitRank comm 0x7f rank 3 nranks 8 cudaDev 3 - Init COMPLETE\n\
         n1:534:1763 [3] NCCL INFO ncclCommInitRank comm 0x7e rank 1 nranks 2 cudaDev 3 - Init COMPLETE\n\
         n1:534:1900 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n",
    );
    assert_eq!(log.world_size, Some(8));
    assert_eq!(log.facts.len(), 1);
    assert_eq!(log.facts[0].rank, Some(3));
}

#[test]
fn an_exception_is_one_of_a_rank_and_no_consequence_of_another_s() {
    let raised = |text: &str| {
        let facts = read_text(text).facts;
        facts
            .iter()
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
fn ranks_within_a_smaller_group_are_not_taken_for_ranks_of_the_world() {
    let pair = "Detected mismatch between collectives on ranks. Rank 1 is running collective: \
                CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE, TensorShape=[4]), but Rank 0 is \
                running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=REDUCE, TensorShape=[4]).";
    assert_eq!(
        read_text(&format!("[rank1]: RuntimeError: {pair}"))
            .facts
            .len(),
        1
    );
    assert_eq!(
        read_text(&format!("[rank5]: RuntimeError: {pair}")).facts,
        []
    );
    let missed = "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 30000 ms";
    let log = read_text(missed);
    assert_eq!(log.facts[0].event, Event::BarrierMissed(vec![1, 3]));
    assert_eq!(read_text(&format!("[rank4]: {missed}")).facts, []);
}

#[test]
fn limits_hold() {
    let long = "x".repeat(MAX_LINE * 3);
    let log = read_text(&format!("{long}\n[rank0]:{TIMEOUT}\n"));
    assert_eq!((log.lines, log.facts.len()), (2, 1));
    let many = format!("[rank0]:{TIMEOUT}\n").repeat(MAX_FACTS + 7);
    let log = read_text(&many);
    assert_eq!((log.facts.len(), log.left_out), (MAX_FACTS, 7));
}

/// Random numbers that are the same in every run.
fn noise(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn no_bytes_make_it_panic() {
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
            let at = noise(&mut state) as usize % bytes.len();
            match noise(&mut state) % 4 {
                0 => bytes[at] = noise(&mut state) as u8,
                1 => bytes.truncate(at.max(1)),
                2 => bytes.insert(at, b"[]()#:- 9\xff\n"[noise(&mut state) as usize % 11]),
                _ => {
                    let from = noise(&mut state) as usize % bytes.len();
                    let piece = bytes[from..(from + 40).min(bytes.len())].to_vec();
                    bytes.splice(at..at, piece);
                }
            }
        }
        let log = read("noise", Some(1), bytes.as_slice()).expect("memory");
        let mut report = rcomm_verdict::analyze::<rcomm_recorder::publish::Dump>(
            &[],
            &rcomm_verdict::Policy::default(),
        );
        rcomm_verdict::logs::join(&mut report, &[log]);
    }
}

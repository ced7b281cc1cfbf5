//! Tests logs of jobs that were asked to end, and of ranks that waited for others when they ended.

use super::judge_lines;
use rcomm_analyzer::{Code, Verdict};

const CANCELLED: &str =
    "slurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2026-09-21T14:20:11 ***";

#[test]
fn no_process_is_blamed_for_its_end_after_the_job_was_cancelled() {
    let closed = "[rank2]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer \
                  [10.0.0.7]:28511";
    let signal = "W0921 14:20:11.2 900 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, \
                  shutting down workers";
    for lines in [
        // A process that does not end by SIGTERM is killed.
        &[CANCELLED, "srun: error: n1: task 3: Killed"][..],
        &[
            CANCELLED,
            closed,
            "srun: error: n1: task 2: Exited with exit code 1",
        ],
        &[signal, closed],
    ] {
        let report = judge_lines(lines);
        assert_eq!(report.verdict, Verdict::Inconclusive, "{lines:?}");
        let first = &report.findings[0];
        assert!(first.culprit_ranks.is_empty(), "{first:?}");
        let expected = "the job was terminated from outside";
        assert!(first.sentence.starts_with(expected), "{first:?}");
        assert!(!first.log.is_empty(), "{lines:?}");
    }
}

#[test]
fn a_process_that_ended_before_the_job_was_cancelled_is_named() {
    let report = judge_lines(&[
        "srun: error: n1: task 3: Killed",
        CANCELLED,
        "srun: error: n1: task 0: Killed",
    ]);
    let first = &report.findings[0];
    assert_eq!((first.code, report.verdict), (Code::E150, Verdict::Crashed));
    assert_eq!(first.culprit_ranks, [3]);
}

#[test]
fn a_rank_that_aborted_is_not_blamed_if_its_own_log_is_missing() {
    // After a time-out, PyTorch's watchdog ends the process like this.
    let report = judge_lines(&["srun: error: n1: task 0: Aborted (core dumped)", CANCELLED]);
    let first = &report.findings[0];
    assert_eq!(first.code, Code::E150);
    assert!(first.confidence <= 0.5, "{first:?}");
}

#[test]
fn a_failure_before_the_job_was_cancelled_is_reported() {
    let completion = "n1:81:90 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.7<5491> \
                      with status=12 opcode=0 len=0 vendor err 129";
    let lines = format!("[rank3]: {completion}");
    let closed = "[rank2]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer \
                  [10.0.0.7]:28511";
    for before in [&[lines.as_str()][..], &[&lines, "step 9"]] {
        let report = judge_lines(&[before, &[CANCELLED, closed]].concat());
        assert_eq!(report.findings[0].code, Code::E152, "{report:?}");
    }
    // After the end, it is a consequence.
    let report = judge_lines(&[CANCELLED, &lines]);
    assert_eq!(report.findings[0].code, Code::N302);
    let aborted = "[rank1]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:616] [Rank 1] Some NCCL operations failed: \
                   WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) raised the following \
                   async exception: NCCL error: remote process exited";
    let first = judge_lines(&[aborted, CANCELLED]).findings.remove(0);
    assert!(first.sentence.contains("aborted an operation"), "{first:?}");
}

#[test]
fn a_line_about_several_tasks_shows_that_the_job_did_not_end_from_outside() {
    let first = judge_lines(&[
        "srun: error: n1: tasks 0,2-3: Exited with exit code 1",
        CANCELLED,
    ])
    .findings
    .remove(0);
    assert_eq!(first.code, Code::E150, "{first:?}");
    assert!(first.culprit_ranks.is_empty(), "{first:?}");
}

#[test]
fn no_exception_after_the_job_was_cancelled_accuses_its_rank() {
    for line in [
        "[rank2]: RuntimeError: DataLoader worker (pid 812) is killed by signal: Terminated.",
        "[rank2]: n1:81:90 [2] enqueue.cc:1 NCCL WARN Cuda failure 'driver shutting down'",
    ] {
        let first = judge_lines(&[CANCELLED, line]).findings.remove(0);
        assert_eq!(first.code, Code::N302, "{first:?}");
        assert!(first.culprit_ranks.is_empty(), "{first:?}");
        let first = judge_lines(&[line, CANCELLED]).findings.remove(0);
        assert_eq!(first.culprit_ranks, [2], "{first:?}");
    }
}

/// The two lines of a rank whose operation in a group timed out.
fn timed_out(rank: u32, group: &str, seq: u64, enqueued: u64) -> [String; 2] {
    let head = format!("[rank{rank}]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:616]");
    [
        format!(
            "{head} [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, \
             NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
        ),
        format!(
            "{head} [PG ID 1 PG GUID {group} Rank 0] failure detected by watchdog at work sequence id: {seq} PG \
             status: last enqueued work: {enqueued}, last completed work: {}",
            seq - 1
        ),
    ]
}

#[test]
fn a_rank_that_timed_out_in_another_group_is_not_behind() {
    let mut lines = Vec::new();
    for rank in 0..6 {
        lines.extend(timed_out(rank, "0(default_pg)", 41, 41));
    }
    // Rank 6 waits for rank 7 in a group of theirs, and rank 7 has no line.
    let waits = "[rank6]:[E626 06:24:44.8 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 6] Received a dump \
                 signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last \
                 enqueued NCCL work: 40, last completed NCCL work: 40.";
    lines.push(waits.to_owned());
    let behind = judge_lines(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(behind.findings[0].culprit_ranks, [6]);
    lines.extend(timed_out(6, "5(tp)", 90, 90));
    let report = judge_lines(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    let blamed = report
        .findings
        .iter()
        .flat_map(|finding| &finding.culprit_ranks);
    assert!(
        blamed.clone().all(|&rank| rank != 6),
        "{:?}",
        report.findings
    );
}

#[test]
fn a_rank_that_had_not_come_is_doubted_where_others_timed_out_in_another_group() {
    let signal = "[rank4]:[E626 06:24:44.8 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 4] Received a dump \
                  signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last \
                  enqueued NCCL work: 40, last completed NCCL work: 40.";
    let mut lines = vec![signal.to_owned()];
    lines.extend((0..3).flat_map(|rank| timed_out(rank, "0(default_pg)", 41, 41)));
    for (extra, is_sure) in [(None, true), (Some(timed_out(3, "5(tp)", 90, 90)), false)] {
        lines.extend(extra.into_iter().flatten());
        let report = judge_lines(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        let first = &report.findings[0];
        assert_eq!(
            (first.code, first.culprit_ranks.as_slice()),
            (Code::E101, &[4][..])
        );
        assert_eq!(first.confidence > 0.6, is_sure, "{first:?}");
    }
}

//! Tests logs alone and together with records: excerpts from public issue threads, and logs written for these tests.

use rcomm_analyzer::load::{LoadOptions, load};
use rcomm_analyzer::print::human::one_line;
use rcomm_analyzer::print::json;
use rcomm_analyzer::{Analysis, Code, Extent, Policy, Report, Unread, Verdict, logs};
use std::borrow::Borrow;
use std::path::{Path, PathBuf};

mod ends;
mod joins;
mod ranks;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

/// The report on these paths, of which every dump counts as whole.
fn judge(paths: &[PathBuf]) -> Report {
    let mut analysis = Analysis::new(Policy::default());
    let loaded = load(paths, &LoadOptions::default(), |loaded| {
        analysis.add_from(&loaded.path, &loaded.dump, Extent::Whole);
    })
    .expect("the paths exist");
    for problem in loaded.problems {
        analysis.add_problem(problem, Unread::Part);
    }
    let mut report = analysis.finish();
    report.input.files = loaded.files;
    logs::join(&mut report, &loaded.logs);
    report
}

/// The report on a log of these lines.
fn judge_lines<Line: Borrow<str>>(lines: &[Line]) -> Report {
    let file = tempfile::Builder::new().suffix(".log").tempfile();
    let file = file.expect("a temporary file can be made");
    std::fs::write(file.path(), lines.join("\n")).expect("the file system has space");
    judge(&[file.path().to_owned()])
}

#[test]
fn every_excerpt_has_the_first_line_that_its_table_states() {
    let folder = fixtures().join("logs");
    let table =
        std::fs::read_to_string(folder.join("expected.txt")).expect("the table can be read");
    let mut rows = 0;
    for row in table.lines().filter(|row| !row.is_empty()) {
        let (name, expected) = row.split_once(": ").expect("a row has a name and a line");
        let report = judge(&[folder.join(name)]);
        assert_eq!(one_line(&report), expected, "{name}");
        assert!(!report.findings[0].next.is_empty(), "{name}");
        assert!(!report.findings[0].log.is_empty(), "{name}");
        rows += 1;
    }
    assert_eq!(rows, 12);
}

#[test]
fn an_unreachable_host_is_named_and_no_rank_is_blamed() {
    for (line, peer) in [
        (
            "n1:534:1763 [3] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.7<43731> failed : No \
             route to host",
            "10.0.0.7 (No route to host)",
        ),
        (
            "[rank3]: RuntimeError: [../gloo/transport/tcp/pair.cc] connect error: SO_ERROR: Connection timed out, \
             remote=[10.0.0.8]:25266",
            "10.0.0.8 (Connection timed out)",
        ),
    ] {
        let report = judge_lines(&[line.to_owned()]);
        let first = &report.findings[0];
        assert_eq!((first.code, report.verdict), (Code::E152, Verdict::Stuck));
        assert!(first.culprit_ranks.is_empty());
        assert!(
            first.sentence.contains(&format!("cannot reach {peer}")),
            "{}",
            first.sentence
        );
    }
    // A peer that answers with a refusal can be reached.
    let refused =
        "n1:534:1763 [3] NCCL WARN Connect to 10.0.0.7<43731> failed : Connection refused";
    let report = judge_lines(&[refused.to_owned()]);
    let mut findings = report.findings.iter();
    assert!(findings.all(|finding| finding.code != Code::E152));
}

/// The two lines that PyTorch logs for a rank whose operation timed out.
fn timed_out(rank: u32, seq: u64, op: &str, numel: u64, enqueued: u64) -> [String; 2] {
    [
        format!(
            "[rank{rank}]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught \
             collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, \
             NumelOut={numel}, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
        ),
        format!(
            "[rank{rank}]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) \
             Rank {rank}] failure detected by watchdog at work sequence id: {seq} PG status: last enqueued \
             work: {enqueued}, last completed work: {}",
            seq - 1
        ),
    ]
}

/// The line of a rank that did not time out itself; `newest` is the last operation that it enqueued and completed.
fn dump_signal(rank: u32, newest: u64) -> String {
    format!(
        "[rank{rank}]:[E626 06:24:45.1 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] \
         Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump \
         the debug info. Last enqueued NCCL work: {newest}, last completed NCCL work: {newest}."
    )
}

/// A line from which the size of the job is known.
const INIT: &str =
    "n1:81:90 [0] NCCL INFO ncclCommInitRank comm 0x55 rank 0 nranks 8 cudaDev 0 - Init COMPLETE";

/// A line after which the lines of a later attempt follow.
const RESTART: &str = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group";

/// A log of a job of eight ranks, of which these timed out in an all_reduce.
fn all_reduce_timeouts(ranks: impl Iterator<Item = u32>) -> Vec<String> {
    let timeouts = ranks.flat_map(|rank| timed_out(rank, 41, "ALLREDUCE", 512, 41));
    std::iter::once(INIT.to_owned()).chain(timeouts).collect()
}

#[test]
fn a_rank_that_had_not_enqueued_the_operation_is_named() {
    let mut lines = all_reduce_timeouts((0..8).filter(|&rank| rank != 5));
    lines.push(dump_signal(5, 40));
    let report = judge_lines(&lines);
    let first = &report.findings[0];
    assert_eq!(
        (first.code, first.culprit_ranks.as_slice()),
        (Code::E101, &[5][..])
    );
    assert_eq!(first.seq, Some(41));
    assert!(first.confidence > 0.8, "{first:?}");
    assert_eq!(report.exit_code(), 1);
}

#[test]
fn a_rank_without_a_line_is_named_with_doubt() {
    let report = judge_lines(&all_reduce_timeouts((0..8).filter(|&rank| rank != 5)));
    let first = &report.findings[0];
    assert_eq!(
        (first.code, first.culprit_ranks.as_slice()),
        (Code::E102, &[5][..])
    );
    assert!(first.confidence <= 0.5, "{first:?}");
    // If half of the ranks have no line, the log is incomplete.
    let of_half = judge_lines(&all_reduce_timeouts(0..4));
    assert_eq!(of_half.verdict, Verdict::Inconclusive);
    assert_eq!(of_half.exit_code(), 2);
}

#[test]
fn no_rank_is_blamed_if_all_are_in_the_operation() {
    let report = judge_lines(&all_reduce_timeouts(0..8));
    let first = &report.findings[0];
    assert_eq!(first.code, Code::E135);
    assert!(
        first.culprit_ranks.is_empty() && first.confidence < 0.5,
        "{first:?}"
    );
}

#[test]
fn another_operation_or_size_under_one_number_is_a_mismatch() {
    for (op, numel, code) in [
        ("BROADCAST", 512, Code::E110),
        ("ALLREDUCE", 256, Code::E112),
    ] {
        let mut lines = all_reduce_timeouts((0..8).filter(|&rank| rank != 5));
        lines.extend(timed_out(5, 41, op, numel, 41));
        let report = judge_lines(&lines);
        let first = &report.findings[0];
        assert_eq!(
            (first.code, first.culprit_ranks.as_slice()),
            (code, &[5][..])
        );
        assert_eq!(report.verdict, Verdict::Mismatch);
    }
    // The parts of an exchange may differ in size.
    let mut lines = vec![INIT.to_owned()];
    lines.extend(timed_out(0, 3, "ALLTOALL_BASE", 512, 3));
    lines.extend(timed_out(1, 3, "ALLTOALL_BASE", 256, 3));
    assert_eq!(judge_lines(&lines).verdict, Verdict::Inconclusive);
}

#[test]
fn a_killed_process_comes_before_those_that_waited_for_it() {
    let mut lines = all_reduce_timeouts((0..8).filter(|&rank| rank != 5));
    lines.extend(
        [
            "Root Cause (first observed failure):",
            "[0]:",
            "  rank      : 5 (local_rank: 5)",
            "  exitcode  : -9 (pid: 14750)",
            "============================================================",
        ]
        .map(str::to_owned),
    );
    let report = judge_lines(&lines);
    let first = &report.findings[0];
    assert_eq!(
        (first.code, first.culprit_ranks.as_slice()),
        (Code::E150, &[5][..])
    );
    // An abort after a time-out is a consequence.
    let mut lines = all_reduce_timeouts(0..8);
    lines.push("Root Cause (first observed failure):".to_owned());
    lines.push("  rank      : 5 (local_rank: 5)".to_owned());
    lines.push("  exitcode  : -6 (pid: 14750)".to_owned());
    assert_eq!(judge_lines(&lines).findings[0].code, Code::E135);
}

#[test]
fn lines_of_an_earlier_attempt_are_not_joined_with_later_ones() {
    // Rank 5 was missing in the first attempt, rank 2 in the second.
    let mut lines = all_reduce_timeouts((0..8).filter(|&rank| rank != 5));
    lines.push(RESTART.to_owned());
    lines.extend(all_reduce_timeouts((0..8).filter(|&rank| rank != 2)));
    let report = judge_lines(&lines);
    let first = &report.findings[0];
    assert_eq!(
        (first.code, first.culprit_ranks.as_slice()),
        (Code::E102, &[2][..])
    );
    assert_eq!(
        report
            .input
            .logs
            .expect("the report counts logs")
            .other_attempts,
        14
    );
    // Without a failure since, the report is about the earlier attempt and states that.
    let mut lines = all_reduce_timeouts(0..8);
    lines.push(RESTART.to_owned());
    let report = judge_lines(&lines);
    let sentence = &report.findings[0].sentence;
    assert_eq!(report.findings[0].code, Code::E135);
    assert!(sentence.contains("restarted after that"), "{sentence}");
}

#[test]
fn torchrun_s_folders_of_attempts_are_kept_apart() {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let write = |attempt: u32, rank: u32, lines: &[String]| {
        let attempt = folder.path().join(format!("run_x/attempt_{attempt}"));
        let rank = attempt.join(rank.to_string());
        std::fs::create_dir_all(&rank).expect("the file system has space");
        let log = rank.join("stderr.log");
        std::fs::write(log, lines.join("\n")).expect("the file system has space");
    };
    for rank in 0..4 {
        let mut lines = timed_out(rank, 41, "ALLREDUCE", 512, 41).to_vec();
        if rank == 0 {
            lines.insert(0, INIT.to_owned());
        }
        write(0, rank, &lines);
    }
    write(1, 0, &timed_out(0, 9, "ALLREDUCE", 512, 9));
    let report = judge(&[folder.path().to_owned()]);
    assert_eq!(
        report
            .input
            .logs
            .as_ref()
            .expect("the report counts logs")
            .other_attempts,
        8
    );
    let first = &report.findings[0];
    assert!(
        first
            .sentence
            .starts_with("rank 0 timed out in all_reduce #9"),
        "{first:?}"
    );
    // A later attempt without a fact is an attempt as well.
    write(2, 0, &["epoch 1: loss 0.4".to_owned()]);
    let sentence = &judge(&[folder.path().to_owned()]).findings[0].sentence;
    assert!(sentence.contains("restarted after that"), "{sentence}");
}

#[test]
fn ranks_within_a_barrier_s_group_are_no_ranks_of_the_job() {
    let missed = "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 30000 ms".to_owned();
    let reached = |label: &str, rank: u32| {
        format!(
            "{label}Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for \
             send/recv from rank 0. Please check rank 0 logs for faulty rank."
        )
    };
    let culprits = |lines: &[String]| {
        let report = judge_lines(lines);
        assert_eq!(report.findings[0].code, Code::E101);
        report.findings[0].culprit_ranks.clone()
    };
    let no_rank: [u32; 0] = [];
    assert_eq!(culprits(&[missed.clone(), reached("", 1)]), no_rank);
    assert_eq!(culprits(&[missed.clone(), reached("[rank6]:", 3)]), no_rank);
    assert_eq!(culprits(&[missed.clone(), reached("[rank3]:", 3)]), [2]);
    let size = "world_size 4".to_owned();
    assert_eq!(
        culprits(&[size, missed, reached("", 1), reached("", 3)]),
        [2]
    );
}

#[test]
fn a_text_without_facts_is_set_aside() {
    let report = judge_lines(&["epoch 1: loss 0.4".to_owned(), "done".to_owned()]);
    assert!(report.input.logs.is_none());
    assert_eq!(report.problems[0].code, Code::N300);
    assert_eq!(report.verdict, Verdict::Inconclusive);
}

#[test]
fn a_long_log_is_read_as_a_stream() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file can be made");
    let mut text = "step 1 of many, nothing to see here\n".repeat(300_000);
    text.push_str(&all_reduce_timeouts(0..8).join("\n"));
    std::fs::write(file.path(), text).expect("the file system has space");
    let options = LoadOptions {
        max_file_bytes: 1 << 20,
        ..LoadOptions::default()
    };
    let loaded = load(&[file.path().to_owned()], &options, |_| panic!("no record"))
        .expect("the file exists");
    assert_eq!(loaded.problems, []);
    assert_eq!(loaded.logs[0].lines, 300_017);
    assert_eq!(loaded.logs[0].facts().count(), 16);
}

#[test]
fn the_json_of_a_log_keeps_to_the_schema() {
    let schema = serde_json::from_str(json::SCHEMA).expect("the schema is valid");
    let validator = jsonschema::validator_for(&schema).expect("the schema is valid");
    let report = judge_lines(&all_reduce_timeouts(0..7));
    let mut out = Vec::new();
    json::write(&report, &mut out).expect("writing to memory does not fail");
    let value: serde_json::Value = serde_json::from_slice(&out).expect("the output is JSON");
    assert!(validator.is_valid(&value), "{value}");
    assert_eq!(value["input"]["logs"]["ranks"], 7);
    assert!(value["findings"][0]["log"][0]["line"].is_u64());
}

#[test]
fn an_exception_without_a_rank_is_named_if_only_an_exit_code_is_known_besides() {
    let agent = "E1126 18:12:31.245000 27237 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) \
                 local_rank: 0 (pid: 30495) of binary: /usr/bin/python";
    let error = "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:151] SO_ERROR: Connection \
                 refused, remote=[127.0.0.1]:12179";
    let traceback = [
        "Traceback (most recent call last):",
        "  File \"train.py\", line 7, in <module>",
        "    dist.init_process_group(\"gloo\")",
        error,
        agent,
        // This traceback is that of torchrun itself and of no rank.
        "Traceback (most recent call last):",
        "  File \"/usr/bin/torchrun\", line 8, in <module>",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    ];
    let report = judge_lines(&traceback.map(str::to_owned));
    let [finding] = &report.findings[..] else {
        panic!("the log has one finding: {report:?}")
    };
    let expected = format!(
        "the process 30495 of local rank 0 ended with exit code 1; an exception without a rank is in line 4: {error}"
    );
    assert_eq!(finding.sentence, expected);
    assert!(
        finding.next.contains("traceback above line 4"),
        "{finding:?}"
    );
    assert!(
        finding.next.contains("listen at [127.0.0.1]:12179"),
        "{finding:?}"
    );
    let lines: Vec<u64> = finding.log.iter().map(|line| line.line).collect();
    assert_eq!(lines, [5, 4]);
    // Without a traceback before it, a line that looks like an exception is none.
    let report = judge_lines(&[error.to_owned(), agent.to_owned()]);
    let sentence = &report.findings[0].sentence;
    assert!(
        sentence.ends_with("the log does not show why"),
        "{sentence}"
    );
}

#[test]
fn a_size_that_gloo_did_not_expect_is_a_mismatch_and_no_crash() {
    let lines = [
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  [enforce fail at gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 4196 vs 4. Received \
         data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
        "[rank0]: RuntimeError: [/__w/gloo/transport/tcp/pair.cc:545] Read error [10.0.0.7]:39559: Connection reset by peer",
        "Root Cause (first observed failure):",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -6 (pid: 30496)",
    ];
    let report = judge_lines(&lines.map(str::to_owned));
    let finding = &report.findings[0];
    assert_eq!(
        (report.verdict, finding.code),
        (Verdict::Mismatch, Code::E112)
    );
    let beginning = "rank 1 received 4196 B from another rank in place of 4 B: ";
    assert!(finding.sentence.starts_with(beginning), "{finding:?}");
    assert!(finding.culprit_ranks.is_empty(), "{finding:?}");
}

/// The log of a torchrun job on gloo whose ranks in `ranks` timed out; rank 0 ended first, with this code.
fn gloo_timeouts(ranks: &[u32], code: i32) -> Vec<String> {
    let error = "RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting \
                 10000ms for recv operation to complete";
    let mut lines: Vec<String> = ranks
        .iter()
        .map(|rank| format!("[rank{rank}]: {error}"))
        .collect();
    lines.push("Failures:".to_owned());
    for rank in 1..4 {
        lines.push(format!("  rank      : {rank} (local_rank: {rank})"));
        lines.push(format!("  exitcode  : -15 (pid: 127{rank})"));
    }
    lines.push("Root Cause (first observed failure):".to_owned());
    lines.push("  rank      : 0 (local_rank: 0)".to_owned());
    lines.push(format!("  exitcode  : {code} (pid: 1270)"));
    lines
}

#[test]
fn a_time_out_in_gloo_does_not_accuse_the_rank_that_ended_first_by_it() {
    // Python's own end may be SIGABRT after an exception.
    for code in [1, -6] {
        let mut lines = gloo_timeouts(&[0, 2, 3], code);
        // Rank 3 also saw the end of a rank that had timed out.
        let closed =
            "[rank3]: RuntimeError: [/__w/gloo/pair.cc:561] Connection closed by peer [::1]:6";
        lines.push(closed.to_owned());
        let report = judge_lines(&lines);
        let finding = &report.findings[0];
        assert_eq!(
            (report.verdict, finding.code),
            (Verdict::Stuck, Code::E102),
            "{finding:?}"
        );
        assert_eq!(finding.culprit_ranks, [1]);
        assert!(finding.confidence <= 0.4, "{finding:?}");
        let sentence = "ranks 0, 2 and 3 timed out in a message of gloo, after 10 s, and no line shows that rank 1 did: ";
        assert!(finding.sentence.starts_with(sentence), "{finding:?}");
        // All timed out: no line shows for whom they waited.
        let report = judge_lines(&gloo_timeouts(&[0, 1, 2, 3], code));
        assert_eq!(report.verdict, Verdict::Inconclusive, "{report:?}");
        assert!(report.findings[0].culprit_ranks.is_empty(), "{report:?}");
        // The rank that ended first did so by itself.
        let report = judge_lines(&gloo_timeouts(&[1, 2, 3], code));
        assert_eq!(report.findings[0].code, Code::E150, "{report:?}");
        assert_eq!(report.findings[0].culprit_ranks, [0]);
    }
}

#[test]
fn slurm_s_order_of_exits_after_a_time_out_in_gloo_accuses_no_rank() {
    let error = "RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting \
                 10000ms for recv operation to complete";
    // The log of rank 0 is missing: it may have timed out, too.
    let lines = [
        "srun: error: n0: task 0: Exited with exit code 1".to_owned(),
        "srun: error: n0: task 1: Exited with exit code 1".to_owned(),
        format!("[rank1]: {error}"),
    ];
    let report = judge_lines(&lines);
    assert_eq!(report.verdict, Verdict::Inconclusive, "{report:?}");
    let finding = &report.findings[0];
    assert_eq!(
        finding.sentence,
        "rank 1 timed out in a message of gloo, after 10 s; the log does not show for which rank it waited"
    );
    assert!(finding.culprit_ranks.is_empty(), "{finding:?}");
}

#[test]
fn the_exception_of_a_rank_that_was_then_aborted_is_cited() {
    let lines = [
        "[rank1]: RuntimeError: bad sample",
        "terminate called without an active exception",
        "Root Cause (first observed failure):",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -6 (pid: 1367)",
    ];
    let report = judge_lines(&lines.map(str::to_owned));
    let finding = &report.findings[0];
    assert_eq!(
        finding.sentence,
        "the process 1367 of rank 1 was killed by signal 6 (SIGABRT) after it had raised RuntimeError: bad sample"
    );
    assert_eq!(finding.next, "read the traceback above line 1");
    let lines: Vec<u64> = finding.log.iter().map(|line| line.line).collect();
    assert_eq!(lines, [5, 1]);
}

//! Tests what a log adds to records, and what in it contradicts them.

use super::{RESTART, dump_signal, fixtures, judge, timed_out};
use rcomm_analyzer::{Code, Report, Verdict};

/// The report on the records of a job in which one rank never joined, and on a log of these lines.
fn judge_with_log(lines: &[String]) -> Report {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let log = folder.path().join("job.log");
    std::fs::write(&log, lines.join("\n")).expect("the file system has space");
    judge(&[fixtures().join("dumps/never-join-w4"), log])
}

#[test]
fn a_log_agrees_with_records_or_contradicts_them() {
    let alone = judge_with_log(&["[rank0]: ValueError: of no use".to_owned()]);
    let first = &alone.findings[0];
    let seq = first.seq.expect("the finding has a number");
    let culprit = first.culprit_ranks[0];
    let group = &first.group.as_ref().expect("the finding has a group").name;
    assert_eq!(group, "0");
    let others = (0..4).filter(|&rank| rank != culprit);
    let lines: Vec<String> = others
        .flat_map(|rank| timed_out(rank, seq, "ALLREDUCE", 512, seq))
        .collect();
    let supported = judge_with_log(&lines);
    let log = &supported.findings[0].log;
    assert!(
        log.len() >= 3 && log.iter().all(|line| !line.contradicts),
        "{log:?}"
    );
    assert_eq!(supported.findings[0].sentence, first.sentence);
    let contradicted = judge_with_log(&timed_out(culprit, seq, "ALLREDUCE", 512, seq));
    assert!(contradicted.findings[0].log[0].contradicts);
    assert_eq!(contradicted.findings[0].code, first.code);
}

#[test]
fn the_time_out_of_a_culprit_contradicts_only_a_finding_that_it_never_issued_the_operation() {
    // Rank 1 issued the operation, but only after the time-out of its peers. Then it timed out, too.
    let late = fixtures().join("circumstances/nccl-late-w8");
    // The culprit's record is missing, so nothing shows whether it came.
    let unread = tempfile::tempdir().expect("a temporary directory can be made");
    for rank in [0, 2, 3] {
        let name = format!("rank_{rank}");
        let dump = fixtures()
            .join("dumps/never-join-w4/pickle")
            .join(format!("rank_{rank}"));
        std::fs::copy(dump, unread.path().join(name)).expect("the dump can be copied");
    }
    let unread = unread.path().to_owned();
    for (records, code, end) in [
        (&late, Code::E101, "#43"),
        (&unread, Code::E102, ", so it had issued it"),
    ] {
        let alone = judge(std::slice::from_ref(records));
        let first = &alone.findings[0];
        assert_eq!(first.code, code, "{}", first.sentence);
        let (culprit, seq) = (
            first.culprit_ranks[0],
            first.seq.expect("the finding has a number"),
        );
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let log = folder.path().join("job.log");
        let lines = timed_out(culprit, seq, "ALLREDUCE", 512, seq).join("\n");
        std::fs::write(&log, lines).expect("the file system has space");
        let report = judge(&[records.clone(), log]);
        assert_eq!(report.findings[0].code, code);
        let line = &report.findings[0].log[0];
        assert_eq!(line.rank, Some(culprit));
        assert!(line.text.ends_with(end), "{}", line.text);
        assert!(!line.contradicts, "{}", line.text);
    }
}

#[test]
fn no_line_of_an_earlier_attempt_is_cited_with_records_of_the_newest() {
    let mut lines = timed_out(0, 1, "ALLREDUCE", 512, 1).to_vec();
    lines.push(RESTART.to_owned());
    assert!(judge_with_log(&lines).findings[0].log.is_empty());
}

#[test]
fn a_log_of_another_group_does_not_contradict_records() {
    let alone = judge_with_log(&["[rank0]: ValueError: of no use".to_owned()]);
    let culprit = alone.findings[0].culprit_ranks[0];
    let mut others = (0..4).filter(|&rank| rank != culprit);
    let odd = others.next().expect("three ranks are left");
    let in_group = |group: &str| -> Vec<String> {
        let lines = (0..4).filter(|&rank| rank != culprit).flat_map(|rank| {
            let op = if rank == odd {
                "BROADCAST"
            } else {
                "ALLREDUCE"
            };
            timed_out(rank, 9, op, 512, 9)
        });
        lines
            .map(|line| line.replace("0(default_pg)", group))
            .collect()
    };
    let of_same = judge_with_log(&in_group("0(default_pg)"));
    let line = &of_same.findings[0].log[0];
    assert!(line.contradicts, "{line:?}");
    let of_other = judge_with_log(&in_group("tp_1"));
    let log = &of_other.findings[0].log;
    let cited = log.iter().find(|line| line.text.contains("on group tp_1"));
    assert!(cited.is_some_and(|line| !line.contradicts), "{log:?}");
}

#[test]
fn a_finding_of_a_log_has_the_group_that_the_records_know_by_its_name() {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let log = folder.path().join("job.log");
    let lines = (0..3).flat_map(|rank| timed_out(rank, 41, "ALLREDUCE", 512, 41));
    let mut lines: Vec<String> = lines.collect();
    lines.push(dump_signal(3, 40));
    std::fs::write(&log, lines.join("\n")).expect("the file system has space");
    let report = judge(&[fixtures().join("dumps/healthy-w4"), log]);
    let first = &report.findings[0];
    assert_eq!((first.code, first.seq), (Code::E101, Some(41)));
    let group = first.group.as_ref();
    assert_eq!(
        group.map(|group| group.name.as_str()),
        Some("0"),
        "{first:?}"
    );
    assert_eq!(group.map(|group| group.ranks.len()), Some(4), "{first:?}");
}

#[test]
fn time_outs_in_the_log_of_a_cancelled_job_are_cited() {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let log = folder.path().join("job.log");
    // Without a label, this is the rank within some group.
    let line = timed_out(1, 41, "ALLREDUCE", 512, 41)[0].replace("[rank1]:", "");
    std::fs::write(&log, line).expect("the file system has space");
    let report = judge(&[fixtures().join("lives/cancelled-w4"), log]);
    assert_eq!(report.verdict, Verdict::Cancelled);
    let mut cited = report.findings.iter().flat_map(|finding| &finding.log);
    assert!(cited.any(|line| line.line == 1), "{:?}", report.findings);
}

//! Tests that findings and their doubts say of a rank only what holds in the state that the rank is in.

use super::unproven::sends;
use crate::job::{State, alive, at, closed, dead, record};
use rcomm_recorder::model::{EntryState, Rank};
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_verdict::{Code, Finding, Policy, Report, analyze};

fn live(dumps: &[Dump], now: f64) -> Report {
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(now)),
        ..Policy::default()
    };
    analyze(dumps, &policy)
}

/// The number of doubts that contain this text.
fn doubts(finding: &Finding, part: &str) -> usize {
    let doubts = finding.doubts.iter();
    doubts.filter(|doubt| doubt.contains(part)).count()
}

const WAITS: [(f64, State); 2] = [(0.0, State::Done(0.1)), (1.0, State::Pending)];

#[test]
fn a_rank_whose_device_has_not_started_an_operation_is_not_said_to_wait_in_none() {
    let dumps = (0..4).map(|rank| {
        let mut dump = record(rank, 4, &WAITS);
        dump.recorder = Recorder::NcclProfiler;
        dump.signatures[0].backend = "nccl".to_owned();
        for entry in &mut dump.entries {
            entry.timeout_ms = 600_000;
        }
        if rank == 0 {
            dump.entries[1].state = EntryState::Scheduled;
            dump.entries[1].time_discovered_started_ns = 0;
        }
        alive(dump, 13.0)
    });
    let report = live(&dumps.collect::<Vec<_>>(), 13.0);
    let finding = &report.findings[0];
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E101, &[0][..])
    );
    let expected = "rank 0 issued all_reduce #2 on group default_pg but has not started it";
    assert!(
        finding.sentence.starts_with(expected),
        "{}",
        finding.sentence
    );
    assert_eq!(doubts(finding, "in no operation"), 0, "{finding:?}");
    // The operation is named once.
    let named = finding.sentence.matches("all_reduce #2").count();
    assert_eq!(named, 1, "{}", finding.sentence);
}

#[test]
fn processes_that_are_gone_are_not_said_to_wait() {
    let first_missing = |closed_ranks: &[Rank]| {
        let dumps = (0..4).map(|rank| {
            let operations = if rank < 2 { &WAITS[..] } else { &WAITS[..1] };
            let dump = record(rank, 4, operations);
            match closed_ranks.contains(&rank) {
                true => closed(dump, 0.5),
                false => alive(dump, 100.0),
            }
        });
        let report = live(&dumps.collect::<Vec<_>>(), 100.0);
        let findings = report.findings.into_iter();
        let mut findings = findings.filter(|finding| finding.code == Code::E101);
        findings.next().expect("ranks 2 and 3 are missing")
    };
    for (closed_ranks, expected) in [
        (
            &[][..],
            Some("one of ranks 2 and 3 may wait for another in"),
        ),
        (
            &[2],
            Some("rank 3 may wait for another of ranks 2 and 3 in"),
        ),
        (&[2, 3], None),
    ] {
        let finding = first_missing(closed_ranks);
        assert_eq!(finding.culprit_ranks, [2, 3]);
        let found = finding
            .doubts
            .iter()
            .find(|doubt| doubt.contains("may wait for"));
        match expected {
            Some(expected) => assert!(found.is_some_and(|doubt| doubt.starts_with(expected))),
            None => assert_eq!(found, None),
        }
        assert!(
            expected.is_none() || finding.confidence <= 0.75,
            "{finding:?}"
        );
    }
}

#[test]
fn a_message_of_a_job_that_is_over_is_not_dated_from_now() {
    let job = |is_over: bool| {
        let dumps = sends(true).map(|dump| match is_over {
            true => dead(dump, 20.0),
            false => alive(dump, 20.0),
        });
        let report = live(&dumps, 3600.0);
        let mut findings = report.findings.into_iter();
        let found = findings.find(|finding| finding.code == Code::E120);
        found.expect("rank 1 posted no receive").sentence
    };
    let says_when = |sentence: &str| sentence.contains(" ago by a call that did not block");
    let (of_live, of_dead) = (job(false), job(true));
    assert!(says_when(&of_live), "{of_live}");
    assert!(!says_when(&of_dead), "{of_dead}");
    let expected = "which rank 0 issued by a call that did not block";
    assert!(of_dead.contains(expected), "{of_dead}");
}

//! Tests the collector as a source.

use crate::server::{Answers, serve};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{CollectorSource, HttpAddress, SimulatedSource, Source, SourceError};
use rcomm_analyzer::{Live, LiveOptions, Moment, Report, Verdict, analyze};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

fn address(address: SocketAddr) -> HttpAddress {
    address.to_string().parse().expect("the text is an address")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// The moment 60 s after the fault.
fn moment(simulation: &Simulation) -> Moment {
    Moment {
        elapsed: Duration::from_secs(100),
        wall_ns: simulation.fault_ns() + 60_000_000_000,
    }
}

/// The report on a simulated job at that moment.
fn judge(simulation: &Simulation) -> Report {
    let now = moment(simulation);
    let mut live = live("simulation");
    let mut source = SimulatedSource::new(simulation.clone(), move || now.wall_ns);
    live.observe(0, source.poll(soon()), now);
    let snapshot = live.refresh(now).expect("the poll gives a new snapshot");
    Report::clone(&snapshot.report)
}

/// A live view of two sources: the first has this name, the second is called `records`.
fn live(name: &str) -> Live {
    Live::new(
        LiveOptions::default(),
        analyze,
        vec![name.into(), "records".into()],
    )
}

/// The answers of a collector with this report.
fn collector(report: &Report) -> Answers {
    let report = serde_json::to_vec(report).expect("the value can be written as JSON");
    let status =
        br#"{"job": "llama", "number": 7, "judged_at_ns": 1, "silent_ranks": [3], "sources": []}"#;
    [
        ("/api/v1/status", (200, status.to_vec())),
        ("/api/v1/report", (200, report)),
    ]
    .into()
}

#[test]
fn a_collectors_report_is_shown_with_its_ranks_and_hosts() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let report = judge(&simulation);
    let mut source = CollectorSource::new(address(serve(collector(&report))), None);
    let now = moment(&simulation);
    let mut live = live("collector");
    live.observe(0, source.poll(soon()), now);
    let snapshot = live.refresh(now).expect("the poll gives a new snapshot");
    assert_eq!(
        (snapshot.report.verdict, &*snapshot.job),
        (Verdict::Stuck, "llama")
    );
    assert_eq!(snapshot.report.findings, report.findings);
    assert_eq!(snapshot.ranks.len(), 16);
    let last = &snapshot.ranks[15];
    assert_eq!((&*last.host, last.local_rank), ("n001", 7));
    assert!(snapshot.ranks[3].silent && !last.silent);
    // The same report again is no change.
    live.observe(0, source.poll(soon()), now);
    assert!(live.refresh(now).is_none());
}

#[test]
fn a_collector_passes_on_a_later_attempt_and_no_size_that_nothing_states() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let mut report = judge(&simulation);
    for may_have_more in [false, true] {
        report.input.may_have_more = may_have_more;
        let mut answers = collector(&report);
        let status = br#"{"job": "llama", "number": 7, "silent_ranks": [],
            "later_attempt": {"attempt": 2, "ranks": [8, 9]}}"#;
        answers.insert("/api/v1/status", (200, status.to_vec()));
        let poll = CollectorSource::new(address(serve(answers)), None).poll(soon());
        let poll = poll.expect("the collector answers");
        let later = poll
            .later_attempt
            .expect("the collector has seen an attempt");
        assert_eq!((later.attempt, later.ranks), (2, vec![8, 9]));
        assert_eq!(poll.world_size, (!may_have_more).then_some(16));
    }
    // Older collectors do not state it.
    let poll = CollectorSource::new(address(serve(collector(&report))), None).poll(soon());
    assert_eq!(poll.expect("the collector answers").later_attempt, None);
}

#[test]
fn the_source_that_read_more_ranks_judges() {
    let large = Simulation::new(Situation::Healthy, 32, 0);
    let small = Simulation::new(Situation::StuckRank, 16, 0);
    let mut source = CollectorSource::new(address(serve(collector(&judge(&small)))), None);
    let mut live = live("collector");
    let now = moment(&small);
    live.observe(0, source.poll(soon()), now);
    let snapshot = live.refresh(now).expect("the poll gives a new snapshot");
    assert_eq!(snapshot.report.verdict, Verdict::Stuck);
    let mut records = SimulatedSource::new(large, move || now.wall_ns);
    live.observe(1, records.poll(soon()), now);
    let snapshot = live.refresh(now).expect("the poll gives a new snapshot");
    assert_eq!(snapshot.ranks.len(), 32);
    assert_ne!(snapshot.report.verdict, Verdict::Stuck);
}

#[test]
fn unusable_answers_of_a_collector_are_errors_with_their_reason() {
    let refused: Answers = [("/api/v1/status", (401, Vec::new()))].into();
    let not_ready: Answers = [("/api/v1/status", (503, Vec::new()))].into();
    let no_collector: Answers = [("/api/v1/status", (200, b"<html>".to_vec()))].into();
    let mut newer = collector(&judge(&Simulation::new(Situation::Healthy, 2, 0)));
    let report = &mut newer
        .get_mut("/api/v1/report")
        .expect("`collector` prepared a report")
        .1;
    let text = String::from_utf8_lossy(report).replace("rcomm.report/1", "rcomm.report/9");
    *report = text.into_bytes();
    for (answers, part) in [
        (
            refused,
            "it requires a token; pass the collector's token with --token",
        ),
        (not_ready, "not read its sources yet"),
        (no_collector, "is invalid"),
        (newer, "rcomm.report/9"),
    ] {
        let error = CollectorSource::new(address(serve(answers)), None).poll(soon());
        let error: SourceError = error.expect_err(part);
        assert!(error.to_string().contains(part), "{error}");
    }
}

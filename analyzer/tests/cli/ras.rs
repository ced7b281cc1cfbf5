//! Tests reports of NCCL's RAS: next to dumps they are further evidence, and alone they give no verdict.

use crate::program::{fixture, run};
use rcomm_analyzer::{Code, Report};

const RAS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/ras");

fn report(scenario: &str, ras: &str) -> Report {
    let ras = format!("{RAS}/{ras}");
    let dumps = fixture(scenario, "pickle");
    serde_json::from_str(&run(&["analyze", "--format", "json", &dumps, &ras]).stdout).unwrap()
}

#[test]
fn the_finding_on_a_rank_without_a_record_states_that_ras_considers_it_dead() {
    let report = report("crashed-w4", "dead.json");
    let first = &report.findings[0];
    assert_eq!(
        (first.code, &first.culprit_ranks[..]),
        (Code::E102, &[3][..])
    );
    let expected = "; NCCL RAS: its process 4182 on node07 (GPU 3) is considered dead";
    assert!(first.sentence.ends_with(expected), "{}", first.sentence);
    assert_eq!(first.confidence, 0.97);
    assert!(report.problems.is_empty(), "{:?}", report.problems);
}

#[test]
fn launch_counts_support_the_finding_on_a_rank_that_never_joined() {
    let report = report("never-join-w4", "behind.txt");
    let first = &report.findings[0];
    assert_eq!(
        (first.code, &first.culprit_ranks[..]),
        (Code::E101, &[1][..])
    );
    let expected = "launched 2 AllGather operations where most launched 3";
    assert!(first.sentence.ends_with(expected), "{}", first.sentence);
}

#[test]
fn a_healthy_job_stays_healthy_whatever_was_counted() {
    // Launches are counted at slightly different moments.
    let report = report("healthy-w4", "behind.txt");
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn a_report_alone_is_no_record() {
    let alone = run(&["analyze", &format!("{RAS}/dead.json")]);
    assert_eq!(alone.code, Some(2), "{}", alone.stdout);
}

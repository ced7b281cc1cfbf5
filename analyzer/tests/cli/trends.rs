//! `rcomm-fr trends`: logs of NCCL's Inspector.

use crate::program::{finish, fixture, rcomm_fr, run};
use rcomm_analyzer::inspector::Trends;
use rcomm_analyzer::{Problem, Report, Verdict};
use std::fs;

const LOGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/inspector");

#[test]
fn logs_of_two_processes_become_one_row_for_each_operation() {
    let mut command = rcomm_fr(&["trends", LOGS]);
    command.env("COLUMNS", "100");
    let run = finish(command);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    insta::assert_snapshot!(run.stdout);
}

#[test]
fn the_json_form_holds_each_rank() {
    let run = run(&["trends", "--format", "json", LOGS]);
    let trends: Trends = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(trends.schema, Trends::SCHEMA);
    // The second process was killed while it wrote a line.
    assert_eq!(
        (trends.files, trends.records, trends.unread_lines),
        (2, 88, 1)
    );
    let first = &trends.trends[0];
    assert_eq!(
        (&*first.function, first.bytes, first.size),
        ("AllReduce", 1 << 24, 2)
    );
    assert!((first.change.unwrap() - 0.45).abs() < 0.1, "{first:?}");
    assert_eq!(trends.trends[1].change, None);
}

#[test]
fn files_that_are_no_such_log_are_refused_with_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("prometheus.prom");
    fs::write(&log, "nccl_bus_bandwidth_gbs{rank=\"0\"} 3\n").unwrap();
    for path in [log.to_str().unwrap(), &*fixture("healthy-w4", "json")] {
        let run = run(&["trends", path]);
        assert_eq!(run.code, Some(2));
        assert_eq!(run.stdout, "");
        let last = run.stderr.lines().last().unwrap();
        assert!(
            last.contains("none of these files is a log of NCCL's Inspector"),
            "{last}"
        );
    }
    assert_eq!(run(&["trends", "/no/such/log"]).code, Some(2));
}

#[test]
fn analyze_leaves_a_log_of_inspector_aside_and_states_why() {
    let dumps = fixture("healthy-w4", "pickle");
    let run = run(&["analyze", "--format", "json", &dumps, LOGS]);
    let report: Report = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(report.verdict, Verdict::Healthy);
    let is_of_file = |problem: &&Problem| !problem.path.is_empty();
    assert_eq!(report.problems.iter().filter(is_of_file).count(), 2);
    for problem in report.problems.iter().filter(is_of_file) {
        assert!(
            problem.sentence.contains("`rcomm-fr trends` reads it"),
            "{}",
            problem.sentence
        );
    }
}

//! `rcomm-fr diff`: what differs between two runs, given as records or as saved reports.

use crate::program::{fixture, run};
use serde_json::Value;

#[test]
fn a_run_that_began_to_hang_is_worse_and_the_reverse_is_not() {
    let healthy = fixture("healthy-w4", "pickle");
    let stuck = fixture("never-join-w4", "pickle");
    let worse = run(&["diff", &healthy, &stuck]);
    assert_eq!(worse.code, Some(1), "{}", worse.stderr);
    assert!(
        worse
            .stdout
            .starts_with("STUCK  was HEALTHY before; 1 new finding"),
        "{}",
        worse.stdout
    );
    assert!(
        worse.stdout.contains("rank 1 never issued"),
        "{}",
        worse.stdout
    );
    let better = run(&["diff", &stuck, &healthy]);
    assert_eq!(better.code, Some(0), "{}", better.stderr);
    assert!(
        better
            .stdout
            .starts_with("HEALTHY  was STUCK before; 1 finding gone"),
        "{}",
        better.stdout
    );
}

#[test]
fn saved_report_can_replace_its_records() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("before.json");
    let saved = saved.to_str().unwrap();
    let stuck = fixture("never-join-w4", "pickle");
    run(&["analyze", &stuck, "--format", "json", "-o", saved]);
    let same = run(&["diff", saved, &stuck, "--format", "json"]);
    assert_eq!(same.code, Some(0), "{}", same.stderr);
    let same: Value = serde_json::from_str(&same.stdout).unwrap();
    assert_eq!(same["schema"], "rcomm.diff/1");
    assert_eq!(same["new"], Value::Array(vec![]));
    assert_eq!(same["gone"], Value::Array(vec![]));
    assert_eq!(same["remaining"].as_array().unwrap().len(), 1);
}

#[test]
fn saved_report_may_have_deep_stacks() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("before.json");
    let stuck = fixture("never-join-w4", "pickle");
    let analyzed = run(&["analyze", &stuck, "--format", "json"]);
    let mut report: Value = serde_json::from_str(&analyzed.stdout).unwrap();
    let innermost = report["stacks"][0].clone();
    assert!(innermost.is_object(), "the dumps have stacks");
    // Each call is two levels, and the parser refuses 128.
    report["stacks"] = (0..200).fold(Value::Array(vec![innermost.clone()]), |callees, _| {
        let mut call = innermost.clone();
        call["children"] = callees;
        Value::Array(vec![call])
    });
    // The schema's name is first, as in the report that was printed.
    let schema = report.as_object_mut().unwrap().remove("schema").unwrap();
    let text = format!("{{\"schema\":{schema},{}", &report.to_string()[1..]);
    std::fs::write(&saved, text).unwrap();
    let same = run(&["diff", saved.to_str().unwrap(), &stuck, "--format", "json"]);
    assert_eq!(same.code, Some(0), "{}", same.stderr);
    let same: Value = serde_json::from_str(&same.stdout).unwrap();
    assert_eq!(same["remaining"].as_array().unwrap().len(), 1);
}

#[test]
fn side_without_a_record_cannot_be_compared() {
    let dir = tempfile::tempdir().unwrap();
    let healthy = fixture("healthy-w4", "pickle");
    let empty = run(&["diff", dir.path().to_str().unwrap(), &healthy]);
    assert_eq!(empty.code, Some(2), "{}", empty.stdout);
    let reason = "no record of any rank could be read in ";
    assert!(empty.stderr.contains(reason), "{}", empty.stderr);
    assert_eq!(run(&["diff", "/nowhere", &healthy]).code, Some(2));
}

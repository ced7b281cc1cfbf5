//! `rcomm-fr watch`: dumps arrive one by one, and the last one completes the report.

use crate::program::{Reader, fixture, rcomm_fr, run, wait};
use rcomm_analyzer::Report;
use rcomm_analyzer::print::json;
use serde_json::Value;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn verdict_follows_the_last_dump() {
    let dir = tempfile::tempdir().unwrap();
    let (dumps, out) = (dir.path().join("dumps"), dir.path().join("report.json"));
    // The folder does not exist yet when the watch begins.
    let mut command = rcomm_fr(&["watch", dumps.to_str().unwrap(), "--format", "json"]);
    command.args(["--timeout", "50s", "-o", out.to_str().unwrap()]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = Reader::of(child.stderr.take().unwrap());

    fs::create_dir(&dumps).unwrap();
    let source = fixture("never-join-w4", "pickle");
    for (rank, expected) in [
        (0, "1 of 4 ranks"),
        (2, "2 of 4 ranks"),
        (3, "3 of 4 ranks"),
    ] {
        let name = format!("rank_{rank}");
        fs::copy(Path::new(&source).join(&name), dumps.join(&name)).unwrap();
        lines.wait_for(expected);
        assert!(!out.exists(), "the report came before the last dump");
    }
    fs::copy(Path::new(&source).join("rank_1"), dumps.join("rank_1")).unwrap();
    let arrived = Instant::now();
    let line = lines.wait_for("4 of 4 ranks");
    let until_verdict = arrived.elapsed();
    assert!(line.contains("STUCK  rank 1 never issued"), "{line}");
    assert_eq!(wait(&mut child), Some(1));
    // The times are printed and not asserted, since the machine may be busy.
    let until_report = arrived.elapsed();
    let times =
        format!("after the last dump: verdict {until_verdict:.1?}, report {until_report:.1?}");
    writeln!(std::io::stderr(), "{times}").unwrap();
    let report: Report = serde_json::from_str(&fs::read_to_string(&out).unwrap()).unwrap();
    assert_eq!(report.input.ranks_read, 4);
    assert_eq!(report.findings[0].culprit_ranks, vec![1]);
}

#[test]
fn dumps_are_awaited_while_the_job_may_have_more_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let (dumps, out) = (dir.path().join("dumps"), dir.path().join("report.json"));
    fs::create_dir(&dumps).unwrap();
    // gloo's own recorder names the members of the newest group only, here those of a group other than the world.
    for name in ["rank_0.json", "rank_1.json"] {
        let source = Path::new(&fixture("healthy-native-w2", "json")).join(name);
        let text = fs::read_to_string(source).unwrap();
        let text = text.replace(r#"["0","default_pg"]"#, r#"["1","tp"]"#);
        fs::write(dumps.join(name), text).unwrap();
    }
    let timeout = Duration::from_secs(1);
    let began = Instant::now();
    let (dumps, out_path) = (dumps.to_str().unwrap(), out.to_str().unwrap());
    let watched = run(&[
        "watch",
        dumps,
        "--settle",
        "1ms",
        "--timeout",
        "1s",
        "--format",
        "json",
        "-o",
        out_path,
    ]);
    assert!(
        began.elapsed() >= timeout,
        "it took the records for complete"
    );
    assert!(
        watched.stderr.contains(" s  2 ranks  "),
        "{}",
        watched.stderr
    );
    let report: Value = serde_json::from_str(&fs::read_to_string(&out).unwrap()).unwrap();
    assert_eq!(report["input"]["may_have_more"], true, "{report}");
    let schema: Value = serde_json::from_str(json::SCHEMA).unwrap();
    let valid = jsonschema::validate(&schema, &report);
    assert!(valid.is_ok(), "{valid:?}");
}

#[test]
fn what_is_there_at_the_deadline_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let source = fixture("crashed-w4", "pickle");
    for rank in 0..3 {
        let name = format!("rank_{rank}");
        fs::copy(Path::new(&source).join(&name), dir.path().join(&name)).unwrap();
    }
    let watched = run(&["watch", dir.path().to_str().unwrap(), "--timeout", "300ms"]);
    assert_eq!(watched.code, Some(1), "{}", watched.stderr);
    assert!(
        watched
            .stdout
            .starts_with("STUCK  rank 3 left no readable record"),
        "{}",
        watched.stdout
    );
}

#[test]
fn folder_in_which_nothing_arrives_is_one_clear_line() {
    let dir = tempfile::tempdir().unwrap();
    let watched = run(&["watch", dir.path().to_str().unwrap(), "--timeout", "10ms"]);
    assert_eq!(watched.code, Some(2));
    let lines: Vec<&str> = watched.stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{}", watched.stderr);
    assert!(lines[0].contains("waiting for records in "), "{}", lines[0]);
    assert!(
        lines[1].starts_with("error: nothing arrived in "),
        "{}",
        lines[1]
    );
}

#[test]
fn a_folder_that_does_not_exist_is_named_and_waited_for() {
    let watched = run(&["watch", "/nowhere/dumps", "--timeout", "10ms"]);
    assert_eq!(watched.code, Some(2));
    assert!(
        watched
            .stderr
            .contains("waiting for /nowhere/dumps to appear"),
        "{}",
        watched.stderr
    );
}

#[test]
fn a_file_that_changes_is_read_anew_and_one_that_is_removed_is_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let source = fixture("never-join-w4", "pickle");
    for rank in 0..4 {
        let name = format!("rank_{rank}");
        let mut bytes = fs::read(Path::new(&source).join(&name)).unwrap();
        if rank == 1 {
            bytes.truncate(bytes.len() / 2);
        }
        fs::write(dir.path().join(&name), bytes).unwrap();
    }
    // The report is due only after an hour without a change, so the program runs until the test kills it.
    let mut command = rcomm_fr(&["watch", dir.path().to_str().unwrap(), "--settle", "1h"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = Reader::of(child.stderr.take().unwrap());
    let line = lines.wait_for("4 of 4 ranks");
    assert!(!line.contains("rank 1 never issued"), "{line}");
    fs::copy(Path::new(&source).join("rank_1"), dir.path().join("rank_1")).unwrap();
    lines.wait_for("STUCK  rank 1 never issued");
    fs::remove_file(dir.path().join("rank_1")).unwrap();
    let line = lines.wait_for("3 of 4 ranks");
    assert!(!line.contains("never issued"), "{line}");
    child.kill().unwrap();
    child.wait().unwrap();
}

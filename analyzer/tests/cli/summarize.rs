//! `rcomm-fr summarize`: each node packs its part, and one node analyzes all of them.

use crate::program::{fixture, run};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Two nodes with four ranks' dumps each.
fn nodes(dir: &Path) -> [PathBuf; 2] {
    [0, 1].map(|node| {
        let folder = dir.join(format!("node{node}"));
        fs::create_dir(&folder).unwrap();
        for rank in 4 * node..4 * node + 4 {
            let name = format!("rank_{rank}");
            let source = Path::new(&fixture("cascade-2x2x2", "pickle")).join(&name);
            fs::copy(source, folder.join(&name)).unwrap();
        }
        folder
    })
}

fn summarize(folder: &Path, output: &Path) {
    let args = [
        "summarize",
        folder.to_str().unwrap(),
        "-o",
        output.to_str().unwrap(),
    ];
    let packed = run(&args);
    assert_eq!(packed.code, Some(0), "{}", packed.stderr);
    assert!(
        packed.stderr.contains("4 dumps from 4 files"),
        "{}",
        packed.stderr
    );
}

fn report(paths: &[&Path]) -> Value {
    let mut args = vec!["analyze", "--format", "json"];
    args.extend(paths.iter().map(|path| path.to_str().unwrap()));
    serde_json::from_str(&run(&args).stdout).unwrap()
}

#[test]
fn summaries_of_all_nodes_give_the_report_of_all_records() {
    let dir = tempfile::tempdir().unwrap();
    let [one, two] = nodes(dir.path());
    let (a, b) = (dir.path().join("0.rsum"), dir.path().join("1.rsum"));
    summarize(&one, &a);
    summarize(&two, &b);
    assert_eq!(report(&[&a, &b]), report(&[&one, &two]));
    assert_eq!(report(&[&b, &a]), report(&[&one, &two]));
    // A summary of summaries holds the same.
    let all = dir.path().join("all.rsum");
    let args = ["summarize", a.to_str().unwrap(), b.to_str().unwrap(), "-o"];
    let packed = run(&[&args[..], &[all.to_str().unwrap()]].concat());
    assert_eq!(packed.code, Some(0), "{}", packed.stderr);
    assert_eq!(report(&[&all]), report(&[&one, &two]));
    assert_eq!(
        fs::metadata(&a).unwrap().permissions().mode() & 0o777,
        0o600
    );
}

fn damaged(change: impl FnOnce(&mut Vec<u8>)) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let [one, _] = nodes(dir.path());
    let path = dir.path().join("0.rsum");
    summarize(&one, &path);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(&path, bytes).unwrap();
    (dir, path)
}

#[test]
fn a_truncated_summary_is_reported_and_its_beginning_used() {
    // Only the checksum and the last part are missing: all records are there.
    let (_dir, path) = damaged(|bytes| bytes.truncate(bytes.len() - 9));
    let analyzed = run(&["analyze", path.to_str().unwrap()]);
    let words: Vec<&str> = analyzed.stdout.split_whitespace().collect();
    let text = words.join(" ");
    assert!(
        text.contains("the summary is cut short after 4 records"),
        "{text}"
    );
    assert!(text.contains("read 4 of 8 ranks"), "{text}");
}

#[test]
fn a_summary_of_a_newer_version_is_skipped() {
    let (_dir, path) = damaged(|bytes| bytes[8] = 200);
    let analyzed = run(&["analyze", path.to_str().unwrap()]);
    assert_eq!(analyzed.code, Some(2));
    assert!(
        analyzed.stdout.contains("summary version 200 is"),
        "{}",
        analyzed.stdout
    );
}

#[test]
fn nothing_to_pack_is_exit_code_two_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let (empty, output) = (dir.path().join("empty"), dir.path().join("0.rsum"));
    fs::create_dir(&empty).unwrap();
    let args = [
        "summarize",
        empty.to_str().unwrap(),
        "-o",
        output.to_str().unwrap(),
    ];
    assert_eq!(run(&args).code, Some(2));
    assert!(!output.exists());
}

#[test]
fn stacks_are_reported_as_left_aside_and_problems_beyond_the_limit_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let [one, _] = nodes(dir.path());
    let stacks = "Thread 0x1 (most recent call first):\n  File \"train.py\", line 13 in load\n";
    for rank in 0..22 {
        fs::write(one.join(format!("rank_{rank}.txt")), stacks).unwrap();
    }
    let output = dir.path().join("0.rsum");
    let args = [
        "summarize",
        one.to_str().unwrap(),
        "-o",
        output.to_str().unwrap(),
    ];
    let packed = run(&args);
    assert_eq!(packed.code, Some(1), "{}", packed.stderr);
    for text in [
        "4 dumps from 26 files",
        "a summary cannot hold stacks",
        "... and 2 more problems; the summary has all",
    ] {
        assert!(packed.stderr.contains(text), "{text}: {}", packed.stderr);
    }
}

/// `srun` here is a script that runs the step once for each of two nodes.
#[test]
fn the_slurm_script_names_the_culprit() {
    let dir = tempfile::tempdir().unwrap();
    nodes(dir.path());
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rcomm-fr"), bin.join("rcomm-fr")).unwrap();
    let srun = bin.join("srun");
    let stand_in = "#!/bin/bash\n\
        while [[ $1 == --* ]]; do shift; done\n\
        for node in 0 1; do (cd \"$NODES/node$node\" && SLURM_NODEID=$node \"$@\") || exit; done\n";
    fs::write(&srun, stand_in).unwrap();
    fs::set_permissions(&srun, fs::Permissions::from_mode(0o700)).unwrap();
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../examples/slurm/analyze.sbatch"
    );
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let out = dir.path().join("out");
    let output = Command::new("bash")
        .arg(script)
        .env("PATH", path)
        .env("NODES", dir.path())
        // Every node reads the folder in which it runs.
        .env("DUMPS", ".")
        .env("OUT", &out)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}{errors}");
    assert!(
        text.starts_with("STUCK  rank 5 never issued"),
        "{text}{errors}"
    );
    assert!(out.join("report.html").is_file());
}

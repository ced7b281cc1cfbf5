//! `rcomm-fr summarize`: each node packs its part, and one node analyzes all of them.

use crate::program::{fixture, run};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Makes the folders of two nodes, each with the dumps of four ranks.
fn make_nodes(dir: &Path) -> [PathBuf; 2] {
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

/// Packs the four dumps in a node's folder.
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

/// The report on these paths, as JSON.
fn report(paths: &[&Path]) -> Value {
    let mut args = vec!["analyze", "--format", "json"];
    args.extend(paths.iter().map(|path| path.to_str().unwrap()));
    serde_json::from_str(&run(&args).stdout).unwrap()
}

#[test]
fn summaries_of_all_nodes_give_the_report_of_all_records() {
    let dir = tempfile::tempdir().unwrap();
    let [node_0, node_1] = make_nodes(dir.path());
    let [summary_0, summary_1, joined] =
        ["0.rsum", "1.rsum", "joined.rsum"].map(|name| dir.path().join(name));
    summarize(&node_0, &summary_0);
    summarize(&node_1, &summary_1);
    let expected = report(&[&node_0, &node_1]);
    assert_eq!(report(&[&summary_0, &summary_1]), expected);
    assert_eq!(report(&[&summary_1, &summary_0]), expected);
    // A summary of summaries holds the same.
    let packed = run(&[
        "summarize",
        summary_0.to_str().unwrap(),
        summary_1.to_str().unwrap(),
        "-o",
        joined.to_str().unwrap(),
    ]);
    assert_eq!(packed.code, Some(0), "{}", packed.stderr);
    assert_eq!(report(&[&joined]), expected);
    let mode = fs::metadata(&summary_0).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// The summary of one node, changed by `change`, in a folder that must be kept.
fn changed_summary(change: impl FnOnce(&mut Vec<u8>)) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let [node, _] = make_nodes(dir.path());
    let path = dir.path().join("0.rsum");
    summarize(&node, &path);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(&path, bytes).unwrap();
    (dir, path)
}

#[test]
fn a_truncated_summary_is_reported_and_its_beginning_used() {
    // Only the checksum and the last part are missing: all records are there.
    let (_dir, path) = changed_summary(|bytes| bytes.truncate(bytes.len() - 9));
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
    let (_dir, path) = changed_summary(|bytes| bytes[8] = 200);
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
    let [node, _] = make_nodes(dir.path());
    let stacks = "Thread 0x1 (most recent call first):\n  File \"train.py\", line 13 in load\n";
    for rank in 0..22 {
        fs::write(node.join(format!("rank_{rank}.txt")), stacks).unwrap();
    }
    let output = dir.path().join("0.rsum");
    let args = [
        "summarize",
        node.to_str().unwrap(),
        "-o",
        output.to_str().unwrap(),
    ];
    let packed = run(&args);
    assert_eq!(packed.code, Some(0), "{}", packed.stderr);
    for text in [
        "4 dumps from 26 files",
        "a summary cannot hold stacks",
        "... and 2 more problems; the summary has all",
    ] {
        assert!(packed.stderr.contains(text), "{text}: {}", packed.stderr);
    }
    // A record of which a part is missing changes the exit code.
    let whole = fs::read(node.join("rank_0")).unwrap();
    fs::write(node.join("rank_0"), &whole[..whole.len() / 2]).unwrap();
    let packed = run(&args);
    assert_eq!(packed.code, Some(1), "{}", packed.stderr);
}

#[test]
fn a_path_that_does_not_exist_and_a_link_that_leads_nowhere_are_exit_code_one() {
    let dir = tempfile::tempdir().unwrap();
    let [node_0, node_1] = make_nodes(dir.path());
    let output = dir.path().join("0.rsum");
    let (missing, pattern) = (dir.path().join("typo"), dir.path().join("typo*"));
    std::os::unix::fs::symlink(&missing, node_1.join("rank_9")).unwrap();
    for other in [&missing, &pattern, &node_1] {
        let paths = [&node_0, other, &output].map(|path| path.to_str().unwrap());
        let packed = run(&["summarize", paths[0], paths[1], "-o", paths[2]]);
        assert_eq!(packed.code, Some(1), "{}", packed.stderr);
        assert!(packed.stderr.contains("left aside"), "{}", packed.stderr);
    }
}

/// Here `srun` is not Slurm's but a script that runs the step once for each of two nodes.
#[test]
fn the_slurm_script_names_the_culprit() {
    let dir = tempfile::tempdir().unwrap();
    make_nodes(dir.path());
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rcomm-fr"), bin.join("rcomm-fr")).unwrap();
    let srun = bin.join("srun");
    let srun_script = "#!/bin/bash\n\
        while [[ $1 == --* ]]; do shift; done\n\
        for node in 0 1; do (cd \"$NODES/node$node\" && SLURM_NODEID=$node \"$@\") || exit; done\n";
    fs::write(&srun, srun_script).unwrap();
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
        // Each step reads the folder in which it runs.
        .env("DUMPS", ".")
        .env("OUT", &out)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stdout}{stderr}");
    assert!(
        stdout.starts_with("STUCK  rank 5 never issued"),
        "{stdout}{stderr}"
    );
    assert!(out.join("report.html").is_file());
}

#[test]
fn control_characters_of_a_path_do_not_reach_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let [node, _] = make_nodes(dir.path());
    fs::write(node.join("ra\u{1b}[2Jnk_9"), "no record").unwrap();
    let output = dir.path().join("0.rsum");
    let [node, output] = [&node, &output].map(|path| path.to_str().unwrap());
    let packed = run(&["summarize", "--color", "always", node, "-o", output]);
    let problem = packed.stderr.lines().find(|line| line.contains("nk_9"));
    assert!(
        problem.is_some_and(|line| !line.contains('\u{1b}')),
        "{}",
        packed.stderr
    );
}

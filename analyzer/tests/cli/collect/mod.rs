//! `rcomm-fr collect`: the archive holds the records that exist and names the absent ones.

mod clusters;
pub(crate) mod running;

use crate::program::{Run, rcomm_fr, run};
use crate::rings::record_operations;
use rcomm_recorder::model::OpType;
use rcomm_recorder::publish::DumpReader;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

pub(crate) const DUMPS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/dumps");

/// The folder with a scenario's pickles.
fn pickles(scenario: &str) -> PathBuf {
    Path::new(DUMPS).join(scenario).join("pickle")
}

/// The members of an archive by name, and its manifest.
pub(crate) fn read_archive(archive: &Path) -> (BTreeMap<String, Vec<u8>>, Value) {
    let mut tar = tar::Archive::new(fs::File::open(archive).unwrap());
    let mut members = BTreeMap::new();
    for entry in tar.entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_str().unwrap().to_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        assert!(
            members.insert(name.clone(), content).is_none(),
            "{name} twice"
        );
    }
    let manifest = members.remove("manifest.json").unwrap();
    (members, serde_json::from_slice(&manifest).unwrap())
}

/// The absences in a manifest, each as `HOST PATH: REASON`.
fn absences(manifest: &Value) -> Vec<String> {
    let absences = manifest["absent"].as_array().unwrap();
    let format = |absence: &Value| {
        let text = |key: &str| absence[key].as_str().unwrap();
        format!("{} {}: {}", text("host"), text("path"), text("reason"))
    };
    absences.iter().map(format).collect()
}

/// Runs `rcomm-fr collect -o ARCHIVE ARGS...`.
fn collect(archive: &Path, args: &[&str]) -> Run {
    let mut command = vec!["collect", "-o", archive.to_str().unwrap()];
    command.extend(args);
    run(&command)
}

#[test]
fn folder_of_dumps_goes_in_whole_and_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let folder = pickles("never-join-w4");
    let collected = collect(&archive, &[folder.to_str().unwrap()]);
    assert_eq!(collected.code, Some(0), "{}", collected.stderr);
    let (members, manifest) = read_archive(&archive);
    assert_eq!(members.len(), 4);
    assert_eq!(manifest["schema"], "rcomm.capture/1");
    assert_eq!(manifest["files"].as_array().unwrap().len(), 4);
    for (name, content) in &members {
        let file = name.rsplit('/').next().unwrap();
        assert_eq!(*content, fs::read(folder.join(file)).unwrap(), "{name}");
    }
    let mode = fs::metadata(&archive).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn files_that_are_no_records_are_left_out_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("dumps");
    fs::create_dir(&folder).unwrap();
    for name in ["rank_0", "rank_1", "rank_2", "rank_3"] {
        fs::copy(pickles("healthy-w4").join(name), folder.join(name)).unwrap();
    }
    fs::write(folder.join("train.log"), "step 1\nstep 2\n").unwrap();
    let archive = dir.path().join("job.rcap");
    assert_eq!(collect(&archive, &[folder.to_str().unwrap()]).code, Some(0));
    let (members, manifest) = read_archive(&archive);
    assert_eq!(members.len(), 4);
    assert_eq!(manifest["left_out"], 1);

    // A log that is named on the command line is taken.
    let log = folder.join("train.log");
    assert_eq!(collect(&archive, &[log.to_str().unwrap()]).code, Some(0));
    assert_eq!(read_archive(&archive).0.len(), 1);
}

#[test]
fn what_is_missing_is_named_and_the_rest_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let folder = pickles("healthy-w4");
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let gone = dir.path().join("gone");
    let args = [&folder, &empty, &gone].map(|path| path.to_str().unwrap());
    let collected = collect(&archive, &args);
    assert_eq!(collected.code, Some(1), "{}", collected.stderr);
    let (members, manifest) = read_archive(&archive);
    assert_eq!(members.len(), 4);
    let absent = absences(&manifest);
    assert_eq!(absent.len(), 2, "{absent:?}");
    assert!(absent[1].contains("gone: No such file"), "{absent:?}");
    assert!(
        absent[0].contains("empty: the folder holds no file"),
        "{absent:?}"
    );
    assert!(
        collected.stderr.contains("absent: "),
        "{}",
        collected.stderr
    );
}

#[test]
fn rings_in_a_folder_are_taken_as_dumps() {
    let dir = tempfile::tempdir().unwrap();
    let rings = dir.path().join("rings");
    let recorders =
        [0, 1].map(|rank| record_operations(&rings, "job", rank, (OpType::AllReduce, "sum"), 2));
    let archive = dir.path().join("job.rcap");
    let collected = collect(&archive, &[rings.to_str().unwrap()]);
    assert_eq!(collected.code, Some(0), "{}", collected.stderr);
    let (members, manifest) = read_archive(&archive);
    assert_eq!((members.len(), &manifest["left_out"]), (2, &Value::from(0)));
    for (name, content) in &members {
        assert!(DumpReader::new().read(content).is_ok(), "{name}");
    }
    drop(recorders);
}

#[test]
fn control_characters_of_a_path_do_not_reach_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let gone = dir.path().join("go\u{1b}[2Jne");
    let collected = collect(&archive, &["--color", "always", gone.to_str().unwrap()]);
    let absent = collected
        .stderr
        .lines()
        .find(|line| line.contains("absent: "));
    assert!(
        absent.is_some_and(|line| !line.contains('\u{1b}')),
        "{absent:?}"
    );
}

#[test]
fn nothing_gathered_is_exit_code_two() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let gone = dir.path().join("gone");
    assert_eq!(collect(&archive, &[gone.to_str().unwrap()]).code, Some(2));
}

#[test]
fn rank_without_a_record_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let folder = pickles("crashed-w4");
    let collected = collect(&archive, &[folder.to_str().unwrap()]);
    assert_eq!(collected.code, Some(1), "{}", collected.stderr);
    let (_, manifest) = read_archive(&archive);
    assert_eq!(manifest["absent"][0]["rank"], 3, "{manifest}");
    assert!(
        collected
            .stderr
            .contains("absent: rank 3: no readable record"),
        "{}",
        collected.stderr
    );
}

#[test]
fn archives_of_hosts_are_joined_under_the_host_names_from_the_user() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    // The hosts n1 and n2 have the dump of one rank each; the command for n3 fails.
    for (host, rank) in [("n1", 0), ("n2", 1)] {
        let folder = dir.path().join(host);
        fs::create_dir(&folder).unwrap();
        let name = format!("rank_{rank}");
        fs::copy(pickles("healthy-w4").join(&name), folder.join(&name)).unwrap();
    }
    let command = format!(
        "{} collect -o - {}/{{host}}",
        env!("CARGO_BIN_EXE_rcomm-fr"),
        dir.path().display()
    );
    let collected = collect(&archive, &["--host", "n1,n2,n3", "--command", &command]);
    assert_eq!(collected.code, Some(1), "{}", collected.stderr);
    let (members, manifest) = read_archive(&archive);
    let absent = manifest["absent"].as_array().unwrap().iter();
    let ranks: Vec<u64> = absent
        .filter_map(|absence| absence["rank"].as_u64())
        .collect();
    assert_eq!(ranks, [2, 3], "no host has a record of these ranks");
    let names: Vec<&str> = members.keys().map(String::as_str).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(
        names[0].starts_with("n1/") && names[0].ends_with("/n1/rank_0"),
        "{names:?}"
    );
    assert!(
        names[1].starts_with("n2/") && names[1].ends_with("/n2/rank_1"),
        "{names:?}"
    );
    let absent = absences(&manifest);
    assert!(
        absent[0].starts_with("n3 : exit status: 2: absent: "),
        "{absent:?}"
    );
}

#[test]
fn host_that_does_not_answer_within_the_timeout_is_an_absence() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let hosts = dir.path().join("hosts");
    fs::write(&hosts, "# the second rack\nn7\n\nn7\n").unwrap();
    let hosts = hosts.to_str().unwrap();
    let folder = pickles("healthy-w4");
    let collected = collect(
        &archive,
        &[
            folder.to_str().unwrap(),
            "--hosts-from",
            hosts,
            "--timeout",
            "50ms",
            "--command",
            "sh -c 'echo waiting for {host} >&2; sleep 1000'",
        ],
    );
    assert_eq!(collected.code, Some(1));
    let (members, manifest) = read_archive(&archive);
    assert_eq!(members.len(), 4);
    let absent = absences(&manifest);
    assert_eq!(absent.len(), 1, "{absent:?}");
    assert!(
        absent[0].starts_with("n7 : no answer in time"),
        "{absent:?}"
    );
}

#[test]
fn answer_that_is_no_archive_is_an_absence() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let collected = collect(
        &archive,
        &[
            "--host",
            "n1",
            "--command",
            "echo Welcome to {host}, have a nice day",
        ],
    );
    assert_eq!(collected.code, Some(2));
    let absent = absences(&read_archive(&archive).1);
    assert!(absent[0].contains("its answer is no archive"), "{absent:?}");
}

#[test]
fn invalid_commands_and_hosts_are_one_clear_line() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    for (args, sentence) in [
        (&["--host", "n1", "--command", "ssh n1 x"][..], "add {host}"),
        (
            &["--host", "n1", "--command", "ssh '{host}"],
            "quote that is not closed",
        ),
        (
            &["--host=-oProxyCommand=x", "--command", "ssh {host}"],
            "is not a host name",
        ),
        (
            &["--hosts-from", "/nowhere", "--command", "ssh {host}"],
            "cannot read /nowhere",
        ),
        (
            &["--rings", "--exception-dump"],
            "--exception-dump is for a running job: add --ask or --torch-store",
        ),
    ] {
        let wrong = collect(&archive, args);
        assert_eq!(wrong.code, Some(2), "{args:?}");
        assert!(wrong.stderr.starts_with("error: "), "{}", wrong.stderr);
        assert_eq!(wrong.stderr.lines().count(), 1, "{}", wrong.stderr);
        assert!(wrong.stderr.contains(sentence), "{}", wrong.stderr);
        assert!(!archive.exists(), "an archive was left behind");
    }
}

#[test]
fn archive_that_cannot_be_written_is_one_error() {
    let folder = pickles("healthy-w4");
    let failed = collect(Path::new("/nowhere/job.rcap"), &[folder.to_str().unwrap()]);
    assert_eq!(failed.code, Some(2));
    assert!(
        failed
            .stderr
            .starts_with("error: cannot write /nowhere/job.rcap"),
        "{}",
        failed.stderr
    );
}

#[test]
fn standard_output_holds_the_archive_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let folder = pickles("healthy-w4");
    let mut command = rcomm_fr(&["collect", "-o", "-", folder.to_str().unwrap()]);
    command.stdout(fs::File::create(&archive).unwrap());
    let status = command.status().unwrap();
    assert_eq!(status.code(), Some(0));
    assert_eq!(read_archive(&archive).0.len(), 4);
}

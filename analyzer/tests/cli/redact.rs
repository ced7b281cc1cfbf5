//! Tests reports and archives with pseudonyms.

use super::collect::DUMPS;
use super::program::{Run, run};
use rcomm_recorder::model::{Failure, FailureKind};
use rcomm_recorder::publish::{Dump, Recorder};
use std::fs;
use std::path::Path;

/// Copies dumps to a new folder in `parent` whose name must not be shown, and returns the new folder.
fn secret_folder(scenario: &str, parent: &Path) -> std::path::PathBuf {
    let folder = parent.join("secret-project");
    fs::create_dir(&folder).unwrap();
    let source = Path::new(DUMPS).join(scenario).join("pickle");
    for file in fs::read_dir(source).unwrap().flatten() {
        fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    folder
}

fn json(run: &Run) -> serde_json::Value {
    serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{error}: {}", run.stdout))
}

/// The verdict of a report, and the code and the culprits of each finding.
fn verdict(report: &serde_json::Value) -> (String, Vec<String>) {
    let findings = report["findings"].as_array().unwrap().iter();
    let findings = findings.map(|finding| {
        let (code, ranks) = (&finding["code"], &finding["culprit_ranks"]);
        format!("{code} {ranks}")
    });
    (report["verdict"].to_string(), findings.collect())
}

#[test]
fn a_redacted_report_says_the_same_without_names() {
    for format in ["text", "json", "html", "perfetto", "columns"] {
        let dir = tempfile::tempdir().unwrap();
        let folder = secret_folder("never-join-w4", dir.path());
        fs::write(folder.join("rank_9"), "no dump").unwrap();
        let folder = folder.to_str().unwrap();
        let plain = run(&["analyze", "--format", format, folder]);
        let redacted = run(&["analyze", "--redact", "--format", format, folder]);
        assert_eq!(plain.code, redacted.code, "{}", redacted.stderr);
        for secret in ["secret-project", "train.py", "/home/"] {
            assert!(!redacted.stdout.contains(secret), "{format}: {secret}");
        }
        if format == "json" {
            let (plain, redacted) = (json(&plain), json(&redacted));
            assert_eq!(verdict(&plain), verdict(&redacted));
        }
        if format == "text" {
            assert!(plain.stdout.contains("secret-project"), "{}", plain.stdout);
            assert!(redacted.stdout.contains("file-"), "{}", redacted.stdout);
        }
    }
}

#[test]
fn a_redacted_archive_is_judged_like_the_records_and_holds_no_name() {
    let dir = tempfile::tempdir().unwrap();
    let folder = secret_folder("never-join-w4", dir.path());
    let log = "[rank0]: Watchdog caught collective operation timeout: secret";
    fs::write(folder.join("secret.log"), log).unwrap();
    let (archive, folder) = (dir.path().join("job.tar"), folder.to_str().unwrap());
    let archive = archive.to_str().unwrap();
    let collected = run(&["collect", "--redact", "-o", archive, folder]);
    assert!(
        collected.code.is_some_and(|code| code < 2),
        "{}",
        collected.stderr
    );
    let content = fs::read(archive).unwrap();
    let system = rustix::system::uname();
    let host = system.nodename().to_bytes();
    for secret in [&b"secret"[..], b"train.py", host] {
        let is_shown = content.windows(secret.len()).any(|part| part == secret);
        assert!(!is_shown, "{}", String::from_utf8_lossy(secret));
    }
    let plain = json(&run(&["analyze", "--format", "json", folder]));
    let redacted = json(&run(&["analyze", "--format", "json", archive]));
    assert_eq!(verdict(&plain), verdict(&redacted));
}

#[test]
fn a_sentence_that_names_the_host_of_a_later_record_is_redacted() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("dumps");
    fs::create_dir(&folder).unwrap();
    for (rank, host) in [(0, "alpha"), (1, "bravo")] {
        let mut dump = Dump {
            recorder: Recorder::Rcomm,
            ..Dump::default()
        };
        dump.identity.rank = Some(rank);
        dump.identity.world_size = Some(2);
        dump.identity.host = host.to_owned();
        let text = "lost bravo; the store at charlie port 29500 did not answer";
        let mut failure = Failure::new(FailureKind::Backend, &[], rank, text);
        (failure.id, failure.time_ns) = (1, 1_700_000_000_000_000_000);
        dump.failures.push(failure);
        fs::write(folder.join(format!("rank_{rank}")), dump.to_pickle()).unwrap();
    }
    let (folder, archive) = (folder.to_str().unwrap(), dir.path().join("job.tar"));
    let plain = run(&["analyze", folder]).stdout;
    assert!(
        plain.contains("lost bravo") && plain.contains("charlie"),
        "{plain}"
    );
    let archive = archive.to_str().unwrap();
    let collected = run(&["collect", "--redact", "-o", archive, folder]);
    assert!(
        collected.code.is_some_and(|code| code < 2),
        "{}",
        collected.stderr
    );
    for redacted in [
        run(&["analyze", "--redact", folder]).stdout,
        run(&["analyze", archive]).stdout,
    ] {
        assert!(redacted.contains("lost host-"), "{redacted}");
        for secret in ["alpha", "bravo", "charlie"] {
            assert!(!redacted.contains(secret), "{redacted}");
        }
    }
}

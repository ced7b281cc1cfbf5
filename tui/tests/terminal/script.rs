//! Use in scripts: the result of one read is printed, and the exit code is the verdict.

use crate::rings::{MISSING, ring_of, stuck_job};
use crate::session::{Session, run};
use rcomm_tests::process::wait_until;
use std::fs;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

#[test]
fn once_and_json_end_with_the_verdict() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let _rings = stuck_job(directory.path());
    let rings = directory.path().display().to_string();
    let stuck = ["--ring-dir", &rings, "--overdue", "1us"];
    let (status, out, err) = run(&[&stuck[..], &["--once"]].concat(), directory.path());
    assert_eq!(status, Some(1), "{out}{err}");
    assert!(out.contains("STUCK") && out.contains("rank 2"), "{out}");
    assert!(out.lines().count() < 30, "{out}");
    // What is printed names no key, but a command.
    let is_key = |word: &str| {
        let word = word.trim_end_matches([',', ';', ':']);
        let key = word
            .strip_prefix('[')
            .and_then(|word| word.strip_suffix(']'));
        key.is_some_and(|key| key.chars().count() == 1 || key == "enter")
    };
    assert!(!out.split_whitespace().any(is_key), "{out}");
    assert!(out.contains("see above; rcomm-fr explain E101"), "{out}");
    let (status, out, _) = run(&[&stuck[..], &["--json"]].concat(), directory.path());
    assert_eq!(status, Some(1));
    let report: rcomm_analyzer::Report =
        serde_json::from_str(&out).expect("the output is a report");
    assert_eq!(report.findings[0].culprit_ranks, [MISSING]);
    let young = ["--ring-dir", &rings, "--overdue", "1h", "--once"];
    assert_eq!(run(&young, directory.path()).0, Some(0));
}

#[test]
fn what_is_printed_once_names_the_trouble_of_another_job() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let _rings = stuck_job(directory.path());
    let other = |rank, last| ring_of("other", directory.path(), rank, last);
    let _others = [other(0, 40), other(1, 41)];
    let rings = directory.path().display().to_string();
    let once = ["--ring-dir", &rings, "--job", "pty-job", "--once"];
    wait_until("the other job to be overdue", || {
        let (_, out, _) = run(&once, directory.path());
        out.contains("1 other job on this node: STUCK\n")
            .then_some(())
    });
}

#[test]
fn failures_end_with_status_two_and_a_sentence() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let ring_dir = directory.path().display().to_string();
    for (arguments, part) in [
        (
            &["--ring-dir", &ring_dir, "--once"][..],
            "no ring of any job",
        ),
        (&["--ring-dir", &ring_dir, "--json"], "rcomm-top replay DIR"),
        (&["replay", "--once", "/does/not/exist"], "/does/not/exist"),
        (&["--ring-dir", &ring_dir], "--once or --json"),
        (&["--filter", "rank:x", "--once"], "not a rank"),
        (
            &["--config", "/does/not/exist", "--once"],
            "/does/not/exist",
        ),
        (&["--no-such-option"], "--no-such-option"),
        (&["replay", "--once", &ring_dir], "no file in"),
        (&[&ring_dir, "--once"], "rcomm-top replay"),
    ] {
        let (status, _, err) = run(arguments, directory.path());
        assert_eq!(status, Some(2), "{arguments:?}: {err}");
        assert!(err.contains(part), "{arguments:?}: {err}");
    }
}

#[test]
fn a_recording_and_dumps_are_replayed_on_the_same_screens() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let rings = stuck_job(directory.path());
    let ring_dir = directory.path().display().to_string();
    let recording = directory.path().join("job.rec").display().to_string();
    let arguments = [
        "--ring-dir",
        &ring_dir,
        "--overdue",
        "1us",
        "--json",
        "--record",
        &recording,
    ];
    let (status, live, err) = run(&arguments, directory.path());
    assert_eq!(status, Some(1), "{err}");
    let replay = ["replay", "--overdue", "1us", "--json", &recording];
    let (status, replayed, err) = run(&replay, directory.path());
    assert_eq!(status, Some(1), "{err}");
    let read = |text: &str| {
        serde_json::from_str::<rcomm_analyzer::Report>(text).expect("the output is a report")
    };
    assert_eq!(read(&live).verdict, read(&replayed).verdict);
    assert_eq!(
        read(&live).findings[0].sentence,
        read(&replayed).findings[0].sentence
    );
    let dumps = directory.path().join("dumps");
    std::fs::create_dir(&dumps).expect("the path is writable");
    for (rank, ring) in rings.iter().enumerate() {
        let path = dumps.join(format!("rank_{rank}.json"));
        std::fs::write(path, ring.snapshot().to_json()).expect("the path is writable");
    }
    let dumps = dumps.display().to_string();
    let (status, out, err) = run(
        &["replay", "--once", "--overdue", "1us", &dumps],
        directory.path(),
    );
    assert_eq!(status, Some(1), "{out}{err}");
    assert!(out.contains("REPLAY") && out.contains("rank 2"), "{out}");
    let mut session = Session::start(&["replay", &recording], directory.path());
    session.wait_text("pty-job");
    session.wait_text("REPLAY");
    session.press("q");
    session.end();
}

/// A replay judges like `rcomm-fr analyze`: files that were written while nothing in them was overdue show no hang.
#[test]
fn a_replay_judges_by_the_times_of_the_files_where_the_records_have_none() {
    /// When the operation that hangs in the fixture was issued, ns since the epoch.
    const ISSUED_NS: u64 = 1_795_239_695_873_462_017;
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let fixture = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/dumps/never-join-w4/pickle"
    );
    let write_dumps = |after: Duration| {
        for rank in 0..4 {
            let name = format!("rank_{rank}");
            let path = directory.path().join(&name);
            let bytes = fs::read(Path::new(fixture).join(&name)).expect("the fixture is readable");
            fs::write(&path, bytes).expect("the path is writable");
            let file = fs::File::options()
                .write(true)
                .open(&path)
                .expect("the file belongs to this test");
            let time = UNIX_EPOCH + Duration::from_nanos(ISSUED_NS) + after;
            file.set_modified(time)
                .expect("the file belongs to this test");
        }
    };
    let folder = directory.path().to_str().expect("the path is UTF-8");
    let look = || run(&["replay", "--once", folder], directory.path());
    write_dumps(Duration::from_millis(300));
    let (status, young, _) = look();
    assert_eq!(status, Some(2), "{young}");
    assert!(young.contains("INCONCLUSIVE"), "{young}");
    write_dumps(Duration::from_secs(60));
    let (status, old, _) = look();
    assert_eq!(status, Some(1), "{old}");
    let words: Vec<&str> = old.split_whitespace().collect();
    let expected =
        "STUCK since 05:41:35 UTC, 60 s before the files were written rank 1 never issued";
    assert!(words.join(" ").contains(expected), "{old}");
}

//! `rcomm-fr rings` and `rcomm-fr dump` on rings of a living process and of a process that died.

use crate::program::{Run, run};
use rcomm_recorder::model::{OpType, ProcessGroupInfo};
use rcomm_recorder::publish::{Dump, LaunchRecord, LaunchedRank, RankEnd};
use rcomm_recorder::record::{
    FlightRecorder, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The variable with the folder of the child's ring.
const CHILD_DIR: &str = "RCOMM_TEST_CHILD_RING_DIR";

/// The ring of a rank with two operations, the second of which is pending.
fn ring_of(dir: &Path, job: &str, rank: u32) -> FlightRecorder {
    record_operations(dir, job, rank, (OpType::AllReduce, "all_reduce"), 1)
}

/// The ring of a rank with two operations of one kind, of which the first `done` have completed.
pub(crate) fn record_operations(
    dir: &Path,
    job: &str,
    rank: u32,
    (op, op_name): (OpType, &str),
    done: u64,
) -> FlightRecorder {
    let mut config = RecorderConfig::new(job, rank, 2);
    config.placement = Placement::Dir(dir.to_owned());
    config.entries = 64;
    config.host = "n001".into();
    let recorder = FlightRecorder::create(&config).unwrap();
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".into(),
        desc: "default_pg".into(),
        ranks: [0, 1].into(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(5));
    recorder.phase("load data");
    recorder.step(41);
    for seq in 1..=2 {
        let key = SignatureKey {
            backend: "cpu",
            op_name,
            inputs: &[],
            outputs: &[],
        };
        let mut operation = Operation::new(group, op, SignatureRef::Key(&key));
        operation.collective_seq_id = seq;
        operation.op_id = seq;
        let ticket = recorder.begin(&operation);
        recorder.started(ticket);
        if seq <= done {
            recorder.completed(ticket);
            recorder.retired(ticket);
        }
    }
    recorder
}

/// Tests nothing itself: `die_with_a_ring` runs it in a process that ends without closing its ring.
#[test]
fn child_that_leaves_its_ring_behind() {
    let Some(dir) = std::env::var_os(CHILD_DIR) else {
        return;
    };
    let _recorder = ring_of(Path::new(&dir), "dead", 0);
    std::process::abort();
}

/// Leaves in this folder the ring of a process that died.
fn die_with_a_ring(dir: &Path) {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "rings::child_that_leaves_its_ring_behind"])
        .env(CHILD_DIR, dir)
        .output()
        .unwrap()
        .status;
    assert!(!status.success(), "the child should have died");
}

/// Runs `rcomm-fr rings ARGS... --dir DIR`.
fn rings(dir: &Path, args: &[&str]) -> Run {
    let mut command = vec!["rings"];
    command.extend(args);
    command.extend(["--dir", dir.to_str().unwrap()]);
    run(&command)
}

#[test]
fn rings_of_the_living_and_the_dead_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let _alive = ring_of(dir.path(), "alive", 1);
    die_with_a_ring(dir.path());
    for args in [&[][..], &["list"]] {
        let listed = rings(dir.path(), args);
        assert_eq!(listed.code, Some(0), "{}", listed.stderr);
        // A line for the job, the heads, and the row of its ring.
        let line = |job: &str| {
            let first = format!("job {job}: 1 ring in {}", dir.path().join(job).display());
            let mut lines = listed.stdout.lines().skip_while(|line| *line != first);
            lines.nth(2).unwrap().to_owned()
        };
        let (alive, dead) = (line("alive"), line("dead"));
        let widths = listed
            .stdout
            .lines()
            .filter(|line| !line.starts_with("job "));
        let widest = widths.map(str::len).max();
        assert!(
            widest.is_some_and(|widest| widest <= 80),
            "{}",
            listed.stdout
        );
        assert!(
            alive.contains(" alive ") && alive.contains(" n001 "),
            "{alive}"
        );
        assert!(dead.contains(" gone "), "{dead}");
        assert!(dead.trim_end().ends_with(".ring"), "{dead}");
    }
    let of_job = rings(dir.path(), &["list", "--job", "dead"]);
    assert!(!of_job.stdout.contains("alive"), "{}", of_job.stdout);
}

#[test]
fn a_list_has_all_rings_of_a_large_node() {
    let dir = tempfile::tempdir().unwrap();
    let _rings: Vec<_> = (0..70)
        .map(|job| ring_of(dir.path(), &format!("large-{job}"), 0))
        .collect();
    let listed = rings(dir.path(), &["list"]);
    let lines = listed.stdout.lines();
    let of_job = lines.filter(|line| line.trim().starts_with("job large"));
    assert_eq!(of_job.count(), 70, "{}", listed.stdout);
}

#[test]
fn directory_without_rings_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let listed = rings(dir.path(), &[]);
    assert_eq!(listed.code, Some(0));
    assert_eq!(
        listed.stdout,
        format!("no rings in {}\n", dir.path().display())
    );
    let of_job = rings(dir.path(), &["list", "--job", "dead"]);
    assert_eq!(of_job.code, Some(0));
    assert_eq!(
        of_job.stdout,
        format!("no rings of job dead in {}\n", dir.path().display())
    );
}

#[test]
fn ring_of_a_dead_rank_shows_its_phase_and_pending_operation() {
    let dir = tempfile::tempdir().unwrap();
    die_with_a_ring(dir.path());
    let shown = rings(dir.path(), &["show", "0"]);
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    for text in [
        "its process is gone",
        "rank 0 of 2, job dead, host n001",
        "phase      load data",
        "step       41",
        "default_pg of ranks 0,1: issued #2, started #2, completed #1",
        "pending, oldest first",
        "all_reduce",
    ] {
        assert!(
            shown.stdout.contains(text),
            "{text} is not in:\n{}",
            shown.stdout
        );
    }
}

#[test]
fn a_group_that_has_completed_nothing_is_said_to_have_completed_none() {
    let dir = tempfile::tempdir().unwrap();
    let kind = (OpType::AllReduce, "all_reduce");
    let _ring = record_operations(dir.path(), "young", 1, kind, 0);
    let shown = rings(dir.path(), &["show", "1"]);
    let text = "default_pg of ranks 0,1: issued #2, started #2, completed none";
    assert!(shown.stdout.contains(text), "{}", shown.stdout);
}

#[test]
fn rank_without_a_ring_is_one_clear_line() {
    let dir = tempfile::tempdir().unwrap();
    let shown = rings(dir.path(), &["show", "7"]);
    assert_eq!(shown.code, Some(2));
    let text = format!(
        "error: no ring of rank 7 in {} (hint: `rcomm-fr rings list` shows what is there)\n",
        dir.path().display()
    );
    assert_eq!(shown.stderr, text);
}

#[test]
fn file_that_is_no_ring_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.ring");
    std::fs::write(&file, "no ring").unwrap();
    let shown = rings(dir.path(), &["show", file.to_str().unwrap()]);
    assert_eq!(shown.code, Some(2));
    assert!(
        shown.stderr.contains("is not a readable ring"),
        "{}",
        shown.stderr
    );
}

#[test]
fn only_rings_of_the_dead_are_removed_and_a_dry_run_removes_none() {
    let dir = tempfile::tempdir().unwrap();
    let alive = ring_of(dir.path(), "alive", 1);
    die_with_a_ring(dir.path());
    let dry_run = rings(dir.path(), &["remove-stale", "--dry-run"]);
    assert!(
        dry_run.stdout.ends_with("would remove 1 ring\n"),
        "{}",
        dry_run.stdout
    );
    let removed = rings(dir.path(), &["remove-stale"]);
    assert_eq!(removed.code, Some(0));
    assert!(
        removed.stdout.ends_with("removed 1 ring\n"),
        "{}",
        removed.stdout
    );
    let left = rings(dir.path(), &["list"]).stdout;
    assert!(left.contains("alive") && !left.contains("dead"), "{left}");
    drop(alive);
}

#[test]
fn ring_becomes_a_dump_in_both_forms_and_nothing_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let ring_dir = dir.path().join("rings");
    std::fs::create_dir(&ring_dir).unwrap();
    die_with_a_ring(&ring_dir);
    let out = dir.path().join("dumps");
    for (format, name) in [
        ("json", "rank_0.json"),
        ("pickle", "rank_0"),
        ("pickle", "rank_0.1"),
    ] {
        let (out, ring_dir) = (out.to_str().unwrap(), ring_dir.to_str().unwrap());
        let dumped = run(&["dump", "--format", format, "-o", out, "--dir", ring_dir]);
        assert_eq!(dumped.code, Some(0), "{}", dumped.stderr);
        let path = Path::new(out).join("dead").join(name);
        assert_eq!(dumped.stdout, format!("{}\n", path.display()));
        let (dump, problems) = Dump::read(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!(problems, vec![]);
        assert_eq!(dump.identity.rank, Some(0));
        assert_eq!(dump.identity.job, "dead");
        assert_eq!(dump.entries.len(), 2);
    }
}

#[test]
fn a_dump_that_cannot_be_written_does_not_hide_those_that_were() {
    let dir = tempfile::tempdir().unwrap();
    let ring_dir = dir.path().join("rings");
    std::fs::create_dir(&ring_dir).unwrap();
    let _rings = ["a", "b", "c", "d"].map(|job| ring_of(&ring_dir, job, 0));
    let out = dir.path().join("dumps");
    std::fs::create_dir(&out).unwrap();
    // No user, root included, can make a file below a file.
    for job in ["b", "c"] {
        std::fs::write(out.join(job), "").unwrap();
    }
    let (out_name, ring_dir) = (out.to_str().unwrap(), ring_dir.to_str().unwrap());
    let dumped = run(&["dump", "-o", out_name, "--dir", ring_dir]);
    assert_eq!(dumped.code, Some(2), "{dumped:?}");
    let written = ["a", "d"].map(|job| format!("{}\n", out.join(job).join("rank_0").display()));
    assert_eq!(dumped.stdout, written.concat());
    let lines: Vec<&str> = dumped.stderr.lines().collect();
    let [other, first] = lines[..] else {
        panic!("two dumps cannot be written: {dumped:?}");
    };
    assert!(
        other.starts_with("not written: ") && other.contains("/dumps/c"),
        "{other}"
    );
    assert!(
        first.starts_with("error: ") && first.contains("/dumps/b"),
        "{first}"
    );
}

#[test]
fn what_is_no_ring_hinders_no_list_and_no_removal() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("a")).unwrap();
    let damaged = dir.path().join("a").join("0.0.ring");
    std::fs::write(&damaged, "no ring").unwrap();
    let listed = rings(dir.path(), &["list"]);
    assert_eq!(listed.code, Some(0), "{listed:?}");
    assert!(listed.stdout.contains("unreadable: "), "{listed:?}");
    let removed = rings(dir.path(), &["remove-stale"]);
    assert_eq!(removed.code, Some(0), "{removed:?}");
    assert!(removed.stdout.contains("removed 0 rings"), "{removed:?}");
    let shown = rings(dir.path(), &["show", damaged.to_str().unwrap()]);
    assert_eq!(shown.code, Some(2), "{shown:?}");
    for (args, code) in [
        (
            &["list", "--help"][..],
            "even if there is no ring or one cannot be read",
        ),
        (&["show", "--help"], "2 no ring matches"),
        (&["remove-stale", "--help"], "a ring could not be removed"),
    ] {
        let help = rings(dir.path(), args);
        let text: Vec<&str> = help.stdout.split_whitespace().collect();
        assert!(text.join(" ").contains(code), "{args:?}: {help:?}");
    }
}

#[test]
fn nothing_to_dump_is_exit_code_two() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    let dumped = run(&["dump", "-o", folder, "--dir", folder]);
    assert_eq!(dumped.code, Some(2));
    assert!(
        dumped.stderr.starts_with("error: no ring of any job in "),
        "{}",
        dumped.stderr
    );
}

#[test]
fn ring_of_a_dead_process_can_be_gathered_and_judged() {
    let dir = tempfile::tempdir().unwrap();
    let ring_dir = dir.path().join("rings");
    std::fs::create_dir(&ring_dir).unwrap();
    die_with_a_ring(&ring_dir);
    let archive = dir.path().join("job.rcap");
    let archive = archive.to_str().unwrap();
    let collected = run(&[
        "collect",
        "--rings",
        "-o",
        archive,
        "--dir",
        ring_dir.to_str().unwrap(),
    ]);
    // The job has two ranks; rank 1 has no ring here.
    assert_eq!(collected.code, Some(1), "{}", collected.stderr);
    assert!(
        collected.stderr.contains("absent: rank 1: "),
        "{}",
        collected.stderr
    );
    let analyzed = run(&["analyze", archive]);
    assert!(
        analyzed.stdout.contains("read 1 of 2 ranks, 2 operations"),
        "{}",
        analyzed.stdout
    );
    // The ring itself gives the same result.
    let direct = run(&["analyze", ring_dir.to_str().unwrap()]);
    assert!(
        direct.stdout.contains("read 1 of 2 ranks, 2 operations"),
        "{}",
        direct.stdout
    );
}

#[test]
fn a_run_that_ended_is_judged_and_not_the_rings_of_the_run_before() {
    let folder = tempfile::tempdir().unwrap();
    die_with_a_ring(folder.path());
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let started_ns = i64::try_from(now.as_nanos()).unwrap();
    let rank = |rank| LaunchedRank {
        rank,
        pid: 1000 + rank,
        end: Some(RankEnd {
            time_ns: started_ns + 5_000_000_000,
            exit_code: Some(0),
            signal: None,
            out_of_memory: None,
        }),
        ..LaunchedRank::default()
    };
    let launch = LaunchRecord {
        schema: LaunchRecord::SCHEMA.into(),
        job: "dead".into(),
        host: "n001".into(),
        world_size: 3,
        started_ns,
        ranks: (0..3).map(rank).collect(),
        ..LaunchRecord::default()
    };
    launch.write(folder.path()).unwrap();
    let job = folder.path().join("dead");
    let newest = run(&["analyze", job.to_str().unwrap()]);
    assert!(
        newest
            .stdout
            .starts_with("ENDED  all 3 ranks ended in order"),
        "{}",
        newest.stdout
    );
    assert_eq!(newest.code, Some(0));
    let json = run(&["analyze", "--format", "json", job.to_str().unwrap()]);
    let note = "to judge the earlier run, pass only its files";
    assert!(json.stdout.contains(note), "{}", json.stdout);
    // The ring alone is the earlier run.
    let ring = job.join("0.0.ring");
    let earlier = run(&["analyze", ring.to_str().unwrap()]);
    assert!(!earlier.stdout.contains("left aside"), "{}", earlier.stdout);
    assert!(!earlier.stdout.starts_with("ENDED"), "{}", earlier.stdout);
}

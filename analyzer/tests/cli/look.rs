//! `rcomm-fr` without arguments: it judges the newest records of this node. If there are none, it explains how to get
//! some.

use crate::collect::running::start_rank;
use crate::program::{Run, finish, rcomm_fr};
use crate::rings::record_operations;
use rcomm_recorder::model::OpType;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Runs the program with this home directory, so that the only records of this machine that it can find are PyTorch's
/// in `/tmp`, and with PyTorch's dumps in `dumps`.
fn look(home: &Path, dumps: &Path) -> Run {
    look_with(&[], home, dumps)
}

fn look_with(options: &[&str], home: &Path, dumps: &Path) -> Run {
    let mut command = rcomm_fr(options);
    command
        .current_dir(home)
        .env("HOME", home)
        .env_remove("XDG_CACHE_HOME")
        .env_remove("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        .env_remove("RCOMM_DUMP_DIR")
        .env("RCOMM_RING_DIR", home.join("rings"))
        .env("TORCH_FR_DUMP_TEMP_FILE", dumps.join("rank_"));
    finish(command)
}

/// Copies a fixture's dumps to a new folder, as if they had been written at the time `written`.
fn copy_dumps(fixture: &str, ranks: u32, folder: &Path, written: SystemTime) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps");
    let source = fixtures.join(fixture).join("pickle");
    std::fs::create_dir_all(folder).unwrap();
    for rank in 0..ranks {
        let name = format!("rank_{rank}");
        let bytes = std::fs::read(source.join(&name)).unwrap();
        let copy = folder.join(&name);
        std::fs::write(&copy, bytes).unwrap();
        let file = std::fs::OpenOptions::new().append(true).open(copy);
        file.unwrap().set_modified(written).unwrap();
    }
}

#[test]
fn of_several_runs_in_the_folder_of_dumps_the_newest_is_judged_and_the_others_named() {
    let home = tempfile::tempdir().unwrap();
    let dumps = home.path().join("rcomm-dumps");
    let now = SystemTime::now();
    let earlier = now - Duration::from_secs(3600);
    copy_dumps("healthy-w4", 4, &dumps.join("a-2"), now);
    // The earlier run has more records, and a fault.
    copy_dumps("cascade-2x2x2", 8, &dumps.join("b-1"), earlier);
    let run = look(home.path(), &home.path().join("none"));
    assert!(!run.stdout.contains("STUCK"), "{run:?}");
    let (newest, others) = run.stdout.split_once("others:").unwrap();
    assert!(
        newest.contains("records here: dumps of rcomm of the run a-2, 4 files"),
        "{run:?}"
    );
    assert!(
        others.contains("dumps of rcomm of the run b-1, 8 files"),
        "{run:?}"
    );
    assert!(others.contains("12 files"), "{run:?}");
    assert!(!run.stdout.contains("old:"), "{run:?}");
}

#[test]
fn the_evidence_can_be_asked_for_without_a_path() {
    let home = tempfile::tempdir().unwrap();
    let dumps = home.path().join("rcomm-dumps");
    copy_dumps("cascade-2x2x2", 8, &dumps, SystemTime::now());
    let none = home.path().join("none");
    let offer = "--verbose shows the evidence";
    let brief = look(home.path(), &none);
    assert!(brief.stdout.contains(offer), "{brief:?}");
    let verbose = look_with(&["--verbose"], home.path(), &none);
    assert!(!verbose.stdout.contains(offer), "{verbose:?}");
    assert!(verbose.stdout.len() > 2 * brief.stdout.len(), "{verbose:?}");
    let misplaced = look_with(&["--verbose", "trends", "none"], home.path(), &none);
    assert_eq!(misplaced.code, Some(2), "{misplaced:?}");
    let expected = "write it after the sub-command";
    assert!(misplaced.stderr.contains(expected), "{misplaced:?}");
}

#[test]
fn the_commands_for_files_leave_out_what_was_not_judged_with_them() {
    let home = tempfile::tempdir().unwrap();
    let dumps = home.path().join("rcomm-dumps");
    let now = SystemTime::now();
    copy_dumps("healthy-w4", 4, &dumps, now);
    copy_dumps(
        "cascade-2x2x2",
        8,
        &dumps.join("b-1"),
        now - Duration::from_secs(60),
    );
    // A dump that is still being written, and a link to a dump elsewhere.
    std::fs::write(dumps.join(".rank_0.77.0.part"), "half").unwrap();
    let other = home.path().join("other");
    std::fs::rename(dumps.join("rank_3"), &other).unwrap();
    std::os::unix::fs::symlink(&other, dumps.join("rank_3")).unwrap();
    let pytorch = home.path().join("pytorch");
    copy_dumps("healthy-w4", 4, &pytorch, now - Duration::from_secs(120));
    std::fs::write(pytorch.join("rank_of_another_kind"), "").unwrap();
    let run = look(home.path(), &pytorch);
    let command_after = |line: &str| {
        let mut lines = run.stdout.lines();
        lines.find(|found| found.contains(line));
        lines.next().unwrap_or_default().trim().to_owned()
    };
    let direct = command_after("dumps of rcomm, 4 files");
    assert_eq!(direct, "rcomm-fr analyze rcomm-dumps/rank_*", "{run:?}");
    let of_run = command_after("dumps of rcomm of the run b-1, 8 files");
    assert_eq!(of_run, "rcomm-fr analyze rcomm-dumps/b-1", "{run:?}");
    let of_pytorch = command_after("PyTorch's dumps, 4 files");
    let expected = format!("rcomm-fr analyze {}/rank_[0-9]*", pytorch.display());
    assert_eq!(of_pytorch, expected, "{run:?}");
    assert!(run.stdout.contains("12 files"), "{run:?}");
}

#[test]
fn the_command_for_files_names_no_link_to_a_folder() {
    let home = tempfile::tempdir().unwrap();
    let dumps = home.path().join("rcomm-dumps");
    let now = SystemTime::now();
    copy_dumps("healthy-w4", 4, &dumps, now);
    let run_before = dumps.join("b-1");
    copy_dumps(
        "cascade-2x2x2",
        8,
        &run_before,
        now - Duration::from_secs(60),
    );
    std::os::unix::fs::symlink(&run_before, dumps.join("rank_before")).unwrap();
    let run = look(home.path(), &home.path().join("none"));
    let each = (0..4).map(|rank| format!(" rcomm-dumps/rank_{rank}"));
    let command = format!("  rcomm-fr analyze{}\n", each.collect::<String>());
    assert!(run.stdout.contains(&command), "{run:?}");
}

#[test]
fn of_several_living_jobs_the_one_with_an_error_is_shown_and_the_others_have_their_verdicts() {
    let home = tempfile::tempdir().unwrap();
    let rings = home.path().join("rings");
    std::fs::create_dir(&rings).unwrap();
    let kinds = [
        (OpType::AllReduce, "all_reduce"),
        (OpType::Broadcast, "broadcast"),
    ];
    let rings_of_odd: Vec<_> = (0..)
        .zip(kinds)
        .map(|(rank, kind)| record_operations(&rings, "odd", rank, kind, 1))
        .collect();
    // This job began last, and its signs of life are the newest.
    let rings_of_well: Vec<_> = (0..2)
        .map(|rank| record_operations(&rings, "well", rank, kinds[0], 2))
        .collect();
    let run = look(home.path(), &home.path().join("none"));
    assert_eq!(run.code, Some(1), "{run:?}");
    let (shown, others) = run.stdout.split_once("others:").unwrap();
    assert!(shown.starts_with("MISMATCH"), "{run:?}");
    assert!(
        (shown.split_whitespace().collect::<Vec<_>>().join(" "))
            .contains("the newest living job whose report has an error: 2 rings of job odd"),
        "{run:?}"
    );
    let line_of_well = others.lines().find(|line| line.contains("job well"));
    assert!(
        line_of_well.is_some_and(|line| line.ends_with(": running") || line.ends_with(": healthy")),
        "{run:?}"
    );
    drop((rings_of_odd, rings_of_well));
}

#[test]
fn the_newest_records_are_judged_and_the_searched_folders_named() {
    let home = tempfile::tempdir().unwrap();
    let dumps = home.path().join("dumps");
    copy_dumps("cascade-2x2x2", 8, &dumps, SystemTime::now());
    let run = look(home.path(), &dumps);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(
        run.stdout
            .starts_with("STUCK  rank 5 never issued all_reduce #6"),
        "{run:?}"
    );
    assert!(run.stdout.contains("PyTorch's dumps, 8 files"), "{run:?}");
    assert!(run.stdout.contains("no rings"), "{run:?}");
}

#[test]
fn without_records_it_names_where_it_looked_and_what_to_do() {
    // Dumps that other programs left in the default place of older versions are records as well.
    let is_dump = |entry: std::fs::DirEntry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with("nccl_trace_rank_")
    };
    if std::fs::read_dir("/tmp").is_ok_and(|entries| entries.flatten().any(is_dump)) {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let run = look(home.path(), &home.path().join("none"));
    assert_eq!(run.code, Some(2), "{run:?}");
    for part in [
        "no records on this node",
        "comm_lib_trace_rank_[0-9]*",
        "/tmp/nccl_trace_rank_[0-9]*",
        "TORCH_FR_BUFFER_SIZE",
        "rcomm-top --ras",
    ] {
        assert!(run.stdout.contains(part), "{part}: {run:?}");
    }
}

#[test]
fn a_folder_that_cannot_be_listed_is_not_called_empty() {
    let home = tempfile::tempdir().unwrap();
    let dumps = home.path().join("dumps");
    copy_dumps("never-join-w4", 4, &dumps, SystemTime::now());
    // No user, root included, can list a file.
    std::fs::write(home.path().join("rings"), "").unwrap();
    std::fs::write(home.path().join("rcomm-dumps"), "").unwrap();
    let run = look(home.path(), &dumps);
    for name in ["/rings ", "  rcomm-dumps "] {
        let line = run.stdout.lines().find(|line| line.contains(name));
        let line = line.unwrap_or_else(|| panic!("{name}: {run:?}"));
        assert!(line.contains("Not a directory"), "{line}");
    }
}

#[test]
fn the_age_of_old_records_comes_before_their_verdict() {
    let home = tempfile::tempdir().unwrap();
    let earlier = SystemTime::now() - Duration::from_secs(3600);
    let dumps = home.path().join("rcomm-dumps");
    copy_dumps("cascade-2x2x2", 8, &dumps.join("b-1"), earlier);
    let run = look(home.path(), &home.path().join("none"));
    // Ranks of other tests may run here.
    let beginning = "No process has a record in the paths searched.";
    assert!(run.stdout.starts_with(beginning), "{run:?}");
    let verdict = "The newest records are 1 h old:\nSTUCK  rank 5";
    assert!(run.stdout.contains(verdict), "{run:?}");
}

#[test]
fn a_job_that_runs_without_a_record_comes_before_old_records() {
    let home = tempfile::tempdir().unwrap();
    let earlier = SystemTime::now() - Duration::from_secs(3600);
    let dumps = home.path().join("rcomm-dumps");
    copy_dumps("cascade-2x2x2", 8, &dumps.join("b-1"), earlier);
    let job = format!("look-{}", std::process::id());
    let _ranks = [0, 1].map(|number| start_rank(number, &job, home.path(), false));
    let run = look(home.path(), &home.path().join("none"));
    let (advice, report) = run
        .stdout
        .split_once("The newest records are 1 h old:\n")
        .unwrap();
    // The lines are as wide as the terminal.
    let advice = advice.split_whitespace().collect::<Vec<_>>().join(" ");
    let job_line = format!("--job {job} 2 processes without a record, since ");
    for part in [
        job_line.as_str(),
        "sleep 600 (rank 0: process ",
        "rcomm-fr collect --ask ",
    ] {
        assert!(advice.contains(part), "{part}: {run:?}");
    }
    assert!(report.starts_with("STUCK  rank 5"), "{run:?}");
}

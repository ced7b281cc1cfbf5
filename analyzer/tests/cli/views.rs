//! A report and a live view over the same files say the same.

use super::program::run;
use rcomm_analyzer::source::{FileSource, Source as _};
use rcomm_analyzer::{Live, LiveOptions, Moment, Report, analyze};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// When the last operation of the dumps was issued, seconds since the epoch.
const ISSUED_S: u64 = 1_795_238_776;

/// Copies dumps of four ranks to a folder in `parent`. The file of rank 1 was written two seconds after the others
/// issued the operation that they wait in, and the other files five minutes later: whether rank 1 joined it later
/// cannot be told.
fn early_dump(parent: &Path) -> PathBuf {
    let folder = parent.join("early_dump");
    fs::create_dir(&folder).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/early_dump");
    for (rank, after_s) in [(0, 317), (1, 2), (2, 317), (3, 317)] {
        let name = format!("nccl_trace_rank_{rank}");
        let text = fs::read(source.join(&name)).unwrap();
        fs::write(folder.join(&name), text).unwrap();
        let written = SystemTime::UNIX_EPOCH + Duration::from_secs(ISSUED_S + after_s);
        let file = File::options().write(true).open(folder.join(&name));
        file.unwrap().set_modified(written).unwrap();
    }
    folder
}

/// The verdict; the code, the culprits and the confidence of each finding; and the sentence of each problem.
fn statements_of(report: &Report) -> String {
    let findings = report.findings.iter();
    let findings = findings.map(|f| (f.code, f.culprit_ranks.clone(), f.confidence));
    let findings: Vec<_> = findings.collect();
    let problems: Vec<_> = report.problems.iter().map(|p| &p.sentence).collect();
    format!("{:?} {findings:?} {problems:?}", report.verdict)
}

fn of_program(folder: &Path, options: &[&str]) -> String {
    let folder = folder.to_str().unwrap();
    let run = run(&[&["analyze", "--format", "json"], options, &[folder]].concat());
    let report = serde_json::from_str(&run.stdout);
    statements_of(&report.unwrap_or_else(|error| panic!("{error}: {} {}", run.stdout, run.stderr)))
}

fn of_live_view(folder: &Path) -> String {
    let mut source = FileSource::new(vec![folder.to_owned()]);
    let name = vec![source.name()];
    let mut live = Live::new(LiveOptions::post_mortem(), analyze, name);
    let at = Moment {
        elapsed: Duration::ZERO,
        wall_ns: i64::try_from(ISSUED_S).unwrap() * 1_000_000_000,
    };
    live.observe(0, source.poll(Instant::now()), at);
    statements_of(&live.refresh(at).unwrap().report)
}

#[test]
fn a_live_view_over_files_judges_by_the_time_of_each_file_as_the_report_does() {
    let parent = tempfile::tempdir().unwrap();
    let folder = early_dump(parent.path());
    let reported = of_program(&folder, &[]);
    assert!(reported.contains("E102, [1], 0.5"), "{reported}");
    assert_eq!(of_live_view(&folder), reported);
    assert_eq!(of_program(&folder, &["--redact"]), reported);
}

#[test]
fn a_live_view_over_files_knows_which_file_was_cut() {
    let parent = tempfile::tempdir().unwrap();
    let folder = early_dump(parent.path());
    let path = folder.join("nccl_trace_rank_1");
    let text = fs::read(&path).unwrap();
    fs::write(&path, &text[..text.len() - 400]).unwrap();
    let program = of_program(&folder, &[]);
    assert_eq!(of_live_view(&folder), program);
}

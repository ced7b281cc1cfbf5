//! Runs the examples as jobs of several processes: those that check themselves, and the job that hangs, whose report
//! the README shows.

#![expect(
    clippy::print_stderr,
    reason = "the reason for a skipped test is part of its result"
)]

use rcomm_recorder::publish::{LaunchRecord, LaunchedRank, remove_stale_rings};
use rcomm_recorder::record::default_directory;
use rcomm_tests::process::{run, wait_until};
use rustix::process::{Pid, Signal, kill_process_group};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};

/// The program of an example, which `cargo test --workspace` builds before it runs tests. If it is missing, prints that
/// the test is skipped and returns `None`.
fn example(name: &str) -> Option<PathBuf> {
    let test = std::env::current_exe().expect("the path of this test");
    let build = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    let program = build.join("examples").join(name);
    if !program.exists() {
        eprintln!(
            "skipped: {} is not built; cargo build -p rcomm-examples --examples builds it",
            program.display()
        );
        return None;
    }
    Some(program)
}

#[test]
fn a_pipeline_over_ranks_learns_what_one_process_learns() {
    let Some(pipeline) = example("pipeline") else {
        return;
    };
    let printed = run(&pipeline, "pipeline", 3);
    assert!(printed[2].contains("as in one process"), "{printed:?}");
}

#[test]
fn a_backend_of_the_programs_own_is_found_by_name() {
    let Some(counting) = example("custom_backend") else {
        return;
    };
    let printed = run(&counting, "custom_backend", 2);
    assert_eq!(printed[1], "rank 1: 2 operations, 8000 bytes\n");
}

#[test]
fn ranks_that_divide_the_optimizers_state_learn_what_one_process_learns() {
    let Some(zero) = example("zero") else { return };
    let printed = run(&zero, "zero", 3);
    assert!(
        printed[0].contains("optimizer state: 2736 bytes of 8192"),
        "{printed:?}"
    );
}

/// `rcomm-run` of the same build as an example. If it is missing, prints that the test is skipped and returns `None`.
fn launcher_of_same_build(example: &Path) -> Option<PathBuf> {
    let build = example.ancestors().nth(2);
    let launcher = build
        .expect("target/PROFILE/examples/NAME")
        .join("rcomm-run");
    if !launcher.exists() {
        eprintln!("skipped: rcomm-run is not built; cargo build -p rcomm-tools builds it");
        return None;
    }
    Some(launcher)
}

/// A rank is killed; the others go on without it, and then with the process that the launcher has started in its place.
#[test]
fn a_job_shrinks_and_grows_while_it_trains() {
    let Some(elastic) = example("elastic") else {
        return;
    };
    let Some(launcher) = launcher_of_same_build(&elastic) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a temporary directory");
    let output = std::process::Command::new(launcher)
        .args(["-n", "4", "--replace", "1", "--job-id", "elastic"])
        .arg(elastic)
        .current_dir(folder.path())
        .env_remove("RCOMM_JOB_SECRET")
        .env("RCOMM_RING_DIR", folder.path())
        .env("RCOMM_DUMP_DIR", folder.path().join("dumps"))
        .output()
        .expect("the program starts");
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{errors}");
    let sizes = "4, 4, 4, 4, 4, 4, 4, 3, 3, 3, 3, 4, 4, 4, 4, 4";
    for rank in 0..4 {
        let expected = format!("rank {rank}, attempt 1: {sizes} ranks, the losses are right");
        assert!(printed.contains(&expected), "{printed}{errors}");
    }
    let is_killed = errors.contains("was killed by SIGKILL (9) after");
    let is_replaced = errors.contains("a process joins in its place, 1 of 1");
    assert!(is_killed && is_replaced, "{errors}");
    // The launcher's record is that of attempt 1, which the ranks have begun themselves. All processes of that attempt
    // ended well.
    let record = LaunchRecord::of_job(folder.path(), "elastic").remove(0);
    assert_eq!((record.attempt, record.ranks.len()), (1, 4), "{record:?}");
    let ended_well = |rank: &LaunchedRank| rank.end.is_some_and(|end| end.is_success());
    assert!(record.ranks.iter().all(ended_well), "{record:?}");
}

/// A rank is lost in the first attempt; the second one goes on from the last step that was saved.
#[test]
fn a_job_that_is_started_again_goes_on_from_its_last_step() {
    let Some(restart) = example("restart") else {
        return;
    };
    let Some(launcher) = launcher_of_same_build(&restart) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a temporary directory");
    let output = std::process::Command::new(launcher)
        .args(["-n", "3", "--max-restarts", "1"])
        .arg(restart)
        .arg(folder.path().join("checkpoint"))
        .current_dir(folder.path())
        .env_remove("RCOMM_JOB_SECRET")
        .env("RCOMM_RING_DIR", folder.path())
        .env("RCOMM_DUMP_DIR", folder.path())
        .output()
        .expect("the program starts");
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{errors}");
    assert!(
        printed.contains("attempt 1 went from step 7 to step 12: the weights are right"),
        "{printed}{errors}"
    );
    assert!(errors.contains("restart 1 of 1"), "{errors}");
}

/// The words of a report, without the seconds and the times of day, which differ between runs.
fn tokens(report: &str) -> Vec<&str> {
    let is_time = |word: &&str| {
        let is_decimal = word.contains('.') && word.parse::<f64>().is_ok();
        is_decimal
            || word.matches(':').count() == 2 && word.starts_with(|c: char| c.is_ascii_digit())
    };
    let tokens = report.split_whitespace();
    tokens.filter(|word| !is_time(word)).collect()
}

/// A launcher and its ranks, which are ended when the test ends, also if it fails.
struct HeldJob(std::process::Child);

impl HeldJob {
    fn end(&self) {
        // A process ignores SIGINT if a shell has started it in the background, so SIGTERM is sent. The error is
        // ignored: the processes may have ended already.
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::TERM);
    }
}

impl Drop for HeldJob {
    fn drop(&mut self) {
        self.end();
    }
}

/// While the job is held, its rings show that rank 2 is stuck as it loads data.
#[test]
fn a_held_job_can_be_analyzed_until_it_is_signaled() {
    let Some(hang) = example("hang") else { return };
    let launcher = std::process::Command::new(hang)
        .arg("--hold")
        // One signal reaches the launcher and its ranks, as ctrl-c does in a terminal.
        .process_group(0)
        .stdout(std::process::Stdio::null())
        .spawn();
    let mut launcher = HeldJob(launcher.expect("the launcher starts"));
    let job = format!("hang-{}", launcher.0.id());
    let rings = default_directory().join(&job);
    wait_until("the verdict", || {
        let options = rcomm_analyzer::load::LoadOptions::default();
        let (dumps, _) =
            rcomm_analyzer::load::load_all(std::slice::from_ref(&rings), &options).ok()?;
        let dumps: Vec<_> = dumps.into_iter().map(|loaded| loaded.dump).collect();
        let report = rcomm_analyzer::analyze(&dumps, &rcomm_analyzer::Policy::default());
        // Until rank 2 hangs, any rank that is behind at this moment may seem to be missing.
        let first = report.findings.first()?;
        (first.culprit_ranks == [2] && first.sentence.contains("load data")).then_some(())
    });
    launcher.end();
    let status = launcher.0.wait().expect("the launcher can be waited for");
    assert!(!status.success(), "{status}");
    let mut removed = 0;
    wait_until("the end of its ranks", || {
        removed += remove_stale_rings(&default_directory(), Some(&job))
            .ok()?
            .len();
        (removed == 4).then_some(())
    });
}

#[test]
fn the_readme_shows_the_report_of_the_first_example() {
    let Some(hang) = example("hang") else { return };
    let readme = include_str!("../../README.md");
    let (_, rest) = readme
        .split_once("```text\n")
        .expect("README.md has a report");
    let (shown, _) = rest.split_once("```").expect("the report ends");
    let output = std::process::Command::new(hang)
        .output()
        .expect("the example runs");
    let printed = String::from_utf8(output.stdout).expect("valid UTF-8");
    let (_, rest) = printed
        .split_once("\n\nSTUCK")
        .unwrap_or_else(|| panic!("{printed}"));
    let (report, _) = rest
        .split_once("\n\n")
        .expect("an empty line ends the findings");
    assert_eq!(tokens(shown)[1..], tokens(report), "{printed}");
    let head = "== 4 ranks, time-out 3.0 s; rank 2 hangs in step 5";
    assert_eq!(printed.lines().next(), Some(head));
}

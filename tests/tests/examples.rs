//! The examples that check themselves, run as jobs of several processes.

#![expect(
    clippy::print_stderr,
    reason = "the reason for a skipped test is part of its result"
)]

use rcomm_tests::process::run;
use std::path::PathBuf;

/// The program of an example, which `cargo test --workspace` builds before it runs tests.
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

/// A report's words, less the seconds and the time of day that are others in each run.
fn tokens(report: &str) -> Vec<&str> {
    let seconds = |word: &&str| {
        let number = word.contains('.') && word.parse::<f64>().is_ok();
        number || word.matches(':').count() == 2 && word.starts_with(|c: char| c.is_ascii_digit())
    };
    let tokens = report.split_whitespace();
    tokens.filter(|word| !seconds(word)).collect()
}

#[test]
fn the_readme_shows_the_report_of_the_first_example() {
    let Some(hang) = example("hang") else { return };
    let readme = include_str!("../../README.md");
    let (_, rest) = readme.split_once("```text\n").expect("a report");
    let (shown, _) = rest.split_once("```").expect("its end");
    let output = std::process::Command::new(hang).output().expect("a run");
    let printed = String::from_utf8(output.stdout).expect("text");
    let (_, rest) = printed
        .split_once("\n\nSTUCK")
        .unwrap_or_else(|| panic!("{printed}"));
    let (report, _) = rest.split_once("\n\n").expect("the end of the findings");
    assert_eq!(tokens(shown)[1..], tokens(report), "{printed}");
}

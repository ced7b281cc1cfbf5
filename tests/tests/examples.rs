//! The examples that check themselves, run as jobs of several processes.

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

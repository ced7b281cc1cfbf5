//! One minute of the soak: random operations on random groups, with and without faults, each result checked.

use std::process::Command;

#[test]
fn a_minute_of_random_jobs_gives_right_results_and_right_errors() {
    let mut soak = Command::new(env!("CARGO_BIN_EXE_soak"));
    let done = soak
        .args(["--seed", "20", "--minutes", "1", "--slack", "60"])
        .output();
    let done = done.expect("the soak starts");
    let output = String::from_utf8_lossy(&done.stdout);
    println!("{output}");
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{output}\n{error}");
}

//! Runs the soak for one minute: random operations on random groups, with and without faults. Each result is checked.

use std::process::Command;

#[test]
fn a_minute_of_random_jobs_gives_right_results_and_right_errors() {
    let mut soak = Command::new(env!("CARGO_BIN_EXE_soak"));
    let output = soak
        .args(["--seed", "20", "--minutes", "1", "--slack", "60"])
        .output();
    let output = output.expect("the soak starts");
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{error}");
}

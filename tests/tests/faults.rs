//! The short list of the fault suite: faults in jobs of real processes, and the ranks that their errors name.

use std::process::Command;

#[test]
fn the_short_list_of_faults_gives_errors_in_time_with_the_right_ranks() {
    // Rows that need a launcher which is not built, or a privilege that this user lacks, print that they are
    // skipped.
    let mut suite = Command::new(env!("CARGO_BIN_EXE_faults"));
    let output = suite.args(["short", "--slack", "30"]).output();
    let output = output.expect("the fault suite starts");
    let table = String::from_utf8_lossy(&output.stdout);
    println!("{table}");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{table}\n{error}");
}

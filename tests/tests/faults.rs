//! The short list of the fault suite: what happens to jobs of real processes, and which rank their errors name.

use std::process::Command;

#[test]
fn errors_come_in_time_and_name_the_right_rank() {
    // Rows that need a launcher which is not built, or a right that this user has not, are skipped aloud.
    let mut suite = Command::new(env!("CARGO_BIN_EXE_faults"));
    let done = suite.args(["short", "--slack", "30"]).output();
    let done = done.expect("the fault suite");
    let table = String::from_utf8_lossy(&done.stdout);
    println!("{table}");
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{table}\n{error}");
}

//! How jobs of real processes live and end: the part of the matrix that every test run takes, each row over
//! one transport. `cargo run -p rcomm-tests --bin lives` runs all of it.
//!
//! Together they take a minute or two, which the number of tests at a time decides.

use rcomm_tests::lives::{Cell, ROWS, Source, Transport, run};
use std::fmt::Write as _;
use std::path::Path;

/// Runs a row once; every answer must be right, and none wrong on the way to it.
#[allow(clippy::print_stderr, reason = "a row that is skipped says so")]
fn right(name: &str, transport: Transport) -> Vec<Cell> {
    let row = ROWS.iter().find(|row| row.name == name);
    let row = row.unwrap_or_else(|| panic!("there is no row {name}"));
    if let Some(why) = row.skipped() {
        eprintln!("{name} skipped: {why}");
        return Vec::new();
    }
    let program = Path::new(env!("CARGO_BIN_EXE_lives"));
    let cells = run(program, row, transport).expect("the job starts");
    let mut wrong = String::new();
    for cell in &cells {
        let last = cell.last.iter().filter(|_| !cell.is_right);
        for sight in last.chain(&cell.wrong) {
            let (source, at, answer) = (cell.source.name(), sight.at, &sight.answer);
            let said = &answer.sentence;
            let _ = writeln!(wrong, "{source} at {at:.2} s: {answer}: {said}");
        }
        let is_missing = cell.last.is_none() && !cell.is_right;
        let missing = if is_missing { "no answer\n" } else { "" };
        wrong.push_str(missing);
    }
    assert!(
        wrong.is_empty(),
        "{name} over {}:\n{wrong}",
        transport.name()
    );
    cells
}

#[test]
fn a_clean_end() {
    right("clean-end", Transport::Shm);
}

#[test]
fn a_rank_that_exits_by_itself() {
    right("exit", Transport::Tcp);
}

#[test]
fn a_launcher_that_is_terminated() {
    right("terminated", Transport::Shm);
}

#[test]
fn a_rank_that_is_killed_inside_an_operation() {
    right("kill-inside", Transport::Tcp);
}

#[test]
fn a_job_that_is_killed_rank_by_rank() {
    right("kill-all", Transport::Tcp);
}

#[test]
fn a_rank_that_is_stopped_inside_an_operation() {
    right("stop-inside", Transport::Shm);
}

#[test]
fn a_stopped_rank_that_goes_on_in_time() {
    right("resume-before", Transport::Shm);
}

#[test]
fn a_hang_that_is_cancelled() {
    right("stuck-cancelled", Transport::Tcp);
}

#[test]
fn a_hang_in_which_another_rank_is_killed() {
    right("stuck-killed", Transport::Shm);
}

#[test]
fn a_stopped_rank_that_is_killed_with_all_others() {
    right("stop-killed", Transport::Tcp);
}

#[test]
fn a_rank_that_comes_after_the_time_out() {
    right("late", Transport::Shm);
}

#[test]
fn a_rank_that_the_kernel_kills_for_want_of_memory() {
    for cell in right("out-of-memory", Transport::Shm) {
        // Dumps alone have no account of a launcher.
        if let (Source::Live | Source::Rings, Some(last)) = (cell.source, cell.last) {
            let sentence = last.answer.sentence;
            let why = "was killed by SIGKILL (the kernel ran out of memory)";
            assert!(sentence.contains(why), "{sentence}");
        }
    }
}

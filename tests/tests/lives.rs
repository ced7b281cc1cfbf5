//! How jobs of real processes live and end. Every test run takes a part of the matrix, each row over one transport;
//! `cargo run -p rcomm-tests --bin lives` runs the whole matrix.
//!
//! Together, the tests take one to two minutes, depending on how many run at a time.

use rcomm_tests::lives::{Cell, ROWS, Source, Transport, run};
use std::fmt::Write as _;
use std::path::Path;

/// Runs a row once, and asserts that no answer is wrong. Returns no cells if the row is skipped.
#[allow(
    clippy::print_stderr,
    reason = "the reason for a skipped row is part of the result"
)]
fn assert_right(name: &str, transport: Transport) -> Vec<Cell> {
    let row = ROWS.iter().find(|row| row.name == name);
    let row = row.unwrap_or_else(|| panic!("there is no row {name}"));
    if let Some(reason) = row.skip_reason() {
        eprintln!("{name} skipped: {reason}");
        return Vec::new();
    }
    let program = Path::new(env!("CARGO_BIN_EXE_lives"));
    let cells = run(program, row, transport, None).expect("the job starts");
    let mut wrong = String::new();
    for cell in &cells {
        let last = cell.last.iter().filter(|_| !cell.is_right);
        for timed in last.chain(&cell.wrong) {
            let (source, at, answer) = (cell.source.name(), timed.at, &timed.answer);
            let sentence = &answer.sentence;
            let _ = writeln!(wrong, "{source} at {at:.2} s: {answer}: {sentence}");
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
fn a_job_that_ends_cleanly_has_ended() {
    assert_right("clean-end", Transport::Shm);
}

#[test]
fn a_rank_that_exits_by_itself_is_named() {
    assert_right("exit", Transport::Tcp);
}

#[test]
fn a_job_whose_launcher_is_terminated_is_cancelled() {
    assert_right("terminated", Transport::Shm);
}

#[test]
fn a_rank_that_was_stopped_before_the_job_was_terminated_is_named() {
    assert_right("stop-between", Transport::Tcp);
}

#[test]
fn a_rank_that_is_slow_in_every_step_is_named() {
    assert_right("slow", Transport::Shm);
}

#[test]
fn a_rank_that_gets_no_processor_is_not_accused() {
    assert_right("starved", Transport::Tcp);
}

#[test]
fn a_rank_that_is_killed_inside_an_operation_is_named() {
    assert_right("kill-inside", Transport::Tcp);
}

#[test]
fn a_job_whose_ranks_are_all_killed_is_cancelled() {
    assert_right("kill-all", Transport::Tcp);
}

#[test]
fn a_rank_that_is_stopped_inside_an_operation_is_named_as_stopped() {
    assert_right("stop-inside", Transport::Shm);
}

#[test]
fn a_job_whose_stopped_rank_is_resumed_in_time_ends() {
    assert_right("resume-before", Transport::Shm);
}

#[test]
fn a_hang_that_is_cancelled_keeps_its_culprit() {
    assert_right("stuck-cancelled", Transport::Tcp);
}

#[test]
fn a_hang_in_which_another_rank_is_killed_keeps_its_culprit() {
    assert_right("stuck-other-killed", Transport::Shm);
}

#[test]
fn a_stopped_rank_that_is_killed_with_all_others_is_named_as_stopped() {
    assert_right("stop-killed", Transport::Tcp);
}

#[test]
fn a_rank_that_joins_after_the_time_out_is_named() {
    assert_right("late", Transport::Shm);
}

#[test]
fn a_rank_that_the_kernel_kills_because_memory_ran_out_is_named() {
    for cell in assert_right("out-of-memory", Transport::Shm) {
        // Looks at dumps alone do not read the launcher's record.
        if let (Source::Live | Source::Rings, Some(last)) = (cell.source, cell.last) {
            let sentence = last.answer.sentence;
            let end = "was killed by SIGKILL (the kernel ran out of memory)";
            assert!(sentence.contains(end), "{sentence}");
        }
    }
}

//! Runs one row of the matrix and checks its answers.

use super::job::{Intervention, Job};
use super::look::{self, Answer, Source, View};
use super::table::{Expected, Row, Transport};
use crate::process::TIME_LIMIT;
use anyhow::Result;
use std::path::Path;
use std::time::{Duration, Instant};

/// An answer, and when it was given.
#[derive(Clone, Debug)]
pub struct TimedAnswer {
    /// Seconds since the fault, negative before it; 0 for an answer from the records that the job left.
    pub at: f64,
    /// The answer.
    pub answer: Answer,
}

/// The answers of one source about one job.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The source of the answers.
    pub source: Source,
    /// The first answer; of the live view, the first that is not "not yet". `None` if there was none.
    pub first: Option<TimedAnswer>,
    /// The last answer; `None` if there was none.
    pub last: Option<TimedAnswer>,
    /// The wrong answers of the live view; the last answer may be among them.
    pub wrong: Vec<TimedAnswer>,
    /// Whether the last answer is right.
    pub is_right: bool,
}

/// How long the live view continues after the end of the job: longer than its answers usually change. While the last
/// answer is not right, the view continues up to three times as long.
const SETTLING_TIME: Duration = Duration::from_secs(4);
/// A job that did not go as its row describes is repeated until it has run this often.
const MAX_TRIES: u32 = 3;

/// Runs the job of a row to its end, judges it from all sources, and returns the answers of each. `program` is a
/// program that calls [`super::part_of_a_job`]. If an answer is wrong and `keep` is given, the job's files are copied to
/// a new folder in it.
///
/// # Errors
/// If the job cannot be started, or its files cannot be copied.
///
/// # Panics
/// If something that the row waits for has not happened within [`TIME_LIMIT`].
pub fn run(
    program: &Path,
    row: &Row,
    transport: Transport,
    keep: Option<&Path>,
) -> Result<Vec<Cell>> {
    let mut tries = 0;
    let (job, view, fault) = loop {
        let mut job = Job::start(program, row, transport)?;
        let view = View::of(job.rings());
        let fault = job.intervene(row.intervention, &view);
        tries += 1;
        if job.matches_its_row() || tries == MAX_TRIES {
            break (job, view, fault);
        }
    };
    let end = Instant::now();
    let is_right = |view: &View| {
        view.answers()
            .last()
            .is_some_and(|(_, answer)| answer.is(&row.last))
    };
    while end.elapsed() < SETTLING_TIME || (!is_right(&view) && end.elapsed() < SETTLING_TIME * 3) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let answers = view.answers();
    drop(view);
    debug_assert!(end.elapsed() < TIME_LIMIT);
    let cells = Source::ALL.map(|source| match source {
        Source::Live => live_cell(row, fault, &answers),
        source => cell_of_files(row, source, &job),
    });
    if let Some(folder) = keep.filter(|_| cells.iter().any(Cell::is_wrong)) {
        job.keep(folder)?;
    }
    Ok(cells.into())
}

impl Cell {
    /// Whether the last answer or an earlier one is wrong.
    pub fn is_wrong(&self) -> bool {
        !self.is_right || !self.wrong.is_empty()
    }
}

fn live_cell(row: &Row, fault: Instant, answers: &[(Instant, Answer)]) -> Cell {
    let timed: Vec<TimedAnswer> = answers
        .iter()
        .map(|(at, answer)| TimedAnswer {
            at: match at.checked_duration_since(fault) {
                Some(after) => after.as_secs_f64(),
                None => -fault.duration_since(*at).as_secs_f64(),
            },
            answer: answer.clone(),
        })
        .collect();
    let is_true = |timed: &&TimedAnswer| {
        let answer = &timed.answer;
        let is_after_fault = timed.at >= 0.0;
        let is_allowed =
            answer.is(&row.last) || row.meanwhile.iter().any(|expected| answer.is(expected));
        // If the culprit itself causes the fault, the time of the fault is measured a moment after it.
        let may_be_early = row.intervention == Intervention::Watch;
        answer.is_not_yet() || (is_allowed && (is_after_fault || may_be_early))
    };
    let mut conclusive = timed.iter().filter(|timed| !timed.answer.is_not_yet());
    let first = conclusive.next().cloned();
    let last = timed.last().cloned();
    let is_right = last.as_ref().is_some_and(|last| last.answer.is(&row.last));
    let wrong = timed
        .iter()
        .filter(|timed| !is_true(timed))
        .cloned()
        .collect();
    Cell {
        source: Source::Live,
        first,
        last,
        wrong,
        is_right,
    }
}

fn cell_of_files(row: &Row, source: Source, job: &Job) -> Cell {
    let rings = job.job_rings();
    let answer = look::afterwards(source, &job.dumps(), &rings);
    let expected: Option<Expected> = match source {
        Source::DumpsAlone => row.dumps,
        Source::Live | Source::Rings | Source::Dumps => Some(row.last),
    };
    let is_right = match (&answer, expected) {
        (Some(answer), Some(expected)) => {
            // Dumps without the rings may not show the fault.
            let is_open = answer.is_not_yet() || answer.leaves_open(&expected);
            answer.is(&expected) || (source == Source::DumpsAlone && is_open)
        }
        (Some(answer), None) => answer.is(&row.last) || answer.is_not_yet(),
        // Dumps are written at time-outs and aborts only.
        (None, _) => source != Source::Rings,
    };
    let timed = answer.map(|answer| TimedAnswer { at: 0.0, answer });
    Cell {
        source,
        first: timed.clone(),
        last: timed,
        wrong: Vec::new(),
        is_right,
    }
}

//! One row from start to end.

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
    /// The source.
    pub source: Source,
    /// The first answer; of the live view, the first that is not "not yet". `None` if there was none.
    pub first: Option<TimedAnswer>,
    /// The last answer; `None` if there was none.
    pub last: Option<TimedAnswer>,
    /// The live view's answers that are not true; the last one may be among them.
    pub wrong: Vec<TimedAnswer>,
    /// Whether the last answer is right.
    pub is_right: bool,
}

/// How long the live view continues after the end of the job: longer than answers usually take to settle; up to three
/// times as long while its answer is not right.
const AFTER: Duration = Duration::from_secs(4);
/// A job is started again, this often in all, until it goes as its row describes.
const MOST_TRIES: u32 = 3;

/// Runs the job of a row once and judges it from all sources; `program` is the one that calls
/// [`super::part_of_a_job`]. If an answer is wrong, what the job left is copied to a new folder in `keep`.
///
/// # Errors
/// If the job cannot be started, or what it left cannot be kept.
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
        if job.matches_its_row() || tries == MOST_TRIES {
            break (job, view, fault);
        }
    };
    let over = Instant::now();
    let right = |view: &View| {
        view.answers()
            .last()
            .is_some_and(|(_, it)| it.is(&row.last))
    };
    while over.elapsed() < AFTER || (!right(&view) && over.elapsed() < AFTER * 3) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let answers = view.answers();
    drop(view);
    debug_assert!(over.elapsed() < TIME_LIMIT);
    let cells = Source::ALL.map(|source| match source {
        Source::Live => live(row, fault, &answers),
        source => left(row, source, &job),
    });
    if let Some(folder) = keep.filter(|_| cells.iter().any(Cell::is_wrong)) {
        job.keep(folder)?;
    }
    Ok(cells.into())
}

impl Cell {
    /// Whether the last answer is wrong, or one on the way to it.
    pub fn is_wrong(&self) -> bool {
        !self.is_right || !self.wrong.is_empty()
    }
}

fn live(row: &Row, fault: Instant, answers: &[(Instant, Answer)]) -> Cell {
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
        let after = timed.at >= 0.0;
        let known = answer.is(&row.last) || row.passing.iter().any(|one| answer.is(one));
        // If the culprit itself causes the fault, the time of the fault is measured a moment after it.
        answer.is_not_yet() || (known && (after || row.intervention == Intervention::Watch))
    };
    let first = timed.iter().find(|it| !it.answer.is_not_yet()).cloned();
    let last = timed.last().cloned();
    let is_right = last.as_ref().is_some_and(|it| it.answer.is(&row.last));
    let wrong = timed.iter().filter(|it| !is_true(it)).cloned().collect();
    Cell {
        source: Source::Live,
        first,
        last,
        wrong,
        is_right,
    }
}

fn left(row: &Row, source: Source, job: &Job) -> Cell {
    let rings = job.job_rings();
    let answer = look::afterwards(source, &job.dumps(), &rings);
    let expected: Option<Expected> = match source {
        Source::DumpsAlone => row.dumps,
        Source::Live | Source::Rings | Source::Dumps => Some(row.last),
    };
    let is_right = match (&answer, expected) {
        (Some(answer), Some(expected)) => {
            // Dumps without the rings may not show the fault.
            let open = answer.is_not_yet() || answer.leaves_open(&expected);
            answer.is(&expected) || (source == Source::DumpsAlone && open)
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

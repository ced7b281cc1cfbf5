//! The notes on records that were left aside (N300): one for each reason, with all ranks that it concerns.

use super::earlier_runs::newest_sign_of_life_ns;
use crate::align::record::Record;
use crate::report::Problem;
use crate::report::format::{format_ranks, time_of_day};
use rcomm_recorder::model::Rank;

/// Records that were left aside, and why.
#[derive(Default)]
pub(crate) struct LeftAside(Vec<Aside>);

/// One record that was left aside.
struct Aside {
    rank: Rank,
    path: String,
    /// The newest sign of life of the record's process, ns by its own clock, for the reasons that begin with it.
    last_ns: Option<i64>,
    /// The reason: a clause if `is_clause`, else the text after "it is" or after the newest sign of life.
    why: String,
    /// Whether `why` is a clause of its own, which no other record shares.
    is_clause: bool,
}

impl LeftAside {
    /// Notes a record for a reason that follows "it is", such as "of attempt 0, the newest is 1". Records with the same
    /// reason share a note.
    pub(super) fn add_state(&mut self, record: &Record, reason: String) {
        self.add(record, None, reason, false);
    }

    /// Notes a record whose newest sign of life came too early: `before` states it, such as "before the job was started
    /// again".
    pub(super) fn add_ended(&mut self, record: &Record, before: String) {
        self.add(record, Some(newest_sign_of_life_ns(record)), before, false);
    }

    /// Notes a record for a reason of its own; `why` is a clause.
    pub(super) fn add_clause(&mut self, record: &Record, why: String) {
        self.add(record, None, why, true);
    }

    fn add(&mut self, record: &Record, last_ns: Option<i64>, why: String, is_clause: bool) {
        self.0.push(Aside {
            rank: record.rank,
            path: record.path.clone(),
            last_ns,
            why,
            is_clause,
        });
    }

    /// The ranks of the records, ascending; some may have another record that is kept.
    pub(crate) fn ranks(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self.0.iter().map(|aside| aside.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The notes. The files of a note are in the order of their ranks.
    pub(crate) fn into_problems(mut self) -> Vec<Problem> {
        self.0.sort_by(|a, b| {
            let key = |aside: &Aside| (aside.last_ns.is_some(), aside.is_clause);
            (key(a), &a.why, a.rank, &a.path).cmp(&(key(b), &b.why, b.rank, &b.path))
        });
        let shares_note = |a: &Aside, b: &Aside| {
            let key = |aside: &Aside| (aside.last_ns.is_some(), aside.is_clause);
            !a.is_clause && key(a) == key(b) && a.why == b.why
        };
        self.0.chunk_by(shares_note).map(note).collect()
    }
}

/// The note on records that were left aside for one reason.
fn note(asides: &[Aside]) -> Problem {
    let mut ranks: Vec<Rank> = asides.iter().map(|aside| aside.rank).collect();
    ranks.dedup();
    let last_ns = asides.iter().filter_map(|aside| aside.last_ns).max();
    let why = asides.first().map_or("", |aside| &aside.why);
    let is_clause = asides.iter().any(|aside| aside.is_clause);
    let (records, were, they, their) = match asides.len() {
        1 => ("record", "was", "it is", "its"),
        _ => ("records", "were", "they are", "their"),
    };
    let reason = match last_ns {
        Some(ns) => format!(
            "{their} newest sign of life is from {}, {why}",
            time_of_day(ns)
        ),
        None if is_clause => why.to_owned(),
        None => format!("{they} {why}"),
    };
    let mut paths = asides.iter().map(|aside| aside.path.clone());
    let path = paths.next().unwrap_or_default();
    let sentence = format!(
        "the {records} of {} {were} left aside: {reason}",
        format_ranks(&ranks)
    );
    let mut problem = Problem::stale_dump(path, sentence);
    problem.more_paths = paths.filter(|path| !path.is_empty()).collect();
    problem
}

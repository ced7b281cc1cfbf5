//! Which record of a rank stands, where several files claim the rank.

use super::LoadedDump;
use crate::finding::Code;
use crate::report::Problem;
use rcomm_recorder::model::{Entry, Rank};
use rcomm_recorder::publish::Dump;
use std::collections::HashMap;

/// The record that stands for each rank so far.
#[derive(Default)]
pub(super) struct Claims(HashMap<Rank, Claim>);

/// Orders the records of one rank: the greatest stands. The path makes the order total, so that it
/// does not matter which file is read first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    attempt: u32,
    newest_ns: i64,
    entries: usize,
    path: String,
}

impl Claim {
    fn of(dump: &Dump, path: &str) -> Self {
        let time = |entry: &Entry| {
            entry
                .time_created_ns
                .max(entry.time_discovered_completed_ns)
        };
        let newest = dump.entries.iter().map(time).max().unwrap_or(0);
        Self {
            attempt: dump.identity.attempt,
            newest_ns: newest.max(dump.identity.dump_time_ns),
            entries: dump.entries.len(),
            path: path.to_owned(),
        }
    }
}

impl Claims {
    /// How many ranks have a record.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The record, if it stands; who does not stand gets a problem.
    pub(super) fn admit(
        &mut self,
        mut loaded: LoadedDump,
        problems: &mut Vec<Problem>,
    ) -> Option<LoadedDump> {
        let rank = loaded.dump.identity.rank?;
        let claim = Claim::of(&loaded.dump, &loaded.path);
        let mut aside = |path: &str, other: &str| {
            problems.push(Problem {
                code: Code::N300,
                path: path.to_owned(),
                sentence: format!("left aside: {other} is a newer record of rank {rank}"),
            });
        };
        match self.0.get_mut(&rank) {
            None => {
                self.0.insert(rank, claim);
                Some(loaded)
            }
            Some(standing) if *standing > claim => {
                aside(&claim.path, &standing.path);
                None
            }
            Some(standing) => {
                aside(&standing.path, &claim.path);
                *standing = claim;
                loaded.supersedes = true;
                Some(loaded)
            }
        }
    }
}

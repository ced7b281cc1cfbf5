//! Reads the same paths repeatedly: each look reads only what changed since the last.

use super::find::{self, FindError, InputFile};
use super::{LoadOptions, LoadedDump, Output, rank_name, read};
use crate::input::ras::RasReport;
use rcomm_recorder::model::Rank;
use rcomm_verdict::Problem;
use rcomm_verdict::logs::Log;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;

/// Remembers which files it has read, and as what.
#[derive(Debug)]
pub struct Follower {
    paths: Vec<PathBuf>,
    /// By name.
    seen: BTreeMap<String, FileStamp>,
}

/// What makes a file worth reading again if it differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileStamp {
    bytes: u64,
    modified: Option<SystemTime>,
    /// A file that came later may show which number in the names is the rank.
    rank: Option<Rank>,
}

/// Something that is no longer as it was.
#[derive(Debug)]
pub enum Change {
    /// The file is gone, or is read anew: what came of it before no longer counts. Members of an
    /// archive have the archive's name and a colon before their own.
    Outdated(String),
    /// A record. Several of one rank are all handed over.
    Dump(Box<LoadedDump>),
    /// A report of NCCL's RAS, and the file's name.
    Ras(String, RasReport),
    /// What a log contains.
    Log(Log),
}

/// What one look found, apart from the changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FollowerPoll {
    /// What is wrong with the files that were read.
    pub problems: Vec<Problem>,
    /// Files that are there now.
    pub files: usize,
}

impl Follower {
    /// Follows these paths, of which nothing has been read yet. They need not exist.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self {
            paths,
            seen: BTreeMap::new(),
        }
    }

    /// Reads what is new or has changed, and hands each change to `take` on the caller's thread: first
    /// all that is outdated, then the records. `None` if nothing has changed.
    ///
    /// Blocks until everything is read.
    ///
    /// # Errors
    /// If a pattern cannot be one.
    pub fn poll(
        &mut self,
        options: &LoadOptions<'_>,
        mut take: impl FnMut(Change),
    ) -> Result<Option<FollowerPoll>, FindError> {
        let mut found = find::Found::default();
        for path in &self.paths {
            match find::find(std::slice::from_ref(path)) {
                Ok(more) => found.extend(more),
                // Not there yet, or no longer.
                Err(FindError::Path { .. } | FindError::NoMatch { .. }) => {}
                Err(error @ FindError::Pattern { .. }) => return Err(error),
            }
        }
        let names: Vec<String> = found.inputs.iter().map(InputFile::name).collect();
        let ranks = rank_name::ranks(&names);
        let mut now = BTreeMap::new();
        let mut fresh = Vec::new();
        for ((input, name), rank) in found.inputs.into_iter().zip(names).zip(ranks) {
            let InputFile::File(path) = &input else {
                continue;
            };
            // A file that vanished between two looks is skipped.
            let Ok(about) = fs::metadata(path) else {
                continue;
            };
            let seen = FileStamp {
                bytes: about.len(),
                modified: about.modified().ok(),
                rank,
            };
            if self.seen.get(&name) != Some(&seen) {
                fresh.push((input, rank));
            }
            now.insert(name, seen);
        }
        let before = std::mem::replace(&mut self.seen, now);
        let gone = before.into_iter();
        let gone = gone.filter(|(name, seen)| self.seen.get(name) != Some(seen));
        let mut changed = !fresh.is_empty();
        for (name, _) in gone {
            changed = true;
            take(Change::Outdated(name));
        }
        if !changed {
            return Ok(None);
        }
        let mut problems = found.problems;
        read(&fresh, options, |output| match output {
            Output::Files(_) => {}
            Output::Problem(problem) => problems.push(problem),
            Output::Dump(dump) => take(Change::Dump(dump)),
            Output::Ras(path, report) => take(Change::Ras(path, report)),
            Output::Log(log) => take(Change::Log(log)),
        });
        Ok(Some(FollowerPoll {
            problems,
            files: self.seen.len(),
        }))
    }
}

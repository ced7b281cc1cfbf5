//! Reads the same paths repeatedly: each poll reads only the files that changed since the previous one.

use super::find::{self, FindError, InputFile};
use super::{LoadOptions, LoadedDump, Output, placing, rank_name, read};
use crate::input::ras::RasReport;
use rcomm_recorder::model::Rank;
use rcomm_verdict::Problem;
use rcomm_verdict::logs::Log;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;

/// Follows paths: remembers which files it has read and their state.
#[derive(Debug)]
pub struct Follower {
    paths: Vec<PathBuf>,
    /// The files of the last poll, by name.
    seen: BTreeMap<String, FileStamp>,
    /// The folders and links of which the newest [`FollowerPoll`] has a problem: folders that could not be listed, and
    /// links that were not followed.
    unlisted: Vec<String>,
}

/// The state of a file. The file is read again if its state changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileStamp {
    bytes: u64,
    modified: Option<SystemTime>,
    /// The rank in the file's name: later files may show which number in the names is the rank.
    rank: Option<Rank>,
}

/// A change of the files.
#[derive(Debug)]
pub enum Change {
    /// The name of a file that is gone or is read again: its earlier records no longer count. Members of an archive
    /// have the archive's name and a colon before their own. The name may also be that of a folder that could not be
    /// listed, or of a link that was not followed: its problem no longer counts.
    Outdated(String),
    /// A dump; if a rank has several, all are passed on.
    Dump(Box<LoadedDump>),
    /// The name of a file and the report of NCCL's RAS in it.
    Ras(String, RasReport),
    /// The facts of a log.
    Log(Log),
}

/// The result of one poll, apart from the changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FollowerPoll {
    /// The problems of the files that were read or left aside, of folders that could not be listed, and of links that
    /// were not followed.
    pub problems: Vec<Problem>,
    /// The number of files that exist now.
    pub files: usize,
}

impl Follower {
    /// Follows these paths, which need not exist; reads nothing yet.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self {
            paths,
            seen: BTreeMap::new(),
            unlisted: Vec::new(),
        }
    }

    /// Reads new and changed files and passes each change to `take` on the caller's thread: first all
    /// [`Change::Outdated`], then what the new and changed files hold. `None` if no file is new, changed or gone.
    /// Standard input (`-`) is ignored.
    ///
    /// Blocks until everything is read.
    ///
    /// # Errors
    /// If a pattern is not valid.
    pub fn poll(
        &mut self,
        options: &LoadOptions<'_>,
        mut take: impl FnMut(Change),
    ) -> Result<Option<FollowerPoll>, FindError> {
        let mut found = find::Found::default();
        for path in &self.paths {
            match find::find(std::slice::from_ref(path)) {
                Ok(more) => found.extend(more),
                // The path cannot be accessed now; the next poll tries again.
                Err(FindError::Path { .. } | FindError::NoMatch { .. }) => {}
                Err(error @ FindError::Pattern { .. }) => return Err(error),
            }
        }
        let names: Vec<String> = found.inputs.iter().map(InputFile::name).collect();
        let ranks = rank_name::ranks(&names);
        let mut stamps = BTreeMap::new();
        let mut fresh = Vec::new();
        for ((input, name), rank) in found.inputs.into_iter().zip(names).zip(ranks) {
            let InputFile::File(path) = &input else {
                continue;
            };
            // A file that vanished after it was found is skipped.
            let Ok(metadata) = fs::metadata(path) else {
                continue;
            };
            let stamp = FileStamp {
                bytes: metadata.len(),
                modified: metadata.modified().ok(),
                rank,
            };
            if self.seen.get(&name) != Some(&stamp) {
                fresh.push((input, rank));
            }
            stamps.insert(name, stamp);
        }
        let before = std::mem::replace(&mut self.seen, stamps);
        let outdated = before.into_iter();
        let outdated = outdated.filter(|(name, stamp)| self.seen.get(name) != Some(stamp));
        let mut changed = !fresh.is_empty();
        for (name, _) in outdated {
            changed = true;
            take(Change::Outdated(name));
        }
        if !changed {
            return Ok(None);
        }
        let mut problems = found.problems;
        let unlisted = problems.iter().map(|problem| problem.path.clone());
        let unlisted = unlisted.collect();
        for path in std::mem::replace(&mut self.unlisted, unlisted) {
            take(Change::Outdated(path));
        }
        let mut renamed = Vec::new();
        read(&fresh, options, |output| {
            match output {
            Output::Files(_) | Output::Manifest(_) => {}
            // The stacks of one moment do not hold for later moments of a folder that is followed.
            Output::Stacks(stacks) => problems.push(Problem::stale_dump(
                stacks.path,
                "left aside: stacks show one moment, and this folder is followed; `rcomm-fr analyze` reads this file",
            )),
            Output::Problem(problem) => problems.push(problem),
            Output::Renamed(dump) => renamed.push(dump),
            Output::Dump(dump) => take(Change::Dump(dump)),
            Output::Ras(path, report) => take(Change::Ras(path, report)),
            Output::Log(log) => take(Change::Log(log)),
        }
        });
        problems.extend(placing::note(renamed));
        Ok(Some(FollowerPoll {
            problems,
            files: self.seen.len(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_in_a_folder_are_named_as_left_aside() {
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let stacks =
            "Thread 0x00007f00 (most recent call first):\n  File \"train.py\", line 3 in step\n";
        fs::write(folder.path().join("rank_1.txt"), stacks).expect("a file can be written");
        let mut follower = Follower::new(vec![folder.path().to_owned()]);
        let poll = follower.poll(&LoadOptions::default(), |change| {
            panic!("stacks are no change: {change:?}")
        });
        let poll = poll.expect("the path is no pattern");
        let problems = poll.expect("a file is new").problems;
        let [problem] = problems.as_slice() else {
            panic!("one file is left aside: {problems:?}");
        };
        assert!(problem.path.ends_with("rank_1.txt"), "{problem:?}");
        assert!(problem.sentence.contains("left aside"), "{problem:?}");
    }

    #[test]
    fn a_folder_that_cannot_be_listed_is_one_problem_in_however_many_polls() {
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let deep: PathBuf = (0..20).map(|depth| depth.to_string()).collect();
        fs::create_dir_all(folder.path().join(deep)).expect("folders can be made");
        let mut follower = Follower::new(vec![folder.path().to_owned()]);
        let mut standing: Vec<Problem> = Vec::new();
        for rank in 0..3 {
            let file = folder.path().join(format!("rank_{rank}"));
            fs::write(file, "no dump").expect("a file can be written");
            let poll = follower.poll(&LoadOptions::default(), |change| {
                if let Change::Outdated(path) = change {
                    standing.retain(|problem| problem.path != path);
                }
            });
            let poll = poll.expect("the path is no pattern");
            standing.extend(poll.expect("a file is new").problems);
            let unlisted = standing
                .iter()
                .filter(|problem| problem.sentence.contains("folders below the named one"));
            assert_eq!(unlisted.count(), 1, "{standing:?}");
        }
    }
}

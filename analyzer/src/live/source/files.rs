//! Reads dumps on disk as a source, once: folders, files and archives.

use super::{Liveness, Observation, Poll, Seen, Source, SourceError};
use crate::input::load::{LoadOptions, LoadedDump, load_all};
use rcomm_verdict::Problem;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

/// Dumps on disk as a source; see the module.
pub struct FileSource {
    paths: Vec<PathBuf>,
}

impl FileSource {
    /// A source of the dumps below these paths, which [`poll`](Source::poll) reads as [`load_all`] does.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self { paths }
    }
}

impl Source for FileSource {
    fn name(&self) -> String {
        let paths: Vec<String> = self.paths.iter().map(|p| p.display().to_string()).collect();
        format!("dumps in {}", paths.join(", "))
    }

    /// # Blocking
    ///
    /// Until all files are read, even after the deadline: there is only one poll.
    fn poll(&mut self, _deadline: Instant) -> Result<Poll, SourceError> {
        let read = load_all(&self.paths, &LoadOptions::default());
        let (dumps, loaded) = read.map_err(|error| SourceError::Nothing {
            what: error.to_string(),
            hint: "name folders, files or archives of dumps, or a recording".into(),
        })?;
        if loaded.files == 0 && loaded.problems.is_empty() {
            let paths = self.paths.iter().map(|path| path.display().to_string());
            let paths: Vec<String> = paths.collect();
            return Err(SourceError::Nothing {
                what: format!("no file in {}", paths.join(", ")),
                hint: "name folders, files or archives of dumps, or a recording".into(),
            });
        }
        let mut problems = loaded.problems;
        let logs = loaded.logs.into_iter().map(|log| (log.path, "a log is"));
        let ras = loaded.ras.into_iter();
        let ras = ras.map(|(path, _)| (path, "a report of NCCL's RAS is"));
        let stacks = loaded.stacks.into_iter();
        let stacks = stacks.map(|stacks| (stacks.path, "the stacks of a rank are"));
        problems.extend(logs.chain(ras).chain(stacks).map(|(path, what)| {
            let sentence =
                format!("left aside: {what} no record; `rcomm-fr analyze` reads this file");
            Problem::stale_dump(path, sentence)
        }));
        Ok(Poll::of_files(dumps, problems))
    }

    fn is_static(&self) -> bool {
        true
    }
}

impl Poll {
    /// The dumps of files and the problems of reading them, as one poll. If there are several files of one rank, the
    /// analysis selects one.
    pub fn of_files(mut dumps: Vec<LoadedDump>, mut problems: Vec<Problem>) -> Self {
        dumps.sort_by_cached_key(|loaded| (loaded.dump.identity.rank, loaded.path.clone()));
        let mut observations: Vec<Observation> = Vec::new();
        let mut files = BTreeMap::new();
        for loaded in dumps {
            let Some(rank) = loaded.dump.identity.rank else {
                problems.push(Problem::unreadable_dump(
                    loaded.path,
                    "left aside: neither the record nor the name of its file states the rank",
                ));
                continue;
            };
            let part = match observations.last() {
                Some(last) if last.rank == rank => last.part.saturating_add(1),
                _ => 0,
            };
            files.insert((rank, part), loaded.file());
            observations.push(Observation {
                rank,
                part,
                liveness: Liveness::Unknown,
                seen: Seen::Changed(Box::new(loaded.dump)),
            });
        }
        Self {
            observations,
            problems,
            files,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_is_no_record_is_named() {
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let ras = r#"{"nccl_version": "2.30", "communicators_count": 0, "communicators": []}"#;
        let stacks =
            "Thread 0x00007f00 (most recent call first):\n  File \"train.py\", line 3 in step\n";
        let log = "[rank0]: ValueError: of no use\n";
        let files = [
            ("ras.json", ras, "a report of NCCL's RAS"),
            ("rank_1.txt", stacks, "the stacks of a rank"),
            ("job.log", log, "a log"),
        ];
        for (name, text, _) in files {
            let path = folder.path().join(name);
            std::fs::write(path, text).expect("a file can be written");
        }
        let mut source = FileSource::new(vec![folder.path().to_owned()]);
        let poll = source.poll(Instant::now()).expect("the folder exists");
        for (name, _, what) in files {
            let mut problems = poll.problems.iter();
            let named = problems.find(|problem| problem.path.ends_with(name));
            let sentence = named.map(|problem| problem.sentence.as_str());
            assert!(
                sentence.is_some_and(|sentence| sentence.contains(what)),
                "{name}: {:?}",
                poll.problems
            );
        }
        assert_eq!(poll.problems.len(), files.len());
    }
}

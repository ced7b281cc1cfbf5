//! Dumps on disk as a source: folders, files and archives. They are read once.

use super::{Liveness, Observation, Poll, Seen, Source, SourceError};
use crate::input::load::{LoadOptions, load_all};
use rcomm_verdict::Problem;
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
        let mut problems = loaded.problems;
        problems.extend(loaded.logs.into_iter().map(|log| {
            let sentence = "left aside: a log is no record; `rcomm-fr analyze` reads it";
            Problem::stale_dump(log.path, sentence)
        }));
        let mut observations: Vec<Observation> = Vec::new();
        let mut written_ns = None;
        for loaded in dumps {
            written_ns = written_ns.max(loaded.written_ns);
            let Some(rank) = loaded.dump.identity.rank else {
                problems.push(Problem::unreadable_dump(
                    loaded.path,
                    "skipped: neither the record nor the file name states its rank",
                ));
                continue;
            };
            // If there are several files of one rank, the analysis selects one.
            let part = match observations.last() {
                Some(last) if last.rank == rank => last.part.saturating_add(1),
                _ => 0,
            };
            observations.push(Observation {
                rank,
                part,
                liveness: Liveness::Unknown,
                seen: Seen::Changed(Box::new(loaded.dump)),
            });
        }
        Ok(Poll {
            observations,
            problems,
            written_ns,
            ..Poll::default()
        })
    }

    fn is_still(&self) -> bool {
        true
    }
}

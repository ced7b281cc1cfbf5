//! The results of reading files.

use super::ras::RasReport;
use super::stacks::RankStacks;
use rcomm_recorder::publish::Dump;
use rcomm_verdict::logs::Log;
use rcomm_verdict::{Analysis, Extent, Problem, RecordFile};

/// The dump of one rank.
#[derive(Debug)]
pub struct LoadedDump {
    /// The dump; its identity holds the rank, from the dump, from its groups or from the name of the file.
    pub dump: Dump,
    /// The path of the file; for a member of an archive, the archive's path, a colon and the member's name.
    pub path: String,
    /// Whether entries may be missing: the file could not be read to its end, some entries were invalid, or it had no
    /// list of entries.
    pub cut: bool,
    /// When the file was written, ns since the epoch. `None` if the dump itself states a time, or if the time of the
    /// file is unknown, as for a member of an archive.
    pub written_ns: Option<i64>,
}

impl LoadedDump {
    /// What the analysis has to know of the file.
    pub fn file(&self) -> RecordFile {
        RecordFile {
            written_ns: self.written_ns,
            extent: match self.cut {
                true => Extent::Cut,
                false => Extent::Whole,
            },
        }
    }

    /// Adds the dump to an analysis, with its path and what is known of its file.
    pub fn add_to(&self, analysis: &mut Analysis) {
        let file = self.file();
        analysis.note_written(file.written_ns);
        analysis.add_from(&self.path, &self.dump, file.extent);
    }
}

/// When the file at `path` was written, ns since the epoch; `None` if that is unknown.
pub(crate) fn written_ns(path: &str) -> Option<i64> {
    let written = std::fs::metadata(path).ok()?.modified().ok()?;
    let since = written.duration_since(std::time::UNIX_EPOCH).ok()?;
    i64::try_from(since.as_nanos()).ok()
}

/// The results of reading, apart from the dumps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Problems of files, folders, links and patterns, in the order of their paths.
    pub problems: Vec<Problem>,
    /// The number of paths that cannot be accessed, of patterns without a match, and of links that were not followed;
    /// each is a problem, too.
    pub unfound: usize,
    /// The number of files. An archive counts as its members, a summary as the files it was made from.
    pub files: usize,
    /// The number of dumps that were passed on; a rank may have several.
    pub dumps: usize,
    /// Reports of NCCL's RAS with their paths, in the order of the paths.
    pub ras: Vec<(String, RasReport)>,
    /// Logs, in the order of their paths.
    pub logs: Vec<Log>,
    /// Python and native stacks of ranks, in the order of their paths.
    pub stacks: Vec<RankStacks>,
    /// Whether an archive of `rcomm-fr collect` was read.
    pub has_manifest: bool,
    /// The number of ranks of the job that such an archive states, the largest of several; `None` if none states it.
    pub world_size: Option<u32>,
}

//! The names of ring files and of jobs' directories.

use crate::error::Error;
use crate::model::Rank;
use crate::record::config::RingPart;
use std::path::PathBuf;

/// Identifies a ring within a directory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingId<'a> {
    pub(crate) job: &'a str,
    pub(crate) rank: Rank,
    pub(crate) attempt: u32,
    pub(crate) part: RingPart,
}

impl RingId<'_> {
    pub(crate) fn file_name(&self) -> String {
        let part = self.part.name();
        let dot = if part.is_empty() { "" } else { "." };
        format!("{}.{}{dot}{part}.ring", self.rank, self.attempt)
    }

    /// The error if another living process has the ring of this name.
    pub(super) fn taken_error(&self, path: PathBuf) -> Error {
        Error::RankTaken {
            job: self.job.to_owned(),
            attempt: self.attempt,
            rank: self.rank,
            path,
        }
    }
}

/// The parts of a ring file's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RingName {
    pub(crate) rank: Rank,
    pub(crate) attempt: u32,
    pub(crate) part: RingPart,
    /// False for `.previous.ring`, a ring that was replaced.
    pub(crate) is_newest: bool,
}

impl RingName {
    /// Parses a file's name; `None` if it is not a ring's.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let stem = name.strip_suffix(".ring")?;
        let (stem, is_newest) = match stem.strip_suffix(".previous") {
            Some(stem) => (stem, false),
            None => (stem, true),
        };
        let (rank, rest) = stem.split_once('.')?;
        let (attempt, part) = match rest.split_once('.') {
            Some((_, "")) => return None,
            Some((attempt, part)) => (attempt, RingPart::from_name(part)?),
            None => (rest, RingPart::Program),
        };
        Some(Self {
            rank: rank.parse().ok()?,
            attempt: attempt.parse().ok()?,
            part,
            is_newest,
        })
    }
}

/// Whether a file of this name is a ring, or one that has not got its name yet. A process maps its ring before the ring
/// has its name, and the kernel's list of its mappings keeps the file's name from before.
pub fn is_ring_or_unnamed(name: &str) -> bool {
    let unnamed = || {
        let stem = name.strip_prefix('.')?.strip_suffix(".new")?;
        let (rank, rest) = stem.split_once('.')?;
        let (attempt, _) = rest.split_once('.')?;
        Some(rank.parse::<Rank>().is_ok() && attempt.parse::<u32>().is_ok())
    };
    RingName::parse(name).is_some() || unnamed().unwrap_or(false)
}

/// A job's name as one path component. Names that had to change contain a hash, so that they stay distinct.
pub(crate) fn job_directory_name(job: &str) -> String {
    let keep = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let clean: String = job
        .chars()
        .take(100)
        .map(|c| if keep(c) { c } else { '_' })
        .collect();
    if clean == job && !clean.is_empty() && !clean.starts_with('.') {
        return clean;
    }
    // FNV-1a.
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{}-{hash:016x}", clean.replacen('.', "_", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_names_become_one_safe_path_component() {
        assert_eq!(job_directory_name("llama-70b.v2"), "llama-70b.v2");
        for odd in ["", ".", "..", "../etc", "a/b", "ä", &"x".repeat(300)] {
            let name = job_directory_name(odd);
            assert!(!name.contains('/') && !name.starts_with('.'), "{name}");
            assert!(!name.is_empty() && name.len() <= 120, "{name}");
        }
        assert_ne!(job_directory_name("a/b"), job_directory_name("a:b"));
    }

    #[test]
    fn only_names_of_rings_are_parsed_as_such() {
        let name = RingName::parse("7.2.ring").unwrap();
        assert_eq!((name.rank, name.attempt, name.is_newest), (7, 2, true));
        assert!(!RingName::parse("7.2.previous.ring").unwrap().is_newest);
        let part = RingName::parse("7.2.nccl.ring").unwrap();
        assert_eq!(
            (part.rank, part.attempt, part.part),
            (7, 2, RingPart::NcclProfiler)
        );
        let previous = RingName::parse("7.2.nccl.previous.ring").unwrap();
        assert_eq!(
            (previous.part, previous.is_newest),
            (RingPart::NcclProfiler, false)
        );
        for other in [
            "7.ring",
            ".7.2.99.new",
            "7.2",
            "x.2.ring",
            "-1.0.ring",
            "7.2..ring",
            "7.2.a.b.ring",
        ] {
            assert_eq!(RingName::parse(other), None, "{other}");
        }
        for (name, expected) in [
            ("7.2.nccl.ring", true),
            (".7.2.99.new", true),
            (".7.2.nccl99.new", true),
            (".launch.99.new", false),
            ("7.2.sock", false),
        ] {
            assert_eq!(is_ring_or_unnamed(name), expected, "{name}");
        }
    }
}

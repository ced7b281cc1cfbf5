//! Configuration of a recorder, and the resulting placement of its ring.

use super::layout::{MAX_SLOTS, RingLayout};
use crate::error::{Error, Result};
use crate::model::Rank;
use std::path::{Path, PathBuf};

/// Where to place the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// A file below `/dev/shm/rcomm-<uid>`; in the process's own memory if that is not possible.
    #[default]
    Shared,
    /// A file in this directory, which should be on a memory-backed file system: on a disk, writing to
    /// a page under write-back blocks the writer.
    Dir(PathBuf),
    /// The process's own memory: not readable from outside.
    Memory,
}

/// When the slots of a ring are reserved and mapped into the process's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Touch {
    /// At creation, which takes a few milliseconds for 3 MiB. Recording then needs no system call and no page fault.
    #[default]
    AtOnce,
    /// When a slot is first written to, or earlier in [`touch_ahead`](super::FlightRecorder::touch_ahead). Writing to
    /// an untouched slot may cause a page fault (every 32nd record does), and every 512th record waits until the system
    /// has reserved 64 KiB. If the system has no space, records that do not fit are counted as lost.
    Ahead,
}

/// Which of a process's rings a ring is: a process has one for each of its recorders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RingPart {
    /// The ring of the program's operations through rcomm: `<rank>.<attempt>.ring`.
    #[default]
    Program,
    /// The ring of the plug-in for NCCL: `<rank>.<attempt>.nccl.ring`.
    NcclProfiler,
}

impl RingPart {
    const NAMES: [(Self, &'static str); 2] = [(Self::Program, ""), (Self::NcclProfiler, "nccl")];

    /// The part's name within the ring's file name; empty for the program's ring.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::NAMES
            .iter()
            .find(|(_, known)| *known == name)
            .map(|&(part, _)| part)
    }

    /// The part's number in a ring's header.
    pub(crate) const fn code(self) -> u64 {
        self as u64
    }

    pub(crate) fn from_code(code: u64) -> Self {
        let known = Self::NAMES.get(usize::try_from(code).unwrap_or(usize::MAX));
        known.map_or(Self::Program, |&(part, _)| part)
    }
}

/// Where the ring is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Storage {
    /// In this file.
    File(PathBuf),
    /// In the process's own memory.
    Memory {
        /// Why it is not in a file, if [`create`](super::FlightRecorder::create) could not make one.
        why: Option<String>,
    },
}

impl Storage {
    /// The ring file, if there is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Memory { .. } => None,
        }
    }
}

/// Configuration of a [`FlightRecorder`](super::FlightRecorder).
#[derive(Clone, Debug)]
pub struct RecorderConfig {
    /// Where to place the ring.
    pub placement: Placement,
    /// When the ring's slots are reserved and mapped.
    pub touch: Touch,
    /// The job's name, the same on all its ranks; at most 255 bytes.
    pub job: String,
    /// Attempt of the job, from 0.
    pub attempt: u32,
    /// Rank in the world.
    pub rank: Rank,
    /// Ranks in the world.
    pub world_size: u32,
    /// Host name, at most 255 bytes.
    pub host: String,
    /// Operations that the ring holds, from 1 to 1,048,576, rounded up to a power of two.
    pub entries: u32,
    /// Number of distinct groups over the life of the process, from 1 to 65,536.
    pub groups: u32,
    /// Distinct signatures kept in a table, from 1 to 65,536. Later ones are stored with their records.
    pub signatures: u32,
    /// Distinct call sites kept, from 1 to 65,536.
    pub call_sites: u32,
    /// Number of NCCL network links whose progress is kept, in addition to that of operations on their channels; 0
    /// keeps neither; at most 65,536.
    pub links: u32,
    /// Which of the process's rings this is.
    pub part: RingPart,
}

impl RecorderConfig {
    /// The largest number of operations that a ring can hold.
    pub const MAX_ENTRIES: u32 = MAX_SLOTS as u32;

    /// The largest number of operations for which the ring with its tables takes at most this many bytes: a power of
    /// two, at most [`MAX_ENTRIES`](Self::MAX_ENTRIES). `None` if the tables alone take more.
    pub fn entries_within(&self, bytes: usize) -> Option<u32> {
        let max = Self::MAX_ENTRIES.ilog2();
        let mut sizes = (0..=max).rev().map(|power| 1 << power);
        sizes.find(|&entries| self.bytes_with(entries) <= bytes)
    }

    /// The size of a ring for this many operations with its tables, in bytes.
    pub fn bytes_with(&self, entries: u32) -> usize {
        let config = Self {
            entries,
            ..self.clone()
        };
        RingLayout::plan(&config).bytes
    }

    /// A configuration with 16,384 entries in shared memory, for attempt 0 on this host.
    pub fn new(job: impl Into<String>, rank: Rank, world_size: u32) -> Self {
        let host = rustix::system::uname();
        Self {
            placement: Placement::Shared,
            touch: Touch::AtOnce,
            job: job.into(),
            attempt: 0,
            rank,
            world_size,
            host: host.nodename().to_string_lossy().into_owned(),
            entries: 16_384,
            groups: 1_024,
            signatures: 4_096,
            call_sites: 1_024,
            links: 0,
            part: RingPart::Program,
        }
    }

    /// Checks the values. The error names the first invalid one.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::InvalidConfig(reason));
        if self.rank >= self.world_size {
            return refuse(format!(
                "rank {} is not less than the world size {}",
                self.rank, self.world_size
            ));
        }
        for (name, text) in [("job", &self.job), ("host", &self.host)] {
            if text.len() > 255 {
                let len = text.len();
                return refuse(format!("the {name} name has {len} bytes, more than 255"));
            }
        }
        for (name, value, max) in [
            ("entries", self.entries, Self::MAX_ENTRIES),
            ("groups", self.groups, 1 << 16),
            ("signatures", self.signatures, 1 << 16),
            ("call sites", self.call_sites, 1 << 16),
        ] {
            if value == 0 || value > max {
                return refuse(format!("{value} {name}: must be from 1 to {max}"));
            }
        }
        if self.links > 1 << 16 {
            return refuse(format!("{} links: must be at most {}", self.links, 1 << 16));
        }
        Ok(())
    }
}

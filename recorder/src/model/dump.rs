//! One rank's record as a value: the contents of a dump file, a ring file or an endpoint's answer.

use crate::model::{
    Communicator, Entry, EntryState, Failure, Frame, GroupPlace, PeerLink, ProcessGroupInfo,
    ProcessGroupStatus, ProcessorWait, Rank, RankStatus, ReducerStep, Signature, Stack,
};
use serde::{Deserialize, Serialize};

/// The version of a dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FormatVersion {
    /// Raised when a field changes its meaning.
    pub major: u32,
    /// Raised when a field is added.
    pub minor: u32,
}

impl FormatVersion {
    /// The version of the dialect that this crate writes; PyTorch 2.15 writes the same.
    pub const WRITTEN: Self = Self {
        major: 2,
        minor: 10,
    };

    /// Parses `2.10` as two integers, so that it is newer than `2.9`; `None` if the text is not two numbers separated
    /// by a dot.
    pub fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once('.')?;
        Some(Self {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    }

    /// Checks that this build can interpret the fields of a dump of this version.
    ///
    /// A higher minor version has more fields, which are ignored. A higher major version has changed the
    /// meaning of a field: reading it would be a guess.
    ///
    /// # Errors
    /// If the major version is higher than the one of [`Self::WRITTEN`].
    pub fn check_readable(self) -> Result<(), UnreadableVersion> {
        if self.major > Self::WRITTEN.major {
            return Err(UnreadableVersion { found: self });
        }
        Ok(())
    }
}

/// A dump of a newer major version than this build knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("format version {found} is newer than this build reads (up to {}.x); use a newer build", FormatVersion::WRITTEN.major)]
pub struct UnreadableVersion {
    /// The version of the dump.
    pub found: FormatVersion,
}

impl std::fmt::Display for FormatVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The recorder that wrote a dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recorder {
    /// This crate.
    Rcomm,
    /// PyTorch's NCCL recorder, or one that behaves like it: states come from device events.
    Nccl,
    /// rcomm's plug-in for NCCL's profiler interface: states come from the device.
    NcclProfiler,
    /// PyTorch's backend-agnostic hook.
    Hook,
    /// PyTorch's gloo recorder: states always `scheduled`, groups without names, no P2P.
    NativeGloo,
    /// torchcomms: one sequence counter for the whole recorder, P2P without peers.
    Torchcomms,
    /// Unknown (an empty ring, for example).
    #[default]
    Unknown,
}

impl Recorder {
    /// Whether states come from the device, so that "not started" means that the device has not reached an operation.
    pub const fn sees_device(self) -> bool {
        matches!(self, Self::Nccl | Self::NcclProfiler)
    }

    /// The record id of the first operation: 1 in the dumps of rcomm's recorders, 0 in all others.
    pub const fn first_record_id(self) -> u64 {
        matches!(self, Self::Rcomm | Self::NcclProfiler) as u64
    }

    const NAMES: [(Self, &'static str); 7] = [
        (Self::Rcomm, "rcomm"),
        (Self::Nccl, "nccl"),
        (Self::NcclProfiler, "nccl_profiler"),
        (Self::Hook, "hook"),
        (Self::NativeGloo, "native_gloo"),
        (Self::Torchcomms, "torchcomms"),
        (Self::Unknown, "unknown"),
    ];

    /// The recorder's name in rcomm's dumps.
    pub fn name(self) -> &'static str {
        let mut names = Self::NAMES.iter();
        names
            .find(|(recorder, _)| *recorder == self)
            .map_or("", |(_, name)| name)
    }

    /// The recorder of this exact name, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut names = Self::NAMES.iter();
        names
            .find(|(_, known)| *known == name)
            .map(|&(recorder, _)| recorder)
    }
}

/// The process of a record. PyTorch's dumps hold none of these fields: there the rank comes from the file
/// name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Rank in the world.
    pub rank: Option<Rank>,
    /// Ranks in the world.
    pub world_size: Option<u32>,
    /// Host name; empty if unknown.
    pub host: String,
    /// Job; empty if unknown.
    pub job: String,
    /// Attempt of the job, from 0 (torchrun's restart count).
    pub attempt: u32,
    /// Process id on its host; 0 if unknown.
    pub pid: u32,
    /// When the record was taken, wall clock, ns since the epoch; 0 if unknown.
    pub dump_time_ns: i64,
    /// When the record began, for a ring when it was made, wall clock, ns since the epoch; 0 if unknown.
    // Summaries hold it in a part of its own.
    #[serde(skip)]
    pub begun_ns: i64,
    /// Why the record was taken (`signal of rank 3`, `requested at its endpoint`, `ring of a dead process`, ...); empty
    /// if unknown.
    pub reason: String,
}

/// One group in a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpGroup {
    /// Name, description, members.
    pub info: ProcessGroupInfo,
    /// The process's rank in the group and the group's size, if the record has these instead of the members.
    pub place: Option<GroupPlace>,
    /// Progress of the group on this rank, if recorded.
    pub status: Option<ProcessGroupStatus>,
}

/// The thread that issued operations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ThreadInfo {
    /// Identifier as the recorder wrote it.
    pub id: String,
    /// Name.
    pub name: String,
}

/// One rank's record, in memory.
///
/// Entries refer to the tables by index. Every index in an entry is valid: readers check it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dump {
    /// Version of the file from which the record was read.
    pub version: FormatVersion,
    /// The recorder that wrote the record.
    pub recorder: Recorder,
    /// The rank and process of the record.
    pub identity: Identity,
    /// The rank's own status, if rcomm's recorder wrote the dump.
    pub status: Option<RankStatus>,
    /// Version of the communication library, as recorded; empty if none.
    pub comm_lib_version: String,
    /// Groups this rank used, each once.
    pub groups: Vec<DumpGroup>,
    /// Distinct call signatures.
    pub signatures: Vec<Signature>,
    /// Distinct frames.
    pub frames: Vec<Frame>,
    /// Distinct stacks, as indices into `frames`, innermost first.
    pub stacks: Vec<Stack>,
    /// Distinct threads.
    pub threads: Vec<ThreadInfo>,
    /// The operations, oldest first.
    pub entries: Vec<Entry>,
    /// Per communicator its name and its facts, as keys and values: NCCL's own report in PyTorch's dumps, and
    /// [`Communicator::to_facts`] in rcomm's; empty if not recorded.
    pub nccl_comm_state: Vec<(String, Vec<(String, String)>)>,
    /// Failures in the order of their numbers: the first ones of the process and the newest.
    pub failures: Vec<Failure>,
    /// When the process closed its record cleanly, wall clock, ns since the epoch; 0 if it did not, or the writer did
    /// not note it.
    pub closed_ns: i64,
    /// The process's connections, one element per other end; empty if they were not recorded.
    pub peers: Vec<PeerLink>,
    /// How long the process's threads had to wait for a processor; `None` if that was not recorded.
    pub processor_wait: Option<ProcessorWait>,
    /// The newest steps of the process's reducers, in the order of their numbers; empty if it has none.
    pub reducer_steps: Vec<ReducerStep>,
}

impl Dump {
    /// The communicators in `nccl_comm_state`, without those that have no valid hash; empty if none were recorded.
    pub fn communicators(&self) -> Vec<Communicator> {
        let state = self.nccl_comm_state.iter();
        state
            .filter_map(|(name, facts)| Communicator::from_facts(name, facts))
            .collect()
    }

    /// Keeps the newest `count` operations and all from the oldest pending one on; drops the others.
    pub fn keep_newest(&mut self, count: usize) {
        let first = self.first_of_newest(count);
        if first > 0 {
            self.entries.drain(..first);
            // A live view holds dumps for long: free the memory of removed entries.
            if self.entries.capacity() > 2 * self.entries.len() {
                self.entries.shrink_to_fit();
            }
        }
    }

    /// A copy of the record with the newest `count` operations and all from the oldest pending one on.
    pub fn newest(&self, count: usize) -> Self {
        Self {
            version: self.version,
            recorder: self.recorder,
            identity: self.identity.clone(),
            status: self.status.clone(),
            comm_lib_version: self.comm_lib_version.clone(),
            groups: self.groups.clone(),
            signatures: self.signatures.clone(),
            frames: self.frames.clone(),
            stacks: self.stacks.clone(),
            threads: self.threads.clone(),
            entries: self.entries[self.first_of_newest(count)..].to_vec(),
            nccl_comm_state: self.nccl_comm_state.clone(),
            failures: self.failures.clone(),
            closed_ns: self.closed_ns,
            peers: self.peers.clone(),
            processor_wait: self.processor_wait,
            reducer_steps: self.reducer_steps.clone(),
        }
    }

    /// Index of the first entry that [`newest`](Self::newest) keeps.
    fn first_of_newest(&self, count: usize) -> usize {
        let beyond = self.entries.len().saturating_sub(count);
        let is_pending = |entry: &Entry| entry.state < EntryState::Completed && !entry.retired;
        let pending = self.entries[..beyond].iter().position(is_pending);
        pending.unwrap_or(beyond)
    }
}

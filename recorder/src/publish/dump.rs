//! One rank's record as a value: what a dump file, a ring file or an endpoint's answer holds.

use crate::model::{
    Entry, Frame, ProcessGroupInfo, ProcessGroupStatus, Rank, RankStatus, Signature, Stack,
};
use serde::{Deserialize, Serialize};

/// The version of a dump: a field added raises `minor`, a field changed raises `major`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FormatVersion {
    /// Raised when a field changes its meaning.
    pub major: u32,
    /// Raised when a field is added.
    pub minor: u32,
}

impl FormatVersion {
    /// The dialect that we write: PyTorch 2.15 writes the same.
    pub const WRITTEN: Self = Self {
        major: 2,
        minor: 10,
    };
}

impl std::fmt::Display for FormatVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Who wrote a record, as far as its peculiarities tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recorder {
    /// This crate.
    Rcomm,
    /// PyTorch's NCCL recorder, or one that behaves like it: states come from device events.
    Nccl,
    /// PyTorch's backend-agnostic hook.
    Hook,
    /// PyTorch's gloo recorder: states always `scheduled`, groups without names, no P2P.
    NativeGloo,
    /// torchcomms: one sequence counter for the whole recorder, P2P without peers.
    Torchcomms,
    /// Cannot be told (an empty ring, say).
    #[default]
    Unknown,
}

/// Whose record this is. PyTorch's dumps hold none of it: there the rank comes from the file name.
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
    /// Why the record was taken (`timeout`, `signal`, `ring of a dead process`, ...); empty if unknown.
    pub reason: String,
}

/// One group in a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpGroup {
    /// Name, description, members.
    pub info: ProcessGroupInfo,
    /// How far it came on this rank, where recorded.
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
/// Entries refer by index to the tables beside them. Every index in an entry is valid: readers check
/// on the way in.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dump {
    /// Version of the file that this came from.
    pub version: FormatVersion,
    /// Who wrote it.
    pub recorder: Recorder,
    /// Whose it is.
    pub identity: Identity,
    /// What the rank said of itself, in our own records.
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
    /// NCCL's own account of its communicators, where it was built to give one.
    pub nccl_comm_state: Vec<(String, Vec<(String, String)>)>,
}

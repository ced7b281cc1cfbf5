//! What a reader of logs recognised, line by line.

use rcomm_recorder::model::{OpType, Rank};

/// One log: a file, or a stream, of one rank or of many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// Where it was read.
    pub path: String,
    /// Lines in all.
    pub lines: u64,
    /// Ranks of the job, where a line states it.
    pub world_size: Option<u32>,
    /// What was recognised, in the order of the lines.
    pub facts: Vec<Fact>,
    /// Facts beyond the limit of the reader: counted, not kept.
    pub left_out: u64,
}

/// One line about the job's end or its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Number of the line, from 1.
    pub line: u64,
    /// The rank in the world whose line it is, where the line or its file shows it.
    pub rank: Option<Rank>,
    /// What it states.
    pub event: Event,
}

/// The name of a process group as logs give it: `0(default_pg)`, `12`.
pub type GroupName = String;

/// What a line states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The watchdog found an operation past its time-out.
    TimedOut(TimedOut),
    /// How far a rank had come in a group.
    Progress(Progress),
    /// Two ranks compared what they issued, and it differs.
    Differ(Box<[Issued; 2]>),
    /// Ranks that had not joined an operation that others are in; `after`: the last that they finished.
    NotJoined {
        /// Which, ascending.
        ranks: Vec<Rank>,
        /// Number of the last collective that they finished.
        after: Option<u64>,
    },
    /// Ranks whose newest operation this is.
    Newest {
        /// Which.
        ranks: Vec<Rank>,
        /// Its number.
        seq: u64,
        /// The operation.
        op: LoggedOp,
        /// They finished it.
        finished: bool,
    },
    /// Ranks that did not pass a monitored barrier.
    BarrierMissed(Vec<Rank>),
    /// The rank of the line reached a monitored barrier that another rank did not pass.
    BarrierReached,
    /// A connection ended from the other side.
    PeerLost {
        /// The address of the other side.
        peer: String,
    },
    /// The network gave a transfer up.
    Unreachable {
        /// The address of the other side.
        peer: String,
        /// What the network reported.
        status: String,
    },
    /// The two ends of a transfer have different sizes.
    SizesDiffer {
        /// The address of the other side.
        peer: String,
        /// Bytes at the side that logged it.
        here: u64,
        /// Bytes at the other side.
        there: u64,
    },
    /// NCCL aborted an operation: the text of its error.
    Aborted {
        /// The operation, if it is named.
        op: Option<(LoggedOp, u64)>,
        /// NCCL's text.
        error: String,
    },
    /// A call of CUDA failed: the text of its error.
    DeviceError(String),
    /// The watchdog made no progress for so many seconds.
    WatchdogStuck(u64),
    /// An exception that ended the rank.
    Raised(String),
    /// A process ended.
    Ended(Ended),
    /// The kernel ended a process for want of memory.
    OutOfMemory {
        /// Its process id.
        pid: Option<u32>,
    },
}

/// An operation as a log names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedOp {
    /// What it is; [`OpType::Other`] if it is not known.
    pub kind: OpType,
    /// As it was spelt.
    pub name: String,
}

/// An operation past its time-out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimedOut {
    /// In which group, where the line names it.
    pub group: Option<GroupName>,
    /// Its number; older versions log none.
    pub seq: Option<u64>,
    /// The operation.
    pub op: LoggedOp,
    /// Elements in and out, where they are known.
    pub elements: [Option<u64>; 2],
    /// The time-out, ms.
    pub timeout_ms: u64,
}

/// How far a rank had come in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// In which group.
    pub group: GroupName,
    /// The operation that failed, where the line is about one.
    pub failed: Option<u64>,
    /// The newest that the rank had enqueued; `None` if none.
    pub enqueued: Option<u64>,
    /// The newest that had completed; `None` if none.
    pub completed: Option<u64>,
}

/// What one of two compared ranks issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// Which rank.
    pub rank: Rank,
    /// Its number of the operation.
    pub seq: Option<u64>,
    /// The operation.
    pub op: LoggedOp,
    /// The shapes as printed; empty if they are not.
    pub shape: String,
    /// The element types as printed; empty if they are not.
    pub dtype: String,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its exit code, or the signal that ended it, negative.
    pub code: i32,
    /// Its rank on its host, where only that is known.
    pub local_rank: Option<u32>,
    /// Process id, where it is known.
    pub pid: Option<u32>,
    /// The launcher names it as the first failure.
    pub first: bool,
}

//! The facts that a reader of logs recognized.

use rcomm_recorder::model::{OpType, Rank};

/// One log: a file or a stream, of one rank or of many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// The path or name under which the log was read.
    pub path: String,
    /// The number of its lines.
    pub lines: u64,
    /// The attempts of the job that the log shows, oldest first: a launcher that restarts its processes begins a new
    /// attempt. The last attempt may have no facts.
    pub attempts: Vec<Attempt>,
    /// The number of facts beyond the reader's limits, which were counted and not kept.
    pub left_out: u64,
}

impl Log {
    /// The facts of all attempts, in the order of their lines.
    pub fn facts(&self) -> impl Iterator<Item = &Fact> {
        self.attempts.iter().flat_map(|attempt| &attempt.facts)
    }
}

/// One start of a job's processes and what followed until the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attempt {
    /// The number of ranks of the job, if a line states it.
    pub world_size: Option<u32>,
    /// The facts in the order of their lines.
    pub facts: Vec<Fact>,
}

/// A line that states something about the end or the state of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Number of the line, from 1.
    pub line: u64,
    /// The global rank that logged the line, if the line or its file shows it.
    pub rank: Option<Rank>,
    /// What the line states.
    pub event: Event,
}

/// The name of a process group as logs give it: `0(default_pg)`, `12`.
pub type GroupName = String;

/// The statement of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The watchdog found an operation that exceeded its time-out.
    TimedOut(TimedOut),
    /// The progress of a rank in a group.
    Progress(Progress),
    /// Two ranks compared their calls, and these differ; the call of the line's own rank comes first. The ranks are
    /// numbered within a group.
    Differ(Box<[Issued; 2]>),
    /// Ranks that had not joined an operation that others are in.
    NotJoined(Vec<Absent>),
    /// Ranks that had not joined an operation that others are in, according to a desync report of PyTorch. They are
    /// numbered within a group.
    Lagging(Vec<Absent>),
    /// The newest operation of some ranks.
    Newest {
        /// The ranks.
        ranks: Vec<Rank>,
        /// The number of the operation.
        seq: u64,
        /// The operation.
        op: LoggedOp,
        /// Whether the ranks finished the operation.
        finished: bool,
    },
    /// Ranks that did not pass a monitored barrier: their group ranks.
    BarrierMissed(Vec<Rank>),
    /// The rank of the line reached a monitored barrier that another rank did not pass.
    BarrierReached {
        /// The group rank of the rank that logged the line; `None` if the line does not state it.
        in_group: Option<Rank>,
    },
    /// The other side closed a connection.
    PeerLost {
        /// The address of the other side.
        peer: String,
    },
    /// The network reported that it cannot reach the other side.
    Unreachable {
        /// The address of the other side.
        peer: String,
        /// What the network reported.
        status: String,
    },
    /// The two ends of a transfer have different sizes.
    SizesDiffer {
        /// The address of the other side; empty if the line does not name it.
        peer: String,
        /// Bytes at the side that logged the line.
        here: u64,
        /// Bytes at the other side.
        there: u64,
    },
    /// NCCL could not create a segment of shared memory.
    NoSharedMemory {
        /// The size of the segment, if stated.
        bytes: Option<u64>,
        /// Whether the line states that no space was left.
        is_full: bool,
    },
    /// NCCL refused a communicator with two ranks on one device.
    SameDevice {
        /// The two ranks, by their numbers in the communicator.
        ranks: [Rank; 2],
        /// The device, as NCCL names it.
        device: String,
    },
    /// NCCL aborted an operation.
    Aborted {
        /// The operation and its number, if they are named.
        op: Option<(LoggedOp, u64)>,
        /// The text of NCCL's error.
        error: String,
    },
    /// A call of CUDA failed: the text of its error.
    DeviceError(String),
    /// The watchdog made no progress for this many seconds.
    WatchdogStuck(u64),
    /// The text of an exception that ended the rank.
    Raised(String),
    /// The text of an exception that names no cause by itself: it usually follows from another rank's failure, or its
    /// traceback has no label and may be of any program.
    Exception(String),
    /// The job was asked to end from outside: its launcher got a signal, or Slurm cancelled its step.
    Terminated,
    /// A process ended.
    Ended(Ended),
    /// The kernel's out-of-memory killer ended a process.
    OutOfMemory {
        /// The id of the process, if the line names it.
        pid: Option<u32>,
    },
}

/// An operation as a log names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedOp {
    /// The operation; [`OpType::Other`] if its name is unknown.
    pub kind: OpType,
    /// The name as logged.
    pub name: String,
}

/// An operation that exceeded its time-out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimedOut {
    /// The group, if the line names it.
    pub group: Option<GroupName>,
    /// The rank within a group of the process, if the line states one: PyTorch writes that of the first group that had
    /// an error.
    pub in_group: Option<Rank>,
    /// The sequence number of the operation; older versions of PyTorch log none.
    pub seq: Option<u64>,
    /// The operation.
    pub op: LoggedOp,
    /// Elements in and out, if they are logged.
    pub elements: [Option<u64>; 2],
    /// The time-out, ms.
    pub timeout_ms: u64,
}

/// A rank that had not joined an operation that others are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Absent {
    /// The rank.
    pub rank: Rank,
    /// Number of the last collective that the rank finished (PyTorch) or called (rcomm's runtime); `None` if there was
    /// none.
    pub after: Option<u64>,
}

/// The progress of a rank in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The group.
    pub group: GroupName,
    /// The number of the operation that failed, if the line is about one.
    pub failed: Option<u64>,
    /// The number of the newest operation that the rank had enqueued; `None` if none.
    pub enqueued: Option<u64>,
    /// The number of the newest operation that had completed; `None` if none.
    pub completed: Option<u64>,
}

/// The call of one of two compared ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// The rank.
    pub rank: Rank,
    /// The sequence number of the call on this rank, if it is logged.
    pub seq: Option<u64>,
    /// The operation.
    pub op: LoggedOp,
    /// The shapes as logged; empty if none were.
    pub shape: String,
    /// The element types as logged; empty if none were.
    pub dtype: String,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The exit code of the process, or the negated number of the signal that ended it.
    pub code: i32,
    /// The rank of the process on its host, if only that is known.
    pub local_rank: Option<u32>,
    /// The id of the process, if known.
    pub pid: Option<u32>,
    /// Whether the launcher names it as the first failure.
    pub first: bool,
}

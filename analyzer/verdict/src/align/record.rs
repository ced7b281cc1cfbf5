//! One recorder's record of a rank in compact columns, which refer to the tables that all ranks share
//! ([`Shared`](crate::align::shared::Shared)).

use rcomm_recorder::model::{
    Communicator, Entry, EntryState, Failure, GroupId, GroupPlace, OpType, Peer, PeerLink,
    ProcessGroupStatus, ProcessorWait, Rank, RankStatus,
};
use rcomm_recorder::publish::{Dump, FormatVersion, Identity, Recorder, RingReader};

/// No job has more ranks: a larger world size in a file or an answer is damage.
pub const MAX_WORLD: u32 = 1 << 20;

/// The value that marks an absent stack, peer, thread or time in a column.
pub(crate) const NONE: u32 = u32::MAX;
/// The peer of a receive from any source.
pub(crate) const ANY: u32 = u32::MAX - 1;

/// Whether a record's file was read to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Extent {
    /// The file was read to its end.
    #[default]
    Whole,
    /// The file was cut short or damaged: the newest operations are missing.
    Cut,
}

/// One operation, 56 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    /// When the operation was issued, wall clock of its host, ns.
    pub(crate) created_ns: i64,
    /// `record_id` minus the first one of the record.
    pub(crate) id: u32,
    /// `collective_seq_id`, or the number that a correction has given the operation in its place.
    pub(crate) seq: u32,
    /// `p2p_seq_id`; in a record by torchcomms the recorded `collective_seq_id`.
    pub(crate) p2p_seq: u32,
    /// Index into [`Shared::calls`].
    pub(crate) call: u32,
    /// Index into [`Shared::stacks`], or [`NONE`].
    pub(crate) stack: u32,
    /// Group rank of the peer, [`ANY`] or [`NONE`].
    pub(crate) peer: u32,
    /// µs after `created_ns`, or [`NONE`].
    pub(crate) started_us: u32,
    /// µs after `created_ns`, or [`NONE`].
    pub(crate) completed_us: u32,
    /// The duration that the backend measured, ms; negative if it did not.
    pub(crate) duration_ms: f32,
    /// The thread that issued the operation, by a number of this record; [`NONE`] if it is not recorded.
    pub(crate) thread: u32,
    /// Index into [`Record::groups`].
    pub(crate) group: u16,
    pub(crate) kind: OpType,
    pub(crate) state: EntryState,
    /// Whether the recorder has ceased to follow the operation, which may have completed or failed.
    pub(crate) retired: bool,
    /// Whether this is a send or a receive, or the marker that closes a batch of them.
    pub(crate) is_p2p: bool,
}

impl Op {
    /// The peer of a message.
    pub(crate) fn peer(&self) -> Peer {
        match self.peer {
            ANY => Peer::Any,
            NONE => Peer::None,
            rank => Peer::Rank(rank),
        }
    }

    pub(crate) fn completed(&self) -> bool {
        self.state == EntryState::Completed
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.state, EntryState::Completed | EntryState::Failed)
    }

    /// When the end of the operation was noticed, wall clock of its host, ns; `None` if it was not noticed or is not
    /// recorded.
    pub(crate) fn completed_ns(&self) -> Option<i64> {
        (self.completed_us != NONE).then(|| {
            self.created_ns
                .saturating_add(i64::from(self.completed_us) * 1000)
        })
    }

    /// When the operation failed, wall clock of its host, ns; `None` if it did not, or if the record does not state
    /// when.
    pub(crate) fn failed_ns(&self) -> Option<i64> {
        let lasted = self
            .wait_ms()
            .filter(|_| self.state == EntryState::Failed)?;
        let lasted_ns = (f64::from(lasted) * 1e6) as i64;
        Some(self.created_ns.saturating_add(lasted_ns))
    }

    /// How long the rank was in the operation, ms: as the backend measured it, else from issue to the noticed end;
    /// `None` if neither is known.
    pub(crate) fn wait_ms(&self) -> Option<f32> {
        if self.duration_ms >= 0.0 {
            Some(self.duration_ms)
        } else {
            (self.completed_us != NONE).then(|| self.completed_us as f32 / 1000.0)
        }
    }
}

/// What stopped a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Signal,
    Debugger,
}

/// A group in the record of one rank.
#[derive(Clone, Debug)]
pub(crate) struct LocalGroup {
    /// The group's number in its process.
    pub(crate) id: GroupId,
    /// Index into [`Shared::groups`].
    pub(crate) group: u32,
    /// The description as this record states it: a rank that made another group under this name may state another one.
    pub(crate) desc: Box<str>,
    pub(crate) status: Option<ProcessGroupStatus>,
    /// The rank's own group rank and the size, if the record holds these and not the members.
    pub(crate) place: Option<GroupPlace>,
}

/// The record of one rank, by one recorder.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) rank: Rank,
    /// The file or source, for sentences; may be empty.
    pub(crate) path: String,
    pub(crate) version: FormatVersion,
    pub(crate) recorder: Recorder,
    pub(crate) identity: Identity,
    pub(crate) status: Option<RankStatus>,
    pub(crate) groups: Vec<LocalGroup>,
    /// The progress of NCCL's channels and links.
    pub(crate) communicators: Vec<Communicator>,
    /// NCCL's numbers of communicators, each with its group's name, as rcomm's backend for NCCL records them.
    pub(crate) comm_ids: Vec<(u64, String)>,
    /// In order of issue.
    pub(crate) ops: Vec<Op>,
    /// Operations that were pending in another record of the process and that this one no longer holds, each with its
    /// `record_id`. They are in no lane.
    pub(crate) unaligned: Vec<(u64, Op)>,
    /// `record_id` of the first operation.
    pub(crate) first_id: u64,
    /// Whether newest operations are missing: the file was cut, or unfinished operations were removed from the record.
    pub(crate) cut: bool,
    /// Whether completed operations seem to have been left out when the record was written.
    pub(crate) only_active: bool,
    /// The failures that the rank's process recorded, in order.
    pub(crate) failures: Vec<Failure>,
    /// When the process closed its record, ns by its own clock; 0 if it did not.
    pub(crate) closed_ns: i64,
    /// The process's connections.
    pub(crate) peers: Vec<PeerLink>,
    /// How long the process's threads had to wait for a processor, if that was recorded.
    pub(crate) processor_wait: Option<ProcessorWait>,
    /// When its file was written, ns by the clock of the file system, if the record itself states no time.
    pub(crate) written_ns: Option<i64>,
    /// Why the record cannot be of the rank that its file's name states; `None` if it may be.
    pub(crate) misnamed: Option<String>,
}

impl Record {
    /// Whether the ring had dropped operations before the first one in the record.
    pub(crate) fn wrapped(&self) -> bool {
        self.first_id > self.recorder.first_record_id()
    }

    /// The number of operations that the ring dropped or overwrote.
    pub(crate) fn lost(&self) -> u64 {
        let dropped = self.status.as_ref().map_or(0, |status| status.dropped);
        let before = self
            .first_id
            .saturating_sub(self.recorder.first_record_id());
        before.saturating_add(dropped)
    }

    /// The newest time among the last 64 operations, ns by the record's own clock; without operations, when the record
    /// was taken; 0 if unknown.
    pub(crate) fn newest_ns(&self) -> i64 {
        let times = self.ops.iter().rev().take(64);
        times
            .map(|op| {
                op.completed_ns()
                    .unwrap_or(op.created_ns)
                    .max(op.created_ns)
            })
            .max()
            .unwrap_or(self.identity.dump_time_ns)
    }

    /// When the record was taken, or [`Record::newest_ns`] if that is later; ns by the record's own clock, 0 if
    /// unknown.
    pub(crate) fn latest_ns(&self) -> i64 {
        self.identity.dump_time_ns.max(self.newest_ns())
    }

    /// Whether the record was read from a ring whose process is dead.
    pub(crate) fn died(&self) -> bool {
        // Compare the whole reason: a reason that quotes an error may contain the word "dead".
        self.identity.reason == RingReader::OWNER_IS_DEAD
    }

    /// Whether the record was read from the ring of a process that lives and is not stopped.
    pub(crate) fn lives(&self) -> bool {
        self.identity.reason == RingReader::OWNER_LIVES
    }

    /// Whether the record was read from a ring, not from a dump.
    pub(crate) fn is_ring(&self) -> bool {
        self.lives() || self.died() || self.closed() || self.stop().is_some()
    }

    /// What stopped the process, if the record was read from a ring whose process is stopped.
    pub(crate) fn stop(&self) -> Option<Stop> {
        match self.identity.reason.as_str() {
            RingReader::OWNER_IS_STOPPED => Some(Stop::Signal),
            RingReader::OWNER_IS_TRACED => Some(Stop::Debugger),
            _ => None,
        }
    }

    /// Whether the record was read from a ring that its process closed.
    pub(crate) fn closed(&self) -> bool {
        self.identity.reason == RingReader::CLOSED
    }

    /// Whether the record aligns with others as it was recorded: it is not joined to another record, no operation of it
    /// is reopened, and it states the members of its groups.
    pub(crate) fn aligns_once(&self) -> bool {
        self.recorder != Recorder::NcclProfiler
            && !retiring_is_all(self.recorder)
            && self.groups.iter().all(|local| local.place.is_none())
    }

    /// The `record_id` of one of this record's operations.
    pub(crate) fn record_id(&self, op: &Op) -> u64 {
        self.first_id.saturating_add(u64::from(op.id))
    }

    /// The operation of this `record_id`, from this record or another one of its process.
    pub(crate) fn operation(&self, record_id: u64) -> Option<&Op> {
        let mut unaligned = self.unaligned.iter();
        let held = self.ops.iter().find(|op| self.record_id(op) == record_id);
        held.or_else(|| Some(&unaligned.find(|(id, _)| *id == record_id)?.1))
    }
}

/// Whether dumps by this recorder may leave out completed operations: those of PyTorch's recorders do if they are asked
/// to (onlyActive).
pub(crate) fn may_leave_out(recorder: Recorder) -> bool {
    !matches!(recorder, Recorder::Rcomm | Recorder::NcclProfiler)
}

/// Whether `retired` is this recorder's only sign that an operation has ended.
pub fn retiring_is_all(recorder: Recorder) -> bool {
    recorder == Recorder::NativeGloo
}

/// Threads may issue operations in other groups between the parts of a call and its marker, but hardly this many. The
/// limit bounds the time for a dump in which no operation has ended.
const MOST_BEFORE_MARKER: usize = 1024;

/// The entry that holds the state and the end of an operation: of a part of a coalesced call, the marker that closes
/// the call, since recorders note these there only; of every other operation, and of a part whose marker the record
/// lacks, its own.
pub fn status_entry<'a>(dump: &'a Dump, entry: &'a Entry) -> &'a Entry {
    if entry.state >= EntryState::Completed || entry.retired {
        return entry;
    }
    let from = (dump.entries).partition_point(|other| other.record_id <= entry.record_id);
    let numbers = |one: &Entry| (one.collective_seq_id, one.p2p_seq_id);
    // The parts of a call and its marker have one number.
    let mut rest = (dump.entries[from..].iter().take(MOST_BEFORE_MARKER))
        .filter(|other| other.group == entry.group)
        .take_while(|other| numbers(other) == numbers(entry));
    rest.find(|other| other.op == OpType::Coalesced)
        .unwrap_or(entry)
}

/// The number of an operation among those of its kind in its group: of a message, or of the call that ends a batch of
/// them, the number among messages, else that among collectives.
pub fn seq_of(entry: &Entry) -> u64 {
    match entry.is_p2p || entry.op.is_p2p() {
        true => entry.p2p_seq_id,
        false => entry.collective_seq_id,
    }
}

/// When an operation ended, wall clock, ns since the epoch: when it completed or, if it failed, when the rank recorded
/// its failure. 0 if it is pending, or that was not recorded.
pub fn ended_ns(dump: &Dump, entry: &Entry) -> i64 {
    let status = status_entry(dump, entry);
    let completed_ns = status.time_discovered_completed_ns;
    if completed_ns > 0 || status.state != EntryState::Failed {
        return completed_ns;
    }
    let is_its = |failure: &&Failure| {
        let operation = failure.operation;
        operation.is_some_and(|operation| operation.record_id == status.record_id)
    };
    let failure = dump.failures.iter().find(is_its);
    failure.map_or(0, |failure| failure.time_ns)
}

/// The index of a rank among the members; `None` if it is not one.
pub(crate) fn position(ranks: &[Rank], rank: Rank) -> Option<usize> {
    // Members are nearly always ascending.
    if let Ok(index) = ranks.binary_search(&rank) {
        return Some(index);
    }
    ranks.iter().position(|&r| r == rank)
}

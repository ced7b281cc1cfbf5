//! Single values, in the various forms of the dialect.
//!
//! Integers occur as numbers and as strings, absent times as `None` and as 0, lists of ranks as lists and as strings.
//! Both readers pass a value that is not a list or dict as a [`Scalar`].

use super::build::{Builder, Fields};
use super::keys::{Field, failure, peer, rank, reducer, top};
use crate::model::dump::{FormatVersion, Recorder};
use crate::model::{
    EntryState, FailedOperation, Failure, FailureKind, GroupId, LinkEnd, OpType, Peer, PeerLink,
    Rank, RankStatus, ReduceOp, ReducerBucket, ReducerStep, WaitingOperation,
};

/// A scalar value, or [`Scalar::Other`] for anything else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scalar<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(&'a str),
    /// A container, or a string that is not UTF-8.
    Other,
}

impl Scalar<'_> {
    /// Name of the kind of value, for messages.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(_) | Self::Float(_) => "a number",
            Self::Text(_) => "a string",
            Self::Other => "a value of another kind",
        }
    }

    /// An integer, from a number, a bool or a string of digits; `None` if it is anything else.
    #[inline(always)]
    fn integer(self) -> Option<i64> {
        match self {
            Self::Int(value) => Some(value),
            Self::Bool(value) => Some(value.into()),
            Self::Text(text) => text.trim().parse().ok(),
            // Every integer up to 2^53 is exact in a float; above that, a float may differ from the number
            // that was written.
            Self::Float(value) if value.fract() == 0.0 && value.abs() <= 9e15 => Some(value as i64),
            _ => None,
        }
    }

    /// An integer in the range of `T`, from a number, a bool or a string of digits; `None` if it is anything else.
    #[inline(always)]
    pub(super) fn int<T: TryFrom<i64>>(self) -> Option<T> {
        T::try_from(self.integer()?).ok()
    }

    /// A bool, from a bool or an integer; Python's `None` is false.
    #[inline(always)]
    fn flag(self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(value),
            Self::None => Some(false),
            Self::Int(value) => Some(value != 0),
            _ => None,
        }
    }

    #[inline(always)]
    fn float(self) -> Option<f32> {
        match self {
            Self::Float(value) => Some(value as f32),
            Self::Int(value) => Some(value as f32),
            Self::Text(text) => text.trim().parse().ok(),
            _ => None,
        }
    }

    /// A time: Python's `None` and 0 both mean "not seen".
    #[inline(always)]
    fn time(self) -> Option<i64> {
        match self {
            Self::None => Some(0),
            other => other.int(),
        }
    }

    /// A text; empty if the value is not a text.
    fn text(self) -> String {
        match self {
            Self::Text(text) => text.to_owned(),
            _ => String::new(),
        }
    }
}

impl std::fmt::Display for Scalar<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bool(value) => value.fmt(f),
            Self::Int(value) => value.fmt(f),
            Self::Float(value) => value.fmt(f),
            Self::Text(text) => text.fmt(f),
            Self::None | Self::Other => Ok(()),
        }
    }
}

/// The ranks in a text such as `[0, 1, 2]`, with or without blanks: every run of digits is a rank. Numbers beyond 32
/// bits are ignored.
pub(super) fn ranks(text: &[u8]) -> Vec<u32> {
    let value = |digits: &[u8]| {
        let next = |value: u32, digit: &u8| {
            let digit = u32::from(digit - b'0');
            value.checked_mul(10)?.checked_add(digit)
        };
        digits.iter().try_fold(0, next)
    };
    text.split(|byte| !byte.is_ascii_digit())
        .filter(|digits| !digits.is_empty())
        .filter_map(value)
        .collect()
}

/// The state of this name; `None` if there is no such state.
pub(super) fn state(text: &[u8]) -> Option<EntryState> {
    Some(match text {
        b"completed" => EntryState::Completed,
        b"started" => EntryState::Started,
        b"scheduled" => EntryState::Scheduled,
        b"failed" => EntryState::Failed,
        _ => return None,
    })
}

/// Stores a scalar field in the draft; `None` if its value is invalid. Invalid values of fields that are optional in
/// an [`Entry`](crate::model::Entry) count as not recorded.
#[inline(always)]
pub(super) fn set_scalar(draft: &mut Fields, field: Field, value: Scalar<'_>) -> Option<()> {
    match field {
        Field::RecordId => draft.record_id = Some(value.int()?),
        Field::PgId => draft.pg_id = Some(value.int()?),
        Field::CollectiveSeqId => draft.collective_seq_id = Some(value.int()?),
        Field::SeqId => draft.seq_id = Some(value.int()?),
        Field::P2pSeqId => draft.p2p_seq_id = value.int()?,
        Field::OpId => draft.op_id = value.int()?,
        Field::TimeCreated => draft.time_created_ns = value.time()?,
        Field::TimeStarted => draft.time_started_ns = value.time()?,
        Field::TimeCompleted => draft.time_completed_ns = value.time()?,
        Field::Duration => draft.duration_ms = value.float(),
        Field::Timeout => draft.timeout_ms = value.int()?,
        Field::Retired => draft.retired = value.flag()?,
        Field::IsP2p => draft.is_p2p = value.flag()?,
        Field::Failed => draft.failed = value.flag()?,
        Field::Root => draft.root = value.int(),
        Field::GraphId => draft.graph_id = value.int(),
        Field::ReduceOp => {
            draft.reduce_op = match value {
                Scalar::Text(name) => ReduceOp::from_name(name),
                _ => None,
            }
        }
        Field::Peer => {
            draft.peer = match value {
                Scalar::Text("any") => Peer::Any,
                Scalar::None => Peer::None,
                other => Peer::Rank(other.int()?),
            }
        }
        Field::Stack => draft.stack_index = value.int(),
        _ => {}
    }
    Some(())
}

/// Stores a scalar of the whole dump; unknown keys are ignored.
pub(super) fn set_top(builder: &mut Builder, key: &str, value: Scalar<'_>) {
    let identity = &mut builder.dump.identity;
    match key {
        top::VERSION => builder.version = FormatVersion::parse(&value.to_string()),
        top::COMM_LIB_VERSION | top::NCCL_VERSION => builder.dump.comm_lib_version = value.text(),
        top::RECORDER => builder.recorder = Recorder::from_name(&value.text()),
        top::RANK => identity.rank = value.int(),
        top::WORLD_SIZE => identity.world_size = value.int(),
        top::HOST => identity.host = value.text(),
        top::JOB => identity.job = value.text(),
        top::ATTEMPT => identity.attempt = value.int().unwrap_or(0),
        top::PID => identity.pid = value.int().unwrap_or(0),
        top::DUMP_TIME => identity.dump_time_ns = value.time().unwrap_or(0),
        top::BEGUN => identity.begun_ns = value.time().unwrap_or(0),
        top::REASON => identity.reason = value.text(),
        top::CLOSED => builder.dump.closed_ns = value.time().unwrap_or(0),
        top::PROCESSOR_WAIT_SINCE => {
            let wait = builder.dump.processor_wait.get_or_insert_default();
            wait.since_ns = value.time().unwrap_or(0);
        }
        top::PROCESSOR_WAIT => {
            let wait = builder.dump.processor_wait.get_or_insert_default();
            wait.waited_ns = value.int().unwrap_or(0);
        }
        _ => {}
    }
}

/// Stores a scalar of the rank's own status.
pub(super) fn set_rank_status(status: &mut RankStatus, key: &str, value: Scalar<'_>) {
    match key {
        rank::PHASE => status.phase = value.text(),
        rank::PHASE_SINCE => status.phase_since_ns = value.time().unwrap_or(0),
        rank::STEP => status.step = value.int().unwrap_or(-1),
        rank::HEARTBEAT => status.heartbeat_ns = value.time().unwrap_or(0),
        rank::DROPPED => status.dropped = value.int().unwrap_or(0),
        rank::EXIT_CODE => {
            status.exit.get_or_insert_default().code = value.int().unwrap_or(u8::MAX);
        }
        rank::EXITED => {
            status.exit.get_or_insert_default().time_ns = value.time().unwrap_or(0);
        }
        _ => {}
    }
}

/// A failure while its fields are read.
#[derive(Default)]
pub(super) struct FailureDraft {
    kind: Option<FailureKind>,
    id: u64,
    pub(super) ranks: Vec<Rank>,
    rank_count: u32,
    group: Option<GroupId>,
    operation: Option<FailedOperation>,
    time_ns: i64,
    seen_by: Rank,
    text: String,
}

impl FailureDraft {
    /// Stores a scalar of the failure.
    pub(super) fn set(&mut self, key: &str, value: Scalar<'_>) {
        match key {
            failure::ID => self.id = value.int().unwrap_or(0),
            failure::KIND => self.kind = FailureKind::from_name(&value.text()),
            failure::RANK_COUNT => self.rank_count = value.int().unwrap_or(0),
            failure::GROUP => self.group = value.int(),
            failure::TIME => self.time_ns = value.time().unwrap_or(0),
            failure::SEEN_BY => self.seen_by = value.int().unwrap_or(0),
            failure::TEXT => self.text = value.text(),
            _ => {}
        }
    }

    /// Stores a scalar of the operation that failed.
    pub(super) fn set_operation(&mut self, key: &str, value: Scalar<'_>) {
        let operation = self.operation.get_or_insert(FailedOperation {
            op: OpType::Other,
            seq: 0,
            is_p2p: false,
            record_id: 0,
        });
        match key {
            failure::OP => operation.op = OpType::from_name(&value.text()).unwrap_or(OpType::Other),
            failure::SEQ => operation.seq = value.int().unwrap_or(0),
            failure::IS_P2P => operation.is_p2p = value.flag().unwrap_or(false),
            failure::RECORD_ID => operation.record_id = value.int().unwrap_or(0),
            _ => {}
        }
    }

    /// Adds the failure to the dump, unless its kind is unknown or the dump has [`MAX_FAILURES`] failures.
    pub(super) fn finish(self, builder: &mut Builder) {
        let failures = &mut builder.dump.failures;
        let Some(kind) = self.kind.filter(|_| failures.len() < MAX_FAILURES) else {
            return;
        };
        let mut failure = Failure {
            id: self.id,
            kind,
            ranks: self.ranks,
            rank_count: self.rank_count,
            group: self.group,
            operation: self.operation,
            time_ns: self.time_ns,
            seen_by: self.seen_by,
            text: self.text,
        };
        failure.limit();
        failures.push(failure);
    }
}

/// The connections to one other end while their fields are read.
pub(super) struct PeerDraft {
    rank: Option<Rank>,
    is_store: bool,
    group: Option<GroupId>,
    seq: u64,
    is_p2p: bool,
    link: PeerLink,
}

impl Default for PeerDraft {
    fn default() -> Self {
        Self {
            rank: None,
            is_store: false,
            group: None,
            seq: 0,
            is_p2p: false,
            link: PeerLink::to(LinkEnd::Store),
        }
    }
}

impl PeerDraft {
    /// Stores a scalar of the connections; unknown keys are ignored.
    pub(super) fn set(&mut self, key: &str, value: Scalar<'_>) {
        let link = &mut self.link;
        match key {
            peer::RANK => self.rank = value.int(),
            peer::STORE => self.is_store = value.flag().unwrap_or(false),
            peer::HEARD => link.heard_ns = value.time().unwrap_or(0),
            peer::SAMPLED => link.sampled_ns = value.time().unwrap_or(0),
            peer::WAITED_SINCE => link.waited_since_ns = value.time().unwrap_or(0),
            peer::GROUP => self.group = value.int(),
            peer::SEQ => self.seq = value.int().unwrap_or(0),
            peer::IS_P2P => self.is_p2p = value.flag().unwrap_or(false),
            peer::RECEIVED => link.received = value.int().unwrap_or(0),
            peer::SENT => link.sent = value.int().unwrap_or(0),
            peer::UNACKNOWLEDGED => link.unacknowledged = value.int().unwrap_or(0),
            peer::ERRNO => link.errno = value.int().unwrap_or(0),
            peer::INTERVAL => link.interval_ms = value.int().unwrap_or(0),
            _ => {}
        }
    }

    /// Adds the connections to the dump, unless they name no other end or the dump has those to [`MAX_PEERS`] ends.
    pub(super) fn finish(self, builder: &mut Builder) {
        let peers = &mut builder.dump.peers;
        let end = match (self.rank, self.is_store) {
            (Some(rank), false) => LinkEnd::Rank(rank),
            (Some(rank), true) => LinkEnd::StoreAtRank(rank),
            (None, true) => LinkEnd::Store,
            (None, false) => return,
        };
        if peers.len() < MAX_PEERS {
            peers.push(PeerLink {
                end,
                waiting: self.group.map(|group| WaitingOperation {
                    group,
                    seq: self.seq,
                    is_p2p: self.is_p2p,
                }),
                ..self.link
            });
        }
    }
}

/// Stores a scalar of a step of a reducer; unknown keys are ignored.
pub(super) fn set_reducer_step(step: &mut ReducerStep, key: &str, value: Scalar<'_>) {
    let times = &mut step.times;
    let number = match key {
        reducer::ENDED => return step.ended_ns = value.time().unwrap_or(0),
        reducer::GROUP => return step.group = value.int().unwrap_or(0),
        reducer::BUCKET_COUNT => return times.bucket_count = value.int().unwrap_or(0),
        reducer::ID => &mut step.id,
        reducer::STEP => &mut times.step,
        reducer::FORWARD => &mut times.forward_ns,
        reducer::BACKWARD => &mut times.backward_ns,
        reducer::COMMUNICATION => &mut times.communication_ns,
        reducer::EXPOSED => &mut times.exposed_ns,
        reducer::BYTES => &mut times.bytes,
        reducer::SUM_STEPS => &mut times.sums.steps,
        reducer::SUM_FORWARD => &mut times.sums.forward_ns,
        reducer::SUM_BACKWARD => &mut times.sums.backward_ns,
        reducer::SUM_COMMUNICATION => &mut times.sums.communication_ns,
        reducer::SUM_EXPOSED => &mut times.sums.exposed_ns,
        _ => return,
    };
    *number = value.int().unwrap_or(0);
}

/// Stores a scalar of a bucket of a reducer; unknown keys are ignored.
pub(super) fn set_reducer_bucket(bucket: &mut ReducerBucket, key: &str, value: Scalar<'_>) {
    let number = match key {
        reducer::INDEX => return bucket.index = value.int().unwrap_or(0),
        reducer::PARAMETERS => return bucket.parameters = value.int().unwrap_or(0),
        reducer::BYTES => &mut bucket.bytes,
        reducer::READY => &mut bucket.ready_ns,
        reducer::SENT => &mut bucket.sent_ns,
        reducer::COMMUNICATION => &mut bucket.communication_ns,
        reducer::EXPOSED => &mut bucket.exposed_ns,
        _ => return,
    };
    *number = value.int().unwrap_or(0);
}

/// Adds a bucket to its step, unless the step has as many buckets as its record can have.
pub(super) fn add_reducer_bucket(step: &mut ReducerStep, bucket: ReducerBucket) {
    if step.buckets.len() < ReducerStep::MAX_BUCKETS {
        step.buckets.push(bucket);
    }
}

/// Adds a step to the dump, unless the step has no number or the dump has [`MAX_REDUCER_STEPS`] steps.
pub(super) fn add_reducer_step(builder: &mut Builder, step: ReducerStep) {
    let steps = &mut builder.dump.reducer_steps;
    if step.id > 0 && steps.len() < MAX_REDUCER_STEPS {
        steps.push(step);
    }
}

/// Maximum number of steps of reducers read from one dump; a ring holds sixteen.
const MAX_REDUCER_STEPS: usize = 256;

/// Maximum number of other ends whose connections are read from one dump: as many as a ring holds.
const MAX_PEERS: usize = 1024;

/// Maximum number of failures read from one dump; a ring holds a quarter as many.
const MAX_FAILURES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_read_with_and_without_blanks() {
        assert_eq!(ranks(b"[0, 1, 12]"), [0, 1, 12]);
        assert_eq!(ranks(b"[0,1,12]"), [0, 1, 12]);
        assert!(ranks(b"[]").is_empty());
        assert!(ranks(b"99999999999999999999").is_empty());
    }

    #[test]
    fn numbers_are_also_read_from_strings() {
        assert_eq!(Scalar::Text("-1").int(), Some(-1_i64));
        assert_eq!(Scalar::Text("-1").int::<u32>(), None);
        assert_eq!(Scalar::Int(7).int(), Some(7_u32));
        assert_eq!(Scalar::Float(7.5).int::<i64>(), None);
        assert_eq!(Scalar::None.time(), Some(0));
    }
}

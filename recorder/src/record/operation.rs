//! [`Operation`]: the description of an issued operation, and the handles that a recorder gives for groups, call sites
//! and records.

use super::signature::{SignatureId, SignatureKey};
use crate::model::{OpType, Peer, ReduceOp};
use std::panic::Location;
use std::time::Duration;

/// A handle of a group. It is valid for the recorder that returned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupHandle(pub(super) u32);

impl GroupHandle {
    /// The number of the group's row, for storage outside of Rust.
    pub const fn row(self) -> u32 {
        self.0
    }

    /// The group with this row. Operations on a row that the recorder does not have are recorded without a group.
    pub const fn of_row(row: u32) -> Self {
        Self(row)
    }
}

/// A signature as [`FlightRecorder::begin`](super::FlightRecorder::begin) takes it.
#[derive(Clone, Copy, Debug)]
pub enum SignatureRef<'a> {
    /// Interned before, which is faster.
    Id(SignatureId),
    /// Looked up, or interned if it is new; if it does not fit in the table, it is stored with this record only.
    Key(&'a SignatureKey<'a>),
}

/// The call site in the program.
#[derive(Clone, Copy, Debug)]
pub enum CallSite {
    /// In Rust (`#[track_caller]`).
    Location(&'static Location<'static>),
    /// In any language: interned before, by
    /// [`FlightRecorder::intern_call_site`](super::FlightRecorder::intern_call_site).
    Id(CallSiteId),
}

impl From<&'static Location<'static>> for CallSite {
    fn from(location: &'static Location<'static>) -> Self {
        Self::Location(location)
    }
}

/// An interned call site. It is valid for the recorder that returned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallSiteId(pub(super) u32);

impl CallSiteId {
    /// The number of the call site's row, for storage outside of Rust.
    pub const fn row(self) -> u32 {
        self.0
    }

    /// The call site with this row. A row that the recorder does not have reads as no call site.
    pub const fn of_row(row: u32) -> Self {
        Self(row)
    }
}

/// When an operation starts, relative to its issue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// After the operations before it; [`FlightRecorder::started`](super::FlightRecorder::started) reports the start
    /// later.
    #[default]
    InTurn,
    /// At the issue: the operation waits for no operation before it.
    AtOnce,
}

/// An operation as it is issued.
#[derive(Clone, Copy, Debug)]
pub struct Operation<'a> {
    /// The operation's group.
    pub group: GroupHandle,
    /// The kind of operation.
    pub op: OpType,
    /// The operation's signature: backend, name and tensors.
    pub signature: SignatureRef<'a>,
    /// Number of the collective in its group; a point-to-point operation carries the number of the last collective
    /// before it.
    pub collective_seq_id: u64,
    /// Number of the point-to-point operation or batch in its group.
    pub p2p_seq_id: u64,
    /// Number of the logical operation in its group.
    pub op_id: u64,
    /// Whether `p2p_seq_id` counts the operation, and not `collective_seq_id`.
    pub is_p2p: bool,
    /// The other end of a send or receive, as a rank of the group.
    pub peer: Peer,
    /// Root of a rooted operation, as a rank of the group.
    pub root: Option<u32>,
    /// The reduction, if the operation has one.
    pub reduce_op: Option<ReduceOp>,
    /// Elements sent to each rank of the group; empty where the operation has none.
    pub input_splits: &'a [u64],
    /// Elements received from each rank of the group; empty where the operation has none.
    pub output_splits: &'a [u64],
    /// The operation's time-out; kept in ms up to 49 days.
    pub timeout: Duration,
    /// The call site in the program.
    pub call_site: Option<CallSite>,
    /// When the operation starts.
    pub start: Start,
}

impl<'a> Operation<'a> {
    /// An operation with only the fields that every operation has.
    #[inline]
    pub const fn new(group: GroupHandle, op: OpType, signature: SignatureRef<'a>) -> Self {
        Self {
            group,
            op,
            signature,
            collective_seq_id: 0,
            p2p_seq_id: 0,
            op_id: 0,
            is_p2p: op.is_p2p(),
            peer: Peer::None,
            root: None,
            reduce_op: None,
            input_splits: &[],
            output_splits: &[],
            timeout: Duration::ZERO,
            call_site: None,
            start: Start::InTurn,
        }
    }
}

/// The handle of a record, for later updates. A ticket is small and can be copied to other threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The record's id.
    pub(super) id: u64,
    /// `collective_seq_id` + 1; 0 for point-to-point operations, which the status does not count.
    pub(super) sequence: u64,
    /// The row of the operation's group.
    pub(super) group: u32,
}

impl Ticket {
    /// The record's id: ascending from 1 over all groups of the process.
    pub const fn record_id(self) -> u64 {
        self.id
    }

    /// The operation's `collective_seq_id`; `None` for point-to-point operations.
    pub const fn collective_seq_id(self) -> Option<u64> {
        self.sequence.checked_sub(1)
    }

    /// The ticket as plain numbers, for storage outside of Rust; the first is the record's id.
    pub const fn to_words(self) -> [u64; 3] {
        [self.id, self.sequence, self.group as u64]
    }

    /// The ticket with the numbers of [`to_words`](Self::to_words). Other numbers refer to another operation or to
    /// none.
    pub const fn of_words([id, sequence, group]: [u64; 3]) -> Self {
        Self {
            id,
            sequence,
            group: group as u32,
        }
    }
}

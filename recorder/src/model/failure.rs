//! Failures of an operation, a group or a process, as the runtime recorded them.

use super::coded::coded;
use super::{GroupId, OpType, Rank};
use serde::{Deserialize, Serialize};

coded! {
    /// The cause that ended an operation, a group or a process.
    FailureKind, "kind of failure" {
        /// A deadline passed.
        Timeout = 1, "timeout";
        /// A peer's process ended, or the connection to it did.
        PeerGone = 2, "peer_gone";
        /// The ranks do not agree on the operation.
        Mismatch = 3, "mismatch";
        /// The program aborted the group. The text is its reason.
        Abort = 4, "abort";
        /// This process withdrew the operation: the group was closed while it was pending.
        Cancelled = 5, "cancelled";
        /// The backend, its library, the store or the system reported an error.
        Backend = 6, "backend_error";
    }
}

/// The operation that failed, on the rank that recorded the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FailedOperation {
    /// The kind of operation.
    pub op: OpType,
    /// The operation's `collective_seq_id`, or its `p2p_seq_id` if `is_p2p`.
    pub seq: u64,
    /// Whether the operation is a send, a receive or a batch of them.
    pub is_p2p: bool,
    /// The number of the operation's record in the process that recorded the failure.
    pub record_id: u64,
}

/// A failure as one rank recorded it.
///
/// A rank records the first failure of each of its groups, failures after which a group can still be used, and failures
/// at the start and the end of its world.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Failure {
    /// Number of the failure in its process, from 1, ascending; 0 if not set. A gap means that failures were not kept.
    pub id: u64,
    /// The cause.
    pub kind: FailureKind,
    /// Global ranks that the failure names, ascending, at most [`Self::MAX_RANKS`]; empty if no rank can be named. For
    /// an abort, the rank whose program called it.
    pub ranks: Vec<Rank>,
    /// The number of ranks that the failure concerns, of which `ranks` may hold only the first.
    pub rank_count: u32,
    /// The group's number in this process; `None` if the failure concerns no group.
    pub group: Option<GroupId>,
    /// The operation; `None` if the failure concerns a group or the process as a whole.
    pub operation: Option<FailedOperation>,
    /// When this rank recorded the failure, wall clock, ns since the epoch; 0 if unknown.
    pub time_ns: i64,
    /// The rank that detected the failure first, as far as this rank can tell: this rank, or the rank whose report it
    /// adopted.
    pub seen_by: Rank,
    /// The facts in one sentence, without group and operation; for an abort the program's reason. At most
    /// [`Self::MAX_TEXT`] bytes.
    pub text: String,
}

impl Failure {
    /// Maximum number of ranks kept per failure.
    pub const MAX_RANKS: usize = 64;
    /// Maximum length of the text, in bytes: text and ranks together fit in a failure's slot of a ring.
    pub const MAX_TEXT: usize = 704;

    /// A failure of this kind that names these ranks, detected by `seen_by`; group, operation, time and number are not
    /// set.
    pub fn new(kind: FailureKind, ranks: &[Rank], seen_by: Rank, text: impl Into<String>) -> Self {
        let mut failure = Self {
            id: 0,
            kind,
            ranks: ranks.to_vec(),
            rank_count: 0,
            group: None,
            operation: None,
            time_ns: 0,
            seen_by,
            text: text.into(),
        };
        failure.limit();
        failure
    }

    /// Sorts the ranks, removes repeated ones, and truncates ranks and text to their limits; `rank_count` becomes at
    /// least the number of ranks before the truncation. Values from outside need this.
    pub fn limit(&mut self) {
        self.ranks.sort_unstable();
        self.ranks.dedup();
        let count = u32::try_from(self.ranks.len()).unwrap_or(u32::MAX);
        self.rank_count = self.rank_count.max(count);
        self.ranks.truncate(Self::MAX_RANKS);
        let end = self.text.floor_char_boundary(Self::MAX_TEXT);
        self.text.truncate(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_text_are_limited() {
        let ranks: Vec<Rank> = (0..100).rev().chain([7]).collect();
        let failure = Failure::new(FailureKind::Timeout, &ranks, 3, "ä".repeat(1000));
        assert_eq!(failure.rank_count, 100);
        assert_eq!(failure.ranks, (0..64).collect::<Vec<_>>());
        assert_eq!(failure.text.len(), Failure::MAX_TEXT);
    }

    #[test]
    fn failure_kinds_are_found_by_code_and_by_name() {
        for &kind in FailureKind::ALL {
            assert_eq!(FailureKind::from_code(kind.code()), Some(kind));
            assert_eq!(FailureKind::from_name(kind.name()), Some(kind));
        }
    }
}

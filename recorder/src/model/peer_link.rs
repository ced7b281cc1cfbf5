//! What a process knows of its connections to its peers and to the store, and since when it waits for them.

use super::{GroupId, Rank};
use serde::{Deserialize, Serialize};

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkEnd {
    /// A rank of the world.
    Rank(Rank),
    /// The store, which the process of this rank serves.
    StoreAtRank(Rank),
    /// The store, if a process that is not a rank serves it, if it is a file, or if it is not known where it is.
    Store,
}

/// The operation that waits for a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WaitingOperation {
    /// The group's number in this process.
    pub group: GroupId,
    /// The operation's `collective_seq_id`, or its `p2p_seq_id` if `is_p2p`.
    pub seq: u64,
    /// Whether the operation is a send, a receive or a batch of them.
    pub is_p2p: bool,
}

/// All connections of a process to one other end, as the process saw them last. A peer that is reached over shared
/// memory alone has no connection: of it only the wait is recorded.
///
/// Times are by the wall clock, ns since the epoch; 0 = never or not known.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PeerLink {
    /// The other end.
    pub end: LinkEnd,
    /// When the other end last gave a sign of life: bytes, or an acknowledgment by its system. For a store, the time
    /// of its last reply.
    pub heard_ns: i64,
    /// When the process looked at the connections last: the silence is measured up to here, not up to when the record
    /// was taken. For a store, when the last request ended, by a reply or a failure.
    pub sampled_ns: i64,
    /// Since when an operation, or a request to the store, waits for the other end; 0 = none does.
    pub waited_since_ns: i64,
    /// The operation that waits; `None` if none does, also while a request to the store waits.
    pub waiting: Option<WaitingOperation>,
    /// Bytes received.
    pub received: u64,
    /// Bytes given to the system to send.
    pub sent: u64,
    /// Packets that were sent and not acknowledged.
    pub unacknowledged: u32,
    /// The number of the system's last error; 0 = none. A reply of a store clears it.
    pub errno: u32,
    /// Time between two signs of life on an idle connection, ms; 0 if unknown, or if an idle connection gives
    /// none.
    pub interval_ms: u32,
}

impl PeerLink {
    /// The connections to an end of which nothing is known yet.
    pub const fn to(end: LinkEnd) -> Self {
        Self {
            end,
            heard_ns: 0,
            sampled_ns: 0,
            waited_since_ns: 0,
            waiting: None,
            received: 0,
            sent: 0,
            unacknowledged: 0,
            errno: 0,
            interval_ms: 0,
        }
    }

    /// Time from the last sign of life to the last sample, ns. `None` if one of the two times is unknown, or if
    /// [`interval_ms`](Self::interval_ms) is 0.
    pub fn silence_ns(&self) -> Option<i64> {
        let is_known = self.heard_ns > 0 && self.sampled_ns > 0 && self.interval_ms > 0;
        is_known.then(|| self.sampled_ns.saturating_sub(self.heard_ns).max(0))
    }

    /// Whether the silence is longer than two intervals plus half a second: one sign of life may be lost and the next
    /// one late by chance. False if the silence is unknown.
    pub fn is_silent(&self) -> bool {
        const SLACK_NS: i64 = 500_000_000;
        let limit = 2 * i64::from(self.interval_ms) * 1_000_000 + SLACK_NS;
        self.silence_ns().is_some_and(|silence| silence > limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_silence_lasts_from_the_last_sign_of_life_to_the_last_sample() {
        let second = 1_000_000_000;
        let mut link = PeerLink {
            heard_ns: 10 * second,
            sampled_ns: 12 * second,
            interval_ms: 1_000,
            ..PeerLink::to(LinkEnd::Rank(1))
        };
        assert_eq!(link.silence_ns(), Some(2 * second));
        assert!(!link.is_silent());
        link.sampled_ns = 13 * second;
        assert!(link.is_silent());
        link.interval_ms = 0;
        assert!(!link.is_silent() && link.silence_ns().is_none());
    }
}

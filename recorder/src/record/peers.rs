//! Rows of connections in a ring: one row per other end, with what the process last saw of its connections to it.

use super::clock::{Anchor, Timestamp};
use super::layout::{RingLayout, halves, join, peer};
use super::ring::Found;
use super::rings;
use super::sync::{Read, Word};
use crate::model::{LinkEnd, PeerLink, WaitingOperation};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often a row is read at most while it changes.
const TRIES: u32 = 1_000;

/// What a process knows of its connections to one other end. Times are on the clock of the records; 0 means never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerFacts {
    /// When the other end last gave a sign of life.
    pub heard: Timestamp,
    /// When the connections were looked at last.
    pub sampled: Timestamp,
    /// When the present wait for the other end began.
    pub waited_since: Timestamp,
    /// The operation that waits.
    pub waiting: Option<WaitingOperation>,
    /// Bytes received.
    pub received: u64,
    /// Bytes given to the system to send.
    pub sent: u64,
    /// Packets that were sent and not acknowledged.
    pub unacknowledged: u32,
    /// The number of the system's last error; 0 = none.
    pub errno: u32,
    /// Time between two signs of life on an idle connection; 0 if unknown, or if an idle connection gives none.
    pub interval: Duration,
}

impl PeerFacts {
    pub(super) fn load(words: &[u64; peer::WORDS]) -> Self {
        let waiting = words[peer::WAITING];
        let (unacknowledged, errno) = halves(words[peer::UNACKNOWLEDGED_AND_ERRNO]);
        Self {
            heard: Timestamp::from_ns(words[peer::HEARD]),
            sampled: Timestamp::from_ns(words[peer::SAMPLED]),
            waited_since: Timestamp::from_ns(words[peer::WAITED_SINCE]),
            waiting: (waiting & peer::HAS_OPERATION != 0).then(|| WaitingOperation {
                group: halves(waiting).0,
                seq: words[peer::SEQ],
                is_p2p: waiting & peer::IS_P2P != 0,
            }),
            received: words[peer::RECEIVED],
            sent: words[peer::SENT],
            unacknowledged,
            errno,
            interval: Duration::from_millis(words[peer::INTERVAL_MS]),
        }
    }

    pub(super) fn store<W: Word>(&self, words: &[W; peer::WORDS]) {
        let store = |word: usize, value| words[word].store(value, Ordering::Relaxed);
        store(peer::HEARD, self.heard.as_ns());
        store(peer::SAMPLED, self.sampled.as_ns());
        store(peer::WAITED_SINCE, self.waited_since.as_ns());
        let waiting = self.waiting.map_or(0, |operation| {
            let p2p = if operation.is_p2p { peer::IS_P2P } else { 0 };
            u64::from(operation.group) | p2p | peer::HAS_OPERATION
        });
        store(peer::WAITING, waiting);
        store(peer::SEQ, self.waiting.map_or(0, |operation| operation.seq));
        store(peer::RECEIVED, self.received);
        store(peer::SENT, self.sent);
        store(
            peer::UNACKNOWLEDGED_AND_ERRNO,
            join(self.unacknowledged, self.errno),
        );
        let interval = u64::try_from(self.interval.as_millis()).unwrap_or(u64::MAX);
        store(peer::INTERVAL_MS, interval);
    }
}

/// An end, encoded as [`peer::END`].
pub(super) fn end_word(end: LinkEnd) -> u64 {
    match end {
        LinkEnd::Rank(rank) => join(rank, peer::RANK),
        LinkEnd::StoreAtRank(rank) => join(rank, peer::STORE_AT_RANK),
        LinkEnd::Store => join(0, peer::STORE),
    }
}

/// Decodes [`peer::END`]; `None` if the kind of end is unknown.
fn end_of(word: u64) -> Option<LinkEnd> {
    let (rank, kind) = halves(word);
    match kind {
        peer::RANK => Some(LinkEnd::Rank(rank)),
        peer::STORE_AT_RANK => Some(LinkEnd::StoreAtRank(rank)),
        peer::STORE => Some(LinkEnd::Store),
        _ => None,
    }
}

/// The connections that a ring holds. Rows that cannot be read are left out.
pub(super) fn read(memory: &impl Read, layout: &RingLayout, anchor: Anchor) -> Vec<PeerLink> {
    let ring = rings::peers(layout);
    let rows = layout.peers.rows.min(peer::MAX_ROWS);
    let links = (0..rows).filter_map(|index| match ring.read(memory, index, TRIES) {
        Found::Record { words, .. } => link_of(&words, anchor),
        Found::Empty | Found::Unreadable { .. } => None,
    });
    links.collect()
}

/// Decodes a row; `None` if the kind of its end is unknown.
fn link_of(words: &[u64; peer::WORDS], anchor: Anchor) -> Option<PeerLink> {
    let end = end_of(words[peer::END])?;
    let facts = PeerFacts::load(words);
    Some(PeerLink {
        end,
        heard_ns: anchor.wall_of(facts.heard.as_ns()),
        sampled_ns: anchor.wall_of(facts.sampled.as_ns()),
        waited_since_ns: anchor.wall_of(facts.waited_since.as_ns()),
        waiting: facts.waiting,
        received: facts.received,
        sent: facts.sent,
        unacknowledged: facts.unacknowledged,
        errno: facts.errno,
        interval_ms: u32::try_from(facts.interval.as_millis()).unwrap_or(u32::MAX),
    })
}

/// A number that stays the same while no row is written.
pub(crate) fn fingerprint(memory: &impl Read, layout: &RingLayout) -> u64 {
    rings::peers(layout).hash_stamps(memory, layout.peers.rows.min(peer::MAX_ROWS), 0)
}

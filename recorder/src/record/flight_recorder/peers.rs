//! Records what the process knows of its connections.

use super::FlightRecorder;
use crate::model::LinkEnd;
use crate::record::layout::{RingLayout, peer};
use crate::record::peers::{PeerFacts, end_word};
use crate::record::ring::{Missed, SlotRing};
use crate::record::rings;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The handle of the record of the connections to one other end. It is valid for the recorder that returned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerHandle(u32);

/// The rows of connections, and the other end of each row.
#[derive(Debug)]
pub(super) struct Peers {
    ring: SlotRing<{ peer::WORDS }>,
    ends: Mutex<Vec<LinkEnd>>,
}

impl Peers {
    pub(super) fn new(layout: &RingLayout) -> Self {
        Self {
            ring: rings::peers(layout),
            ends: Mutex::default(),
        }
    }
}

impl FlightRecorder {
    /// The handle of the connections to this end, whose row is added if there is none; `None` if the table is full or
    /// the row cannot be written. Takes a lock and may allocate: call it once, and keep the handle.
    pub fn peer(&self, end: LinkEnd) -> Option<PeerHandle> {
        let mut ends = self
            .peers
            .ends
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = ends.iter().position(|&known| known == end) {
            return Some(PeerHandle(index as u32));
        }
        if ends.len() >= self.layout.peers.rows {
            return None;
        }
        let handle = PeerHandle(ends.len() as u32);
        let fill = |words: &[AtomicU64; peer::WORDS]| {
            words[peer::END].store(end_word(end), Ordering::Relaxed);
            PeerFacts::default().store(words);
        };
        self.peers
            .ring
            .write(&self.map, self.id_of(handle), fill)
            .ok()?;
        ends.push(end);
        Some(handle)
    }

    /// Changes what is recorded of the connections to an end. Takes no lock and does not allocate; while another thread
    /// writes the same row, the change may be lost, which is counted.
    pub fn update_peer(&self, handle: PeerHandle, change: impl FnOnce(&mut PeerFacts)) {
        let update = |words: &[AtomicU64; peer::WORDS]| {
            let now = std::array::from_fn(|word| words[word].load(Ordering::Relaxed));
            let mut facts = PeerFacts::load(&now);
            change(&mut facts);
            facts.store(words);
        };
        let updated: Result<(), Missed> =
            self.peers
                .ring
                .update(&self.map, self.id_of(handle), update);
        if updated.is_err() {
            self.count(crate::record::layout::header::UPDATES_LOST);
        }
    }

    /// The id of a row is constant: its index plus the number of rows, so that none is 0.
    fn id_of(&self, handle: PeerHandle) -> u64 {
        u64::from(handle.0) + self.peers.ring.slots() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::WaitingOperation;
    use crate::record::{Placement, RecorderConfig, Timestamp};
    use std::time::Duration;

    #[test]
    fn the_facts_of_a_peer_are_read_back() {
        let config = RecorderConfig {
            placement: Placement::Memory,
            ..RecorderConfig::new("job", 0, 3)
        };
        let recorder = FlightRecorder::create(&config).unwrap();
        let peer = recorder.peer(LinkEnd::Rank(2)).unwrap();
        let store = recorder.peer(LinkEnd::StoreAtRank(0)).unwrap();
        assert_eq!(recorder.peer(LinkEnd::Rank(2)), Some(peer));
        let now = recorder.now();
        let waiting = WaitingOperation {
            group: 3,
            seq: 1 << 40,
            is_p2p: true,
        };
        recorder.update_peer(peer, |facts| {
            facts.heard = now;
            facts.sampled = Timestamp::from_ns(now.as_ns() + 5);
            facts.waited_since = now;
            facts.waiting = Some(waiting);
            (facts.received, facts.sent) = (7, 1 << 50);
            (facts.unacknowledged, facts.errno) = (4, 104);
            facts.interval = Duration::from_secs(1);
        });
        recorder.update_peer(store, |facts| facts.errno = 32);
        let [to_peer, to_store] = <[_; 2]>::try_from(recorder.snapshot().peers).unwrap();
        assert_eq!(to_peer.end, LinkEnd::Rank(2));
        assert_eq!(to_peer.silence_ns(), Some(5));
        assert_eq!(to_peer.waiting, Some(waiting));
        assert_eq!((to_peer.received, to_peer.sent), (7, 1 << 50));
        assert_eq!((to_peer.unacknowledged, to_peer.errno), (4, 104));
        assert_eq!(to_peer.interval_ms, 1_000);
        assert_eq!(
            (to_store.end, to_store.errno),
            (LinkEnd::StoreAtRank(0), 32)
        );
        assert_eq!(to_store.waited_since_ns, 0);
    }

    #[test]
    fn ends_beyond_the_table_are_left_out() {
        let config = RecorderConfig {
            placement: Placement::Memory,
            ..RecorderConfig::new("job", 0, 2)
        };
        let recorder = FlightRecorder::create(&config).unwrap();
        assert!((0..2).all(|rank| recorder.peer(LinkEnd::Rank(rank)).is_some()));
        assert_eq!(recorder.peer(LinkEnd::Rank(2)), None);
        assert_eq!(recorder.snapshot().peers.len(), 2);
    }
}

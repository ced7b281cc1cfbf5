//! The transfers in progress on each link.
//!
//! From 2.27 on NCCL reports a transfer as soon as its operation is launched, also while earlier ones of the same link
//! are in progress, and carries them out in their order (`ProxyAppend`, proxy.cc:440 of NCCL 2.30.7). The record of a
//! link is that of its first transfer: in a hang the operations behind the one that hangs are queued.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};

/// The number of transfers of a link whose operations are known: the first one, and those behind it.
const QUEUED: u64 = 8;

/// The transfers on a link of the ring.
#[derive(Debug, Default)]
struct Link {
    /// The number of the link's use in the upper half, and the number of its transfers in progress in the lower half.
    /// Transfers of an earlier use change nothing.
    word: AtomicU64,
    /// The position of the link's first transfer: how often a transfer became the first by the end of another.
    head: AtomicU64,
    /// The records of the operations of the transfers behind the first one, each with the lower bits of the transfer's
    /// position, by position.
    queue: [AtomicU64; QUEUED as usize],
}

/// The links of the ring.
pub(crate) struct Links(Box<[Link]>);

/// What a use adds to a link's word.
const USE: u64 = 1 << 32;

/// The number of bits of a record's id.
const ID_BITS: u32 = 48;
const ID: u64 = (1 << ID_BITS) - 1;

/// A transfer that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    /// The number of the link's use.
    pub(crate) number: u32,
    /// Whether no earlier transfer of the link is in progress.
    pub(crate) is_first: bool,
}

/// What a transfer that has ended leaves on its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// The transfer is not of the link's current use.
    Unchanged,
    /// Nothing is in progress.
    Idle,
    /// The next transfer is the first one now. The record of its operation has this id; 0 = unknown.
    Next(u64),
}

impl Links {
    pub(crate) fn new(links: u32) -> Self {
        let links = links.next_power_of_two();
        Self((0..links).map(|_| Link::default()).collect())
    }

    /// Counts a transfer that begins, for the operation with this record.
    #[inline(always)]
    pub(crate) fn begins(&self, link: usize, record: u64) -> Begun {
        let link = &self.0[link];
        // The exchange is ordered with the reuse of the link's row: see `release_idle`.
        let before = link.word.fetch_add(1, SeqCst);
        let ahead = before % USE;
        if ahead > 0 && ahead < QUEUED {
            let position = link.head.load(Relaxed) + ahead;
            let word = position << ID_BITS | record & ID;
            link.queue[(position % QUEUED) as usize].store(word, Relaxed);
        }
        Begun {
            number: (before >> 32) as u32,
            is_first: ahead == 0,
        }
    }

    /// Counts a transfer of this use as ended: the first one in progress, since transfers end in their order.
    ///
    /// One proxy thread reports the transfers of a link, and a row with a transfer in progress is given to no other
    /// link. So a load and a store suffice, which cost less than an exchange. If an abort releases the link between
    /// them, the store undoes the release, and the transfers behind this one still count.
    #[inline(always)]
    pub(crate) fn ends(&self, link: usize, number: u32) -> Left {
        let Some(link) = self.0.get(link) else {
            return Left::Unchanged;
        };
        let before = link.word.load(SeqCst);
        let under_way = before % USE;
        if before >> 32 != u64::from(number) || under_way == 0 {
            return Left::Unchanged;
        }
        link.word.store(before - 1, Release);
        if under_way == 1 {
            return Left::Idle;
        }
        let position = link.head.load(Relaxed) + 1;
        link.head.store(position, Relaxed);
        let word = link.queue[(position % QUEUED) as usize].load(Relaxed);
        // A transfer that had `QUEUED` or more ahead of it was not noted, so its place holds an earlier position.
        let is_noted = word >> ID_BITS == position & (u64::MAX >> ID_BITS);
        Left::Next(if is_noted { word & ID } else { 0 })
    }

    /// Begins the link's next use, without transfers.
    pub(crate) fn release(&self, link: usize) {
        let next = |word: u64| Some((word - word % USE).wrapping_add(USE));
        let _ = self.0[link].word.fetch_update(SeqCst, SeqCst, next);
    }

    /// Begins the link's next use if no transfer is in progress, and returns whether it did.
    pub(crate) fn release_idle(&self, link: usize) -> bool {
        let next = |word: u64| word.is_multiple_of(USE).then(|| word.wrapping_add(USE));
        let word = &self.0[link].word;
        word.fetch_update(SeqCst, SeqCst, next).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_of_an_earlier_use_change_nothing() {
        let links = Links::new(1);
        let old = links.begins(0, 1);
        assert!(old.is_first && !links.release_idle(0));
        links.release(0);
        let new = links.begins(0, 2);
        assert!(new.is_first);
        assert_eq!(links.ends(0, old.number), Left::Unchanged);
        let next = links.begins(0, 3);
        assert_eq!((next.number, next.is_first), (new.number, false));
        assert_eq!(links.ends(0, new.number), Left::Next(3));
        assert_eq!(links.ends(0, new.number), Left::Idle);
        assert_eq!(links.ends(0, new.number), Left::Unchanged);
        assert!(links.release_idle(0));
        assert_ne!(links.begins(0, 4).number, new.number);
    }

    #[test]
    fn transfers_behind_the_first_one_follow_in_their_order() {
        let links = Links::new(1);
        let number = links.begins(0, 100).number;
        // Twice as many transfers are under way as are known, and then two at a time.
        (101..100 + 2 * QUEUED).for_each(|record| {
            links.begins(0, record);
        });
        for record in 101..100 + 2 * QUEUED {
            let known = if record < 100 + QUEUED { record } else { 0 };
            assert_eq!(links.ends(0, number), Left::Next(known));
        }
        for record in 200..300 {
            links.begins(0, record);
            assert_eq!(links.ends(0, number), Left::Next(record));
        }
        assert_eq!(links.ends(0, number), Left::Idle);
        assert!(links.begins(0, 7).is_first);
        links.begins(0, 8);
        assert_eq!(links.ends(0, number), Left::Next(8));
    }
}

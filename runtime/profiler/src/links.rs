//! The transfers in progress on each link.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// For each link of the ring, the number of its use in the upper half of a word, and the number of its transfers in
/// progress in the lower half. Transfers of an earlier use change nothing.
pub(crate) struct Links(Box<[AtomicU64]>);

const USE: u64 = 1 << 32;

impl Links {
    pub(crate) fn new(links: u32) -> Self {
        let links = links.next_power_of_two();
        Self((0..links).map(|_| AtomicU64::new(0)).collect())
    }

    /// Counts a transfer that begins, and returns the number of the link's use.
    #[inline]
    pub(crate) fn begins(&self, link: usize) -> u32 {
        (self.0[link].fetch_add(1, SeqCst) >> 32) as u32
    }

    /// Counts a transfer of this use as over; true if it was the last one in progress.
    #[inline]
    pub(crate) fn ends(&self, link: usize, number: u32) -> bool {
        let Some(word) = self.0.get(link) else {
            return false;
        };
        let changed = word.fetch_update(SeqCst, SeqCst, |word| {
            (word >> 32 == u64::from(number) && word % USE > 0).then(|| word - 1)
        });
        changed.is_ok_and(|before| before % USE == 1)
    }

    /// Begins the link's next use, without transfers.
    pub(crate) fn release(&self, link: usize) {
        let next = |word: u64| Some((word - word % USE).wrapping_add(USE));
        let _ = self.0[link].fetch_update(SeqCst, SeqCst, next);
    }

    /// Begins the link's next use if no transfer is in progress; tells whether it did.
    pub(crate) fn release_idle(&self, link: usize) -> bool {
        let next = |word: u64| word.is_multiple_of(USE).then(|| word.wrapping_add(USE));
        self.0[link].fetch_update(SeqCst, SeqCst, next).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_of_an_earlier_use_change_nothing() {
        let links = Links::new(1);
        let old = links.begins(0);
        assert!(!links.release_idle(0));
        links.release(0);
        let new = links.begins(0);
        assert!(!links.ends(0, old));
        assert_eq!(links.begins(0), new);
        assert!(!links.ends(0, new));
        assert!(links.ends(0, new));
        assert!(!links.ends(0, new), "no transfer is left");
        assert!(links.release_idle(0));
        assert_ne!(links.begins(0), new);
    }
}

//! The atomic memory of a ring.
//!
//! The ring's protocol is written once, over these traits, so that the code that the model checker checks is the code
//! that runs. A process maps its own ring as standard atomics ([`Map`](super::file::map::Map)), and reads the file of
//! another process's ring ([`View`](super::file::view::View)); under the model checker the words are loom's.

use std::sync::atomic::{self, AtomicU64, Ordering};

/// One 64-bit word that several threads or processes access.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64>;
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
}

/// Memory that can be read and written.
pub(crate) trait Memory {
    type Word: Word;

    /// How often a writer tries to claim a slot, the first try included, before it gives up.
    const TRIES: u32;

    fn words(&self) -> &[Self::Word];
    fn fence(&self, order: Ordering);
}

/// Memory that can be read, possibly during concurrent writes.
pub(crate) trait Read {
    /// The number of words.
    fn len(&self) -> usize;
    /// The word at this index, loaded relaxed; 0 beyond the end, so that no file content can make a
    /// reader fail.
    fn load(&self, index: usize) -> u64;
    /// Orders the loads before it before the loads after it.
    fn fence_acquire(&self);
}

impl<M: Memory> Read for M {
    fn len(&self) -> usize {
        self.words().len()
    }

    fn load(&self, index: usize) -> u64 {
        self.words()
            .get(index)
            .map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn fence_acquire(&self) {
        self.fence(Ordering::Acquire);
    }
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        Self::store(self, value, order);
    }

    #[inline]
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        Self::compare_exchange(self, current, new, success, failure)
    }

    #[inline]
    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        Self::fetch_add(self, value, order)
    }
}

/// [`Memory::TRIES`] in production; all tries together take a few microseconds at most.
pub(crate) const TRIES: u32 = 64;

/// The production fence.
#[inline]
pub(crate) fn fence(order: Ordering) {
    atomic::fence(order);
}

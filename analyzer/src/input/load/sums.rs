//! Limits what all inputs of one load take together, however many files and threads there are.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Files that are larger than this when unpacked, bytes, are read and parsed one at a time.
///
/// A parser may need many times the size of its input. With this limit, all threads together need little more memory
/// than one of them needs for the largest file.
pub(super) const LARGE_FILE: u64 = 32 << 20;

/// The counters of unpacked bytes, and the lock for large files, that the threads of one load share.
pub(super) struct Sums {
    /// Locked while a large file is in memory.
    large: Mutex<()>,
    /// Bytes of all packed inputs that were opened, and what they have been unpacked to.
    packed: AtomicU64,
    unpacked: AtomicU64,
    /// The number of bytes that packed inputs may unpack to whatever their size.
    free: u64,
    /// How many times their size packed inputs may unpack to.
    ratio: u64,
}

impl Sums {
    pub(super) fn new((free, ratio): (u64, u64)) -> Self {
        Self {
            large: Mutex::default(),
            packed: AtomicU64::new(0),
            unpacked: AtomicU64::new(0),
            free,
            ratio,
        }
    }

    /// Blocks until no other large file is in memory. The caller's file counts as in memory until the result is
    /// dropped.
    pub(super) fn admit_large(&self) -> MutexGuard<'_, ()> {
        self.large.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a packed input of this size.
    pub(super) fn open(&self, packed: u64) {
        self.packed.fetch_add(packed, Ordering::Relaxed);
    }

    /// Counts bytes that were unpacked.
    ///
    /// # Errors
    /// If the inputs unpack to more than they may together.
    pub(super) fn unpack(&self, bytes: u64) -> io::Result<()> {
        let unpacked = self.unpacked.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let limit = self.packed.load(Ordering::Relaxed);
        let limit = limit.saturating_mul(self.ratio).max(self.free);
        if unpacked <= limit {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "the packed files unpack to more than {}, and to over {} times their size, together",
            rcomm_verdict::format::bytes(self.free),
            self.ratio,
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_inputs_share_one_allowance_that_grows_with_their_size() {
        let sums = Sums::new((1_000, 200));
        sums.open(4);
        sums.unpack(900).unwrap();
        sums.unpack(100).unwrap();
        let error = sums.unpack(1).unwrap_err().to_string();
        assert!(error.contains("over 200 times their size"), "{error}");
        sums.open(96);
        sums.unpack(10_000).unwrap();
        assert!(sums.unpack(10_000).is_err());
    }
}

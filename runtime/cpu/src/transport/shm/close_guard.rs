//! [`CloseGuard`]: what a rank that leaves a group tells the ranks that share memory with it.

use super::area::{CONTROL, LINE};
use super::mapping::{Mapping, wake};
use rcomm_recorder::model::Rank;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The most awaited ranks that a rank leaves on the exchange area.
pub(super) const MAX_AWAITED: usize = 12;

/// For whom a rank had waited until a time-out when it left a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Awaited {
    /// The rank of the world that had waited: the rank that left, or another whose time-out it had learned of.
    pub(crate) by: Rank,
    /// The awaited ranks of the world. The exchange area holds the first [`MAX_AWAITED`] of them.
    pub(crate) ranks: Vec<Rank>,
    /// Number of all awaited ranks.
    pub(crate) count: usize,
}

/// Announces on an exchange area that this rank leaves the group, even while a thread of the rank waits in a phase.
pub(crate) struct CloseGuard {
    pub(super) control: Mapping,
    pub(super) rank: usize,
    pub(super) ranks: Arc<[Rank]>,
}

impl CloseGuard {
    /// Ends the waits of other ranks for phases that this rank has not published. `awaited` is `None` if this rank does
    /// not leave because of a time-out; all calls that pass something must pass the same.
    pub(crate) fn leave(&self, awaited: Option<&Awaited>) {
        let left = self.left(self.rank, 0);
        if left.load(Ordering::Acquire) == 0
            && let Some(Awaited { by, ranks, count }) = awaited
        {
            self.left(self.rank, 2).store(*by, Ordering::Relaxed);
            for (word, rank) in (3..3 + MAX_AWAITED).zip(ranks) {
                self.left(self.rank, word).store(*rank, Ordering::Relaxed);
            }
            // Another thread may announce meanwhile that the rank has left: the count belongs to the words before it.
            let count = u32::try_from(*count).unwrap_or(u32::MAX);
            self.left(self.rank, 1).store(count, Ordering::Release);
        }
        left.store(1, Ordering::Release);
        for parity in 0..2 {
            wake(self.control.word(self.rank * CONTROL + parity * LINE));
        }
    }

    /// Whether the rank with the index `rank` in the exchange area has announced that it leaves the group.
    #[inline]
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.left(rank, 0).load(Ordering::Acquire) != 0
    }

    /// For whom `rank`, a rank of the world, had waited until a time-out when it left the group; `None` if it has not
    /// left, left for another reason, or is on another host.
    pub(crate) fn awaited_by(&self, rank: Rank) -> Option<Awaited> {
        let index = self.ranks.iter().position(|&member| member == rank)?;
        if !self.has_left(index) {
            return None;
        }
        let count = self.left(index, 1).load(Ordering::Acquire) as usize;
        let word = |word| self.left(index, word).load(Ordering::Relaxed);
        (count > 0).then(|| Awaited {
            by: word(2),
            ranks: (3..3 + count.min(MAX_AWAITED)).map(word).collect(),
            count,
        })
    }

    /// A word of what a rank has announced. Word 0 is 1 once it has left, word 1 holds the number of awaited ranks,
    /// word 2 the rank that waited for them, and the next ones hold the awaited ranks.
    fn left(&self, rank: usize, word: usize) -> &AtomicU32 {
        self.control.word(rank * CONTROL + 3 * LINE + 4 * word)
    }
}

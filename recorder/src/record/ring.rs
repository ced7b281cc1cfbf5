//! Slots of atomic words with a stamp, and a ring of words for data that does not fit in a slot.
//!
//! A slot's first word is its stamp: the id of its record, a revision that grows with every update in place, and a busy
//! bit. A writer claims the slot by one compare-exchange that sets the bit, stores the other words, and publishes the
//! stamp without the bit; where only one thread at a time writes, a plain store claims it. A reader accepts the words
//! only if the stamp was the same and not busy before and after the copy (a seqlock; see H. Boehm, "Can seqlocks get
//! along with programming language memory models?", MSPC 2012). Writers never wait for readers. A writer that finds its
//! slot claimed retries for a few microseconds at most and then gives up; the caller counts that.
//!
//! Data of variable length goes to a [`LapRing`]: a writer reserves words by one addition; a reader
//! checks after copying that no later reservation has lapped its words.
//!
//! A loom model checks the ordering of both (`ring_model`).

use super::sync::{Memory, Read, Word};
use std::sync::atomic::Ordering;

/// The bit of a stamp that marks a slot as being written to.
const BUSY: u64 = 1;
const REVISION_BITS: u32 = 15;
const ID_SHIFT: u32 = REVISION_BITS + 1;

/// The largest record id that a stamp can hold: a million records a second for eight years.
pub(crate) const MAX_ID: u64 = (1 << (64 - ID_SHIFT)) - 1;

const fn stamp_of(id: u64) -> u64 {
    id << ID_SHIFT
}

/// Whether a slot with this stamp is being written to, or its writer died there.
pub(crate) const fn is_busy(stamp: u64) -> bool {
    stamp & BUSY != 0
}

const fn id_of(stamp: u64) -> u64 {
    stamp >> ID_SHIFT
}

/// The same id, the next revision, not busy.
const fn next_revision(stamp: u64) -> u64 {
    let revision = (stamp >> 1).wrapping_add(1) & ((1 << REVISION_BITS) - 1);
    stamp_of(id_of(stamp)) | (revision << 1)
}

/// Why a writer did not write a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missed {
    /// The slot contains the record to write already, or a newer one; or it does not contain the record to update.
    Reused,
    /// Another writer held the slot during all tries.
    Held,
    /// The slot is beyond the memory that may be used.
    Beyond,
}

/// What a reader found in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found<const N: usize> {
    /// Never written.
    Empty,
    /// A complete record; `words[0]` is its stamp.
    Record { id: u64, words: [u64; N] },
    /// Busy or changed at every try, or left incomplete by a process that died while writing.
    Unreadable { id: u64 },
}

/// A ring of `mask + 1` slots (a power of two) of `N` words from word `base` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotRing<const N: usize> {
    base: usize,
    /// The number of slots - 1.
    mask: u64,
}

impl<const N: usize> SlotRing<N> {
    /// `slots` must be a power of two.
    pub(crate) fn new(base: usize, slots: usize) -> Self {
        debug_assert!(slots.is_power_of_two());
        Self {
            base,
            mask: (slots as u64).wrapping_sub(1),
        }
    }

    pub(crate) fn slots(&self) -> usize {
        (self.mask as usize).wrapping_add(1)
    }

    /// The slot of record `id`.
    pub(crate) fn index_of(&self, id: u64) -> usize {
        (id & self.mask) as usize
    }

    /// The word after the slot of record `id`.
    pub(crate) fn end_of(&self, id: u64) -> usize {
        self.base + (self.index_of(id) + 1) * N
    }

    /// The words of the slot of record `id`.
    #[inline]
    fn slot<'m, M: Memory>(&self, memory: &'m M, id: u64) -> Result<&'m [M::Word; N], Missed> {
        let start = self.base + self.index_of(id) * N;
        let words = memory.words().get(start..);
        words
            .and_then(<[M::Word]>::first_chunk)
            .ok_or(Missed::Beyond)
    }

    /// Writes record `id` to its slot: `fill` stores every word but the first.
    #[inline]
    pub(crate) fn write<M: Memory>(
        &self,
        memory: &M,
        id: u64,
        fill: impl FnOnce(&[M::Word; N]),
    ) -> Result<(), Missed> {
        let slot = self.slot(memory, id)?;
        let mut old = slot[0].load(Ordering::Relaxed);
        for _ in 0..M::TRIES {
            if id_of(old) >= id {
                return Err(Missed::Reused);
            }
            if old & BUSY == 0 {
                let claim = stamp_of(id) | BUSY;
                match slot[0].compare_exchange(old, claim, Ordering::Acquire, Ordering::Relaxed) {
                    Ok(_) => {
                        // A reader that sees one of this writer's words must see the claim, which precedes
                        // it.
                        memory.fence(Ordering::Release);
                        fill(slot);
                        slot[0].store(stamp_of(id), Ordering::Release);
                        return Ok(());
                    }
                    Err(now) => {
                        old = now;
                        continue;
                    }
                }
            }
            std::hint::spin_loop();
            old = slot[0].load(Ordering::Relaxed);
        }
        Err(Missed::Held)
    }

    /// Changes words of record `id` in place, if its slot still contains it.
    #[inline]
    pub(crate) fn update<M: Memory>(
        &self,
        memory: &M,
        id: u64,
        change: impl FnOnce(&[M::Word; N]),
    ) -> Result<(), Missed> {
        let slot = self.slot(memory, id)?;
        let mut old = slot[0].load(Ordering::Relaxed);
        for _ in 0..M::TRIES {
            if id_of(old) != id {
                return Err(Missed::Reused);
            }
            if old & BUSY == 0 {
                match slot[0].compare_exchange(
                    old,
                    old | BUSY,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => {
                        memory.fence(Ordering::Release);
                        change(slot);
                        slot[0].store(next_revision(old), Ordering::Release);
                        return Ok(());
                    }
                    Err(now) => {
                        old = now;
                        continue;
                    }
                }
            }
            std::hint::spin_loop();
            old = slot[0].load(Ordering::Relaxed);
        }
        Err(Missed::Held)
    }

    /// Does the same as [`write`](Self::write) for a slot that only one thread at a time writes, without an exchange.
    /// If two threads do, the record may mix their words.
    #[inline(always)]
    pub(crate) fn write_alone<M: Memory>(
        &self,
        memory: &M,
        id: u64,
        fill: impl FnOnce(&[M::Word; N]),
    ) -> Result<(), Missed> {
        let slot = self.slot(memory, id)?;
        let old = slot[0].load(Ordering::Relaxed);
        if id_of(old) >= id {
            return Err(Missed::Reused);
        }
        if old & BUSY != 0 {
            return self.write(memory, id, fill);
        }
        slot[0].store(stamp_of(id) | BUSY, Ordering::Relaxed);
        memory.fence(Ordering::Release);
        fill(slot);
        slot[0].store(stamp_of(id), Ordering::Release);
        Ok(())
    }

    /// Does the same as [`update`](Self::update) for a slot that, in all but rare cases, only one thread at a time
    /// writes, without an exchange. If it sees another writer, it does what [`update`](Self::update) does. If two
    /// threads begin at once, the record may mix their words, and its stamp may be that of one of the two changes.
    #[inline(always)]
    pub(crate) fn update_alone<M: Memory>(
        &self,
        memory: &M,
        id: u64,
        change: impl FnOnce(&[M::Word; N]),
    ) -> Result<(), Missed> {
        let slot = self.slot(memory, id)?;
        let old = slot[0].load(Ordering::Relaxed);
        if id_of(old) != id {
            return Err(Missed::Reused);
        }
        if old & BUSY != 0 {
            return self.update(memory, id, change);
        }
        slot[0].store(old | BUSY, Ordering::Relaxed);
        memory.fence(Ordering::Release);
        change(slot);
        slot[0].store(next_revision(old), Ordering::Release);
        Ok(())
    }

    /// Changes one word of record `id`, if its slot still contains it, as [`update_alone`](Self::update_alone) does. A
    /// reader gets the word from before or after the change, so the slot is not claimed.
    #[inline(always)]
    pub(crate) fn update_word<M: Memory>(
        &self,
        memory: &M,
        id: u64,
        word: usize,
        change: impl FnOnce(u64) -> u64,
    ) -> Result<(), Missed> {
        let slot = self.slot(memory, id)?;
        let old = slot[0].load(Ordering::Relaxed);
        if id_of(old) != id {
            return Err(Missed::Reused);
        }
        let change = |slot: &[M::Word; N]| {
            slot[word].store(
                change(slot[word].load(Ordering::Relaxed)),
                Ordering::Relaxed,
            );
        };
        if old & BUSY != 0 {
            return self.update(memory, id, change);
        }
        change(slot);
        slot[0].store(next_revision(old), Ordering::Release);
        Ok(())
    }

    /// The stamp of the slot at `index`: equal stamps mean an unchanged slot.
    pub(crate) fn stamp(&self, memory: &impl Read, index: usize) -> u64 {
        memory.load(self.base.saturating_add(index.saturating_mul(N)))
    }

    /// Adds the stamps of the first `rows` slots to `hash`, which then changes when any of these slots does.
    pub(crate) fn hash_stamps(&self, memory: &impl Read, rows: usize, hash: u64) -> u64 {
        (0..rows).fold(hash, |hash, index| {
            (hash.rotate_left(5) ^ self.stamp(memory, index)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        })
    }

    /// Copies the slot at `index`, with up to `tries` tries while it changes.
    pub(crate) fn read(&self, memory: &impl Read, index: usize, tries: u32) -> Found<N> {
        let start = self.base.saturating_add(index.saturating_mul(N));
        let mut before = 0;
        for _ in 0..tries.max(1) {
            before = memory.load(start);
            if before == 0 {
                return Found::Empty;
            }
            if before & BUSY == 0 {
                // The slot's words are read after its stamp.
                memory.fence_acquire();
                let mut words = [before; N];
                for (index, word) in words.iter_mut().enumerate().skip(1) {
                    *word = memory.load(start.saturating_add(index));
                }
                // If a word is from a later writer, the second read of the stamp sees that writer's claim.
                memory.fence_acquire();
                if memory.load(start) == before {
                    return Found::Record {
                        id: id_of(before),
                        words,
                    };
                }
            }
            std::hint::spin_loop();
        }
        Found::Unreadable { id: id_of(before) }
    }
}

/// A ring of words in which each record takes as many words as it needs. Positions count from the first word ever
/// reserved and never wrap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LapRing {
    /// The word that counts reservations.
    head: usize,
    /// The index of the ring's first word.
    base: usize,
    /// The number of words, a power of two.
    words: usize,
}

impl LapRing {
    /// `words` must be a power of two.
    pub(crate) fn new(head: usize, base: usize, words: usize) -> Self {
        debug_assert!(words.is_power_of_two());
        Self { head, base, words }
    }

    /// Maximum number of words per record, so that one record cannot evict all others.
    pub(crate) fn limit(&self) -> usize {
        self.words / 8
    }

    /// Stores `len` words, which `fill` pushes in order, and returns their position; `None` if `len` is more than
    /// [`limit`](Self::limit).
    pub(crate) fn write<M: Memory>(
        &self,
        memory: &M,
        len: usize,
        fill: impl FnOnce(&mut dyn FnMut(u64)),
    ) -> Option<u64> {
        if len > self.limit() {
            return None;
        }
        let words = memory.words();
        let position = words[self.head].fetch_add(len as u64, Ordering::Relaxed);
        // A reader that sees one of this writer's words must see the reservation.
        memory.fence(Ordering::Release);
        let mut stored = 0;
        fill(&mut |word| {
            if stored < len {
                words[self.index_of(position, stored)].store(word, Ordering::Relaxed);
                stored += 1;
            }
        });
        Some(position)
    }

    /// Whether these words were reserved, and no later reservation has reached them.
    pub(crate) fn holds(&self, memory: &impl Read, position: u64, len: usize) -> bool {
        let head = memory.load(self.head);
        let end = position.saturating_add(len as u64);
        len <= self.limit() && end <= head && head - position <= self.words as u64
    }

    /// Copies the `len` words at `position`; `None` if they were overwritten or never written.
    ///
    /// A slow writer whose own words were already overwritten may still store words into a later record, so each record
    /// ends with a hash.
    pub(crate) fn read(&self, memory: &impl Read, position: u64, len: usize) -> Option<Vec<u64>> {
        if !self.holds(memory, position, len) {
            return None;
        }
        let words = (0..len)
            .map(|offset| memory.load(self.index_of(position, offset)))
            .collect();
        // If a word is from a later writer, the check below sees that writer's reservation.
        memory.fence_acquire();
        self.holds(memory, position, len).then_some(words)
    }

    /// The index in the memory of the word `offset` after `position`.
    fn index_of(&self, position: u64, offset: usize) -> usize {
        let within = position.wrapping_add(offset as u64) & (self.words as u64).wrapping_sub(1);
        self.base.saturating_add(within as usize)
    }
}

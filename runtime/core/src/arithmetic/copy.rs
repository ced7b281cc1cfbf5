//! Copies through the caches, copies past them, and [`AdaptiveCopy`], which chooses between the two.
//!
//! The C library copies more than a few KiB by one string instruction. The functions here use plain vector loads
//! and stores, whose effect on the caches is known.
//!
//! To write to a cache line that another core has, a core must first take it from that core's caches, and few
//! such requests are under way at once. The table has rates in GB/s that were measured on two processors, for cores
//! that share a last-level cache (near) and cores that do not (far):
//!
//! | | through the caches | past the caches (streaming stores) |
//! |---|---|---|
//! | EPYC of 2024, near | written at 8 to 10, read at 30 | written at 16, read at 15 |
//! | the same, once the line has left the other core's caches | written at 40 | |
//! | EPYC of 2021, near | written at 14 to 35, read at 17 to 33 | written at 10 to 20, read at 11 |
//! | EPYC of 2024, far | written at 2 | written at 28, read at 25 |
//! | EPYC of 2021, far | written at 4 to 7, read at 9 to 13 | written at 18 to 25, read at 10 to 14 |
//!
//! The slots of shared memory are used in turn, as many as memory allows, so that the lines of a slot have left the
//! reader's caches when it is written again. Two ranks that exchange data swap slots instead, and each writes lines
//! that its own core has. The system does not tell which row applies to a pair of cores, and under a hypervisor the row
//! changes when cores are reassigned: [`AdaptiveCopy`] measures both ways.

use super::Level;
use std::time::{Duration, Instant};

/// Below this many bytes the C library's copy is a few vector moves as well.
const LIBRARY_COPY_MAX: usize = 1 << 10;

/// Copies for another core that reads the copy next: through the caches, or for a while past them where measurements
/// show that to be faster.
///
/// The time of a copy through the caches depends on where its lines are. Two ranks that swap slots each write where
/// they have read. After the other rank has streamed such lines and this core has read them, no other core has them: a
/// single copy through the caches is then fast, and does not show how fast such copies would be without streaming. So
/// streaming ends after a fixed number of bytes, and starts over after many slow copies in a row.
#[derive(Debug, Default)]
pub struct AdaptiveCopy {
    /// Pieces copied since the last one that was timed.
    untimed: u32,
    /// Pieces copied through the caches, while that was slow, since the last one that was streamed for comparison.
    untried: u32,
    /// Bytes of consecutive slow pieces. A piece that was not timed counts as slow if the next timed one is slow.
    slow_bytes: usize,
    /// How many more bytes are streamed before the caches are used again.
    bytes_to_stream: usize,
    through_caches: Pace,
    past_caches: Pace,
}

/// How fast copies of one kind were.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    /// The smoothed nanoseconds for a byte.
    per_byte: f32,
    /// Number of copies that were timed, up to [`Pace::MIN_TIMED`].
    timed: u32,
}

impl Pace {
    /// How many copies are timed before the pace is used.
    const MIN_TIMED: u32 = 4;

    /// Whether enough copies were timed.
    fn is_known(self) -> bool {
        self.timed >= Self::MIN_TIMED
    }

    /// Takes the duration of a copy into account. A copy that was interrupted by another thread, or that touched memory
    /// for the first time, took much longer than others; none takes less time than it needs. So a shorter time moves
    /// the pace half of the way at once; a longer one moves it a quarter of the way, and counts as at most twice the
    /// pace.
    fn update(&mut self, len: usize, took: Duration) {
        let sample = took.as_nanos() as f32 / len as f32;
        let so_far = self.per_byte;
        self.per_byte = if self.timed == 0 {
            sample
        } else if sample < so_far {
            f32::midpoint(so_far, sample)
        } else {
            so_far + (sample.min(2.0 * so_far) - so_far) / 4.0
        };
        self.timed = (self.timed + 1).min(Self::MIN_TIMED);
    }
}

impl AdaptiveCopy {
    /// Pieces of at least this many bytes are measured, and streamed while streaming is on.
    const MIN_STREAMED: usize = 16 << 10;
    /// How many pieces are copied untimed between two timed ones, since reading the clock twice has a cost. This number
    /// plus one is prime, and so are the next two plus one: in an operation whose pieces repeat regularly, the timed
    /// piece is then not always the same one.
    const TIMED_INTERVAL: u32 = 6;
    /// How many pieces are copied through the caches, while that is slow, between two that are streamed for comparison.
    const TRIED_INTERVAL: u32 = 60;
    /// Like [`TRIED_INTERVAL`](Self::TRIED_INTERVAL), until enough streamed copies were timed to know their pace.
    const FIRST_TRIED_INTERVAL: u32 = 12;
    /// A copy through the caches that takes longer than this, in nanoseconds for a byte, is slow. Cores that share a
    /// cache copy faster, unless the source has to come from memory.
    const SLOW_NANOS_PER_BYTE: f64 = 0.125;
    /// After this many slow bytes, copies change to streaming if it is faster. Fewer slow bytes may come from a
    /// preempted thread, or from the first round through memory that was not used for a while.
    const SLOW_BYTES_LIMIT: usize = 4 << 20;
    /// Streaming has to be this many times as fast as the caches, since the reader of streamed lines finds them in no
    /// cache.
    const MIN_SPEEDUP: f32 = 1.5;
    /// Streaming stays on for this many bytes. Then the caches are tried again, which costs 2 to 10 % of the time
    /// by the rates above.
    const STREAMED_BYTES: usize = 512 << 20;

    /// Whether a piece of `len` bytes would be streamed.
    #[inline]
    pub fn streams(&self, len: usize) -> bool {
        len >= Self::MIN_STREAMED && self.bytes_to_stream > 0
    }

    /// Copies the piece `from` to `to`.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn copy(&mut self, to: &mut [u8], from: &[u8]) {
        if to.len() < Self::MIN_STREAMED {
            return copy(to, from);
        }
        let is_trial = self.is_trial();
        let streams = is_trial || self.bytes_to_stream > 0;
        self.bytes_to_stream = self.bytes_to_stream.saturating_sub(to.len());
        let copy_piece = match streams {
            true => copy_past_caches,
            false => copy,
        };
        if !is_trial && self.untimed < Self::TIMED_INTERVAL {
            self.untimed += 1;
            return copy_piece(to, from);
        }
        let began = Instant::now();
        copy_piece(to, from);
        self.update(streams, to.len(), began.elapsed());
    }

    /// Counts a piece; returns whether to stream it for comparison.
    #[inline]
    fn is_trial(&mut self) -> bool {
        if self.slow_bytes == 0 || self.bytes_to_stream > 0 {
            return false;
        }
        let interval = match self.past_caches.is_known() {
            true => Self::TRIED_INTERVAL,
            false => Self::FIRST_TRIED_INTERVAL,
        };
        self.untried += 1;
        if self.untried <= interval {
            return false;
        }
        self.untried = 0;
        true
    }

    /// Updates the state with the duration of a copy, past the caches or through them.
    fn update(&mut self, streamed: bool, len: usize, took: Duration) {
        self.untimed = 0;
        if streamed {
            self.past_caches.update(len, took);
        } else {
            self.through_caches.update(len, took);
            if took.as_nanos() as f64 <= len as f64 * Self::SLOW_NANOS_PER_BYTE {
                self.slow_bytes = 0;
            } else {
                // The pieces before this one were not timed; they are assumed to have been as slow.
                self.slow_bytes += len * (Self::TIMED_INTERVAL as usize + 1);
            }
        }
        let (cached, past) = (self.through_caches, self.past_caches);
        if self.slow_bytes >= Self::SLOW_BYTES_LIMIT
            && cached.is_known()
            && past.is_known()
            && cached.per_byte > past.per_byte * Self::MIN_SPEEDUP
        {
            self.slow_bytes = 0;
            self.bytes_to_stream = Self::STREAMED_BYTES;
        }
    }
}

/// Copies `from` to `to` through the caches, for a reader that uses the bytes soon.
///
/// # Panics
/// If the lengths differ.
#[inline]
pub fn copy(to: &mut [u8], from: &[u8]) {
    assert_eq!(
        to.len(),
        from.len(),
        "the copy and the original differ in length"
    );
    if to.len() < LIBRARY_COPY_MAX {
        to.copy_from_slice(from);
    } else {
        // SAFETY: `detect` returns only a level that this processor has.
        unsafe { copy_at(Level::detect(), to, from, Stores::Cached) }
    }
}

/// Copies `from` to `to` past the caches, for a reader that reads only after many more bytes were copied, or for
/// another core where that was measured to be faster ([`AdaptiveCopy`]). On a processor without AVX2, it copies through
/// the caches.
///
/// # Panics
/// If the lengths differ.
pub fn copy_past_caches(to: &mut [u8], from: &[u8]) {
    assert_eq!(
        to.len(),
        from.len(),
        "the copy and the original differ in length"
    );
    // SAFETY: `detect` returns only a level that this processor has.
    unsafe { copy_at(Level::detect(), to, from, Stores::Streaming) }
}

/// Whether stores go to the caches or past them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stores {
    Cached,
    Streaming,
}

/// Copies between slices of the same length, with the instructions of `level`.
///
/// # Safety
/// The processor has `level`.
unsafe fn copy_at(level: Level, to: &mut [u8], from: &[u8], stores: Stores) {
    /// Bytes that one iteration of the loops moves.
    const BLOCK: usize = 256;
    // Streaming stores need aligned addresses.
    let head = to.as_ptr().align_offset(64).min(to.len());
    let (to_head, to) = to.split_at_mut(head);
    let (from_head, from) = from.split_at(head);
    to_head.copy_from_slice(from_head);
    let block_bytes = to.len() - to.len() % BLOCK;
    let (to, to_tail) = to.split_at_mut(block_bytes);
    let (from, from_tail) = from.split_at(block_bytes);
    let (target, source, blocks) = (to.as_mut_ptr(), from.as_ptr(), block_bytes / BLOCK);
    // SAFETY: `target` and `source` each have `blocks` blocks, one in a slice borrowed for writing and one in a slice
    // borrowed for reading, so that they do not overlap. `head` bytes were split off, so the target begins at a
    // multiple of 64, or no block is left. The caller passes only a level that the processor has.
    unsafe {
        match (level, stores) {
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512, Stores::Cached) => avx512::<false>(target, source, blocks),
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512, Stores::Streaming) => avx512::<true>(target, source, blocks),
            #[cfg(target_arch = "x86_64")]
            (Level::Avx2, Stores::Cached) => avx2::<false>(target, source, blocks),
            #[cfg(target_arch = "x86_64")]
            (Level::Avx2, Stores::Streaming) => avx2::<true>(target, source, blocks),
            (Level::Portable, _) => target.copy_from_nonoverlapping(source, block_bytes),
        }
    }
    to_tail.copy_from_slice(from_tail);
}

/// # Safety
/// `blocks` blocks of 256 bytes can be read at `from` and written at `to`; the two ranges do not overlap, and `to`
/// is a multiple of 64.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512<const STREAMING: bool>(to: *mut u8, from: *const u8, blocks: usize) {
    use std::arch::x86_64::*;
    // Four vectors at a time, so that the compiler does not replace the loop by a call of `memcpy`.
    for block in 0..blocks {
        // SAFETY: `block` is less than `blocks`, so 256 bytes at both addresses are among those that the caller
        // guarantees to be readable and writable. Loads need no alignment; stores go to multiples of 64, since `to`
        // begins at such a multiple and 64 divides both steps.
        unsafe {
            let from = from.add(block * 256).cast::<__m512i>();
            let to = to.add(block * 256).cast::<__m512i>();
            let moved = [0, 1, 2, 3].map(|lane| _mm512_loadu_si512(from.add(lane)));
            for (lane, vector) in moved.into_iter().enumerate() {
                if STREAMING {
                    _mm512_stream_si512(to.add(lane), vector);
                } else {
                    _mm512_store_si512(to.add(lane), vector);
                }
            }
        }
    }
    if STREAMING {
        // The fence orders these stores before later ones: a thread that sees a later store also sees these.
        _mm_sfence();
    }
}

/// # Safety
/// See [`avx512`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<const STREAMING: bool>(to: *mut u8, from: *const u8, blocks: usize) {
    use std::arch::x86_64::*;
    for block in 0..blocks {
        // SAFETY: `block` is less than `blocks`, so 256 bytes at both addresses are among those that the
        // caller guarantees to be readable and writable. Loads need no alignment; stores go to multiples of
        // 32, since `to` begins at a multiple of 64 and 32 divides both steps.
        unsafe {
            let from = from.add(block * 256).cast::<__m256i>();
            let to = to.add(block * 256).cast::<__m256i>();
            let moved = [0, 1, 2, 3, 4, 5, 6, 7].map(|lane| _mm256_loadu_si256(from.add(lane)));
            for (lane, vector) in moved.into_iter().enumerate() {
                if STREAMING {
                    _mm256_stream_si256(to.add(lane), vector);
                } else {
                    _mm256_store_si256(to.add(lane), vector);
                }
            }
        }
    }
    if STREAMING {
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The levels that this processor has.
    fn levels() -> Vec<Level> {
        let mut levels = vec![Level::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if std::is_x86_feature_detected!("avx2") {
                levels.push(Level::Avx2);
            }
            if Level::detect() == Level::Avx512 {
                levels.push(Level::Avx512);
            }
        }
        levels
    }

    const PIECE: usize = 64 << 10;

    /// Updates `copier` as if `count` pieces had been copied at this many bytes per nanosecond.
    fn feed(copier: &mut AdaptiveCopy, streamed: bool, rate: f64, count: usize) {
        let took = Duration::from_nanos((PIECE as f64 / rate) as u64);
        for _ in 0..count {
            copier.update(streamed, PIECE, took);
        }
    }

    #[test]
    fn streaming_begins_where_it_is_faster_after_many_slow_bytes_and_ends_after_its_bytes() {
        let mut copier = AdaptiveCopy::default();
        feed(&mut copier, false, 5.5, 20);
        assert!(
            !copier.streams(PIECE),
            "it streams before a streamed copy was timed"
        );
        feed(&mut copier, true, 20.0, 3);
        assert!(
            !copier.streams(PIECE),
            "it streams after too few timed streamed copies"
        );
        feed(&mut copier, true, 20.0, 1);
        assert!(copier.streams(PIECE) && !copier.streams(100));
        assert_eq!(copier.bytes_to_stream, AdaptiveCopy::STREAMED_BYTES);
        copier.bytes_to_stream = 8 * PIECE;
        let (from, mut to) = (vec![7; PIECE], vec![0; PIECE]);
        for _ in 0..8 {
            assert!(copier.streams(PIECE));
            copier.copy(&mut to, &from);
        }
        assert!(!copier.streams(PIECE) && to == from);
    }

    #[test]
    fn few_slow_bytes_between_fast_ones_do_not_begin_streaming() {
        let mut copier = AdaptiveCopy::default();
        feed(&mut copier, true, 20.0, 4);
        for _ in 0..10 {
            feed(&mut copier, false, 5.5, 8);
            feed(&mut copier, false, 15.0, 1);
        }
        assert!(!copier.streams(PIECE));
        feed(&mut copier, false, 5.5, 20);
        assert!(copier.streams(PIECE));
    }

    #[test]
    fn slow_copies_do_not_begin_streaming_that_is_not_faster() {
        let mut copier = AdaptiveCopy::default();
        // The original comes from memory, either way.
        feed(&mut copier, true, 6.0, 4);
        feed(&mut copier, false, 5.5, 100);
        assert!(!copier.streams(PIECE));
        // A copy that another thread interrupted changes nothing.
        feed(&mut copier, false, 0.01, 1);
        feed(&mut copier, false, 5.5, 4);
        assert!(!copier.streams(PIECE));
    }

    #[test]
    fn pieces_are_streamed_for_comparison_only_while_the_caches_are_slow() {
        let trials = |copier: &mut AdaptiveCopy| (0..1000).filter(|_| copier.is_trial()).count();
        let mut copier = AdaptiveCopy::default();
        assert_eq!(trials(&mut copier), 0);
        feed(&mut copier, false, 15.0, 4);
        assert_eq!(trials(&mut copier), 0);
        feed(&mut copier, false, 5.5, 1);
        assert_eq!(trials(&mut copier), 76);
        feed(&mut copier, true, 6.0, 4);
        assert_eq!(trials(&mut copier), 16);
        feed(&mut copier, false, 15.0, 1);
        assert_eq!(trials(&mut copier), 0);
    }

    #[test]
    fn copies_of_any_length_and_alignment_equal_their_originals_and_write_nothing_else() {
        let from: Vec<u8> = (0..5000_u32).map(|index| (index * 7 % 251) as u8).collect();
        for level in levels() {
            for stores in [Stores::Cached, Stores::Streaming] {
                for (start, len) in [(0, 0), (1, 63), (3, 1000), (17, 1024), (0, 4096), (5, 4500)] {
                    let mut to = vec![255; 6000];
                    let source = &from[start..start + len];
                    let target = &mut to[start + 9..start + 9 + len];
                    // SAFETY: `levels` returns only levels that this processor has.
                    unsafe { copy_at(level, target, source, stores) };
                    assert_eq!(
                        &to[start + 9..start + 9 + len],
                        source,
                        "{level:?} {stores:?}"
                    );
                    assert!(to[..start + 9].iter().all(|&byte| byte == 255));
                    assert!(to[start + 9 + len..].iter().all(|&byte| byte == 255));
                }
            }
        }
    }
}

//! Copies that keep to the caches, copies to another core, and copies past the caches.
//!
//! The C library copies more than a few KiB by one string instruction; these are plain vector loads and
//! stores, so that what they do to the caches is known.
//!
//! To write to a line that another core has read last, a core must first take it away from that core,
//! and few such requests are under way at once. On an EPYC 9004 that made 14 GB/s of writing into shared
//! memory, and less than 1 GB/s while the two cores were far apart, where streaming stores, which need no
//! answer, made 80 and 40; the other core then reads from memory at 10 to 16 GB/s in place of 40. For a
//! piece of 64 KiB both together take two thirds of the time, for one of 4 KiB they take longer.

use super::Level;

/// Below this the library's copy is a handful of vector moves too.
const SHORT: usize = 1 << 10;

/// From this length on a piece for another core is streamed.
pub(crate) const HANDED_OVER: usize = 16 << 10;

/// Copies for another core, which reads it next.
///
/// # Panics
/// If the lengths differ.
#[inline]
pub(crate) fn hand_over(to: &mut [u8], from: &[u8]) {
    if to.len() < HANDED_OVER {
        copy(to, from);
    } else {
        copy_past_caches(to, from);
    }
}

/// Copies for this core.
///
/// # Panics
/// If the lengths differ.
#[inline]
pub(crate) fn copy(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy is as long as its original");
    if to.len() < SHORT {
        to.copy_from_slice(from);
    } else {
        copy_at(Level::detect(), to, from, Stores::Cached);
    }
}

/// Copies for somebody who does not read it before many more bytes have passed.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn copy_past_caches(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy is as long as its original");
    copy_at(Level::detect(), to, from, Stores::Streaming);
}

/// Where stores go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stores {
    Cached,
    Streaming,
}

/// Copies with the instructions of `level`, which the processor has.
fn copy_at(level: Level, to: &mut [u8], from: &[u8], stores: Stores) {
    /// What one turn of the loops moves.
    const BLOCK: usize = 256;
    // Streaming stores are to aligned addresses.
    let head = to.as_ptr().align_offset(64).min(to.len());
    let (to_head, to) = to.split_at_mut(head);
    let (from_head, from) = from.split_at(head);
    to_head.copy_from_slice(from_head);
    let whole = to.len() - to.len() % BLOCK;
    let (to, to_tail) = to.split_at_mut(whole);
    let (from, from_tail) = from.split_at(whole);
    let (target, source, blocks) = (to.as_mut_ptr(), from.as_ptr(), whole / BLOCK);
    // SAFETY: both are exclusive or shared slices of `blocks` blocks, the target starts at a multiple of
    // 64, and the caller vouches for the level.
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
            (Level::Portable, _) => target.copy_from_nonoverlapping(source, whole),
        }
    }
    to_tail.copy_from_slice(from_tail);
}

/// # Safety
/// `blocks` blocks of 256 bytes can be read at `from` and written at `to`, which is a multiple of 64;
/// they do not overlap.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512<const STREAMING: bool>(to: *mut u8, from: *const u8, blocks: usize) {
    use std::arch::x86_64::*;
    for block in 0..blocks {
        // SAFETY: inside both ranges, as the caller promised. Four at a time, so that no compiler makes
        // the library's copy of it again.
        unsafe {
            let from = from.add(block * 256).cast::<__m512i>();
            let to = to.add(block * 256).cast::<__m512i>();
            let moved = [0, 1, 2, 3].map(|at| _mm512_loadu_si512(from.add(at)));
            for (at, vector) in moved.into_iter().enumerate() {
                if STREAMING {
                    _mm512_stream_si512(to.add(at), vector);
                } else {
                    _mm512_store_si512(to.add(at), vector);
                }
            }
        }
    }
    if STREAMING {
        // Before anything that is stored later: whoever sees that sees these.
        _mm_sfence();
    }
}

/// # Safety
/// As [`avx512`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<const STREAMING: bool>(to: *mut u8, from: *const u8, blocks: usize) {
    use std::arch::x86_64::*;
    for block in 0..blocks {
        // SAFETY: as above.
        unsafe {
            let from = from.add(block * 256).cast::<__m256i>();
            let to = to.add(block * 256).cast::<__m256i>();
            let moved = [0, 1, 2, 3, 4, 5, 6, 7].map(|at| _mm256_loadu_si256(from.add(at)));
            for (at, vector) in moved.into_iter().enumerate() {
                if STREAMING {
                    _mm256_stream_si256(to.add(at), vector);
                } else {
                    _mm256_store_si256(to.add(at), vector);
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

    #[test]
    fn copies_of_any_length_and_place_are_equal_to_their_originals_and_touch_nothing_else() {
        let from: Vec<u8> = (0..5000_u32).map(|at| (at * 7 % 251) as u8).collect();
        for level in levels() {
            for stores in [Stores::Cached, Stores::Streaming] {
                for (start, len) in [(0, 0), (1, 63), (3, 1000), (17, 1024), (0, 4096), (5, 4500)] {
                    let mut to = vec![255; 6000];
                    let source = &from[start..start + len];
                    copy_at(level, &mut to[start + 9..start + 9 + len], source, stores);
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

//! The layout of a group's area in the segment: lines, slots, and, for the stream between each pair of ranks, two
//! rings, which are byte buffers, one for each direction.

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;

/// `len`, rounded up to a multiple of `to`.
pub(super) fn align(len: usize, to: usize) -> usize {
    len.div_ceil(to) * to
}

/// Bytes from the start of one rank's control words (two lines, `sleepers` with `processor`, `left` with the ranks for
/// which it had waited, and for the first rank the group's outcome) to the next rank's.
pub(super) const CONTROL: usize = 512;
/// Bytes from one line of a rank to the next, and the alignment of slots: two cache lines, since
/// processors fetch cache lines in pairs. Lines are described in the documentation of [`shm`](super).
pub(super) const LINE: usize = 128;

/// Number of data bytes in a line, besides its flag and signature.
pub(crate) const INLINE: usize = 48;
/// The maximum size of a slot in bytes.
pub(crate) const SLOT: usize = 192 << 10;
/// The maximum size of a *round*, the memory in which a rank places its slots one after the other and then from the
/// beginning again: more than a second-level cache of 1 MiB holds. So when a slot's memory is written again, the
/// caches of the ranks that have read it no longer have it. Writing is slow if it has to invalidate those copies.
const MAX_ROUND: usize = 8 * SLOT;
/// Slots up to this size, except those that two ranks swap, use two positions alternately, which are before the
/// round. The first-level caches of the ranks' cores hold them, and a rank fetches them for writing while it waits
/// (`fetch_small`).
pub(super) const SMALL: usize = 8 << 10;
/// Bytes of a small slot that are fetched ahead.
pub(super) const FETCHED: usize = 1 << 10;
/// Bytes of the two positions that each of two ranks has for the slots that they swap (`Traffic::Exchange` in
/// `shm_exchange`).
const SWAPPED: usize = 2 * SLOT;
/// Minimum size of a round, so that a slot never overlaps the previous one.
const MIN_ROUND: usize = 3 * SLOT;
/// Bytes that the rounds of all ranks of a group share. A small group has fewer and a large one more, since a round has
/// at most [`MAX_ROUND`] and at least [`MIN_ROUND`].
const ROUNDS_TOTAL: usize = 24 << 20;

/// Bytes before the data of a ring, for its counts, marks and cells.
pub(super) const RING_HEAD: usize = PAGE;
/// Maximum and minimum number of bytes that a stream holds in each direction. A large ring is faster for the reason
/// given at [`MAX_ROUND`].
const MAX_RING: usize = 1 << 20;
const MIN_RING: usize = 256 << 10;
/// Bytes that the rings of all pairs of a group share, without their heads. A small group has fewer and a large one
/// more, since a ring has at most [`MAX_RING`] and at least [`MIN_RING`].
const RINGS_TOTAL: usize = 128 << 20;

/// Bytes for the slots of one rank.
pub(super) fn slots_len(ranks: usize) -> usize {
    let share = ROUNDS_TOTAL / ranks.max(1) / PAGE * PAGE;
    round_offset(ranks) + share.clamp(MIN_ROUND, MAX_ROUND)
}

/// The offset of the round of slots, after the positions for small slots and for swapped slots.
pub(super) fn round_offset(ranks: usize) -> usize {
    2 * SMALL + if ranks == 2 { SWAPPED } else { 0 }
}

/// Bytes of a group's exchange area: lines and slots.
pub(super) fn shm_exchange_len(ranks: usize) -> usize {
    align(ranks * CONTROL, PAGE) + ranks * slots_len(ranks)
}

/// Number of pairs of this many ranks.
fn pairs(ranks: usize) -> usize {
    ranks * ranks.saturating_sub(1) / 2
}

/// Bytes that a stream of a group of `ranks` ranks holds in each direction.
pub(super) fn ring_len(ranks: usize) -> usize {
    let share = RINGS_TOTAL / (2 * pairs(ranks).max(1)) / PAGE * PAGE;
    share.clamp(MIN_RING, MAX_RING)
}

/// Bytes of the two rings of a pair.
pub(super) fn rings_len(ranks: usize) -> usize {
    2 * (RING_HEAD + ring_len(ranks))
}

/// Bytes of the area of a group of `ranks` ranks: its exchange area, and the rings of each pair.
pub(super) fn area_len(ranks: usize) -> usize {
    shm_exchange_len(ranks) + pairs(ranks) * rings_len(ranks)
}

/// The index of a pair of ranks, from 0.
pub(super) fn pair_of(one: usize, other: usize) -> usize {
    let (low, high) = (one.min(other), one.max(other));
    high * high.saturating_sub(1) / 2 + low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_has_an_index_of_its_own() {
        for size in [2, 3, 8] {
            let mut indices: Vec<usize> = (0..size)
                .flat_map(|high| (0..high).map(move |low| pair_of(low, high)))
                .collect();
            indices.sort_unstable();
            assert_eq!(indices, (0..pairs(size)).collect::<Vec<_>>());
        }
        assert_eq!(pair_of(2, 5), pair_of(5, 2));
    }
}

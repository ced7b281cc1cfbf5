//! How the area of a group is laid out in the segment: lines, slots, and the rings of each pair.

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;

/// `len`, rounded up to a multiple of `to`.
pub(super) fn align(len: usize, to: usize) -> usize {
    len.div_ceil(to) * to
}

/// Bytes between the control words of two ranks.
pub(super) const CONTROL: usize = 512;
/// Bytes between a rank's two lines; two cache lines, since they are fetched in pairs.
pub(super) const LINE: usize = 128;

/// Bytes that a line carries besides its flag and signature.
pub(crate) const INLINE: usize = 48;
/// Most bytes of one slot.
pub(crate) const SLOT: usize = 192 << 10;
/// Bytes that a rank puts its slots into, one behind the other, where memory allows: more than a
/// second-level cache of 1 MiB holds. What the others have read is then no longer in *their* caches when
/// it is written again, so writing it does not have to invalidate their copies, which is what makes
/// writing slow.
const SLOTS_ROUND: usize = 8 * SLOT;
/// Slots up to this size are two places used in turn, before the others: both cores' first-level caches
/// hold them, and they are fetched for writing while the rank waits (`fetch_small`).
pub(super) const SMALL: usize = 8 << 10;
/// Bytes of them that are fetched ahead.
pub(super) const FETCHED: usize = 1 << 10;
/// Bytes of the two places that a pair exchanges its slots in ([`Traffic::Exchange`]).
const EXCHANGED: usize = 2 * SLOT;
/// Fewest bytes of a round: a slot never overlaps the one before it.
const SLOTS_LEAST: usize = 3 * SLOT;
/// Bytes for the slots of all ranks of a group, as long as each has the least.
const SLOTS_ALL: usize = 24 << 20;

/// Bytes before those of a ring, for its counts.
pub(super) const RING_HEAD: usize = PAGE;
/// Most and fewest bytes that a stream holds in each direction: a long round for the reason given at
/// [`SLOTS_ROUND`].
const RING_MOST: usize = 1 << 20;
const RING_LEAST: usize = 256 << 10;
/// Bytes for the rings of all pairs of a group, as long as each has the least.
const RINGS_ALL: usize = 128 << 20;

/// Bytes for the slots of one rank.
pub(super) fn slots_len(ranks: usize) -> usize {
    let share = SLOTS_ALL / ranks.max(1) / PAGE * PAGE;
    round_at(ranks) + share.clamp(SLOTS_LEAST, SLOTS_ROUND)
}

/// Where the round of slots begins, behind the places for small ones and for exchanged ones.
pub(super) fn round_at(ranks: usize) -> usize {
    2 * SMALL + if ranks == 2 { EXCHANGED } else { 0 }
}

/// Bytes of a group's exchange area: lines and slots.
pub(super) fn shm_exchange_len(ranks: usize) -> usize {
    align(ranks * CONTROL, PAGE) + ranks * slots_len(ranks)
}

/// How many pairs this many ranks form.
fn pairs(ranks: usize) -> usize {
    ranks * ranks.saturating_sub(1) / 2
}

/// Bytes that a stream of such a group holds in each direction.
pub(super) fn ring_len(ranks: usize) -> usize {
    let share = RINGS_ALL / (2 * pairs(ranks).max(1)) / PAGE * PAGE;
    share.clamp(RING_LEAST, RING_MOST)
}

/// Bytes of the two rings of a pair.
pub(super) fn rings_len(ranks: usize) -> usize {
    2 * (RING_HEAD + ring_len(ranks))
}

/// Bytes of the area of a group of so many ranks: its exchange area, and the rings of each pair.
pub(super) fn area_len(ranks: usize) -> usize {
    shm_exchange_len(ranks) + pairs(ranks) * rings_len(ranks)
}

/// Which pair two ranks are, counted from 0.
pub(super) fn pair_of(one: usize, other: usize) -> usize {
    let (low, high) = (one.min(other), one.max(other));
    high * high.saturating_sub(1) / 2 + low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_has_rings_of_its_own() {
        for size in [2, 3, 8] {
            let mut all: Vec<usize> = (0..size)
                .flat_map(|high| (0..high).map(move |low| pair_of(low, high)))
                .collect();
            all.sort_unstable();
            assert_eq!(all, (0..pairs(size)).collect::<Vec<_>>());
        }
        assert_eq!(pair_of(2, 5), pair_of(5, 2));
    }
}

//! How the bytes of an operation are divided among ranks.

use std::ops::Range;

/// Returns the range of `rank`'s part of `len` bytes, in whole elements of `element` bytes. The parts of all
/// `size` ranks differ by at most one element.
pub(crate) fn part_of(rank: usize, size: usize, len: usize, element: usize) -> Range<usize> {
    // The product with a rank may exceed 64 bits.
    let count = (len / element) as u128;
    let edge = |rank: usize| (count * rank as u128 / size as u128) as usize * element;
    edge(rank)..edge(rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_elements_once_and_split_none() {
        for (size, count) in [(1, 5), (3, 7), (4, 0), (8, 3), (5, 1 << 20)] {
            let mut end = 0;
            for rank in 0..size {
                let part = part_of(rank, size, count * 4, 4);
                assert_eq!(part.start, end);
                assert_eq!(part.len() % 4, 0);
                end = part.end;
            }
            assert_eq!(end, count * 4);
        }
    }
}

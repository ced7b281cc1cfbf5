//! The terms on which ranks access each other's bytes, and how the ranks agree on them.

use crate::collective::part_of;
use crate::transport::shm::INLINE;
use crate::wait::Failure;
use rcomm_core::Access;
use std::ops::Range;

/// What ranks may do while they access each other's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// All ranks only read.
    Read,
    /// Each rank alone accesses its [share](share_of) of all ranks' bytes.
    Share,
}

/// Returns the range, of `len` bytes, that `rank` works on for all ranks: whole cache lines, and so whole
/// elements.
pub(super) fn share_of(rank: usize, size: usize, len: usize) -> Range<usize> {
    const LINE: usize = 64;
    let lines = part_of(rank, size, len.next_multiple_of(LINE), LINE);
    lines.start.min(len)..lines.end.min(len)
}

/// Bytes of a rank that the terms name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// Number of bytes.
    pub(crate) len: usize,
    /// The access to these bytes that the rule grants.
    pub(crate) access: Access,
}

/// Which ranks' bytes are used, and how. All ranks derive the same terms from the headers on which they agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AccessTerms {
    /// The bytes of each rank; `None` for a rank whose bytes no other rank needs.
    pub(crate) needs: Vec<Option<Need>>,
    /// The rule for the access.
    pub(crate) rule: Rule,
}

/// A way for all ranks to exchange a few bytes with each other, in one *phase* after another.
pub(crate) trait Phases {
    /// Shows these bytes, at most [`INLINE`], to all other ranks, and waits until all ranks have shown theirs.
    fn show(&mut self, bytes: &[u8]) -> Result<(), Failure>;

    /// Returns the bytes that `rank` has shown in the last phase, followed by unspecified bytes.
    fn shown(&self, rank: usize) -> &[u8; INLINE];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_bytes_once_and_split_no_element() {
        for len in [0, 16, 64, 80, 4096, 4112, 1 << 20] {
            for size in [1, 2, 3, 7, 40] {
                let mut end = 0;
                for rank in 0..size {
                    let share = share_of(rank, size, len);
                    assert_eq!(share.start, end);
                    assert_eq!((share.start % 16, share.len() % 16), (0, 0));
                    end = share.end;
                }
                assert_eq!(end, len);
            }
        }
    }
}

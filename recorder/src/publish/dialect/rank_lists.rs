//! The members of groups, as text and as numbers.

use super::value;
use hashbrown::HashMap;
use std::sync::Arc;

/// Lists of ranks that were read before, by their text.
///
/// Every rank of a job writes the members of its groups, so the files of n ranks hold the list of all ranks n times. A
/// list is converted once and shared by all dumps of one reader.
#[derive(Default)]
pub(super) struct RankLists {
    known: HashMap<Box<[u8]>, Arc<[u32]>>,
    /// Bytes of all texts in `known`.
    kept_bytes: usize,
}

/// Maximum length of all texts that are kept, in bytes.
const KEPT_BYTES: usize = 8 << 20;

impl RankLists {
    /// The ranks in a text such as `[0, 1, 2]`; see [`value::ranks`].
    pub(super) fn parse(&mut self, text: &[u8]) -> Arc<[u32]> {
        if let Some(ranks) = self.known.get(text) {
            return ranks.clone();
        }
        let ranks: Arc<[u32]> = value::ranks(text).into();
        if self.kept_bytes + text.len() > KEPT_BYTES {
            self.known.clear();
            self.kept_bytes = 0;
        }
        if text.len() <= KEPT_BYTES {
            self.kept_bytes += text.len();
            self.known.insert(text.into(), ranks.clone());
        }
        ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_share_one_list() {
        let mut lists = RankLists::default();
        let list = lists.parse(b"[0, 1, 2]");
        assert_eq!(*list, [0, 1, 2]);
        assert!(Arc::ptr_eq(&list, &lists.parse(b"[0, 1, 2]")));
        assert_eq!(*lists.parse(b"[0, 1, 3]"), [0, 1, 3]);
    }

    #[test]
    fn the_kept_texts_are_bounded() {
        let mut lists = RankLists::default();
        let long = |digit: u8| vec![digit; KEPT_BYTES / 2 - 1];
        for digit in b'0'..=b'9' {
            lists.parse(&long(digit));
            lists.parse(&[digit]);
            let total: usize = lists.known.keys().map(|text| text.len()).sum();
            assert_eq!(lists.kept_bytes, total);
            assert!(lists.kept_bytes <= KEPT_BYTES);
        }
        lists.parse(&vec![b' '; KEPT_BYTES + 1]);
        assert!(lists.kept_bytes <= KEPT_BYTES);
    }
}

//! Tables that hold each repeated value once.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::{BuildHasher, Hash};

/// Distinct runs of values, numbered from 0 in the order of their first appearance.
///
/// All runs lie in one vector; looking one up allocates nothing.
pub(super) struct Interner<T> {
    values: Vec<T>,
    /// The end of each run. A run begins at the end of the previous one.
    ends: Vec<usize>,
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl<T> Default for Interner<T> {
    fn default() -> Self {
        Self {
            values: Vec::new(),
            ends: Vec::new(),
            table: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
        }
    }
}

/// The values of the run with this number.
fn run<'a, T>(values: &'a [T], ends: &[usize], id: u32) -> &'a [T] {
    let id = id as usize;
    let start = id.checked_sub(1).map_or(0, |before| ends[before]);
    &values[start..ends[id]]
}

impl<T: Copy + Eq + Hash> Interner<T> {
    /// The number of this run, and whether it is new.
    pub(super) fn intern(&mut self, wanted: &[T]) -> (u32, bool) {
        let hash = self.hasher.hash_one(wanted);
        let found = self
            .table
            .find(hash, |&id| run(&self.values, &self.ends, id) == wanted);
        if let Some(&id) = found {
            return (id, false);
        }
        let id = self.ends.len() as u32;
        self.values.extend_from_slice(wanted);
        self.ends.push(self.values.len());
        let (values, ends, hasher) = (&self.values, &self.ends, &self.hasher);
        self.table
            .insert_unique(hash, id, |&id| hasher.hash_one(run(values, ends, id)));
        (id, true)
    }

    /// The number of this run, if it has one.
    fn find(&self, wanted: &[T]) -> Option<u32> {
        let hash = self.hasher.hash_one(wanted);
        let same = |&id: &u32| run(&self.values, &self.ends, id) == wanted;
        self.table.find(hash, same).copied()
    }

    /// The run with this number, which must come from [`Interner::intern`].
    pub(super) fn get(&self, id: u32) -> &[T] {
        run(&self.values, &self.ends, id)
    }
}

/// Number of slots of the cache in a [`Recurring`].
const RECENT: usize = 256;
/// Value of a slot that holds no run.
const NO_RUN: u32 = u32::MAX;

/// An [`Interner`] for runs that in most cases repeat recent ones, as a program's operations do. A
/// direct-mapped cache in front of the table saves the hash, which costs more than the rest of a look-up.
pub(super) struct Recurring<T> {
    runs: Interner<T>,
    recent: [u32; RECENT],
}

impl<T> Default for Recurring<T> {
    fn default() -> Self {
        Self {
            runs: Interner::default(),
            recent: [NO_RUN; RECENT],
        }
    }
}

impl<T: Copy + Eq + Hash + Into<u64>> Recurring<T> {
    /// The number of this run, and whether it is new.
    pub(super) fn intern(&mut self, wanted: &[T]) -> (u32, bool) {
        // Odd factors, one for each position, so that the products do not depend on each other.
        let mut factor: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut sum: u64 = 0;
        for &value in wanted {
            sum = sum.wrapping_add(value.into().wrapping_mul(factor));
            factor = factor.wrapping_add(0x5851_f42d_4c95_7f2e);
        }
        let slot = (sum >> 56) as usize % RECENT;
        let id = self.recent[slot];
        if id != NO_RUN && self.runs.get(id) == wanted {
            return (id, false);
        }
        let (id, is_new) = self.runs.intern(wanted);
        self.recent[slot] = id;
        (id, is_new)
    }
}

/// A string's number in a [`Texts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Text(pub(super) u32);

/// Distinct strings.
#[derive(Default)]
pub(super) struct Texts(Interner<u8>);

impl Texts {
    /// The number of this string, which is added if it is new.
    pub(super) fn intern(&mut self, text: &str) -> Text {
        Text(self.0.intern(text.as_bytes()).0)
    }

    /// Interns bytes that should be UTF-8; invalid sequences are replaced by U+FFFD.
    pub(super) fn intern_bytes(&mut self, bytes: &[u8]) -> Text {
        match self.0.find(bytes) {
            Some(known) => Text(known),
            None => self.intern(&String::from_utf8_lossy(bytes)),
        }
    }

    /// The string with this number.
    pub(super) fn get(&self, text: Text) -> &str {
        // Only whole strings are interned.
        std::str::from_utf8(self.0.get(text.0)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_runs_get_the_same_number() {
        let mut runs = Interner::default();
        assert_eq!(runs.intern(&[1_u64, 2]), (0, true));
        assert_eq!(runs.intern(&[]), (1, true));
        assert_eq!(runs.intern(&[1, 2]), (0, false));
        assert_eq!(runs.intern(&[]), (1, false));
        for value in 0..10_000 {
            assert_eq!(runs.intern(&[value, 7]), (2 + value as u32, true));
        }
        for value in 0..10_000 {
            assert_eq!(runs.intern(&[value, 7]), (2 + value as u32, false));
        }
        assert_eq!(runs.get(0), [1, 2]);
        assert!(runs.get(1).is_empty());
    }

    #[test]
    fn runs_that_share_a_cache_slot_are_distinguished() {
        let mut runs = Recurring::default();
        for _ in 0..2 {
            for value in 0..1000_u64 {
                let (id, _) = runs.intern(&[value, 7]);
                assert_eq!(id, value as u32);
            }
        }
        assert_eq!(runs.intern(&[7, 0]), (1000, true));
        assert_eq!(runs.intern(&[]), (1001, true));
        assert_eq!(runs.intern(&[0]), (1002, true));
        assert_eq!(runs.intern(&[]), (1001, false));
    }

    #[test]
    fn invalid_utf8_is_replaced() {
        let mut texts = Texts::default();
        let text = texts.intern_bytes(b"a\xffb");
        assert_eq!(texts.get(text), "a\u{fffd}b");
    }
}

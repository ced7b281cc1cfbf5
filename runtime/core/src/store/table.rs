//! The contents of a store in memory, and the effect of each operation.
//!
//! The in-process store, the file store's view of its file, and the TCP server all use these rules.
//! Nothing here waits, wakes a waiter or does I/O. Keys and values are bytes without an encoding.

use std::collections::{HashMap, VecDeque};

/// Why an addition to a counter failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddError {
    /// The key holds something that is not a decimal number.
    NotANumber,
    /// The sum does not fit in 64 bits.
    Overflow,
}

impl std::fmt::Display for AddError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            AddError::NotANumber => "it holds something that is not a decimal number",
            AddError::Overflow => "the sum does not fit in 64 bits",
        })
    }
}

/// How a key's value compares with the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compared {
    /// The value is the expected one; or the key is absent and no value was expected.
    Equal,
    /// The key has another value.
    Differs,
    /// The key is absent although a value was expected.
    Absent,
}

/// The counter that `held` contains as decimal text, plus `delta`.
pub(crate) fn sum(held: Option<&[u8]>, delta: i64) -> Result<i64, AddError> {
    let count: i64 = match held {
        None => 0,
        Some(text) => std::str::from_utf8(text)
            .ok()
            .and_then(|text| text.trim_ascii().parse().ok())
            .ok_or(AddError::NotANumber)?,
    };
    count.checked_add(delta).ok_or(AddError::Overflow)
}

/// The overhead, in bytes, that is counted for each key, each queue and each value of a queue.
pub(crate) const ENTRY_OVERHEAD: usize = 64;

/// Keys with their values, and queues with theirs.
#[derive(Default)]
pub(crate) struct Table {
    values: HashMap<Box<[u8]>, Vec<u8>>,
    queues: HashMap<Box<[u8]>, VecDeque<Vec<u8>>>,
    /// The value of [`Table::bytes`], kept up to date by every change.
    bytes: usize,
}

impl Table {
    /// The memory that is counted for all keys and values: their bytes, and [`ENTRY_OVERHEAD`] for each key, each
    /// queue and each value of a queue.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many names there are, of values and of queues.
    pub(crate) fn names(&self) -> usize {
        self.values.len() + self.queues.len()
    }

    pub(crate) fn set(&mut self, key: &[u8], value: &[u8]) {
        self.bytes += value.len();
        match self.values.get_mut(key) {
            // A value set over and over, such as a heartbeat, keeps its allocation, unless the allocation is over 64
            // bytes and more than half of it would be unused.
            Some(held) if held.capacity() / 2 <= value.len().max(32) => {
                self.bytes -= held.len();
                held.clear();
                held.extend_from_slice(value);
            }
            Some(held) => {
                self.bytes -= held.len();
                *held = value.to_vec();
            }
            None => {
                self.bytes += key.len() + ENTRY_OVERHEAD;
                self.values.insert(key.into(), value.to_vec());
            }
        }
    }

    pub(crate) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    pub(crate) fn add(&mut self, key: &[u8], delta: i64) -> Result<i64, AddError> {
        let count = sum(self.get(key), delta)?;
        self.set(key, itoa::Buffer::new().format(count).as_bytes());
        Ok(count)
    }

    /// Compares the value of `key` with `expected`.
    pub(crate) fn compare(&self, key: &[u8], expected: &[u8]) -> Compared {
        match self.get(key) {
            None if expected.is_empty() => Compared::Equal,
            None => Compared::Absent,
            Some(held) if held == expected => Compared::Equal,
            Some(_) => Compared::Differs,
        }
    }

    /// Compares, stores if equal, and returns the reply to a compare-and-set.
    pub(crate) fn compare_set<'a>(
        &'a mut self,
        key: &[u8],
        expected: &'a [u8],
        desired: &'a [u8],
    ) -> &'a [u8] {
        match self.compare(key, expected) {
            Compared::Equal => {
                self.set(key, desired);
                desired
            }
            Compared::Differs => self.get(key).unwrap_or_default(),
            Compared::Absent => expected,
        }
    }

    pub(crate) fn append(&mut self, key: &[u8], value: &[u8]) {
        match self.values.get_mut(key) {
            Some(held) => {
                self.bytes += value.len();
                held.extend_from_slice(value);
            }
            None => self.set(key, value),
        }
    }

    pub(crate) fn delete(&mut self, key: &[u8]) -> bool {
        let removed = self.values.remove(key);
        if let Some(value) = &removed {
            self.bytes -= key.len() + ENTRY_OVERHEAD + value.len();
        }
        removed.is_some()
    }

    /// Whether a wait for `key` would end now: whether it is a key, or a queue that is not empty.
    pub(crate) fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    pub(crate) fn keys(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.values.keys().map(|key| &**key)
    }

    pub(crate) fn queue_push(&mut self, key: &[u8], value: &[u8]) {
        self.bytes += ENTRY_OVERHEAD + value.len();
        match self.queues.get_mut(key) {
            Some(queue) => queue.push_back(value.to_vec()),
            None => {
                self.bytes += key.len() + ENTRY_OVERHEAD;
                let queue = VecDeque::from([value.to_vec()]);
                self.queues.insert(key.into(), queue);
            }
        }
    }

    pub(crate) fn queue_pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        self.bytes -= value
            .as_ref()
            .map_or(0, |value| ENTRY_OVERHEAD + value.len());
        // Empty queues are removed, since `has` checks only whether the name exists.
        if queue.is_empty() {
            self.queues.remove(key);
            self.bytes -= key.len() + ENTRY_OVERHEAD;
        }
        value
    }

    pub(crate) fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_stored_as_decimal_text() {
        let mut table = Table::default();
        assert_eq!(table.add(b"n", -2), Ok(-2));
        assert_eq!(table.get(b"n"), Some(&b"-2"[..]));
        table.set(b"n", b"41");
        assert_eq!(table.add(b"n", 1), Ok(42));
        table.set(b"n", b"forty");
        assert_eq!(table.add(b"n", 1), Err(AddError::NotANumber));
        table.set(b"n", i64::MAX.to_string().as_bytes());
        assert_eq!(table.add(b"n", 1), Err(AddError::Overflow));
        assert_eq!(table.get(b"n"), Some(i64::MAX.to_string().as_bytes()));
    }

    #[test]
    fn a_queue_is_removed_when_it_becomes_empty() {
        let mut table = Table::default();
        table.queue_push(b"q", b"one");
        table.queue_push(b"q", b"two");
        assert!(table.has(b"q"));
        assert_eq!(table.queue_pop(b"q"), Some(b"one".to_vec()));
        assert_eq!(table.queue_pop(b"q"), Some(b"two".to_vec()));
        assert!(!table.has(b"q"));
        assert_eq!(table.queue_pop(b"q"), None);
    }

    #[test]
    fn a_short_value_that_replaces_a_long_one_frees_its_memory() {
        let mut table = Table::default();
        table.set(b"k", &vec![7; 1 << 20]);
        table.set(b"k", b"x");
        assert_eq!(table.get(b"k"), Some(&b"x"[..]));
        assert!(table.values[&b"k"[..]].capacity() < 1024);
    }

    #[test]
    fn bytes_counts_keys_values_and_queues_and_is_0_once_all_are_removed() {
        let mut table = Table::default();
        table.set(b"key", b"value");
        assert_eq!(table.bytes(), 8 + ENTRY_OVERHEAD);
        table.set(b"key", &[7; 1000]);
        table.set(b"key", b"x");
        table.append(b"key", b"yz");
        assert_eq!(table.bytes(), 6 + ENTRY_OVERHEAD);
        table.queue_push(b"q", b"one");
        table.queue_push(b"q", b"two");
        assert_eq!(
            table.bytes(),
            6 + ENTRY_OVERHEAD + 1 + 6 + 3 * ENTRY_OVERHEAD
        );
        assert_eq!(table.names(), 2);
        table.queue_pop(b"q");
        table.queue_pop(b"q");
        assert_eq!(table.compare_set(b"key", b"xyz", b""), b"");
        assert!(table.delete(b"key") && !table.delete(b"key"));
        assert_eq!((table.bytes(), table.names()), (0, 0));
    }
}

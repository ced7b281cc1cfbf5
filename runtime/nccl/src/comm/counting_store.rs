//! A store for tests, which counts the keys that are read, and can end.

use rcomm_core::store::{HashStore, Store};
use rcomm_core::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A store that counts the keys of all calls that read keys or wait for them.
#[derive(Default)]
pub(crate) struct CountingStore {
    store: HashStore,
    keys: AtomicU64,
    /// The number of keys after which reads fail.
    limit: Option<u64>,
}

impl CountingStore {
    /// Makes a store that ends when this many keys have been read.
    pub(crate) fn ending_after(keys: u64) -> Self {
        Self {
            limit: Some(keys),
            ..Self::default()
        }
    }

    /// The number of keys that were read so far.
    pub(crate) fn keys(&self) -> u64 {
        self.keys.load(Ordering::Relaxed)
    }

    fn note(&self, keys: usize) -> Result<&HashStore> {
        let keys = keys as u64;
        let read = keys + self.keys.fetch_add(keys, Ordering::Relaxed);
        match self.limit.is_some_and(|limit| read > limit) {
            true => Err(Error::new(ErrorKind::Store, "the store has ended")),
            false => Ok(&self.store),
        }
    }
}

impl Store for CountingStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.note(1)?.get(key, timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.note(1)?.add(key, delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.note(1)?.compare_set(key, expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.note(keys.len())?.wait(keys, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.note(keys.len())?.check(keys)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.store.delete(key)
    }

    fn num_keys(&self) -> Result<u64> {
        self.store.num_keys()
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.store.list_keys()
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.append(key, value)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.store.multi_set(pairs)
    }

    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()> {
        self.note(1)?.barrier(key, world_size, timeout)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.note(keys.len())?.multi_get(keys, timeout)
    }
}

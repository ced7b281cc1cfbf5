//! A store whose waits are counted.

use crate::op::error::Result;
use crate::store::{BatchReply, BatchRequest, Store};
use crate::watch::wait_counters::{RuntimeWait, WaitCounters};
use std::sync::Arc;
use std::time::Duration;

/// Counts the calls of a [`Store`] that may wait for other ranks.
pub(super) struct CountedStore {
    store: Arc<dyn Store>,
    waits: Arc<WaitCounters>,
}

impl CountedStore {
    pub(super) fn new(store: Arc<dyn Store>, waits: Arc<WaitCounters>) -> Self {
        Self { store, waits }
    }
}

impl Store for CountedStore {
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let _waiting = self.waits.begin(RuntimeWait::Store);
        self.store.get(key, timeout)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let _waiting = self.waits.begin(RuntimeWait::Store);
        self.store.wait(keys, timeout)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let _waiting = self.waits.begin(RuntimeWait::Store);
        self.store.multi_get(keys, timeout)
    }

    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()> {
        let _waiting = self.waits.begin(RuntimeWait::Store);
        self.store.barrier(key, world_size, timeout)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, value)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.store.add(key, delta)
    }

    fn add_within(&self, key: &str, delta: i64, timeout: Duration) -> Result<i64> {
        self.store.add_within(key, delta, timeout)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(key, expected, desired)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.store.check(keys)
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

    fn batch(&self, requests: &[BatchRequest<'_>]) -> Result<Vec<BatchReply>> {
        self.store.batch(requests)
    }

    fn server(&self) -> Option<String> {
        self.store.server()
    }

    fn obeys_limits(&self) -> bool {
        self.store.obeys_limits()
    }
}

//! A part of a store, under a prefix.

use super::{BatchReply, BatchRequest, QueueStore, Store};
use crate::op::error::Result;
use std::sync::Arc;
use std::time::Duration;

/// A [`Store`] whose key `k` is the key `prefix/k` of the underlying store, as PyTorch's `PrefixStore`
/// spells it.
///
/// `num_keys` and `list_keys` cover only the keys under the prefix; `list_keys` names them without the prefix.
/// Time-out errors name the full key.
pub struct PrefixStore<S: ?Sized> {
    prefix: String,
    store: Arc<S>,
}

impl<S: Store + ?Sized> PrefixStore<S> {
    /// The part of `store` under `prefix`.
    pub fn new(prefix: impl Into<String>, store: Arc<S>) -> Self {
        let mut prefix = prefix.into();
        prefix.push('/');
        Self { prefix, store }
    }

    /// The underlying store.
    pub fn inner(&self) -> &Arc<S> {
        &self.store
    }

    /// The name of `key` in the underlying store.
    pub(crate) fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn names(&self, keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| self.name(key)).collect()
    }
}

fn borrowed(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

impl<S: Store + ?Sized> Store for PrefixStore<S> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.name(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.store.get(&self.name(key), timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.store.add(&self.name(key), delta)
    }

    fn add_within(&self, key: &str, delta: i64, timeout: Duration) -> Result<i64> {
        self.store.add_within(&self.name(key), delta, timeout)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(&self.name(key), expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.store.wait(&borrowed(&self.names(keys)), timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.store.check(&borrowed(&self.names(keys)))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.store.delete(&self.name(key))
    }

    fn num_keys(&self) -> Result<u64> {
        Ok(self.list_keys()?.len() as u64)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let strip = |key: String| key.strip_prefix(&self.prefix).map(str::to_owned);
        Ok(self
            .store
            .list_keys()?
            .into_iter()
            .filter_map(strip)
            .collect())
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.append(&self.name(key), value)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.store.multi_get(&borrowed(&self.names(keys)), timeout)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let names: Vec<String> = pairs.iter().map(|(key, _)| self.name(key)).collect();
        let pairs: Vec<(&str, &[u8])> = names
            .iter()
            .zip(pairs)
            .map(|(name, (_, value))| (name.as_str(), *value))
            .collect();
        self.store.multi_set(&pairs)
    }

    fn batch(&self, requests: &[BatchRequest<'_>]) -> Result<Vec<BatchReply>> {
        let names: Vec<String> = requests
            .iter()
            .map(|request| self.name(request.key()))
            .collect();
        let requests: Vec<BatchRequest<'_>> = requests
            .iter()
            .zip(&names)
            .map(|(request, name)| request.renamed(name))
            .collect();
        self.store.batch(&requests)
    }

    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()> {
        self.store.barrier(&self.name(key), world_size, timeout)
    }

    fn server(&self) -> Option<String> {
        self.store.server()
    }

    fn obeys_limits(&self) -> bool {
        self.store.obeys_limits()
    }
}

impl<S: QueueStore + ?Sized> QueueStore for PrefixStore<S> {
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.queue_push(&self.name(key), value)
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.store.queue_pop(&self.name(key), timeout)
    }

    fn try_queue_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.store.try_queue_pop(&self.name(key))
    }

    fn queue_len(&self, key: &str) -> Result<u64> {
        self.store.queue_len(&self.name(key))
    }
}

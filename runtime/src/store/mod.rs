//! Where ranks leave each other notes before they are connected.

use crate::error::Result;
use std::time::Duration;

/// A small shared map from keys to bytes.
///
/// # Blocking
/// `get` and `wait` block until the keys are there or `timeout` has passed; nothing else waits for
/// another rank.
///
/// # Thread safety
/// Every method may be called from any thread at any time. A call that waits does not hold up the
/// calls of other threads.
///
/// # Errors
/// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) names the keys that did not come;
/// [`ErrorKind::Store`](crate::ErrorKind::Store) says what the store did wrong.
pub trait Store: Send + Sync {
    /// Sets `key`, over whatever it held, and wakes who waits for it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of `key`, once it is there.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds to a counter (0 before the first `add`) and returns its new value.
    ///
    /// The counter is kept as decimal text, as PyTorch keeps it.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Sets `key` to `desired` if it holds `expected` (or is absent and `expected` is empty); returns
    /// what it holds afterwards, or `expected` where the key is absent and `expected` is not empty.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Waits until every key is there.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Whether every key is there now.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Removes `key`; says whether it was there.
    fn delete(&self, key: &str) -> Result<bool>;

    /// How many keys there are.
    fn num_keys(&self) -> Result<u64>;
}

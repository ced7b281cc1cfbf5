//! The ranks that have reached a point, as bits of counters in the store: 48 ranks share one key.

use rcomm_core::Result;
use rcomm_core::store::Store;

/// The number of ranks that have a bit in one counter. A counter of the store is a signed 64-bit number.
const RANKS_PER_KEY: u32 = 48;

fn bit_of(index: u32) -> i64 {
    1 << (index % RANKS_PER_KEY)
}

/// The ranks of a communicator that have reached one point.
pub(super) struct Arrivals<'a> {
    pub(super) store: &'a dyn Store,
    /// The prefix of the keys.
    pub(super) name: &'static str,
    /// The number of ranks of the communicator.
    pub(super) ranks: u32,
}

impl Arrivals<'_> {
    /// Publishes that this rank has arrived. To be called once by each rank. Returns true on one rank, when all
    /// ranks have arrived.
    ///
    /// # Errors
    /// `Store`.
    pub(super) fn note(&self, own: u32) -> Result<bool> {
        let first = own / RANKS_PER_KEY * RANKS_PER_KEY;
        let of_key = first..self.ranks.min(first + RANKS_PER_KEY);
        let all: i64 = of_key.map(bit_of).sum();
        // One rank completes each key, and one rank completes the last key.
        if self.store.add(&self.key_of(own), bit_of(own))? != all {
            return Ok(false);
        }
        let keys = self.ranks.div_ceil(RANKS_PER_KEY);
        Ok(keys == 1 || self.store.add(&self.full(), 1)? == i64::from(keys))
    }

    /// Returns for each rank whether it has arrived.
    ///
    /// # Errors
    /// `Store`.
    pub(super) fn read(&self) -> Result<Vec<bool>> {
        let mut arrived = Vec::with_capacity(self.ranks as usize);
        for first in (0..self.ranks).step_by(RANKS_PER_KEY as usize) {
            let bits = self.store.add(&self.key_of(first), 0)?;
            let of_key = first..self.ranks.min(first + RANKS_PER_KEY);
            arrived.extend(of_key.map(|index| bits & bit_of(index) != 0));
        }
        Ok(arrived)
    }

    /// Returns all keys, for their removal.
    pub(super) fn keys(&self) -> Vec<String> {
        let firsts = (0..self.ranks).step_by(RANKS_PER_KEY as usize);
        let mut keys: Vec<String> = firsts.map(|first| self.key_of(first)).collect();
        if keys.len() > 1 {
            keys.push(self.full());
        }
        keys
    }

    fn key_of(&self, index: u32) -> String {
        format!("{}/{}", self.name, index / RANKS_PER_KEY)
    }

    /// The key that counts the keys whose ranks have all arrived.
    fn full(&self) -> String {
        format!("{}/full", self.name)
    }
}

/// Removes a key. An error is only logged: some stores cannot remove keys.
pub(super) fn remove(store: &dyn Store, key: &str) {
    if let Err(error) = store.delete(key) {
        tracing::debug!(%error, key, "a key of a rendezvous stays in the store");
    }
}

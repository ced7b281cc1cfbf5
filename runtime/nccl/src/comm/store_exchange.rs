//! The values that the members of a group publish for each other in the store when all of them must take a
//! step together, so that a rank that times out can name those that did not arrive.

use super::peer_info::{MAX_KEYS_PER_READ, unreadable};
use rcomm_core::Deadline;
use rcomm_core::backend::GroupContext;
use rcomm_core::store::{PrefixStore, Store};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::Rank;
use std::sync::Arc;
use std::time::Duration;

/// The values of one step that all members take.
pub(crate) struct StoreExchange {
    store: PrefixStore<dyn Store>,
    ranks: Arc<[Rank]>,
    own_index: u32,
}

impl StoreExchange {
    /// Makes the exchange of one step. `prefix` is the prefix of its keys; all members pass the same one.
    pub(crate) fn new(group: &GroupContext, prefix: String) -> Self {
        Self {
            store: PrefixStore::new(prefix, group.store.clone()),
            ranks: group.info.ranks.clone(),
            own_index: group.group_rank,
        }
    }

    /// Publishes this rank's value under `key`.
    pub(crate) fn publish(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&format!("{key}/{}", self.own_index), value)
    }

    /// Returns the values of all members, in order of rank. The first member reads all of them and publishes them under
    /// one key for the others: so N ranks read O(N) keys in total.
    ///
    /// # Blocking
    /// Until all have published one, or the deadline.
    ///
    /// # Errors
    /// `Timeout` names the ranks that have not published theirs; `Rendezvous` if the values cannot be read; the error of
    /// the store.
    pub(crate) fn gather(&self, key: &str, deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let deadline = deadline.started();
        self.try_gather(key, deadline).map_err(|error| {
            if error.kind() != ErrorKind::Timeout {
                return error;
            }
            let missing = self.missing(key);
            Error::new(ErrorKind::Timeout, format!("did not arrive: {missing}"))
        })
    }

    fn try_gather(&self, key: &str, deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let all = format!("{key}/all");
        let time_left = || deadline.remaining().max(Duration::from_millis(1));
        if self.own_index != 0 {
            let values = self.store.get(&all, time_left())?;
            return serde_json::from_slice(&values).map_err(|error| unreadable("read", error));
        }
        let ranks: Vec<usize> = (0..self.ranks.len()).collect();
        let mut values = Vec::with_capacity(ranks.len());
        for ranks in ranks.chunks(MAX_KEYS_PER_READ) {
            let keys: Vec<String> = ranks.iter().map(|rank| format!("{key}/{rank}")).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            values.extend(self.store.multi_get(&keys, time_left())?);
        }
        let bytes = serde_json::to_vec(&values).map_err(|error| unreadable("written", error))?;
        self.store.set(&all, &bytes)?;
        Ok(values)
    }

    /// Returns the ranks that are known not to have published this value, as text for an error message.
    pub(crate) fn missing(&self, key: &str) -> String {
        let has_published = |at: usize| self.store.check(&[&format!("{key}/{at}")]).unwrap_or(true);
        let ranks = self.ranks.iter().enumerate();
        let missing = ranks.filter(|(at, _)| !has_published(*at));
        let missing: Vec<String> = missing.map(|(_, rank)| rank.to_string()).collect();
        match missing.is_empty() {
            true => "none that is known".to_owned(),
            false => format!("rank {}", missing.join(", ")),
        }
    }

    /// Publishes that this rank gives up. The store keeps only the first error of this step.
    pub(crate) fn publish_failure(&self, why: &Error) {
        let text = format!("rank {}: {why}", self.ranks[self.own_index as usize]);
        if let Err(error) = self.store.compare_set("failed", b"", text.as_bytes()) {
            tracing::debug!(%error, "failed to publish the failure of this rank");
        }
    }

    /// Fails with `Mismatch` and the message of the first rank that gave up, if one did.
    pub(crate) fn check_failed(&self) -> Result<()> {
        if !self.store.check(&["failed"])? {
            return Ok(());
        }
        let text = self.store.get("failed", Duration::from_secs(10))?;
        let text = String::from_utf8_lossy(&text).into_owned();
        Err(Error::new(ErrorKind::Mismatch, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::counting_store::CountingStore;

    #[test]
    fn the_number_of_keys_that_are_gathered_grows_linearly_with_the_number_of_ranks() {
        const RANKS: u32 = 1024;
        let store = Arc::new(CountingStore::default());
        let shared: Arc<dyn Store> = store.clone();
        let ranks: Arc<[Rank]> = (0..RANKS).collect();
        let of = |own_index| StoreExchange {
            store: PrefixStore::new("window/0", shared.clone()),
            ranks: ranks.clone(),
            own_index,
        };
        for rank in 0..RANKS {
            of(rank).publish("part", &rank.to_le_bytes()).unwrap();
        }
        let expected: Vec<Vec<u8>> = (0..RANKS).map(|it| it.to_le_bytes().to_vec()).collect();
        for rank in 0..RANKS {
            let brief = Deadline::In(Duration::from_secs(60));
            assert_eq!(of(rank).gather("part", brief).unwrap(), expected);
        }
        // The first rank reads each value, the others one key.
        assert_eq!(store.keys(), u64::from(2 * RANKS - 1));
        let missing = of(1).gather("closed", Deadline::In(Duration::from_millis(1)));
        let error = missing.unwrap_err().to_string();
        assert!(error.contains("did not arrive: rank 0, 1, 2, "), "{error}");
    }
}

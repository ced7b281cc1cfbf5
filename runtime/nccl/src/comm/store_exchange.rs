//! The values that the members of a group publish for each other in the store when all of them must take a
//! step together, so that a rank that times out can name those that did not arrive.

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

    /// Returns the values of all members, in order of rank.
    ///
    /// # Blocking
    /// Until all have published one, or the deadline.
    ///
    /// # Errors
    /// `Timeout` names the ranks that have not published theirs; the error of the store.
    pub(crate) fn gather(&self, key: &str, deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> = (0..self.ranks.len())
            .map(|rank| format!("{key}/{rank}"))
            .collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let timeout = deadline.remaining().max(Duration::from_millis(1));
        self.store.multi_get(&keys, timeout).map_err(|error| {
            if error.kind() != ErrorKind::Timeout {
                return error;
            }
            let missing = self.missing(key);
            Error::new(ErrorKind::Timeout, format!("did not arrive: {missing}"))
        })
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

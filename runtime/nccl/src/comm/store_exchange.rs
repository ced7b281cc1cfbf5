//! What the members of a group leave for each other in the store when all of them must take a step
//! together, so that a rank that times out can name those that did not arrive.

use rcomm_core::Deadline;
use rcomm_core::backend::GroupContext;
use rcomm_core::store::{PrefixStore, Store};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::Rank;
use std::sync::Arc;
use std::time::Duration;

/// Notes about one thing that all members do.
pub(crate) struct Notes {
    store: PrefixStore<dyn Store>,
    ranks: Arc<[Rank]>,
    own: u32,
}

impl Notes {
    /// `place` is that of this one thing, the same on all members.
    pub(crate) fn new(group: &GroupContext, place: String) -> Self {
        Self {
            store: PrefixStore::new(place, group.store.clone()),
            ranks: group.info.ranks.clone(),
            own: group.group_rank,
        }
    }

    /// Leaves this rank's note.
    pub(crate) fn leave(&self, word: &str, text: &[u8]) -> Result<()> {
        self.store.set(&format!("{word}/{}", self.own), text)
    }

    /// The notes of all members, in order of rank.
    ///
    /// # Blocking
    /// Until all have left one, or the deadline.
    ///
    /// # Errors
    /// `Timeout` names the ranks that have not left theirs.
    pub(crate) fn gather(&self, word: &str, deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> = (0..self.ranks.len())
            .map(|rank| format!("{word}/{rank}"))
            .collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let patience = deadline.remaining().max(Duration::from_millis(1));
        self.store.multi_get(&keys, patience).map_err(|error| {
            if error.kind() != ErrorKind::Timeout {
                return error;
            }
            let absent = self.absent(word);
            Error::new(ErrorKind::Timeout, format!("did not come: {absent}"))
        })
    }

    /// The ranks that have left no such note, as text for an error message.
    pub(crate) fn absent(&self, word: &str) -> String {
        let here = |at: usize| self.store.check(&[&format!("{word}/{at}")]).unwrap_or(true);
        let ranks = self.ranks.iter().enumerate();
        let absent = ranks.filter(|(at, _)| !here(*at));
        let absent: Vec<String> = absent.map(|(_, rank)| rank.to_string()).collect();
        match absent.is_empty() {
            true => "no rank".to_owned(),
            false => format!("rank {}", absent.join(", ")),
        }
    }

    /// Publishes that this rank gives up. Only the first error of the group is kept.
    pub(crate) fn give_up(&self, why: &Error) {
        let text = format!("rank {}: {why}", self.ranks[self.own as usize]);
        if let Err(error) = self.store.compare_set("failed", b"", text.as_bytes()) {
            tracing::debug!(%error, "failed to publish the failure of this rank");
        }
    }

    /// The error of the first rank that gave up.
    pub(crate) fn check_failed(&self) -> Result<()> {
        if !self.store.check(&["failed"])? {
            return Ok(());
        }
        let text = self.store.get("failed", Duration::from_secs(10))?;
        let text = String::from_utf8_lossy(&text).into_owned();
        Err(Error::new(ErrorKind::Mismatch, text))
    }
}

//! The rounds in which a world is recreated with other processes, as the store holds them.
//!
//! | key | holds | writer |
//! |---|---|---|
//! | `rcomm/round/<attempt>` | the world size and the ranks whose processes stay: `4\n0,1,3` | the first rank that stays to call [`World::grow`](crate::World::grow) |
//! | `rcomm/round/<attempt>/callers` | how many ranks have called it | each rank that stays |
//! | `rcomm/round/newest` | the attempt of the newest round | the first rank that is counted among the callers of each round |
//!
//! A round is a rendezvous like that of the job's start, under a new attempt number. So no key of an earlier one is
//! read, and records state to which world they belong. A round that has failed is not repeated: the next one has the
//! next attempt number.

use crate::op::error::{Error, ErrorKind, Result};
use crate::store::Store;
use rcomm_recorder::model::{Rank, text};
use std::time::Duration;

/// The key of the attempt of the newest round.
const NEWEST: &str = "rcomm/round/newest";
/// The most ranks that a message lists.
const MAX_RANKS: usize = 16;
/// The most bytes of a round's text that are read.
const MAX_BYTES: usize = 1 << 20;

/// A world that the ranks that stay want to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) attempt: u32,
    pub(super) size: u32,
    /// The ranks whose processes stay, ascending. The other ranks below `size` are for processes that join.
    pub(super) stay: Vec<Rank>,
}

impl Round {
    /// Publishes this round, in the name of one of the ranks that stay.
    ///
    /// # Errors
    /// `Mismatch` if another rank that stays wants another world. Otherwise the store's error.
    pub(super) fn publish(&self, store: &dyn Store) -> Result<()> {
        let key = key(self.attempt);
        let wanted = self.to_text();
        let held = store.compare_set(&key, b"", wanted.as_bytes())?;
        if held != wanted.as_bytes() {
            let message = match Self::from_text(self.attempt, &held) {
                Some(held) => format!("this rank wants {self}, another rank {held}"),
                None => format!(
                    "{key} in the store holds no round: another program may have written to it"
                ),
            };
            return Err(Error::new(ErrorKind::Mismatch, message));
        }
        if store.add(&format!("{key}/callers"), 1)? == 1 {
            store.set(NEWEST, self.attempt.to_string().as_bytes())?;
        }
        Ok(())
    }

    /// The newest round; `None` if none is published within `wait`.
    ///
    /// # Errors
    /// The store's; `Store` if a key holds something else.
    pub(super) fn newest(store: &dyn Store, wait: Duration) -> Result<Option<Self>> {
        let attempt = match store.get(NEWEST, wait) {
            Err(error) if error.kind() == ErrorKind::Timeout => return Ok(None),
            attempt => attempt?,
        };
        let foreign = || {
            let message = format!(
                "{NEWEST} in the store names no round: another program may have written to it"
            );
            Error::new(ErrorKind::Store, message)
        };
        let attempt = std::str::from_utf8(&attempt).ok();
        let attempt: u32 = attempt
            .and_then(|text| text.parse().ok())
            .ok_or_else(foreign)?;
        // The key exists, so this does not wait.
        let text = store.get(&key(attempt), Duration::from_secs(1))?;
        Self::from_text(attempt, &text)
            .map(Some)
            .ok_or_else(foreign)
    }

    /// Whether the place of this rank is for a process that joins.
    pub(super) fn is_open_for(&self, rank: Rank) -> bool {
        rank < self.size && self.stay.binary_search(&rank).is_err()
    }

    fn to_text(&self) -> String {
        let stay: Vec<String> = self.stay.iter().map(Rank::to_string).collect();
        format!("{}\n{}", self.size, stay.join(","))
    }

    /// Reads what [`to_text`](Self::to_text) wrote; `None` if the text is no round.
    fn from_text(attempt: u32, text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text.get(..MAX_BYTES.min(text.len()))?).ok()?;
        let (size, stay) = text.split_once('\n')?;
        let stay = stay.split(',').map(|rank| rank.parse().ok());
        Some(Self {
            attempt,
            size: size.parse().ok()?,
            stay: stay.collect::<Option<_>>()?,
        })
    }
}

impl std::fmt::Display for Round {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stay = text::ranks(&self.stay, MAX_RANKS);
        write!(f, "a world of {} with the processes of {stay}", self.size)
    }
}

/// The newest attempt of the job that its ranks have begun themselves; 0 if they have begun none. For launchers, whose
/// next attempt must be a later one.
///
/// # Errors
/// The store's.
pub fn newest_attempt(store: &dyn Store) -> Result<u32> {
    if !store.check(&[NEWEST])? {
        return Ok(0);
    }
    let newest = Round::newest(store, Duration::from_secs(1))?;
    Ok(newest.map_or(0, |round| round.attempt))
}

fn key(attempt: u32) -> String {
    format!("rcomm/round/{attempt}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::HashStore;

    #[test]
    fn ranks_that_stay_agree_on_a_round_and_later_ones_follow_it() {
        let store = HashStore::new();
        assert_eq!(Round::newest(&store, Duration::ZERO).unwrap(), None);
        assert_eq!(newest_attempt(&store).unwrap(), 0);
        let first = Round {
            attempt: 1,
            size: 4,
            stay: vec![0, 1, 3],
        };
        first.publish(&store).unwrap();
        first.publish(&store).unwrap();
        assert_eq!(
            Round::newest(&store, Duration::ZERO).unwrap().as_ref(),
            Some(&first)
        );
        assert_eq!(
            [0, 2, 4].map(|rank| first.is_open_for(rank)),
            [false, true, false]
        );
        let other = Round {
            size: 3,
            ..first.clone()
        };
        let error = other.publish(&store).unwrap_err();
        assert_eq!(
            error.to_string(),
            "this rank wants a world of 3 with the processes of ranks 0, 1, 3, another rank a world of 4 with the \
             processes of ranks 0, 1, 3"
        );
        let second = Round {
            attempt: 2,
            ..first.clone()
        };
        second.publish(&store).unwrap();
        // A rank that comes late to a round that has failed does not hide the one that followed.
        first.publish(&store).unwrap();
        assert_eq!(newest_attempt(&store).unwrap(), 2);
    }

    #[test]
    fn a_text_that_is_no_round_is_an_error() {
        let store = HashStore::new();
        for (newest, round) in [("x", "4\n0"), ("7", "4"), ("7", "4\n0,x"), ("7", "")] {
            store.set(NEWEST, newest.as_bytes()).unwrap();
            store.set(&key(7), round.as_bytes()).unwrap();
            let error = Round::newest(&store, Duration::ZERO).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Store, "{newest} {round}");
        }
    }
}

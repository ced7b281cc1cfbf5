//! The note of a rank that has given up a group, which it leaves in the group's store.

use rcomm_core::store::Store;
use rcomm_core::{Error, Result};
use rcomm_recorder::model::Rank;
use std::time::Duration;

/// The key under which the store holds the rank that was the first to leave a note: 4 bytes in little-endian order.
const FIRST_TO_GIVE_UP: &str = "first_gave_up";
/// How long the store may take to return a value that it has.
const READ_TIME: Duration = Duration::from_millis(500);
/// The largest number of members with ended connections whose notes are looked for.
const MAX_LOOKED_FOR: usize = 64;

/// Why a rank gave up, and from which collective on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    /// The turn of the first collective that had not ended on this rank when it gave up. 0, which is before all, if the
    /// note cannot be read.
    pub(crate) first_turn: u64,
    /// The error with which it gave up, as [`Error::to_note`] encodes it.
    reason: Vec<u8>,
}

impl Note {
    /// The note of rank `own_rank`.
    pub(crate) fn new(first_turn: u64, error: &Error, own_rank: Rank) -> Self {
        Self {
            first_turn,
            reason: error.to_note(own_rank),
        }
    }

    /// Returns the error for an operation of rank `own_rank` that `from`, which left this note, has ended.
    pub(crate) fn error(&self, from: Rank, own_rank: Rank) -> Error {
        Error::from_note(&self.reason, from, own_rank)
    }

    fn decode(bytes: &[u8]) -> Self {
        let (turn, reason) = bytes.split_first_chunk().unwrap_or((&[0; 8], bytes));
        Self {
            first_turn: u64::from_le_bytes(*turn),
            reason: reason.to_vec(),
        }
    }

    /// Puts the note of rank `own_rank` into the store.
    pub(crate) fn publish(&self, store: &dyn Store, own_rank: Rank) -> Result<()> {
        let bytes = [&self.first_turn.to_le_bytes()[..], &self.reason].concat();
        store.set(&key(own_rank), &bytes)?;
        store.compare_set(FIRST_TO_GIVE_UP, b"", &own_rank.to_le_bytes())?;
        Ok(())
    }

    /// Returns the note of `rank`; `None` if it has left none.
    pub(crate) fn look(store: &dyn Store, rank: Rank) -> Result<Option<Self>> {
        let key = key(rank);
        match store.check(&[&key])? {
            true => Ok(Some(Self::decode(&store.get(&key, READ_TIME)?))),
            false => Ok(None),
        }
    }

    /// Waits for the note of `rank`, for at most this time; then fails with the store's `Timeout`.
    pub(crate) fn wait(store: &dyn Store, rank: Rank, limit: Duration) -> Result<Self> {
        Ok(Self::decode(&store.get(&key(rank), limit)?))
    }
}

/// Returns a member that gave up the collective of this turn, or one before it: the first that gave up at all, or one
/// of `closed`, the members whose connections have ended.
pub(crate) fn find_rank_that_gave_up(
    store: &dyn Store,
    turn: u64,
    closed: &[Rank],
) -> Result<Option<Rank>> {
    if !store.check(&[FIRST_TO_GIVE_UP])? {
        return Ok(None);
    }
    let first = store.get(FIRST_TO_GIVE_UP, READ_TIME)?;
    let first = first.first_chunk().map(|bytes| Rank::from_le_bytes(*bytes));
    let closed = closed.iter().copied().take(MAX_LOOKED_FOR);
    for rank in first.into_iter().chain(closed) {
        if Note::look(store, rank)?.is_some_and(|note| note.first_turn <= turn) {
            return Ok(Some(rank));
        }
    }
    Ok(None)
}

/// The key under which a rank publishes its note.
fn key(rank: Rank) -> String {
    format!("gave_up/{rank}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_core::ErrorKind;
    use rcomm_core::store::HashStore;

    #[test]
    fn a_rank_is_found_only_for_collectives_that_it_did_not_end() {
        let store = HashStore::new();
        assert_eq!(find_rank_that_gave_up(&store, 9, &[0, 1]).unwrap(), None);
        let error = Error::new(ErrorKind::Aborted, "by hand");
        Note::new(5, &error, 2).publish(&store, 2).unwrap();
        Note::new(4, &error, 1).publish(&store, 1).unwrap();
        assert_eq!(find_rank_that_gave_up(&store, 3, &[1, 2]).unwrap(), None);
        assert_eq!(find_rank_that_gave_up(&store, 4, &[0]).unwrap(), None);
        assert_eq!(find_rank_that_gave_up(&store, 4, &[0, 1]).unwrap(), Some(1));
        assert_eq!(find_rank_that_gave_up(&store, 5, &[]).unwrap(), Some(2));
    }

    #[test]
    fn a_note_keeps_its_turn_and_reason() {
        let store = HashStore::new();
        let error = Error::new(ErrorKind::Timeout, "waited for rank 3").with_rank(3);
        let note = Note::new(7, &error, 2);
        note.publish(&store, 2).unwrap();
        assert_eq!(Note::look(&store, 2).unwrap(), Some(note.clone()));
        assert_eq!(Note::wait(&store, 2, READ_TIME).unwrap(), note);
        assert_eq!(note.error(2, 0).ranks(), [3]);
        assert_eq!(Note::look(&store, 1).unwrap(), None);
        assert_eq!(Note::decode(b"short").first_turn, 0);
    }
}

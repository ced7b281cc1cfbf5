//! Decides whether the end of an operation that the device reports is believed.
//!
//! When a rank aborts or revokes a communicator, the rank's kernels leave their loops, and still post their steps to
//! the peers. Then a peer's kernel, which no rank has stopped, ends as if it were done, with wrong data, although a
//! rank may never have joined the operation. The device and the library report a success (seen on an H100 with NCCL
//! 2.30.7, four ranks on one device). So a rank whose kernels may run first writes a note to the group's store that it
//! gives up the group, and only then stops the kernels. A rank that sees an end which such a stop may have caused looks
//! for a note before it reports a success.
//!
//! Most ends are believed at once, since an operation that waits for a missing rank runs for seconds before a rank
//! gives up. An end is in doubt if the operation may have run for [`LONG`] or longer, if its deadline has passed, or if
//! another rank has reported that the group failed.
//!
//! A rank that has aborted the group itself believes no end, and so no longer needs the note. The last rank to abort
//! the group removes the note. If a rank never aborts the group, because it is gone or has no error, the note stays:
//! that rank may still arrive late at an operation.

use crate::library::foreign_call::ForeignCall;
use rcomm_core::Deadline;
use rcomm_core::backend::GroupContext;
use rcomm_core::store::Store;
use rcomm_core::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The key of the note that a rank has given up the group. The note has the rank and its reason.
const KEY: &str = "given-up";

/// The key of the counter of the ranks that have aborted the group.
const LEFT: &str = "given-up/left";

/// An end is in doubt if the operation may have run for this long.
const LONG: Duration = Duration::from_secs(1);

/// The largest number of bytes of a note that are kept.
const KEPT: usize = 1_024;

/// The notes by which the ranks of a group learn that one of them has given up the group.
pub(crate) struct Notes {
    store: Arc<dyn Store>,
    /// This rank, by its number in the world.
    rank: u32,
    /// The number of ranks of the group.
    ranks: u32,
    /// Whether another rank has reported that the group failed.
    reported: AtomicBool,
}

impl Notes {
    /// How long the store may take to accept a note: a store that has failed must not delay the abort.
    const WRITE: Duration = Duration::from_secs(1);
    /// How long the store may take to answer whether there is a note.
    const READ: Duration = Duration::from_secs(5);

    pub(crate) fn of(group: &GroupContext) -> Self {
        let rank = group.info.global_rank_of(group.group_rank);
        Self {
            store: group.store.clone(),
            rank: rank.unwrap_or(group.group_rank),
            ranks: group.size(),
            reported: AtomicBool::new(false),
        }
    }

    /// Notes that another rank has reported a failure of the group.
    pub(crate) fn note_report(&self) {
        self.reported.store(true, Ordering::Relaxed);
    }

    /// Writes the note that this rank gives up the group. To be called before the rank's kernels are stopped.
    ///
    /// # Blocking
    /// Until the store has the note, for [`WRITE`](Self::WRITE) at most.
    pub(crate) fn give_up(&self, reason: &Error) {
        let text = shortened(format!("rank {}: {reason}", self.rank));
        let store = self.store.clone();
        // The first rank's note is kept.
        let write = move || store.compare_set(KEY, b"", text.as_bytes());
        let written = ForeignCall::begin("rcomm/nccl-note", write)
            .and_then(|mut call| call.wait(Self::WRITE));
        let error = match written {
            Ok(Some(Ok(_))) => return,
            Ok(Some(Err(error))) | Err(error) => error,
            Ok(None) => Error::new(ErrorKind::Timeout, "the store has not answered"),
        };
        tracing::warn!(
            %error,
            "the store has no note that this rank aborts the group: operations of the other ranks may seem to succeed"
        );
    }

    /// Counts that this rank has aborted the group, and removes the note if all ranks were counted. To be called once;
    /// the rank believes no end any more.
    ///
    /// # Blocking
    /// Until the store has answered, for [`WRITE`](Self::WRITE) at most.
    pub(crate) fn leave(&self) {
        let (store, ranks) = (self.store.clone(), self.ranks);
        let count = move || {
            if store.add(LEFT, 1)? < i64::from(ranks) {
                return Ok(());
            }
            [KEY, LEFT]
                .iter()
                .try_for_each(|key| store.delete(key).map(drop))
        };
        let counted = ForeignCall::begin("rcomm/nccl-note", count)
            .and_then(|mut call| call.wait(Self::WRITE));
        if let Ok(Some(Err(error))) | Err(error) = counted {
            tracing::debug!(%error, "a note that a rank has given up the group stays in the store");
        }
    }

    /// Returns the note of the first rank that has given up the group; `None` if no rank has.
    fn read(store: &dyn Store) -> Result<Option<String>> {
        if !store.check(&[KEY])? {
            return Ok(None);
        }
        let note = store.get(KEY, Self::READ)?;
        Ok(Some(shortened(String::from_utf8_lossy(&note).into_owned())))
    }
}

/// Cuts a note to [`KEPT`] bytes.
fn shortened(mut note: String) -> String {
    note.truncate(note.floor_char_boundary(KEPT));
    note
}

/// What is known of the end of one operation.
pub(crate) struct Doubt {
    /// When the operation was last seen not to run: when it was issued, or later.
    idle: Instant,
    query: Option<Box<Query>>,
}

/// A query of the group's store for a note.
struct Query {
    call: ForeignCall<Result<Option<String>>>,
    /// The moment until which the store may answer.
    until: Instant,
}

impl Doubt {
    pub(crate) fn of_op_issued(at: Instant) -> Self {
        Self {
            idle: at,
            query: None,
        }
    }

    /// Notes that the device has not begun the operation.
    pub(crate) fn note_idle(&mut self) {
        self.idle = Instant::now();
    }

    /// Decides on the end of an operation that the device reports. Returns `Ok` if the end is believed, and the error
    /// of the operation if not; `None` while the store has not replied. Does not wait.
    pub(crate) fn judge(&mut self, notes: &Notes, deadline: Deadline) -> Option<Result<()>> {
        let is_late = deadline.has_passed();
        if self.query.is_none() {
            let in_doubt =
                is_late || self.idle.elapsed() >= LONG || notes.reported.load(Ordering::Relaxed);
            if !in_doubt {
                return Some(Ok(()));
            }
            let store = notes.store.clone();
            match ForeignCall::begin("rcomm/nccl-check", move || Notes::read(&*store)) {
                Ok(call) => {
                    let until = Instant::now() + Notes::READ;
                    self.query = Some(Box::new(Query { call, until }));
                }
                Err(error) => return Some(Err(unknown(&error))),
            }
        }
        let Query { call, until } = &mut **self.query.as_mut()?;
        Some(match call.wait(Duration::ZERO) {
            Ok(None) if Instant::now() < *until => return None,
            Ok(None) => {
                let error = Error::new(ErrorKind::Timeout, "it has not answered in time");
                Err(unknown(&error))
            }
            Ok(Some(Ok(None))) => Ok(()),
            Ok(Some(Ok(Some(note)))) => Err(given_up(&note, is_late)),
            Ok(Some(Err(error))) | Err(error) => Err(unknown(&error)),
        })
    }
}

/// Returns the error of an operation of a group that a rank has given up.
fn given_up(note: &str, is_late: bool) -> Error {
    let (rank, reason) = note.split_once(": ").unwrap_or(("another rank", note));
    let kind = match is_late {
        true => ErrorKind::Timeout,
        false => ErrorKind::Aborted,
    };
    let message = format!(
        "it ended, perhaps with wrong data: {rank} gave the group up, which can end operations of the other ranks as if \
         they were done; its reason: {reason}"
    );
    Error::new(kind, message)
}

/// Returns the error of an operation whose end cannot be judged.
fn unknown(error: &Error) -> Error {
    let message = format!(
        "it ended, and this rank cannot tell whether another rank gave the group up before, since the store was asked in \
         vain: {error}"
    );
    Error::new(ErrorKind::Backend, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_core::HashStore;

    const RANKS: u32 = 4;

    fn notes(store: &Arc<HashStore>, rank: u32) -> Notes {
        Notes {
            store: store.clone(),
            rank,
            ranks: RANKS,
            reported: AtomicBool::new(false),
        }
    }

    /// Returns the decision on an operation that was last seen idle `since` ago.
    fn decide(notes: &Notes, since: Duration, deadline: Deadline) -> Result<()> {
        let idle = Instant::now().checked_sub(since).unwrap();
        let mut doubt = Doubt { idle, query: None };
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(decision) = doubt.judge(notes, deadline) {
                return decision;
            }
            assert!(Instant::now() < end, "no decision");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn only_an_end_in_doubt_of_a_group_that_a_rank_gave_up_is_refused() {
        let far = Deadline::In(Duration::from_secs(600)).started();
        let past = Deadline::At(Instant::now());
        let store = Arc::new(HashStore::default());
        let (ours, theirs) = (notes(&store, 0), notes(&store, 3));
        let short = Duration::ZERO;
        for since in [short, LONG] {
            decide(&ours, since, far).unwrap();
            decide(&ours, since, past).unwrap();
        }
        theirs.give_up(&Error::new(ErrorKind::Timeout, "not done after 5.0 s"));
        notes(&store, 2).give_up(&Error::new(ErrorKind::Aborted, "later"));
        decide(&ours, short, far).unwrap();
        let error = decide(&ours, LONG, far).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Aborted);
        let text = error.to_string();
        assert!(text.contains("rank 3 gave the group up"), "{text}");
        assert!(text.ends_with("its reason: not done after 5.0 s"), "{text}");
        let error = decide(&ours, short, past).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        ours.note_report();
        decide(&ours, short, far).unwrap_err();
    }

    #[test]
    fn the_note_stays_until_the_last_rank_has_aborted_the_group() {
        let far = Deadline::In(Duration::from_secs(600)).started();
        let store = Arc::new(HashStore::default());
        let late = notes(&store, RANKS - 1);
        for rank in 0..RANKS - 1 {
            let notes = notes(&store, rank);
            notes.give_up(&Error::new(ErrorKind::Timeout, "not done after 5.0 s"));
            notes.leave();
            decide(&late, LONG, far).unwrap_err();
        }
        late.leave();
        assert_eq!(store.num_keys().unwrap(), 0);
    }
}

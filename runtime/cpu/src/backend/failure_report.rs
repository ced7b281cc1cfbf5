//! How a group fails: the error for its caller, and the reason that its peers read from the store.

use super::group::CpuGroup;
use crate::channels::cut;
use crate::wait::{Failure, Interrupted, Stop, WaitPolicy};
use rcomm_core::Deadline;
use rcomm_core::store::{Store, StoreQuery};
use rcomm_core::{Error, ErrorKind};
use rcomm_recorder::model::Rank;
use std::time::{Duration, Instant};

/// How long a rank waits for the store to take its reason for giving up.
const NOTE_TIME: Duration = Duration::from_millis(400);
/// How long a rank whose peer has closed its channels looks in the store for that peer's reason.
const REASON_TIME: Duration = Duration::from_millis(500);
/// How long a rank waits for the reason of a rank that has given up the operation: that rank may itself
/// first look for its peer's reason.
const GIVEN_UP_TIME: Duration = Duration::from_millis(1500);
/// How long a rank that has lost a peer checks whether other members are gone too.
const OTHERS_TIME: Duration = Duration::from_millis(150);
/// The largest number of other members that are checked; if the group has more, none is checked.
const MAX_CHECKED: usize = 64;

impl CpuGroup {
    /// Turns a failure into the error for the caller. Unless the ranks are still in step, it stops the
    /// group and publishes the reason to the others.
    pub(crate) fn fail(&self, failure: Failure) -> Error {
        if let Failure::Gone(rank, Some(cause)) = &failure {
            self.mesh.links().note_error(*rank, cause);
        }
        self.mesh.links().sample_now();
        let in_step = matches!(failure, Failure::Mismatch(..) | Failure::Argument(_));
        let error = self.explain(failure);
        if in_step {
            return error;
        }
        self.stop_for(error.clone());
        error
    }

    /// Makes all pending and later operations fail with this error, on this rank and on the peers that wait
    /// for it.
    ///
    /// # Blocking
    /// Until the store has the reason for the peers, at most [`NOTE_TIME`].
    pub(crate) fn stop_for(&self, error: Error) {
        let own = self.mesh.rank();
        let note = error.to_note(own);
        if self.stop.raise(error) {
            // A store that does not answer must not prevent this rank from ending its operations.
            let left = StoreQuery::ask_within(&self.store, NOTE_TIME, move |store| {
                store.set(&note_key(own), &note)
            });
            if !matches!(left, Some(Ok(()))) {
                tracing::debug!(?left, "the store may not have why this rank gave up");
            }
        }
        self.release_peers();
    }

    /// Releases the ranks that wait for this one in this group.
    pub(crate) fn release_peers(&self) {
        cut(&self.sockets);
        if let Some(close_guard) = &self.close_guard {
            close_guard.leave();
        }
    }

    pub(crate) fn explain(&self, failure: Failure) -> Error {
        match failure {
            Failure::Interrupted(Interrupted::TimedOut) => {
                Error::new(ErrorKind::Timeout, "no end before the deadline")
            }
            Failure::Late(ranks) => {
                let message = format!("waited for {} until the deadline", list(&ranks));
                Error::new(ErrorKind::Timeout, message).with_ranks(&ranks)
            }
            Failure::Interrupted(Interrupted::Stopped(reason)) => reason,
            Failure::Gone(rank, cause) => self.explain_gone(rank, cause),
            Failure::GivenUp(rank) => self.explain_given_up(rank),
            Failure::Refused {
                peer,
                address,
                kind,
                why,
            } => {
                let message = format!("{address}, the address of rank {peer}, refused: {why}");
                Error::new(kind, message).with_rank(peer)
            }
            Failure::Address { peer, text } => Error::new(
                ErrorKind::Store,
                format!("the store has {text:?} for the address of rank {peer}"),
            )
            .with_rank(peer),
            Failure::Garbled(rank, what) => {
                Error::new(ErrorKind::Backend, format!("rank {rank} sent {what}")).with_rank(rank)
            }
            Failure::Mismatch(rank, message) => {
                Error::new(ErrorKind::Mismatch, message).with_rank(rank)
            }
            Failure::Store(error) | Failure::Argument(error) => error,
            Failure::Io(error) => Error::io("cannot use a socket", error),
            Failure::Closed => Error::new(ErrorKind::Closed, "the world was shut down"),
        }
    }

    /// Returns the error for a channel that `rank` has closed: the reason from its note if it gave up, else
    /// that its process is gone, or still running, or that this could not be found out.
    ///
    /// # Blocking
    /// For about [`REASON_TIME`], whether or not the store answers, and [`OTHERS_TIME`] more if the process is
    /// gone. A host that does not answer may add the time-out of one attempt to connect.
    pub(crate) fn explain_gone(&self, rank: Rank, cause: Option<std::io::Error>) -> Error {
        let stop = Stop::default();
        let deadline = Instant::now() + REASON_TIME;
        let mut policy = WaitPolicy::new(&stop, Deadline::At(deadline), self.wait_mode);
        loop {
            // The peer is checked before its note is read: a peer that is gone has already written any
            // note that it leaves.
            let gone = self.mesh.find_gone(rank, &mut policy);
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(note) = self.note_of(rank, left) {
                return Error::from_note(&note, rank, self.mesh.rank());
            }
            match gone {
                Ok(true) => return self.lost(rank, cause),
                Ok(false) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Ok(false) => {
                    let message = format!("rank {rank} closed its connection but is still running");
                    return Error::new(ErrorKind::PeerLost, message).with_rank(rank);
                }
                Err(Failure::Io(error)) => {
                    let what = format!("cannot find out whether rank {rank} is gone");
                    return Error::io(what, error);
                }
                Err(_) => {
                    let message = format!("the connection of rank {rank} ended");
                    let error = Error::new(ErrorKind::PeerLost, message).with_rank(rank);
                    return match cause {
                        Some(cause) => error.with_source(cause),
                        None => error,
                    };
                }
            }
        }
    }

    fn lost(&self, rank: Rank, cause: Option<std::io::Error>) -> Error {
        let mut lost = self.other_lost(rank);
        if lost.is_empty() {
            let message = format!("rank {rank} is gone: its connection ended");
            let error = Error::new(ErrorKind::PeerLost, message).with_rank(rank);
            return match cause {
                Some(cause) => error.with_source(cause),
                None => error,
            };
        }
        lost.push(rank);
        lost.sort_unstable();
        let message = format!("{} are gone: their connections ended", list(&lost));
        Error::new(ErrorKind::PeerLost, message).with_ranks(&lost)
    }

    /// Returns the other members that were found to be gone within [`OTHERS_TIME`]; none if the group has more
    /// than [`MAX_CHECKED`] others. A member that has left a note did not die: it gave up.
    fn other_lost(&self, rank: Rank) -> Vec<Rank> {
        let stop = Stop::default();
        let deadline = Instant::now() + OTHERS_TIME;
        let mut policy = WaitPolicy::new(&stop, Deadline::At(deadline), self.wait_mode);
        let own = self.mesh.rank();
        let others = self.ranks.iter().copied();
        let mut others: Vec<Rank> = others.filter(|&it| it != rank && it != own).collect();
        if others.len() > MAX_CHECKED {
            return Vec::new();
        }
        others.retain(|&other| {
            let is_gone = self.mesh.is_gone(other, &mut policy);
            let left = deadline.saturating_duration_since(Instant::now());
            matches!(is_gone, Ok(true)) && matches!(self.has_note(other, left), Some(Ok(false)))
        });
        others
    }

    /// Returns the error for an operation that has failed on all ranks, since `rank` gave up this or an earlier
    /// one.
    fn explain_given_up(&self, rank: Rank) -> Error {
        let key = note_key(rank);
        let note = StoreQuery::ask_within(&self.store, GIVEN_UP_TIME, move |store| {
            store.get(&key, GIVEN_UP_TIME)
        });
        match note {
            Some(Ok(note)) => Error::from_note(&note, rank, self.mesh.rank()),
            Some(Err(_)) | None => {
                let message = format!("rank {rank} gave up this operation or one before it");
                Error::new(ErrorKind::Aborted, message).with_rank(rank)
            }
        }
    }

    fn has_note(&self, rank: Rank, limit: Duration) -> Option<rcomm_core::Result<bool>> {
        let key = note_key(rank);
        StoreQuery::ask_within(&self.store, limit, move |store| store.check(&[&key]))
    }

    /// Returns a rank's reason for giving up, if the store has it within this time.
    fn note_of(&self, rank: Rank, limit: Duration) -> Option<Vec<u8>> {
        let key = note_key(rank);
        let look = move |store: &dyn Store| match store.check(&[&key])? {
            true => store.get(&key, REASON_TIME).map(Some),
            false => Ok(None),
        };
        StoreQuery::ask_within(&self.store, limit, look)?.ok()?
    }
}

/// Formats ranks as `rank 3` or `ranks 1, 2`.
fn list(ranks: &[Rank]) -> String {
    let words: Vec<String> = ranks.iter().map(Rank::to_string).collect();
    match ranks {
        [rank] => format!("rank {rank}"),
        _ => format!("ranks {}", words.join(", ")),
    }
}

/// The key under which a rank publishes its reason for giving up.
fn note_key(rank: Rank) -> String {
    format!("gave_up/{rank}")
}

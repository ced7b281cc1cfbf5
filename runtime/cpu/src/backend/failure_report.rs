//! How a group ends: the error for its caller, and the report that its peers find in the store.

use super::group::CpuGroup;
use crate::channels::cut;
use crate::wait::{Failure, Interrupted, Stop, WaitPolicy};
use rcomm_core::Deadline;
use rcomm_core::{Error, ErrorKind};
use rcomm_recorder::model::Rank;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a rank waits until the store has its reason for giving up.
const NOTE_TIME: Duration = Duration::from_millis(400);
/// How long a rank whose peer has closed its channels looks for that peer's reason.
const REASON_TIME: Duration = Duration::from_millis(500);
/// How long a rank waits for the reason of one that has given up the operation: that one may itself look for its
/// peer's reason first.
const GIVEN_UP_TIME: Duration = Duration::from_secs(3);

impl CpuGroup {
    /// Turns a failure into the error for the caller. Unless the ranks are still in step, the group is
    /// stopped, and the others learn why.
    pub(crate) fn fail(&self, failure: Failure) -> Error {
        let in_step = matches!(failure, Failure::Mismatch(..) | Failure::Argument(_));
        let error = self.explain(failure);
        if in_step {
            return error;
        }
        self.stop_for(error.clone());
        error
    }

    /// Makes all pending and later operations fail with this error, and the peers that wait for this rank.
    ///
    /// # Blocking
    /// Until the store has the reason for the peers, [`NOTE_TIME`] at most.
    pub(crate) fn stop_for(&self, error: Error) {
        let own = self.mesh.rank();
        let note = error.to_note(own);
        if self.stop.raise(error) {
            let (store, (done, is_done)) = (self.store.clone(), mpsc::channel());
            let leave = move || {
                if let Err(unheard) = store.set(&note_key(own), &note) {
                    tracing::debug!(%unheard, "failed to publish why this rank gave up");
                }
                let _ = done.send(());
            };
            // A store that does not answer must not keep this rank from ending its operations.
            let thread = std::thread::Builder::new().name("rcomm/notice".into());
            match thread.spawn(leave) {
                Ok(_) => drop(is_done.recv_timeout(NOTE_TIME)),
                Err(error) => tracing::debug!(%error, "cannot start the thread rcomm/notice"),
            }
        }
        self.hang_up();
    }

    /// Releases the ranks that wait for this one in this group.
    pub(crate) fn hang_up(&self) {
        cut(&self.sockets);
        if let Some(close_guard) = &self.close_guard {
            close_guard.leave();
        }
    }

    pub(crate) fn explain(&self, failure: Failure) -> Error {
        let list = |ranks: &[Rank]| {
            let ranks: Vec<String> = ranks.iter().map(Rank::to_string).collect();
            match ranks.len() {
                1 => format!("rank {}", ranks[0]),
                _ => format!("ranks {}", ranks.join(", ")),
            }
        };
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

    /// A peer's channel has ended: its process exited, or it gave up and reported why.
    pub(crate) fn explain_gone(&self, rank: Rank, cause: Option<std::io::Error>) -> Error {
        let stop = Stop::default();
        let deadline = Instant::now() + REASON_TIME;
        let mut policy = WaitPolicy::new(&stop, Deadline::At(deadline), self.wait_mode);
        let key = note_key(rank);
        loop {
            if self.store.check(&[&key]).unwrap_or(false)
                && let Ok(note) = self.store.get(&key, REASON_TIME)
            {
                return Error::from_note(&note, rank, self.mesh.rank());
            }
            match self.mesh.is_gone(rank, &mut policy) {
                Ok(false) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Ok(false) => {
                    let message = format!("rank {rank} closed its connection but is still running");
                    return Error::new(ErrorKind::PeerLost, message).with_rank(rank);
                }
                _ => {
                    let message = format!("rank {rank} is gone: its connection ended");
                    let error = Error::new(ErrorKind::PeerLost, message).with_rank(rank);
                    return match cause {
                        Some(cause) => error.with_source(cause),
                        None => error,
                    };
                }
            }
        }
    }
}

impl CpuGroup {
    /// All ranks have agreed that the operation has failed, since this one gave it up.
    fn explain_given_up(&self, rank: Rank) -> Error {
        match self.store.get(&note_key(rank), GIVEN_UP_TIME) {
            Ok(note) => Error::from_note(&note, rank, self.mesh.rank()),
            Err(_) => {
                let message = format!("rank {rank} gave up this operation or one before it");
                Error::new(ErrorKind::Aborted, message).with_rank(rank)
            }
        }
    }
}

/// The key under which a rank publishes its reason for giving up.
fn note_key(rank: Rank) -> String {
    format!("gave_up/{rank}")
}

//! How a group fails: the error for its caller, and the reason that its peers read from the store.

use super::group::CpuGroup;
use super::note::Note;
use crate::channels::{Sockets, cut};
use crate::mesh::links::is_abort;
use crate::mesh::{Mesh, PeerState};
use crate::transport::shm::{Awaited, CloseGuard};
use crate::wait::{Failure, Interrupted, Stop, WaitPolicy};
use rcomm_core::Deadline;
use rcomm_core::store::{Store, StoreQuery};
use rcomm_core::{Error, ErrorKind};
use rcomm_recorder::model::{FailureKind, Rank, text};
use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// The most ranks that an error lists by number.
const MAX_RANKS: usize = 64;

/// How long a rank that gives up keeps its channels open for the store to take its reason.
const NOTE_TIME: Duration = Duration::from_millis(400);
/// The longest time for which a rank's error waits until its peers are released: a store that works answers sooner.
const RELEASE_TIME: Duration = Duration::from_millis(250);
/// How long a rank whose peer has closed its channels looks in the store for that peer's reason.
const REASON_TIME: Duration = Duration::from_millis(500);
/// How long a rank waits for the reason of a rank that has given up the operation: that rank may itself
/// first look for its peer's reason.
const GIVEN_UP_TIME: Duration = Duration::from_millis(1500);
/// How long a rank that knows who was absent waits for a first answer of the store before it asks the store for the
/// reason: the store may be silent.
const ANSWER_TIME: Duration = Duration::from_millis(250);
/// How long a rank that has lost a peer checks whether other members are gone too.
const OTHERS_TIME: Duration = Duration::from_millis(150);
/// The largest number of other members that are checked; if the group has more, none is checked.
const MAX_CHECKED: usize = 64;

impl CpuGroup {
    /// Turns a failure into the error for the caller. Unless the ranks are still in step, it stops the
    /// group and publishes the reason to the others.
    ///
    /// # Blocking
    /// Same as [`explain`](Self::explain), then like [`stop_for`](Self::stop_for) if the group is stopped.
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
        self.mesh.note_failure(&error);
        self.stop_for(error.clone());
        error
    }

    /// Makes all pending and later operations fail with this error, on this rank and on the peers that wait
    /// for it. If the group has failed before, the first error is kept, and the peers are released at once.
    ///
    /// A thread publishes the reason, and releases the peers once the store has answered, or after [`NOTE_TIME`].
    ///
    /// # Blocking
    /// Until the peers are released, for at most [`RELEASE_TIME`]: a member that comes once this rank has its error
    /// must be refused, and a store that does not reply must not keep the error back.
    pub(crate) fn stop_for(&self, error: Error) {
        let own_rank = self.mesh.rank();
        if !self.stop.raise(error.clone()) {
            return self.waiting_peers().refuse();
        }
        // A collective that ends on this rank after this point fails, as the note says, unless all ranks share memory.
        let note = Note::new(self.sequencer.give_up(), &error, own_rank);
        let publish = move |store: &dyn Store| note.publish(store, own_rank);
        let (store, peers) = (self.store.clone(), self.waiting_peers());
        let (refused, is_refused) = channel();
        let publish = move || {
            let published = StoreQuery::ask_within(&store, NOTE_TIME, publish);
            if !matches!(published, Some(Ok(()))) {
                tracing::debug!(
                    ?published,
                    "the store may not have this rank's reason for giving up"
                );
            }
            peers.refuse();
            // The send fails if no caller waits any longer.
            let _ = refused.send(());
        };
        let thread = std::thread::Builder::new().name("rcomm/notice".to_owned());
        match thread.spawn(publish) {
            Ok(thread) => {
                let mut notice = self.notice.lock().unwrap_or_else(PoisonError::into_inner);
                *notice = Some(thread);
                drop(notice);
                let _ = is_refused.recv_timeout(RELEASE_TIME);
            }
            Err(error) => {
                tracing::debug!(%error, "the store does not have this rank's reason for giving up");
                self.waiting_peers().refuse();
            }
        }
    }

    /// Waits until the peers have been released: for at most [`NOTE_TIME`] after the group's failure. To the peers, a
    /// process that ends before that could look lost.
    pub(crate) fn finish_notice(&self) {
        let mut notice = self.notice.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = notice.take() {
            // A panic in the thread was already reported where it happened.
            let _ = thread.join();
        }
    }

    /// Releases the ranks that wait for this one in this group.
    pub(crate) fn release_peers(&self) {
        self.waiting_peers().release();
    }

    fn waiting_peers(&self) -> WaitingPeers {
        WaitingPeers {
            mesh: self.mesh.clone(),
            group: self.wire_id,
            sockets: self.sockets.clone(),
            close_guard: self.close_guard.clone(),
            awaited: self.awaited(),
        }
    }

    /// For whom a rank had waited until its time-out, if the group has failed because of that.
    fn awaited(&self) -> Option<Awaited> {
        let failure = self.stop.reason()?.failure(self.mesh.rank());
        (failure.kind == FailureKind::Timeout).then_some(Awaited {
            by: failure.seen_by,
            count: failure.rank_count as usize,
            ranks: failure.ranks,
        })
    }

    /// Returns the error for a failure of an operation. Does not stop the group.
    ///
    /// # Blocking
    /// Same as [`explain_gone`](Self::explain_gone) after `Gone`; for [`GIVEN_UP_TIME`] at most after `GivenUp`, and
    /// [`ANSWER_TIME`] more if ranks were absent.
    pub(crate) fn explain(&self, failure: Failure) -> Error {
        match failure {
            Failure::Interrupted(Interrupted::TimedOut) => Error::new(
                ErrorKind::Timeout,
                "the operation did not end before its deadline",
            ),
            Failure::Late(ranks) => late_error(&ranks, ranks.len()),
            Failure::Interrupted(Interrupted::Stopped(reason)) => reason,
            Failure::Gone(rank, cause) => self.explain_gone(rank, cause),
            Failure::GivenUp { rank, absent } => self.explain_given_up(rank, &absent),
            Failure::Refused {
                peer,
                address,
                kind,
                reason,
            } => {
                let message = format!("{address}, the address of rank {peer}, refused: {reason}");
                Error::new(kind, message).with_rank(peer)
            }
            Failure::Address { peer, text } => Error::new(
                ErrorKind::Store,
                format!(
                    "the store has {text:?} in place of the addresses of rank {peer}: check that no other program \
                     writes to the store"
                ),
            )
            .with_rank(peer),
            Failure::Garbled(rank, message) => {
                Error::new(ErrorKind::Backend, format!("rank {rank} sent {message}"))
                    .with_rank(rank)
            }
            Failure::TooManyCounts { counts, most } => Error::new(
                ErrorKind::Backend,
                format!(
                    "the operation has {counts} counts, but ranks that share memory exchange at most {most}: use a \
                     group of fewer ranks"
                ),
            ),
            Failure::Mismatch(rank, message) => {
                Error::new(ErrorKind::Mismatch, message).with_rank(rank)
            }
            Failure::Store(error) | Failure::Argument(error) => error,
            Failure::Io(error) => Error::io("cannot use a socket or shared memory", error),
            Failure::Closed => Error::new(ErrorKind::Closed, "the world was shut down"),
        }
    }

    /// Returns the error for a channel to `rank` that has ended: the reason from the rank's note if it gave up; else
    /// that its process is gone, or still runs, or that this could not be found out. If this host's own system ended
    /// the channel, the error names this rank instead.
    ///
    /// # Blocking
    /// For at most about [`REASON_TIME`], whether or not the store replies, and [`OTHERS_TIME`] more if the process is
    /// gone.
    pub(crate) fn explain_gone(&self, rank: Rank, cause: Option<io::Error>) -> Error {
        // There is no cause if another operation has read the socket's error before.
        let local = cause.as_ref().filter(|cause| is_abort(cause));
        if local.is_some() || self.mesh.links().is_aborted(rank) {
            let own_rank = self.mesh.rank();
            let message =
                format!("the host of rank {own_rank} aborted its connection to rank {rank}");
            let error = Error::new(ErrorKind::PeerLost, message).with_rank(own_rank);
            return match local.and_then(io::Error::raw_os_error) {
                Some(errno) => error.with_source(io::Error::from_raw_os_error(errno)),
                None => error,
            };
        }
        let stop = Stop::default();
        let deadline = Instant::now() + REASON_TIME;
        let mut policy = WaitPolicy::new(&stop, Deadline::At(deadline), self.wait_mode);
        let (mut is_first_look, mut still_runs) = (true, false);
        loop {
            // The peer is checked before its note is read: a peer that is gone has already written any
            // note that it leaves. On a busy host the check may last until its deadline, so it gets half of the time,
            // and the note the rest.
            let half = deadline.min(Instant::now() + REASON_TIME / 2);
            let mut looking = WaitPolicy::new(&stop, Deadline::At(half), self.wait_mode);
            let found = self.mesh.find_gone(rank, &mut looking);
            still_runs |= matches!(found, Ok(PeerState::Runs));
            let time_left = deadline.saturating_duration_since(Instant::now());
            if let Some(note) = self.note_of(rank, time_left) {
                let reason = note.error(rank, self.mesh.rank());
                // A rank publishes its reason before it closes its channels. So a channel that ended before there was a
                // reason broke by itself. If the reason is that another channel of `rank` broke too, the two channels
                // have `rank` in common.
                if !is_first_look && self.names_running_ranks(&reason, rank, &mut policy) {
                    return with_cause(connection_ended(rank, still_runs), cause);
                }
                return reason;
            }
            is_first_look = false;
            match found {
                Ok(PeerState::Gone) => {
                    let gave_up = self.waited_before_it_left(rank);
                    return gave_up.unwrap_or_else(|| self.lost_error(rank, cause));
                }
                Ok(_) | Err(Failure::Gone(..)) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Ok(_) => return self.ended_error(rank, still_runs, cause),
                Err(Failure::Interrupted(_) | Failure::Late(_)) if Instant::now() < deadline => {}
                Err(Failure::Io(error)) => {
                    let message = format!("cannot find out whether rank {rank} is gone");
                    return Error::io(message, error);
                }
                Err(_) => return self.ended_error(rank, false, cause),
            }
        }
    }

    /// The error of a rank that shares memory with this one and left the group after a time-out; `None` if the memory
    /// does not say so. The store may not have that rank's note, or may not reply.
    fn waited_before_it_left(&self, rank: Rank) -> Option<Error> {
        let Awaited { by, ranks, count } = self.close_guard.as_ref()?.awaited_by(rank)?;
        let note = late_error(&ranks, count).to_note(by);
        Some(Error::from_note(&note, rank, self.mesh.rank()))
    }

    /// The error of a channel to `rank` that ended for no reason that is known.
    fn ended_error(&self, rank: Rank, still_runs: bool, cause: Option<io::Error>) -> Error {
        let gave_up = self.waited_before_it_left(rank);
        gave_up.unwrap_or_else(|| with_cause(connection_ended(rank, still_runs), cause))
    }

    /// Whether the reason that `from` gave is the loss of other ranks, all of which still run.
    fn names_running_ranks(&self, reason: &Error, from: Rank, policy: &mut WaitPolicy<'_>) -> bool {
        let is_loss = reason.failure(self.mesh.rank()).kind == FailureKind::PeerGone;
        is_loss
            && reason
                .ranks()
                .iter()
                .all(|&rank| rank != from && matches!(self.mesh.is_gone(rank, policy), Ok(false)))
    }

    /// Returns the error for the loss of `rank`, which also names the other members that are gone.
    fn lost_error(&self, rank: Rank, cause: Option<io::Error>) -> Error {
        let mut lost = self.other_lost(rank);
        if lost.is_empty() {
            return with_cause(Error::gone(&[rank], ": its connection ended"), cause);
        }
        lost.push(rank);
        lost.sort_unstable();
        Error::gone(&lost, ": their connections ended")
    }

    /// Returns the other members that were found to be gone within [`OTHERS_TIME`]; none if the group has more than
    /// [`MAX_CHECKED`] others. A member that has left a note did not die: it gave up. One for whose note the store
    /// gives no answer is left out too.
    fn other_lost(&self, rank: Rank) -> Vec<Rank> {
        let stop = Stop::default();
        let deadline = Instant::now() + OTHERS_TIME;
        let mut policy = WaitPolicy::new(&stop, Deadline::At(deadline), self.wait_mode);
        let own_rank = self.mesh.rank();
        let others = self.ranks.iter().copied();
        let mut others: Vec<Rank> = others
            .filter(|&other| other != rank && other != own_rank)
            .collect();
        if others.len() > MAX_CHECKED {
            return Vec::new();
        }
        others.retain(|&other| {
            let found = self.mesh.find_gone(other, &mut policy);
            let time_left = deadline.saturating_duration_since(Instant::now());
            matches!(found, Ok(PeerState::Gone))
                && matches!(self.has_note(other, time_left), Some(Ok(false)))
        });
        others
    }

    /// Returns the error for an operation that has failed on all ranks, since `rank` gave up this or an earlier
    /// one. If the reason is not known, the error names the ranks that were `absent`.
    fn explain_given_up(&self, rank: Rank, absent: &[Rank]) -> Error {
        // A silent store must not delay an error that can name the absent ranks without it.
        let is_silent = !absent.is_empty() && self.has_note(rank, ANSWER_TIME).is_none();
        let note = match is_silent {
            true => None,
            false => StoreQuery::ask_within(&self.store, GIVEN_UP_TIME, move |store| {
                Note::wait(store, rank, GIVEN_UP_TIME)
            }),
        };
        match note {
            Some(Ok(note)) => note.error(rank, self.mesh.rank()),
            Some(Err(_)) | None if absent.is_empty() => {
                let message = format!("rank {rank} gave up this operation or one before it");
                Error::new(ErrorKind::Aborted, message).with_rank(rank)
            }
            Some(Err(_)) | None => {
                let absent_text = text::ranks(absent, MAX_RANKS);
                let message =
                    format!("rank {rank} gave up this operation: {absent_text} had not arrived");
                Error::new(ErrorKind::Aborted, message).with_ranks(absent)
            }
        }
    }

    /// Whether the store has this rank's note; `None` if it does not answer within this time.
    fn has_note(&self, rank: Rank, limit: Duration) -> Option<rcomm_core::Result<bool>> {
        let look = move |store: &dyn Store| Ok(Note::look(store, rank)?.is_some());
        StoreQuery::ask_within(&self.store, limit, look)
    }

    /// Returns a rank's reason for giving up, if the store has it within this time.
    pub(super) fn note_of(&self, rank: Rank, limit: Duration) -> Option<Note> {
        let look = move |store: &dyn Store| Note::look(store, rank);
        StoreQuery::ask_within(&self.store, limit, look)?.ok()?
    }
}

/// The error of a rank that waited for this many others, of which `ranks` are the first, until its deadline.
fn late_error(ranks: &[Rank], count: usize) -> Error {
    let more = match count.saturating_sub(ranks.len()) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let message = format!(
        "waited for {}{more} until the deadline",
        text::ranks(ranks, MAX_RANKS)
    );
    Error::new(ErrorKind::Timeout, message).with_ranks(ranks)
}

/// The ranks that wait for this one in a group.
struct WaitingPeers {
    mesh: Arc<Mesh>,
    group: u64,
    sockets: Sockets,
    close_guard: Option<Arc<CloseGuard>>,
    awaited: Option<Awaited>,
}

impl WaitingPeers {
    /// Releases the peers, and refuses the channels of peers that come later.
    fn refuse(&self) {
        self.mesh.give_up(self.group);
        self.release();
    }

    /// Ends the waits of the peers: shuts the group's sockets down, and marks the shared memory.
    fn release(&self) {
        cut(&self.sockets);
        if let Some(close_guard) = &self.close_guard {
            close_guard.leave(self.awaited.as_ref());
        }
    }
}

/// The error of a connection that ended. It does not say which end closed it: a read that follows a broken connection's
/// error sees the same end as one that follows the peer's closing.
fn connection_ended(rank: Rank, still_runs: bool) -> Error {
    let addition = match still_runs {
        true => ", but its process still runs",
        false => "",
    };
    let message = format!("the connection to rank {rank} ended{addition}");
    Error::new(ErrorKind::PeerLost, message).with_rank(rank)
}

/// Adds the operating system's error, if there is one.
fn with_cause(error: Error, cause: Option<io::Error>) -> Error {
    match cause {
        Some(cause) => error.with_source(cause),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_are_not_listed_are_counted() {
        let all = late_error(&[1, 2], 2).to_string();
        assert_eq!(all, "waited for ranks 1, 2 until the deadline");
        let first = late_error(&[1, 2], 40).to_string();
        assert_eq!(
            first,
            "waited for ranks 1, 2 and 38 more until the deadline"
        );
    }
}

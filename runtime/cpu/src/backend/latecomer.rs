//! Makes an operation of a late rank fail: one that begins after another member has given up the group, or ends after
//! one has given up that operation.
//!
//! Data that those members sent before may be waiting in sockets and in shared memory, and there may be space for what
//! this rank sends. Without this check such an operation could complete on the late rank alone. Collectives in shared
//! memory need no check, since their ranks decide each phase together. In all other operations, a member that has given
//! up has cut its connections or marked the shared memory, after it has tried to leave its reason in the store.
//!
//! A process that a signal has stopped inside a collective may also find all data that it needs, and complete the
//! collective alone. So a collective that lasted [`PROMPT`] or longer is checked once more before it returns `Ok`.

use super::group::CpuGroup;
use super::note::find_rank_that_gave_up;
use crate::wait::Failure;
use rcomm_core::backend::Call;
use rcomm_core::store::{Store, StoreQuery};
use rcomm_core::{Deadline, Op, Result};
use rcomm_recorder::model::{Pattern, Peer, Rank};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A rank that begins an operation this soon after the end of a short one, or ends it this soon after it has begun, is
/// not late: its peers wait longer than that. So it does not poll its sockets, which would cost a system call.
const PROMPT: Duration = Duration::from_millis(1);
/// After a collective that has lasted this long, or past its deadline, this rank asks the store whether a member to
/// which it has no connection has given the collective up. The request costs little compared with this time.
const LONG: Duration = Duration::from_secs(1);
/// How long a rank that knows of no closed connection waits for the store after such a collective.
const LOOK_TIME: Duration = Duration::from_millis(100);
/// How long a rank that has found a closed connection waits for the store to say whether that member gave up.
const REASON_TIME: Duration = Duration::from_millis(500);

/// When this rank was last seen to be in time, and which members are known to have left.
pub(crate) struct Punctuality {
    /// Where the times below count from.
    origin: Instant,
    /// When this rank was last seen in time, ns since `origin`: the end of the last operation. If that lasted
    /// [`PROMPT`] or longer, its beginning, so that the next operation is checked even if it follows at once.
    last_in_time: AtomicU64,
    /// Members that have closed their connections and of which the store gave no note in time.
    left: Mutex<Vec<Rank>>,
}

impl Default for Punctuality {
    fn default() -> Self {
        Self {
            origin: Instant::now(),
            last_in_time: AtomicU64::new(0),
            left: Mutex::default(),
        }
    }
}

impl Punctuality {
    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Notes that an operation ends; returns how long it lasted.
    fn end(&self, began: u64) -> Duration {
        let now = self.now();
        let lasted = Duration::from_nanos(now.saturating_sub(began));
        let seen = if lasted < PROMPT { now } else { began };
        self.last_in_time.store(seen, Ordering::Relaxed);
        lasted
    }

    /// Whether this rank may begin an operation late: it ended no short one within [`PROMPT`] before `now`.
    fn may_be_late(&self, now: u64) -> bool {
        let idle = now.saturating_sub(self.last_in_time.load(Ordering::Relaxed));
        idle >= PROMPT.as_nanos() as u64
    }
}

impl CpuGroup {
    /// Returns the time, in ns since the group was made, for [`end_message`](Self::end_message); 0 in a group that
    /// needs no check.
    pub(super) fn begin_message(&self) -> u64 {
        match self.ends_together {
            true => 0,
            false => self.punctuality.now(),
        }
    }

    /// Notes that a send or a receive has ended.
    pub(super) fn end_message(&self, began: u64) {
        if !self.ends_together {
            self.punctuality.end(began);
        }
    }

    /// Fails if a member has left the group or given it up: a collective needs all members. Looks for such a member
    /// only if this rank may be late. Returns the time, in ns since the group was made, for
    /// [`end_collective`](Self::end_collective); 0 in a group that needs no check.
    ///
    /// # Blocking
    /// Same as [`fail`](Self::fail), after such a member was found.
    #[inline]
    pub(super) fn refuse_late_collective(&self) -> Result<u64> {
        if self.ends_together {
            return Ok(0);
        }
        let now = self.punctuality.now();
        if self.punctuality.may_be_late(now)
            && let Some(&rank) = self.closed_members().first()
        {
            return Err(self.fail(Failure::Gone(rank, None)));
        }
        Ok(now)
    }

    /// Notes that this rank's part of a collective is done. Fails if a member has given it up since.
    ///
    /// # Blocking
    /// Not at all after a collective shorter than [`PROMPT`]. After others, while the store is asked: for at most
    /// [`REASON_TIME`] if a connection of the group is closed, for at most [`LOOK_TIME`] if the collective lasted
    /// [`LONG`] or ended past its deadline, otherwise not at all. Then like [`fail`](Self::fail), if a member has given
    /// up.
    #[inline]
    pub(super) fn end_collective(&self, call: &Call, began: u64) -> Result<()> {
        if self.ends_together {
            return Ok(());
        }
        match self.punctuality.end(began) {
            lasted if lasted < PROMPT => Ok(()),
            lasted => self.refuse_given_up(call, lasted),
        }
    }

    /// Fails if a member has given up this collective. A member that gave up a later collective had ended this one
    /// before.
    #[cold]
    fn refuse_given_up(&self, call: &Call, lasted: Duration) -> Result<()> {
        let closed = self.closed_members();
        let is_past_deadline = match call.deadline {
            Deadline::In(time) => lasted >= time,
            Deadline::At(end) => Instant::now() >= end,
        };
        let limit = match closed.is_empty() {
            false => REASON_TIME,
            true if lasted >= LONG || is_past_deadline => LOOK_TIME,
            true => return Ok(()),
        };
        let turn = call.turn;
        let look = move |store: &dyn Store| find_rank_that_gave_up(store, turn, &closed);
        match StoreQuery::ask_within(&self.store, limit, look) {
            Some(Ok(Some(rank))) => Err(self.fail(Failure::Gone(rank, None))),
            // Members that have left cleanly have closed their connections too, and the process that served the store
            // may have been one of them.
            _ => Ok(()),
        }
    }

    /// Fails if a member with which this operation exchanges messages has given up the group, or if one to which it
    /// sends has left. What a member sent before it left cleanly may still be received.
    ///
    /// # Blocking
    /// Same as [`fail`](Self::fail), after such a member was found. While the store is asked, for at most
    /// [`REASON_TIME`], if a member from which this operation receives has closed its connection.
    #[inline]
    pub(super) fn refuse_late_message(&self, op: &Op<'_>) -> Result<()> {
        if let Op::Coalesced(ops) = op {
            return ops.iter().try_for_each(|op| self.refuse_late_message(op));
        }
        let is_send = op.op_type().pattern() == Pattern::Send;
        match op.peer() {
            Peer::Rank(peer) => self.refuse_if_left(peer as usize, is_send),
            Peer::Any => {
                let mut others = (0..self.ranks.len()).filter(|&peer| peer != self.rank);
                others.try_for_each(|peer| self.refuse_if_left(peer, is_send))
            }
            Peer::None => Ok(()),
        }
    }

    /// Fails if this member has given up the group, or if it has left and the operation sends to it.
    #[inline]
    fn refuse_if_left(&self, peer: usize, is_send: bool) -> Result<()> {
        let has_closed = match (self.p2p.place_in_memory(peer), &self.close_guard) {
            (Some(place), Some(guard)) => guard.has_left(place),
            _ => {
                self.punctuality.may_be_late(self.punctuality.now())
                    && self.closed_members().contains(&self.ranks[peer])
            }
        };
        if has_closed {
            self.refuse_closed(self.ranks[peer], is_send)
        } else {
            Ok(())
        }
    }

    /// The members that have closed a connection of the group, including connections that this rank has not used yet.
    fn closed_members(&self) -> Vec<Rank> {
        let sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = closed(sockets.iter().map(|(rank, socket)| (*rank, &**socket)));
        drop(sockets);
        found.extend(
            self.mesh
                .with_arrived(self.wire_id, |arrived| closed(arrived)),
        );
        found
    }

    /// Fails for a member that has closed its connection or marked the shared memory: for a send always, for a receive
    /// only if the store has its note. Remembers a member without one. Blocks for [`REASON_TIME`] at most while the
    /// store is asked, then like [`fail`](Self::fail) if it fails.
    #[cold]
    fn refuse_closed(&self, rank: Rank, is_send: bool) -> Result<()> {
        let lock = || {
            self.punctuality
                .left
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        if !is_send {
            if lock().contains(&rank) {
                return Ok(());
            }
            if self.note_of(rank, REASON_TIME).is_none() {
                lock().push(rank);
                return Ok(());
            }
        }
        Err(self.fail(Failure::Gone(rank, None)))
    }
}

/// Which of these ranks have closed their socket, or lost it.
fn closed<'s>(sockets: impl Iterator<Item = (Rank, &'s TcpStream)>) -> Vec<Rank> {
    let (ranks, mut fds): (Vec<Rank>, Vec<PollFd<'_>>) = sockets
        .map(|(rank, socket)| (rank, PollFd::new(socket, PollFlags::RDHUP)))
        .unzip();
    let no_wait = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    if !matches!(poll(&mut fds, Some(&no_wait)), Ok(1..)) {
        return Vec::new();
    }
    let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let closed = fds.iter().zip(ranks);
    let closed = closed.filter(|(fd, _)| fd.revents().intersects(ends));
    closed.map(|(_, rank)| rank).collect()
}

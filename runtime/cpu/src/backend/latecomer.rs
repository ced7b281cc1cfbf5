//! Refuses the operation of a rank that comes after other members have given up the group.
//!
//! What those ranks sent before may be waiting in sockets and in shared memory, and there may be room to send to them:
//! without this check such an operation could complete on the late rank alone. Collectives in shared memory need no
//! check, since their ranks decide each phase together. In all other operations, a member that has given up has cut
//! its connections, or marked the shared memory, after it had left its reason in the store.

use super::group::CpuGroup;
use crate::wait::Failure;
use rcomm_core::{Op, Result};
use rcomm_recorder::model::{Pattern, Peer, Rank};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A rank that begins an operation this soon after its last one is not late: its peers wait longer than that. So the
/// sockets need not be looked at, which costs a system call.
const PROMPT: Duration = Duration::from_millis(1);
/// How long a rank waits for the store, which has the reason of a member that gave up.
const REASON_TIME: Duration = Duration::from_millis(500);

/// When this rank's last operation in the group ended, and which members are known to have left.
pub(crate) struct Punctuality {
    began: Instant,
    /// When the last operation ended, ns since `began`.
    ended: AtomicU64,
    /// Members that have closed their connections without giving up.
    left: Mutex<Vec<Rank>>,
}

impl Default for Punctuality {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            ended: AtomicU64::new(0),
            left: Mutex::default(),
        }
    }
}

impl Punctuality {
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn may_be_late(&self) -> bool {
        let idle = self
            .now()
            .saturating_sub(self.ended.load(Ordering::Relaxed));
        idle >= PROMPT.as_nanos() as u64
    }
}

impl CpuGroup {
    /// Notes that an operation has ended.
    pub(super) fn note_end(&self) {
        if !self.is_in_memory {
            self.punctuality
                .ended
                .store(self.punctuality.now(), Ordering::Relaxed);
        }
    }

    /// Fails if a member that the collective needs has left the group or given it up: it needs all of them.
    ///
    /// # Blocking
    /// As [`fail`](Self::fail), after such a member was found.
    #[inline]
    pub(super) fn refuse_late_collective(&self) -> Result<()> {
        if self.is_in_memory || !self.punctuality.may_be_late() {
            return Ok(());
        }
        match self.closed_members().first() {
            Some(&rank) => Err(self.fail(Failure::Gone(rank, None))),
            None => Ok(()),
        }
    }

    /// Fails if a member has given up the group with which this operation exchanges messages, or if one that it sends
    /// to has left. What a member sent before it left in order may still be received.
    ///
    /// # Blocking
    /// As [`fail`](Self::fail), after such a member was found; for the store's answer if one has left in order.
    #[inline]
    pub(super) fn refuse_late_message(&self, op: &Op<'_>) -> Result<()> {
        if let Op::Coalesced(ops) = op {
            return ops.iter().try_for_each(|op| self.refuse_late_message(op));
        }
        let sends = op.op_type().pattern() == Pattern::Send;
        match op.peer() {
            Peer::Rank(peer) => self.refuse_without(peer as usize, sends),
            Peer::Any => {
                let mut others = (0..self.ranks.len()).filter(|&at| at != self.rank);
                others.try_for_each(|at| self.refuse_without(at, sends))
            }
            Peer::None => Ok(()),
        }
    }

    #[inline]
    fn refuse_without(&self, at: usize, sends: bool) -> Result<()> {
        let has_closed = match (self.p2p.place_in_memory(at), &self.close_guard) {
            (Some(place), Some(guard)) => guard.has_left(place),
            _ => self.punctuality.may_be_late() && self.closed_members().contains(&self.ranks[at]),
        };
        if has_closed {
            self.refuse_closed(self.ranks[at], sends)
        } else {
            Ok(())
        }
    }

    /// The members that have closed a connection of the group, including those that this rank has not used yet.
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

    #[cold]
    fn refuse_closed(&self, rank: Rank, sends: bool) -> Result<()> {
        let lock = || {
            self.punctuality
                .left
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        if !sends {
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
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    if !matches!(poll(&mut fds, Some(&now)), Ok(1..)) {
        return Vec::new();
    }
    let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let closed = fds.iter().zip(ranks);
    let closed = closed.filter(|(fd, _)| fd.revents().intersects(ends));
    closed.map(|(_, rank)| rank).collect()
}

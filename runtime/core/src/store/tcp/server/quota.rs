//! Limits on the time that clients take, on unfinished requests, and on connections that have not proved the
//! secret.

use super::connection::{Admission, ClientConnection};
use super::state::ConnectionId;
use crate::store::limit::after;
use crate::store::tcp::access::StoreLimits;
use crate::store::tcp::protocol::Violation;
use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How long a client that was refused may take to read the reason.
const REASON_TIME: Duration = Duration::from_secs(2);

/// Which deadline of a connection has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// The client has not proved the secret (of an open store: not sent VALIDATE), or it was refused.
    Proof,
    /// The client has not finished its request.
    Request,
}

/// The connections under a deadline, and what is counted toward the limits.
pub(super) struct Quota {
    pub(super) limits: StoreLimits,
    /// Connections that may not use the store yet, or may no longer, by the moment when they are closed.
    proofs: BTreeSet<(Instant, ConnectionId)>,
    /// Connections with a request that has not arrived in full, by the moment when they are closed.
    requests: BTreeSet<(Instant, ConnectionId)>,
    unfinished_bytes: usize,
    /// How many of `requests` each host has.
    per_host: HashMap<Option<IpAddr>, usize>,
}

impl Quota {
    pub(super) fn new(limits: StoreLimits) -> Self {
        Self {
            limits,
            proofs: BTreeSet::new(),
            requests: BTreeSet::new(),
            unfinished_bytes: 0,
            per_host: HashMap::new(),
        }
    }

    /// Adds a new connection. If too many connections may not use the store, returns the one whose deadline is first,
    /// for the caller to close.
    pub(super) fn accepted(
        &mut self,
        id: ConnectionId,
        new: &mut ClientConnection,
    ) -> Option<ConnectionId> {
        let oldest = self.proofs.first().map(|(_, oldest)| *oldest);
        let is_full = self.proofs.len() >= self.limits.unproved;
        self.set_deadline(id, new, self.limits.proof_time);
        oldest.filter(|_| is_full)
    }

    /// Notes that the connection may use the store from now on.
    pub(super) fn mark_served(&mut self, id: ConnectionId, connection: &mut ClientConnection) {
        if let Some(deadline) = connection.deadline.take() {
            self.proofs.remove(&(deadline, id));
        }
    }

    /// Notes that the connection was refused: it has a short time to read the reason.
    pub(super) fn mark_refused(&mut self, id: ConnectionId, connection: &mut ClientConnection) {
        self.forget(id, connection);
        self.set_deadline(id, connection, REASON_TIME);
    }

    /// Gives a connection that may not use the store this much time.
    fn set_deadline(
        &mut self,
        id: ConnectionId,
        connection: &mut ClientConnection,
        time: Duration,
    ) {
        let deadline = after(time);
        connection.deadline = Some(deadline);
        self.proofs.insert((deadline, id));
    }

    /// Updates the counters from the connection's inbox. `has_finished` is whether a request was finished since the
    /// last call. Fails if a limit is exceeded.
    pub(super) fn count(
        &mut self,
        id: ConnectionId,
        connection: &mut ClientConnection,
        has_finished: bool,
    ) -> Result<(), Violation> {
        let held = connection.inbox.len();
        if held == 0 && connection.counted == 0 {
            return Ok(());
        }
        self.unfinished_bytes = self.unfinished_bytes - connection.counted + held;
        connection.counted = held;
        if let Admission::Served { .. } = connection.admission {
            let is_unfinished = held > 0 && !connection.paused;
            if connection.deadline.is_some() && (has_finished || !is_unfinished) {
                self.end_deadline(id, connection);
            }
            if is_unfinished && connection.deadline.is_none() {
                let count = self.per_host.entry(connection.host).or_default();
                if *count >= self.limits.unfinished_per_host {
                    return Err(Violation::TooManyUnfinished(*count));
                }
                *count += 1;
                let deadline = after(self.limits.request_time);
                connection.deadline = Some(deadline);
                self.requests.insert((deadline, id));
            }
        }
        let limit = self.limits.unfinished_bytes;
        match self.unfinished_bytes > limit {
            true => Err(Violation::TooManyUnfinishedBytes(
                self.unfinished_bytes,
                limit,
            )),
            false => Ok(()),
        }
    }

    /// Ends the deadline that the connection has, if any.
    fn end_deadline(&mut self, id: ConnectionId, connection: &mut ClientConnection) {
        let Some(deadline) = connection.deadline.take() else {
            return;
        };
        if self.requests.remove(&(deadline, id))
            && let Some(count) = self.per_host.get_mut(&connection.host)
        {
            *count -= 1;
            if *count == 0 {
                self.per_host.remove(&connection.host);
            }
        }
        self.proofs.remove(&(deadline, id));
    }

    /// Removes the connection from all limits.
    pub(super) fn forget(&mut self, id: ConnectionId, connection: &mut ClientConnection) {
        self.end_deadline(id, connection);
        self.unfinished_bytes -= connection.counted;
        connection.counted = 0;
    }

    /// The earliest deadline of all connections.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let first = |set: &BTreeSet<(Instant, ConnectionId)>| set.first().map(|(at, _)| *at);
        [first(&self.proofs), first(&self.requests)]
            .into_iter()
            .flatten()
            .min()
    }

    /// A connection whose deadline has passed, and why. It stays overdue until it is refused or forgotten.
    pub(super) fn overdue(&self, now: Instant) -> Option<(ConnectionId, Overdue)> {
        let first = |set: &BTreeSet<(Instant, ConnectionId)>, missed| {
            let (_, id) = set.first().filter(|(at, _)| *at <= now)?;
            Some((*id, missed))
        };
        first(&self.proofs, Overdue::Proof).or_else(|| first(&self.requests, Overdue::Request))
    }
}

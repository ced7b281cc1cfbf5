//! The server's one thread, which accepts, reads, replies and wakes waiters.

use super::connection::{Admission, Buffers, ClientConnection, LinkState, named};
use super::open_files::raise_descriptor_limit;
use super::quota::{Overdue, Quota};
use super::state::{ConnectionId, State};
use crate::store::tcp::access::{StoreAccess, StoreLimits};
use crate::store::tcp::protocol::{MAGIC, OpCode, Request, STOP_WAITING, Violation};
use crate::store::tcp::spin::Spin;
use rcomm_recorder::model::text;
use rcomm_recorder::publish::{STORE_REFUSAL, Secret, StoreChallenge, Tls, TlsError};
use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, acceptfrom_with, shutdown, sockopt};
use slab::Slab;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most bytes that one read takes.
const READ: usize = 256 << 10;
/// Above this many bytes of unread replies, a connection's requests wait.
const BACK_PRESSURE: usize = 1 << 20;
/// The most connections that are accepted before other events are handled.
const ACCEPTS: usize = 128;
/// How long to wait before accepting is tried again, after file descriptors or memory ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The epoll token of the stop signal. The tokens of connections count up from 0.
const STOP: u64 = u64::MAX;
/// The token of the first listener; further listeners count down from it.
const LISTENER: u64 = STOP - 1;

/// The server's sockets and data, owned by its thread.
pub(super) struct EventLoop {
    epoll: OwnedFd,
    listeners: Vec<OwnedFd>,
    /// When to accept again, after file descriptors or memory ran out.
    listen_at: Option<Instant>,
    connections: Slab<ClientConnection>,
    state: State,
    /// The key that clients must prove that they know; `None` in an open store.
    key: Option<Secret>,
    /// The identity of this process, if all clients must use TLS.
    tls: Option<Tls>,
    quota: Quota,
    buffers: Buffers,
    scratch: Box<[u8]>,
    spin: Spin,
    /// Connections, other than the one being served, whose wait a request has ended and which get
    /// [`STOP_WAITING`].
    woken: Vec<ConnectionId>,
}

impl EventLoop {
    pub(super) fn new(
        listeners: Vec<OwnedFd>,
        stop: Arc<OwnedFd>,
        access: &StoreAccess,
        limits: StoreLimits,
    ) -> rustix::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(STOP);
        epoll::add(&epoll, &*stop, data, epoll::EventFlags::IN)?;
        let this = Self {
            epoll,
            listeners,
            listen_at: None,
            connections: Slab::new(),
            state: State::new(limits.stored_bytes, limits.stored_keys),
            key: access.secret().map(Secret::store_key),
            tls: access.tls().cloned(),
            quota: Quota::new(limits),
            buffers: Buffers::default(),
            scratch: vec![0; READ].into_boxed_slice(),
            spin: Spin::initially_sleeping(),
            woken: Vec::new(),
        };
        this.listen()?;
        Ok(this)
    }

    /// Has epoll report new connections.
    fn listen(&self) -> rustix::io::Result<()> {
        for (index, listener) in self.listeners.iter().enumerate() {
            let data = epoll::EventData::new_u64(LISTENER - index as u64);
            epoll::add(&self.epoll, listener, data, epoll::EventFlags::IN)?;
        }
        Ok(())
    }

    /// Serves until the stop signal.
    pub(super) fn run(mut self) {
        let none = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(STOP),
        };
        let mut events = [none; 256];
        loop {
            let ready = match self.wait(&mut events) {
                Ok(ready) => ready,
                Err(Errno::INTR) => 0,
                Err(error) => {
                    tracing::error!(%error, "the store server stops: epoll failed");
                    return;
                }
            };
            for event in &events[..ready] {
                let (token, flags) = (event.data.u64(), event.flags);
                if token == STOP {
                    return;
                }
                if token > LISTENER - self.listeners.len() as u64 {
                    self.accept((LISTENER - token) as usize);
                } else {
                    self.serve(token as ConnectionId, flags);
                }
            }
            self.close_overdue();
            if self.listen_at.is_some_and(|at| at <= Instant::now()) {
                self.listen_at = None;
                if let Err(error) = self.listen() {
                    tracing::error!(%error, "the store server cannot accept more connections");
                }
            }
        }
    }

    /// Waits for events, until the first deadline at the latest; returns how many there are.
    fn wait(&mut self, events: &mut [epoll::Event; 256]) -> rustix::io::Result<usize> {
        const NOW: Timespec = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let ready = epoll::wait(&self.epoll, &mut events[..], Some(&NOW))?;
        if ready > 0 {
            return Ok(ready);
        }
        let idle_since = Instant::now();
        if self.spin.should_poll() {
            while idle_since.elapsed() < Spin::LONGEST {
                std::thread::yield_now();
                let ready = epoll::wait(&self.epoll, &mut events[..], Some(&NOW))?;
                if ready > 0 {
                    self.spin.polled(idle_since.elapsed());
                    return Ok(ready);
                }
            }
            self.spin.poll_failed();
        }
        let next = [self.listen_at, self.quota.next_deadline()]
            .into_iter()
            .flatten()
            .min();
        let limit = next.and_then(|at| at.saturating_duration_since(idle_since).try_into().ok());
        let ready = epoll::wait(&self.epoll, &mut events[..], limit.as_ref())?;
        self.spin.slept(idle_since.elapsed());
        Ok(ready)
    }

    /// Accepts new connections, [`ACCEPTS`] at most.
    fn accept(&mut self, listener: usize) {
        for _ in 0..ACCEPTS {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let (socket, peer) = match acceptfrom_with(&self.listeners[listener], flags) {
                Ok(accepted) => accepted,
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE) if raise_descriptor_limit() => continue,
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)) => {
                    self.pause_accepting(error);
                    return;
                }
                // An error of this connection alone, such as a peer that has already closed it.
                Err(_) => continue,
            };
            let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
            if self.connections.len() >= self.quota.limits.connections {
                let limit = self.quota.limits.connections;
                tracing::warn!(
                    peer = named(peer),
                    limit,
                    "the store server refuses a connection: its limit of connections is reached"
                );
                continue;
            }
            // Without this option small replies are late; nothing else depends on it.
            let _ = sockopt::set_tcp_nodelay(&socket, true);
            let slot = self.connections.vacant_entry();
            let data = epoll::EventData::new_u64(slot.key() as u64);
            match epoll::add(&self.epoll, &socket, data, epoll::EventFlags::IN) {
                Ok(()) => {
                    let host = peer.map(|address| address.ip().to_canonical());
                    let id = slot.key();
                    let tls = self.tls.as_ref().map(Tls::answer);
                    let new = slot.insert(ClientConnection::new(socket, host, tls));
                    if let Some(oldest) = self.quota.accepted(id, new) {
                        self.close(oldest);
                    }
                }
                Err(error) => tracing::warn!(%error, "the store server drops a new connection"),
            }
        }
    }

    /// Stops accepting connections for [`ACCEPT_PAUSE`].
    fn pause_accepting(&mut self, error: Errno) {
        tracing::warn!(
            %error,
            connections = self.connections.len(),
            "the store server cannot accept a connection; it tries again every {}. \
             If the limit of open files is reached, raise it (ulimit -n)",
            text::duration(ACCEPT_PAUSE)
        );
        for listener in &self.listeners {
            let _ = epoll::delete(&self.epoll, listener);
        }
        self.listen_at = Some(Instant::now() + ACCEPT_PAUSE);
    }

    /// Handles an event of a connection, then the connections whose waits it has ended.
    fn serve(&mut self, id: ConnectionId, flags: epoll::EventFlags) {
        // An event may be left over from a connection that was closed a moment ago.
        if !self.connections.contains(id) {
            return;
        }
        // All events but writability (bytes, the end, an error) show in a read.
        let must_read = flags.difference(epoll::EventFlags::OUT) != epoll::EventFlags::empty();
        let mut link = match must_read {
            true => self.read(id),
            false => LinkState::Open,
        };
        if link == LinkState::Open {
            link = self.settle(id);
        }
        if link == LinkState::Lost {
            self.close(id);
        }
        // The wait that ended first is answered first. Serving a connection may end further waits.
        let mut next = 0;
        while let Some(&woken) = self.woken.get(next) {
            next += 1;
            if let Some(connection) = self.connections.get_mut(woken) {
                connection.outbox.push(STOP_WAITING);
            }
            if self.settle(woken) == LinkState::Lost {
                self.close(woken);
            }
        }
        self.woken.clear();
    }

    /// Reads what has arrived, and answers the requests that are complete.
    fn read(&mut self, id: ConnectionId) -> LinkState {
        let Some(connection) = self.connections.get_mut(id) else {
            return LinkState::Open;
        };
        let read = match &mut connection.tls {
            Some(session) => session.serve(&connection.socket, &mut self.scratch),
            None => rustix::io::read(&connection.socket, &mut self.scratch[..]).map_err(Into::into),
        };
        let count = match read {
            Ok(0) => return LinkState::Lost,
            Ok(count) => count,
            Err(error) => return self.handle_read_error(id, &error),
        };
        if let Admission::Refused = connection.admission {
            return LinkState::Open;
        }
        if !connection.inbox.is_empty() {
            let mut bytes = std::mem::take(&mut connection.inbox);
            bytes.extend_from_slice(&self.scratch[..count]);
            return self.answer(id, bytes);
        }
        // The common case: whole requests, served from the buffer they were read into.
        let scratch = std::mem::take(&mut self.scratch);
        let used = self.answer_requests(id, &scratch[..count]);
        let link = match (used, self.connections.get_mut(id)) {
            (Ok(used), Some(connection)) => {
                connection.inbox.extend_from_slice(&scratch[used..count]);
                self.count(id, used > 0)
            }
            _ => LinkState::Lost,
        };
        self.scratch = scratch;
        link
    }

    /// Answers the complete requests in `bytes` and keeps the rest as the connection's inbox.
    fn answer(&mut self, id: ConnectionId, mut bytes: Vec<u8>) -> LinkState {
        match (
            self.answer_requests(id, &bytes),
            self.connections.get_mut(id),
        ) {
            (Ok(used), Some(connection)) => {
                if used < bytes.len() {
                    bytes.drain(..used);
                    if bytes.len() < bytes.capacity() / 4 {
                        bytes.shrink_to_fit();
                    }
                    connection.inbox = bytes;
                }
                self.count(id, used > 0)
            }
            _ => LinkState::Lost,
        }
    }

    /// Updates the counters of the bytes and requests that the connection holds. `has_finished` is whether a request
    /// was finished since the last call.
    fn count(&mut self, id: ConnectionId, has_finished: bool) -> LinkState {
        let Some(connection) = self.connections.get_mut(id) else {
            return LinkState::Open;
        };
        match self.quota.count(id, connection, has_finished) {
            Ok(()) => LinkState::Open,
            Err(violation) => self.refuse(id, violation),
        }
    }

    /// Answers the complete requests, until too many replies are unread; returns how many bytes they took. A client
    /// that breaks a rule is refused. Everything that it sent then counts as taken, or the violation is returned if the
    /// connection must be closed at once.
    fn answer_requests(&mut self, id: ConnectionId, bytes: &[u8]) -> Result<usize, Violation> {
        let connection = &mut self.connections[id];
        if connection.outbox.capacity() == 0 {
            connection.outbox = self.buffers.take();
        }
        let mut used = 0;
        let answered = loop {
            let connection = &mut self.connections[id];
            if connection.unsent() > BACK_PRESSURE {
                connection.paused = true;
                break self.check_unread();
            }
            if let Some(&code) = bytes.get(used)
                && !self.may_begin(id, code)
            {
                break Err(self.not_admitted(code));
            }
            let connection = &mut self.connections[id];
            let length = match connection.scanner.advance(&bytes[used..]) {
                Ok(Some(length)) => length,
                Ok(None) => break Ok(()),
                Err(violation) => break Err(violation),
            };
            let frame = &bytes[used..used + length];
            used += length;
            if !matches!(connection.admission, Admission::Served { .. }) {
                if let Err(violation) = self.admit(id, frame) {
                    break Err(violation);
                }
                continue;
            }
            let Some(request) = Request::decode(frame) else {
                break Err(Violation::UnknownOpCode(frame[0]));
            };
            if matches!((&request, &self.key), (Request::Hello(_), None)) {
                break Err(Violation::NoSecretHere);
            }
            if let Err(violation) = self.state.apply(id, request, &mut connection.outbox) {
                break Err(violation);
            }
            for woken in self.state.take_woken() {
                // A connection may wake itself; its own bytes keep their order.
                if woken == id {
                    connection.outbox.push(STOP_WAITING);
                } else {
                    self.woken.push(woken);
                }
            }
        };
        match answered {
            Ok(()) => Ok(used),
            Err(violation) => match self.refuse(id, violation) {
                LinkState::Open => Ok(bytes.len()),
                LinkState::Lost => Err(violation),
            },
        }
    }

    /// Whether a request of this kind may come now.
    fn may_begin(&self, id: ConnectionId, code: u8) -> bool {
        let op = OpCode::of(code);
        match self.connections[id].admission {
            Admission::New => op == Some(OpCode::Validate),
            Admission::Validated => op == Some(OpCode::Hello),
            Admission::Challenged(_) => op == Some(OpCode::Proof),
            Admission::Served { .. } | Admission::Refused => true,
        }
    }

    /// The violation of a client whose request began with this byte before it may use the store.
    fn not_admitted(&self, code: u8) -> Violation {
        /// The first byte of TLS, which no request has.
        const TLS_HANDSHAKE: u8 = 0x16;
        match self.key {
            _ if code == TLS_HANDSHAKE => Violation::NoTlsHere,
            Some(_) => Violation::NotProved,
            None => Violation::NotValidated,
        }
    }

    /// Handles a failed read.
    fn handle_read_error(&mut self, id: ConnectionId, error: &io::Error) -> LinkState {
        if matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
        ) {
            return LinkState::Open;
        }
        match (TlsError::of(error), self.connections.get_mut(id)) {
            (Some(TlsError::Plain), Some(connection)) => {
                connection.tls = None;
                self.refuse(id, Violation::NeedsTls)
            }
            (Some(why), Some(connection)) if !matches!(why, TlsError::Closed) => {
                let peer = named(connection.host);
                tracing::warn!(
                    peer,
                    "the store server closes a connection whose TLS has failed: {why}"
                );
                // The client has some time to read the alert of TLS, as others have for the reason of a refusal.
                connection.tls = None;
                connection.admission = Admission::Refused;
                connection.inbox = Vec::new();
                connection.outbox = Vec::new();
                self.state.forget(id);
                self.quota.mark_refused(id, connection);
                self.state.count_refused(&peer);
                LinkState::Open
            }
            _ => LinkState::Lost,
        }
    }

    /// Handles a request of a client that is not served yet: VALIDATE, HELLO or PROOF.
    fn admit(&mut self, id: ConnectionId, frame: &[u8]) -> Result<(), Violation> {
        let connection = &mut self.connections[id];
        let request = Request::decode(frame);
        connection.admission = match (&connection.admission, request, &self.key) {
            (Admission::New, Some(Request::Validate(MAGIC)), None) => {
                Admission::Served { proved: false }
            }
            (Admission::New, Some(Request::Validate(MAGIC)), Some(_)) => Admission::Validated,
            (Admission::New, Some(Request::Validate(magic)), _) => {
                return Err(Violation::WrongMagic(magic));
            }
            (Admission::Validated, Some(Request::Hello(nonce)), Some(key)) => {
                let made = StoreChallenge::new(&connection.bound_key(key), &nonce);
                let (challenge, answer) = made.map_err(|_| Violation::NoRandomness)?;
                connection.outbox.extend_from_slice(&answer);
                Admission::Challenged(challenge)
            }
            (Admission::Challenged(challenge), Some(Request::Proof(proof)), Some(key)) => {
                if !challenge.is_met(&connection.bound_key(key), &proof) {
                    return Err(Violation::WrongProof);
                }
                connection.outbox.push(STOP_WAITING);
                Admission::Served { proved: true }
            }
            _ => return Err(self.not_admitted(frame[0])),
        };
        if let Admission::Served { .. } = connection.admission {
            self.quota.mark_served(id, connection);
        }
        Ok(())
    }

    /// Checks that all unread replies together are within their limit.
    fn check_unread(&self) -> Result<(), Violation> {
        let limit = self.quota.limits.unread_bytes;
        let connections = self.connections.iter();
        let held = connections.map(|(_, connection)| connection.unsent()).sum();
        match held > limit {
            true => Err(Violation::TooManyUnreadBytes(held, limit)),
            false => Ok(()),
        }
    }

    /// Stops serving the connection. The client gets the reason if it has proved the secret or still had to prove it,
    /// if it sent HELLO to a server without a secret or TLS to one without TLS, or if it does not use the TLS that this
    /// server requires. For any other client the connection is `Lost`: PyTorch's would read the text as a reply.
    fn refuse(&mut self, id: ConnectionId, violation: Violation) -> LinkState {
        let Some(connection) = self.connections.get_mut(id) else {
            return LinkState::Open;
        };
        let peer = rustix::net::getpeername(&connection.socket).ok().flatten();
        let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
        tracing::warn!(
            peer = named(peer),
            "the store server closes a connection: {violation}"
        );
        let lacks_proof =
            self.key.is_some() && !matches!(connection.admission, Admission::Served { .. });
        if lacks_proof {
            self.state.count_refused(&named(connection.host));
        }
        let has_proved = matches!(connection.admission, Admission::Served { proved: true });
        let explained_to_all = [
            Violation::NoSecretHere,
            Violation::NeedsTls,
            Violation::NoTlsHere,
        ];
        if !has_proved && !lacks_proof && !explained_to_all.contains(&violation) {
            return LinkState::Lost;
        }
        self.state.forget(id);
        self.quota.mark_refused(id, connection);
        connection.admission = Admission::Refused;
        connection.paused = false;
        connection.inbox = Vec::new();
        connection.outbox.extend_from_slice(&STORE_REFUSAL);
        let text = violation.to_string();
        connection.outbox.extend_from_slice(text.as_bytes());
        connection.outbox.push(b'\n');
        LinkState::Open
    }

    /// Closes connections whose deadline has passed.
    fn close_overdue(&mut self) {
        let now = Instant::now();
        while let Some((id, why)) = self.quota.overdue(now) {
            let link = match why {
                Overdue::Proof => LinkState::Lost,
                Overdue::Request => {
                    let limit = self.quota.limits.request_time.as_secs();
                    self.refuse(id, Violation::TooSlow(limit))
                }
            };
            if link == LinkState::Lost || self.settle(id) == LinkState::Lost {
                self.close(id);
            }
        }
    }

    /// Sends what the socket accepts, continues with requests that were held back if the peer has read enough,
    /// and sets the events that epoll reports for the connection.
    fn settle(&mut self, id: ConnectionId) -> LinkState {
        let connection = loop {
            let Some(connection) = self.connections.get_mut(id) else {
                return LinkState::Open;
            };
            if connection.flush(&mut self.buffers) == LinkState::Lost {
                return LinkState::Lost;
            }
            if let Admission::Refused = connection.admission
                && connection.unsent() == 0
            {
                // The client reads the reason before the end of the stream; closing with bytes unread would
                // send a reset.
                let _ = shutdown(&connection.socket, Shutdown::Write);
            }
            if !connection.paused || connection.unsent() > BACK_PRESSURE / 2 {
                break connection;
            }
            connection.paused = false;
            let held_back = std::mem::take(&mut connection.inbox);
            if self.answer(id, held_back) == LinkState::Lost {
                return LinkState::Lost;
            }
        };
        let mut interest = epoll::EventFlags::empty();
        interest.set(epoll::EventFlags::IN, !connection.paused);
        interest.set(epoll::EventFlags::OUT, connection.unsent() > 0);
        if interest != connection.interest {
            connection.interest = interest;
            let data = epoll::EventData::new_u64(id as u64);
            if epoll::modify(&self.epoll, &connection.socket, data, interest).is_err() {
                return LinkState::Lost;
            }
        }
        LinkState::Open
    }

    /// Closes a connection, and ends its wait.
    fn close(&mut self, id: ConnectionId) {
        if let Some(mut connection) = self.connections.try_remove(id) {
            self.state.forget(id);
            self.quota.forget(id, &mut connection);
            if let Admission::Challenged(_) = connection.admission {
                let peer = named(connection.host);
                tracing::warn!(
                    peer,
                    "the connection of a client of the store ended before it had proved the job's secret"
                );
                self.state.count_refused(&peer);
            }
            // Replies that are still unsent are sent if the socket accepts them.
            connection.flush(&mut self.buffers);
            // Closing the only descriptor of the socket takes it out of epoll, too.
            self.buffers.give(connection.outbox);
        }
    }
}

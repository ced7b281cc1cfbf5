//! The server's one thread: accept, read, answer, wake.

use super::connection::{Buffers, Connection, Link};
use super::state::{ConnectionId, State};
use crate::world::store::tcp::protocol::{MAGIC, Request, STOP_WAITING, Violation};
use crate::world::store::tcp::spin::Spin;
use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use rustix::process::{Resource, getrlimit, setrlimit};
use slab::Slab;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most bytes that one read takes.
const READ: usize = 256 << 10;
/// Above this many bytes of unread replies, a connection's requests wait.
const BACK_PRESSURE: usize = 1 << 20;
/// The most connections that are accepted before others get their turn.
const ACCEPTS: usize = 128;
/// How long to wait for a free file descriptor before accepting is tried again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const STOP: u64 = u64::MAX;
/// The first listener; the next count down from here.
const LISTENER: u64 = STOP - 1;

pub(super) struct EventLoop {
    epoll: OwnedFd,
    listeners: Vec<OwnedFd>,
    /// When to listen again, after file descriptors ran out.
    listen_at: Option<Instant>,
    connections: Slab<Connection>,
    state: State,
    buffers: Buffers,
    scratch: Box<[u8]>,
    spin: Spin,
    /// Connections with replies to send, other than the one being served.
    dirty: Vec<ConnectionId>,
}

impl EventLoop {
    pub(super) fn new(listeners: Vec<OwnedFd>, stop: Arc<OwnedFd>) -> rustix::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(STOP);
        epoll::add(&epoll, &*stop, data, epoll::EventFlags::IN)?;
        let this = Self {
            epoll,
            listeners,
            listen_at: None,
            connections: Slab::new(),
            state: State::default(),
            buffers: Buffers::default(),
            scratch: vec![0; READ].into_boxed_slice(),
            spin: Spin::wary(),
            dirty: Vec::new(),
        };
        this.listen()?;
        Ok(this)
    }

    fn listen(&self) -> rustix::io::Result<()> {
        for (i, listener) in self.listeners.iter().enumerate() {
            let data = epoll::EventData::new_u64(LISTENER - i as u64);
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
            if self.listen_at.is_some_and(|at| at <= Instant::now()) {
                self.listen_at = None;
                if let Err(error) = self.listen() {
                    tracing::error!(%error, "the store server can accept no more connections");
                }
            }
        }
    }

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
        if self.spin.pays() {
            while idle_since.elapsed() < Spin::LONGEST {
                std::thread::yield_now();
                let ready = epoll::wait(&self.epoll, &mut events[..], Some(&NOW))?;
                if ready > 0 {
                    return Ok(ready);
                }
            }
            self.spin.was_in_vain();
        }
        let limit = self
            .listen_at
            .and_then(|at| at.saturating_duration_since(idle_since).try_into().ok());
        let ready = epoll::wait(&self.epoll, &mut events[..], limit.as_ref())?;
        self.spin.slept(idle_since.elapsed());
        Ok(ready)
    }

    fn accept(&mut self, listener: usize) {
        for _ in 0..ACCEPTS {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = match accept_with(&self.listeners[listener], flags) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE) if raise_descriptor_limit() => continue,
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)) => {
                    self.pause_accepting(error);
                    return;
                }
                // The peer gave up between its SYN and now.
                Err(_) => continue,
            };
            // Without it small replies are late; nothing else depends on it.
            let _ = sockopt::set_tcp_nodelay(&socket, true);
            let slot = self.connections.vacant_entry();
            let data = epoll::EventData::new_u64(slot.key() as u64);
            match epoll::add(&self.epoll, &socket, data, epoll::EventFlags::IN) {
                Ok(()) => {
                    slot.insert(Connection::new(socket));
                }
                Err(error) => tracing::warn!(%error, "the store server drops a new connection"),
            }
        }
    }

    fn pause_accepting(&mut self, error: Errno) {
        tracing::warn!(
            %error,
            connections = self.connections.len(),
            "the store server cannot accept a connection; it tries again every {ACCEPT_PAUSE:?}. \
             Raise the limit of open files (ulimit -n)"
        );
        for listener in &self.listeners {
            let _ = epoll::delete(&self.epoll, listener);
        }
        self.listen_at = Some(Instant::now() + ACCEPT_PAUSE);
    }

    fn serve(&mut self, id: ConnectionId, flags: epoll::EventFlags) {
        // An event may be left over from a connection that was closed a moment ago.
        if !self.connections.contains(id) {
            return;
        }
        // Anything but room to write (bytes, the end, an error) shows in a read.
        let reads = flags.difference(epoll::EventFlags::OUT) != epoll::EventFlags::empty();
        let mut link = match reads {
            true => self.read(id),
            false => Link::Open,
        };
        if link == Link::Open {
            link = self.settle(id);
        }
        if link == Link::Lost {
            self.close(id);
        }
        // The longest-waiting request comes first. An answer may let more be answered.
        let mut next = 0;
        while let Some(&woken) = self.dirty.get(next) {
            next += 1;
            if let Some(connection) = self.connections.get_mut(woken) {
                connection.outbox.push(STOP_WAITING);
            }
            if self.settle(woken) == Link::Lost {
                self.close(woken);
            }
        }
        self.dirty.clear();
    }

    fn read(&mut self, id: ConnectionId) -> Link {
        let Some(connection) = self.connections.get_mut(id) else {
            return Link::Open;
        };
        let count = match rustix::io::read(&connection.socket, &mut self.scratch[..]) {
            Ok(0) => return Link::Lost,
            Ok(count) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Link::Open,
            Err(_) => return Link::Lost,
        };
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
                Link::Open
            }
            _ => Link::Lost,
        };
        self.scratch = scratch;
        link
    }

    /// Answers what is complete in `bytes` and keeps the rest as the connection's inbox.
    fn answer(&mut self, id: ConnectionId, mut bytes: Vec<u8>) -> Link {
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
                Link::Open
            }
            _ => Link::Lost,
        }
    }

    /// Answers the requests that are complete; returns how many bytes they took.
    fn answer_requests(&mut self, id: ConnectionId, bytes: &[u8]) -> Result<usize, Violation> {
        let connection = &mut self.connections[id];
        if connection.outbox.capacity() == 0 {
            connection.outbox = self.buffers.take();
        }
        let mut used = 0;
        let answered = loop {
            if connection.unsent() > BACK_PRESSURE {
                connection.paused = true;
                break Ok(());
            }
            let length = match connection.scanner.advance(&bytes[used..]) {
                Ok(Some(length)) => length,
                Ok(None) => break Ok(()),
                Err(violation) => break Err(violation),
            };
            let frame = &bytes[used..used + length];
            used += length;
            if !connection.validated {
                match Request::decode(frame) {
                    Some(Request::Validate(MAGIC)) => connection.validated = true,
                    Some(Request::Validate(magic)) => break Err(Violation::WrongMagic(magic)),
                    _ => break Err(Violation::NotValidated),
                }
                continue;
            }
            let Some(request) = Request::decode(frame) else {
                break Err(Violation::UnknownOpCode(frame[0]));
            };
            if let Err(violation) = self.state.apply(id, request, &mut connection.outbox) {
                break Err(violation);
            }
            for woken in self.state.take_woken() {
                // A connection may wake itself; its own bytes keep their order.
                if woken == id {
                    connection.outbox.push(STOP_WAITING);
                } else {
                    self.dirty.push(woken);
                }
            }
        };
        if let Err(violation) = answered {
            let peer = rustix::net::getpeername(&connection.socket).ok().flatten();
            tracing::warn!(?peer, "the store server closes a connection: {violation}");
            return Err(violation);
        }
        Ok(used)
    }

    /// Sends what can be sent, continues with requests that were held back if the peer has read enough,
    /// and asks epoll for what the connection needs next.
    fn settle(&mut self, id: ConnectionId) -> Link {
        let connection = loop {
            let Some(connection) = self.connections.get_mut(id) else {
                return Link::Open;
            };
            if connection.flush(&mut self.buffers) == Link::Lost {
                return Link::Lost;
            }
            if !connection.paused || connection.unsent() > BACK_PRESSURE / 2 {
                break connection;
            }
            connection.paused = false;
            let held_back = std::mem::take(&mut connection.inbox);
            if self.answer(id, held_back) == Link::Lost {
                return Link::Lost;
            }
        };
        let mut interest = epoll::EventFlags::empty();
        interest.set(epoll::EventFlags::IN, !connection.paused);
        interest.set(epoll::EventFlags::OUT, connection.unsent() > 0);
        if interest != connection.interest {
            connection.interest = interest;
            let data = epoll::EventData::new_u64(id as u64);
            if epoll::modify(&self.epoll, &connection.socket, data, interest).is_err() {
                return Link::Lost;
            }
        }
        Link::Open
    }

    fn close(&mut self, id: ConnectionId) {
        if let Some(mut connection) = self.connections.try_remove(id) {
            self.state.forget(id);
            // What was answered before the fault still goes out if the socket takes it.
            connection.flush(&mut self.buffers);
            // Closing the only descriptor of the socket takes it out of epoll, too.
            self.buffers.give(connection.outbox);
        }
    }
}

/// Takes the soft limit of open files up to the hard one; returns whether that changed it.
fn raise_descriptor_limit() -> bool {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return false;
    }
    tracing::info!(from = ?limit.current, to = ?limit.maximum, "the store server needs more open files");
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).is_ok()
}

//! The thread `rcomm/mesh`: performs handshakes with callers, and passes their channels to the threads that use them.

use super::handshake::{
    ANSWER_LEN, ChannelKind, Decision, End, HANDSHAKE_LEN, Handshake, Identity, PROOF_LEN,
};
use super::shortage::{Shortage, has_caller, is_shortage};
use super::{fill_random, lock};
use crate::transport::{TcpConnection, fd_passing, shm::Segment};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Handshake as TlsHandshake, Tls, TlsError};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// The largest number of handshakes in progress at one time.
const MAX_HANDSHAKES: usize = 1024;
/// Once so many handshakes with one host are in progress, the oldest one ends for each that begins.
const MAX_OF_HOST: usize = 512;
/// A handshake that takes less than this is not ended for another one: its caller would take this rank for gone. Ranks
/// need milliseconds.
const LEAST_TIME: Duration = Duration::from_secs(1);
/// The largest number of callers that are accepted before the handshakes in progress are advanced again.
const ACCEPTED_AT_ONCE: usize = 64;
/// The time-out of a handshake.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// How long the listener waits after a shortage of descriptors or memory before it accepts again.
const RETRY_TIME: Duration = Duration::from_millis(10);
/// How long a caller whose TLS was refused may take to read why.
const REASON_TIME: Duration = Duration::from_secs(2);

/// Identifies one socket of a channel that another rank opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ChannelId {
    pub(super) group: u64,
    pub(super) kind: ChannelKind,
    pub(super) peer: Rank,
    /// Index of this socket among those of the channel.
    pub(super) stream: u32,
}

/// The channels that other ranks have opened.
#[derive(Default)]
pub(super) struct Arrived {
    /// The channels that no thread of this rank has taken yet.
    pub(super) channels: HashMap<ChannelId, TcpConnection>,
    /// Groups whose operations have failed on this rank: their channels are refused.
    pub(super) given_up: HashSet<u64>,
}

/// The state that the listening thread shares with the threads that open channels.
pub(super) struct ListenerState {
    pub(super) arrived: Mutex<Arrived>,
    /// Notified when channels have arrived, and when the mesh is closed.
    pub(super) changed: Condvar,
    /// Number of callers that were refused, or whose connection ended or expired before the handshake was complete.
    pub(super) refused: AtomicU64,
    pub(super) shortage: Arc<Shortage>,
    /// Set to end the thread.
    pub(super) stop: AtomicBool,
}

impl ListenerState {
    pub(super) fn new() -> Self {
        Self {
            arrived: Mutex::default(),
            changed: Condvar::new(),
            refused: AtomicU64::new(0),
            shortage: Arc::default(),
            stop: AtomicBool::new(false),
        }
    }
}

pub(super) fn milliseconds(count: i64) -> Timespec {
    Timespec {
        tv_sec: count / 1000,
        tv_nsec: count % 1000 * 1_000_000,
    }
}

/// The listening thread: performs the handshakes of all callers at the same time, so that no caller delays
/// another.
pub(super) struct Listener {
    identity: Identity,
    tls: Option<Tls>,
    shared: Arc<ListenerState>,
    /// A port on each address of this rank.
    tcp: Vec<TcpListener>,
    /// The socket on which neighbors request the shared memory; only on the rank that made the memory.
    segment_server: Option<(UnixListener, Arc<Segment>)>,
    wake: Arc<OwnedFd>,
    pending: Vec<PendingHandshake>,
    limits: Limits,
    /// When to accept again after a shortage; `None` without one.
    retry_at: Option<Instant>,
    /// Callers whose TLS was refused, each with the time of the refusal. Their sockets stay open for a while: closing a
    /// socket with unread bytes resets it, and the caller loses the reason.
    without_tls: Vec<(TcpStream, Instant)>,
}

/// How many handshakes may be in progress: [`MAX_HANDSHAKES`], [`MAX_OF_HOST`] and [`LEAST_TIME`], except in tests.
#[derive(Clone, Copy)]
struct Limits {
    total: usize,
    per_host: usize,
    least_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            total: MAX_HANDSHAKES,
            per_host: MAX_OF_HOST,
            least_time: LEAST_TIME,
        }
    }
}

/// How a caller connected.
enum Caller {
    /// Over TCP, from any host, for a channel.
    Tcp(TcpConnection),
    /// Over a unix socket, from this host and user, for the shared memory.
    Unix(UnixStream),
}

impl Caller {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(connection) => connection.read(into),
            Self::Unix(stream) => stream.read(into),
        }
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(connection) => connection.write_few(bytes),
            Self::Unix(stream) => stream.write_all(bytes),
        }
    }

    /// Sets TLS up, if the caller must use it; returns whether it is done.
    fn set_up_tls(&mut self) -> io::Result<bool> {
        match self {
            Self::Tcp(TcpConnection {
                socket,
                tls: Some(session),
            }) => Ok(session.handshake(&*socket)? == TlsHandshake::Done),
            _ => Ok(true),
        }
    }

    fn identity<'i>(&self, base: &'i Identity) -> Cow<'i, Identity> {
        match self {
            Self::Tcp(connection) => base.tied_to(connection.tls.as_deref()),
            Self::Unix(_) => Cow::Borrowed(base),
        }
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(connection) => connection.socket.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

/// Reads and drops what a refused caller has sent; returns whether its connection is still open.
fn drop_received(socket: &mut TcpStream) -> bool {
    match socket.read(&mut [0; 4096]) {
        Ok(0) => false,
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// One handshake in progress.
struct PendingHandshake {
    caller: Caller,
    /// Where the caller is; `None` for a process of this host's user, over the unix socket.
    host: Option<IpAddr>,
    since: Instant,
    received: Vec<u8>,
    /// The handshake, its bytes, and the nonce of the reply; `None` until the handshake is answered.
    answered: Option<(Handshake, [u8; HANDSHAKE_LEN], [u8; 32])>,
}

/// How far a handshake got.
enum HandshakeProgress {
    /// Not all bytes have arrived yet.
    More,
    /// The proof was correct: the caller knows the job's secret.
    Channel(ChannelId),
    /// The caller is not a rank of this job, or its connection has failed or ended.
    Refused,
    /// TLS could not be set up with the caller, which got an answer or an alert with the reason.
    NoTls,
}

impl Listener {
    /// Makes a listener. Only the rank that made the host's shared memory passes a `segment_server`.
    pub(super) fn new(
        identity: Identity,
        tls: Option<Tls>,
        shared: Arc<ListenerState>,
        tcp: Vec<TcpListener>,
        segment_server: Option<(UnixListener, Arc<Segment>)>,
        wake: Arc<OwnedFd>,
    ) -> Self {
        Self {
            identity,
            tls,
            shared,
            tcp,
            segment_server,
            wake,
            pending: Vec::new(),
            limits: Limits::default(),
            retry_at: None,
            without_tls: Vec::new(),
        }
    }

    /// Answers callers until `stop` is set.
    pub(super) fn work(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            let mut sockets = vec![PollFd::new(&*self.wake, PollFlags::IN)];
            // At the limit, new callers wait in the system's queue until a handshake is old enough to make room.
            let has_room = self.pending.len() < self.limits.total || self.most_crowding().is_some();
            if has_room && self.retry_at.is_none() {
                let ports = self.tcp.iter();
                sockets.extend(ports.map(|port| PollFd::new(port, PollFlags::IN)));
                if let Some((listener, _)) = &self.segment_server {
                    sockets.push(PollFd::new(listener, PollFlags::IN));
                }
            }
            for handshake in &self.pending {
                sockets.push(PollFd::from_borrowed_fd(
                    handshake.caller.as_fd(),
                    PollFlags::IN,
                ));
            }
            // A pending handshake may expire without any further event.
            let timeout = match self.retry_at {
                Some(at) => at.saturating_duration_since(Instant::now()).try_into().ok(),
                None if self.pending.is_empty() && self.without_tls.is_empty() => None,
                None => Some(milliseconds(250)),
            };
            match rustix::event::poll(&mut sockets, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "failed to poll connections: no more are accepted");
                    return;
                }
            }
            drop(sockets);
            if self.retry_at.is_none_or(|at| at <= Instant::now()) {
                self.retry_at = None;
                self.accept();
                if self.retry_at.is_none() {
                    self.shared.shortage.end();
                }
            }
            self.advance_handshakes();
            self.without_tls.retain_mut(|(socket, since)| {
                since.elapsed() < REASON_TIME && drop_received(socket)
            });
        }
    }

    fn accept(&mut self) {
        self.accept_neighbors();
        for port in 0..self.tcp.len() {
            self.accept_at(port);
        }
    }

    /// Accepts the callers of one port.
    fn accept_at(&mut self, port: usize) {
        for _ in 0..ACCEPTED_AT_ONCE {
            if !self.make_room() {
                return;
            }
            match self.tcp[port].accept() {
                Ok((stream, from)) => {
                    let host = Some(from.ip().to_canonical());
                    let of_host = self.pending.iter().filter(|pending| pending.host == host);
                    if of_host.count() >= self.limits.per_host
                        && let Some(oldest) = self.oldest_of(host)
                    {
                        self.end_early(oldest);
                    }
                    if stream.set_nonblocking(true).is_ok() && stream.set_nodelay(true).is_ok() {
                        let connection = TcpConnection {
                            socket: stream,
                            tls: self.tls.as_ref().map(Tls::answer),
                        };
                        self.pending
                            .push(PendingHandshake::new(Caller::Tcp(connection), host));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_shortage(&error) => {
                    if has_caller(&self.tcp[port]) {
                        self.note_shortage(&error);
                    }
                    return;
                }
                Err(error) => {
                    // Mostly a caller has already closed its connection: others may still connect.
                    tracing::warn!(%error, "failed to accept a connection");
                    std::thread::sleep(Duration::from_millis(1));
                    return;
                }
            }
        }
    }

    /// Notes that a caller cannot be accepted, and leaves it in the system's queue for a while.
    fn note_shortage(&mut self, error: &io::Error) {
        self.retry_at = Some(Instant::now() + RETRY_TIME);
        self.shared.shortage.note(error);
    }

    /// Whether a handshake can begin: at the limit, another one is closed for it.
    fn make_room(&mut self) -> bool {
        if self.pending.len() < self.limits.total {
            return true;
        }
        let crowding = self.most_crowding();
        if let Some(index) = crowding {
            self.end_early(index);
        }
        crowding.is_some()
    }

    /// The oldest handshake of the host that has the most, if it is old enough to be ended for another one.
    fn most_crowding(&self) -> Option<usize> {
        let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::new();
        for handshake in &self.pending {
            *counts.entry(handshake.host).or_insert(0) += 1;
        }
        let (&host, _) = counts.iter().max_by_key(|(_, count)| **count)?;
        self.oldest_of(host)
    }

    /// The oldest handshake of a host that may be closed for another one. Callers that have not sent a valid first
    /// message come first, since a rank sends that at once.
    fn oldest_of(&self, host: Option<IpAddr>) -> Option<usize> {
        let pending = self.pending.iter().enumerate();
        let old = pending.filter(|(_, handshake)| {
            handshake.host == host && handshake.since.elapsed() >= self.limits.least_time
        });
        let oldest =
            old.min_by_key(|(_, handshake)| (handshake.answered.is_some(), handshake.since));
        oldest.map(|(index, _)| index)
    }

    /// Ends the handshake at this index to make room for another.
    fn end_early(&mut self, index: usize) {
        self.pending.swap_remove(index);
        let count = self.shared.refused.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::warn!(
            count,
            "closed the connection of a caller to make room for others: it had not proved the \
             job's secret"
        );
    }

    /// Accepts connections from this host's ranks, and refuses those of other users.
    fn accept_neighbors(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            if self.segment_server.is_none() || !self.make_room() {
                return;
            }
            let Some((listener, _)) = &self.segment_server else {
                return;
            };
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if is_shortage(&error) && has_caller(listener) => {
                    return self.note_shortage(&error);
                }
                // There is no caller, or it has already closed its connection.
                Err(_) => return,
            };
            let user = rustix::net::sockopt::socket_peercred(&stream).map(|peer| peer.uid);
            if user == Ok(rustix::process::geteuid()) && stream.set_nonblocking(true).is_ok() {
                self.pending
                    .push(PendingHandshake::new(Caller::Unix(stream), None));
            } else {
                self.shared.refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Reads what has arrived for the pending handshakes, and ends those that are complete, invalid or too old.
    fn advance_handshakes(&mut self) {
        let mut index = 0;
        while index < self.pending.len() {
            let outcome = self.pending[index].read_handshake(&self.identity);
            let has_expired = self.pending[index].since.elapsed() > HANDSHAKE_TIME;
            match outcome {
                HandshakeProgress::More if !has_expired => index += 1,
                HandshakeProgress::Channel(id) => {
                    let handshake = self.pending.swap_remove(index);
                    // The welcome is sent before another thread gets the channel, since that thread may write at
                    // once. Four bytes always fit into a new socket's buffer; a broken socket is detected at its
                    // first use.
                    let welcome = Decision::Welcome.to_bytes();
                    match (handshake.caller, &self.segment_server) {
                        (Caller::Tcp(mut connection), _) if id.kind != ChannelKind::Segment => {
                            // The caller may send its data and exit as soon as it has read the welcome. A thread
                            // that then finds that the caller is gone must also find the channel, so both steps
                            // are made under the lock.
                            let mut arrived = lock(&self.shared.arrived);
                            if !arrived.given_up.contains(&id.group) {
                                let _ = connection.write_few(&welcome);
                                arrived.channels.insert(id, connection);
                            }
                            drop(arrived);
                            self.shared.changed.notify_all();
                        }
                        (Caller::Unix(stream), Some((_, segment)))
                            if id.kind == ChannelKind::Segment =>
                        {
                            if let Err(error) = fd_passing::send(&stream, &welcome, segment.file())
                            {
                                tracing::warn!(%error, rank = id.peer, "cannot share memory");
                            }
                        }
                        _ => {
                            self.shared.refused.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
                outcome => {
                    let caller = self.pending.swap_remove(index).caller;
                    if let (HandshakeProgress::NoTls, Caller::Tcp(connection)) = (outcome, caller)
                        && connection.socket.shutdown(Shutdown::Write).is_ok()
                        && self.without_tls.len() < MAX_HANDSHAKES
                    {
                        self.without_tls.push((connection.socket, Instant::now()));
                    }
                    let count = self.shared.refused.fetch_add(1, Ordering::Relaxed) + 1;
                    tracing::warn!(count, "a caller did not complete the handshake of this job");
                }
            }
        }
    }
}

impl PendingHandshake {
    fn new(caller: Caller, host: Option<IpAddr>) -> Self {
        Self {
            caller,
            host,
            since: Instant::now(),
            received: Vec::with_capacity(HANDSHAKE_LEN),
            answered: None,
        }
    }

    fn read_handshake(&mut self, identity: &Identity) -> HandshakeProgress {
        match self.caller.set_up_tls() {
            Ok(true) => {}
            Ok(false) => return HandshakeProgress::More,
            Err(error) => return self.refuse_without_tls(&error),
        }
        let identity = self.caller.identity(identity);
        let identity = &*identity;
        loop {
            let needed = match self.answered {
                None => HANDSHAKE_LEN,
                Some(_) => PROOF_LEN,
            };
            while self.received.len() < needed {
                let mut more = [0; HANDSHAKE_LEN];
                let missing = needed - self.received.len();
                match self.caller.read(&mut more[..missing]) {
                    Ok(0) => return HandshakeProgress::Refused,
                    Ok(count) => self.received.extend_from_slice(&more[..count]),
                    Err(error)
                        if matches!(
                            error.kind(),
                            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                        ) =>
                    {
                        return HandshakeProgress::More;
                    }
                    Err(_) => return HandshakeProgress::Refused,
                }
            }
            match self.answered.take() {
                None => {
                    if !self.answer(identity) {
                        return HandshakeProgress::Refused;
                    }
                }
                Some((handshake, first, nonce)) => {
                    if identity.verifies(End::Dialer, &first, &nonce, &self.received) {
                        return HandshakeProgress::Channel(ChannelId {
                            group: handshake.group,
                            kind: handshake.kind,
                            peer: handshake.from,
                            stream: handshake.stream,
                        });
                    }
                    let _ = self.caller.write_all(&Decision::WrongSecret.to_bytes());
                    return HandshakeProgress::Refused;
                }
            }
        }
    }

    /// Refuses a caller with which TLS could not be set up. A caller that does not use TLS gets the answer that it
    /// must; one whose TLS handshake failed gets TLS's own alert.
    fn refuse_without_tls(&mut self, error: &io::Error) -> HandshakeProgress {
        tracing::warn!(%error, "cannot set up TLS with a caller");
        let Caller::Tcp(connection) = &mut self.caller else {
            return HandshakeProgress::Refused;
        };
        connection.tls = None;
        match TlsError::of(error) {
            Some(TlsError::Plain) => {
                let mut answer = [0; ANSWER_LEN];
                answer[..4].copy_from_slice(&Decision::NeedsTls.to_bytes());
                let _ = connection.write_few(&answer);
                HandshakeProgress::NoTls
            }
            Some(TlsError::Failed(_)) => HandshakeProgress::NoTls,
            Some(TlsError::Closed) | None => HandshakeProgress::Refused,
        }
    }

    /// Answers the handshake; returns whether the caller is asked for its proof.
    fn answer(&mut self, identity: &Identity) -> bool {
        let mut first = [0; HANDSHAKE_LEN];
        first.copy_from_slice(&self.received);
        self.received.clear();
        let mut answer = [0; ANSWER_LEN];
        let handshake = match Handshake::decode(&first, identity) {
            Ok(handshake) => handshake,
            Err(decision) => {
                answer[..4].copy_from_slice(&decision.to_bytes());
                let _ = self.caller.write_all(&answer);
                return false;
            }
        };
        let mut nonce = [0; 32];
        if let Err(error) = fill_random(&mut nonce) {
            tracing::error!(%error, "no random numbers: refused a connection");
            return false;
        }
        answer[4..36].copy_from_slice(&nonce);
        answer[36..].copy_from_slice(&identity.prove(End::Acceptor, &first, &nonce));
        self.answered = Some((handshake, first, nonce));
        self.caller.write_all(&answer).is_ok()
    }
}

#[cfg(test)]
#[path = "listener_tests.rs"]
mod tests;

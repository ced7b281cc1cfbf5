//! One connection to a server: connecting, with TLS and a proof of the secret where the store requires them, then
//! sending and reading with deadlines.

use super::access::StoreAccess;
use super::encoder::Encoder;
use super::obstacle::Obstacle;
use super::protocol::{MAGIC, OpCode, WAIT_CANCELED};
use super::spin::Spin;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::limit::{after, left_until};
use rcomm_recorder::model::text;
use rcomm_recorder::publish::{
    Handshake, STORE_REFUSAL, Secret, StoreCaller, Tls, TlsError, TlsSession,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// The pause between two tries to connect: the first, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(100));
/// After this long without a connection, a log line gives the obstacle.
const LOG_AFTER: Duration = Duration::from_secs(5);
/// How long after a caller's time-out a reply is still awaited: a live server answers at once if it need not
/// wait.
pub(super) const GRACE: Duration = Duration::from_secs(2);
/// How long one address may take to accept the connection: the host's next address may be the one that answers.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// If a try has less time than this and gets no reply, the short time may be the only reason.
const MIN_TRY: Duration = Duration::from_secs(1);
/// The longest string, in bytes, to accept from a server: PyTorch's older server has no limit.
const MAX_STRING: u64 = 1 << 30;
/// The buffer space for one read, in bytes, and the most that an empty inbox keeps allocated.
const READ: usize = 16 << 10;
/// The longest reason of a refusal that is read, in bytes.
const MAX_REASON: usize = 1024;
/// The nonce of a PING whose reply shows that the server has handled the requests before it. Any value serves;
/// this one spells READ.
pub(super) const NONCE: u32 = 0x5245_4144;

/// Why a send or a read has failed. The connection is then no longer usable. A wait that only runs out of time has not
/// failed: [`Connection::read_wait`] then returns [`Waited::TimedOut`].
#[derive(Debug)]
pub(super) enum Broken {
    /// The deadline passed.
    Late,
    /// The server closed the connection.
    Closed,
    /// A system call failed.
    Failed(io::Error),
    /// TLS failed.
    Tls(TlsError),
    /// The server sent an invalid reply.
    Garbled(String),
    /// The server refused, for this reason.
    Refused(String),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        match (error.kind(), TlsError::of(&error)) {
            (_, Some(why)) => Broken::Tls(why.clone()),
            (io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe, _) => Broken::Closed,
            _ => Broken::Failed(error),
        }
    }
}

impl From<Errno> for Broken {
    fn from(error: Errno) -> Self {
        io::Error::from(error).into()
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    /// The server has replied: the keys are set, or all ranks have arrived at the barrier.
    Ended,
    /// No reply arrived in time, and the wait was cancelled.
    TimedOut,
}

/// A connection to a server. One request is sent at a time, and its reply read.
pub(super) struct Connection {
    socket: TcpStream,
    tls: Option<Box<TlsSession>>,
    /// Bytes read from the socket; those not used yet are `inbox[used..]`.
    inbox: Vec<u8>,
    used: usize,
    spin: Spin,
}

impl Connection {
    /// Connects to `host` and validates the server there. Tries again until `timeout` has passed, but not after an
    /// obstacle that another try would meet too. Sends the requests `first` with the proof of the secret, which saves
    /// their round trip, or after the validation if there is no secret; the caller reads the replies.
    pub(super) fn dial(
        host: &str,
        port: u16,
        timeout: Duration,
        access: &StoreAccess,
        first: &[u8],
    ) -> Result<Self> {
        let started = Instant::now();
        let deadline = after(timeout);
        let mut pause = RETRY.0;
        let mut logged = false;
        let mut earlier = None;
        loop {
            let left_for_try = left_until(deadline);
            let obstacle = match Self::dial_once(host, port, deadline, access, first) {
                Ok(connection) => return Ok(connection),
                Err(obstacle) if obstacle.is_final() => {
                    return Err(obstacle.unauthorized(host, port));
                }
                Err(obstacle @ Obstacle::Foreign(_)) => {
                    let message = format!("no store at {host} port {port}: {obstacle}");
                    return Err(Error::new(ErrorKind::Rendezvous, message));
                }
                // The last try begins shortly before the deadline: that it got no answer is weaker evidence than the
                // obstacle of an earlier try.
                Err(obstacle) if left_for_try < MIN_TRY && obstacle.is_silence() => {
                    earlier.take().unwrap_or(obstacle)
                }
                Err(obstacle) => obstacle,
            };
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::new(
                    ErrorKind::Rendezvous,
                    format!(
                        "no store at {host} port {port} within {}: {obstacle}",
                        text::duration(timeout)
                    ),
                ));
            }
            if !logged && now - started > LOG_AFTER {
                logged = true;
                tracing::warn!("no store at {host} port {port} yet: {obstacle}; still trying");
            }
            earlier = Some(obstacle);
            std::thread::sleep(pause.min(deadline - now));
            pause = (pause * 5 / 4).min(RETRY.1);
        }
    }

    /// Connects again to a server to which this client was connected: if nothing listens there now, it is gone.
    pub(super) fn dial_again(
        host: &str,
        port: u16,
        timeout: Duration,
        access: &StoreAccess,
    ) -> Result<Self> {
        let deadline = after(timeout);
        Self::dial_once(host, port, deadline, access, &[]).map_err(|obstacle| match obstacle {
            obstacle if obstacle.is_final() => obstacle.unauthorized(host, port),
            obstacle => obstacle.of_known_store(host, port),
        })
    }

    /// Tries once to connect to each address of `host`, until one answers.
    fn dial_once(
        host: &str,
        port: u16,
        deadline: Instant,
        access: &StoreAccess,
        first: &[u8],
    ) -> Result<Self, Obstacle> {
        let addresses: Vec<SocketAddr> = (host, port)
            .to_socket_addrs()
            .map_err(Obstacle::NoAddress)?
            .collect();
        let mut obstacle = Obstacle::NoAddress(io::ErrorKind::NotFound.into());
        for address in addresses {
            // One try even if the deadline has passed: a running server answers at once.
            let left = left_until(deadline).max(Duration::from_millis(1));
            match Self::connect_to(address, left, access, first) {
                Ok(connection) => return Ok(connection),
                Err(error @ Obstacle::Foreign(_)) => return Err(error),
                Err(error) if error.is_final() => return Err(error),
                Err(error) => obstacle = error,
            }
        }
        Err(obstacle)
    }

    /// Tries once to connect to one address, and validates the server there.
    fn connect_to(
        address: SocketAddr,
        timeout: Duration,
        access: &StoreAccess,
        first: &[u8],
    ) -> Result<Self, Obstacle> {
        let deadline = Instant::now() + timeout;
        let socket =
            TcpStream::connect_timeout(&address, timeout.min(CONNECT_LIMIT)).map_err(|error| {
                if error.kind() == io::ErrorKind::ConnectionRefused {
                    Obstacle::NoListener
                } else {
                    Obstacle::Unreachable(error)
                }
            })?;
        // A socket can connect to itself if its target is an ephemeral port without a listener.
        if socket.local_addr().ok() == socket.peer_addr().ok() {
            return Err(Obstacle::NoListener);
        }
        socket.set_nodelay(true).map_err(Obstacle::Unreachable)?;
        let mut connection = Self {
            socket,
            tls: access.tls().map(Tls::call),
            inbox: Vec::new(),
            used: 0,
            spin: Spin::initially_polling(),
        };
        connection.set_up_tls(deadline)?;
        if let Some(secret) = access.secret() {
            connection.prove(secret, first, deadline)?;
            return Ok(connection);
        }
        // One write: PyTorch's server closes a connection whose VALIDATE arrives in pieces.
        let nonce = std::process::id();
        let validation = Encoder::default()
            .op(OpCode::Validate)
            .u32(MAGIC)
            .op(OpCode::Ping)
            .u32(nonce);
        let validated = connection
            .send(validation.bytes(), deadline)
            .and_then(|()| connection.read_reply(4, deadline))
            .map(|answer| answer == nonce.to_le_bytes());
        let validated = match validated {
            // Not before: a server that takes another protocol must not get these bytes.
            Ok(true) => connection.send(first, deadline).map(|()| true),
            validated => validated,
        };
        match validated {
            Ok(true) => Ok(connection),
            Ok(false) => Err(Obstacle::Foreign(connection.first_bytes())),
            Err(broken) => {
                Err(connection.no_answer(broken, &nonce.to_le_bytes(), Obstacle::Closed))
            }
        }
    }

    /// Why the first answer has not arrived whole. A store's first answer begins with `start`. `closed` is the obstacle
    /// if the server closed the connection without a byte.
    fn no_answer(&self, broken: Broken, start: &[u8], closed: Obstacle) -> Obstacle {
        let begins_with = |start: &[u8]| {
            let compared = self.inbox.len().min(start.len());
            self.inbox[..compared] == start[..compared]
        };
        let bytes = self.inbox.len();
        match broken {
            Broken::Refused(reason) => Obstacle::Refusal(reason),
            Broken::Tls(why) => Obstacle::Tls(why),
            Broken::Failed(error) => Obstacle::Unreachable(error),
            Broken::Late if bytes == 0 => Obstacle::Silent,
            _ if bytes == 0 => closed,
            _ if !begins_with(start) && !begins_with(&STORE_REFUSAL) => {
                Obstacle::Foreign(self.first_bytes())
            }
            Broken::Late => Obstacle::SilentAfter(bytes),
            _ => Obstacle::ClosedAfter(bytes),
        }
    }

    /// Sets TLS up, if the connection uses it.
    fn set_up_tls(&mut self, deadline: Instant) -> Result<(), Obstacle> {
        let broken = loop {
            let Some(session) = &mut self.tls else {
                return Ok(());
            };
            let waited = match session.handshake(&self.socket) {
                Ok(Handshake::Done) => {
                    session.read_ahead(READ);
                    return Ok(());
                }
                Ok(Handshake::Waits(event)) => self.sleep(event, deadline),
                Err(error) => Err(error.into()),
            };
            if let Err(broken) = waited {
                break broken;
            }
        };
        Err(match broken {
            Broken::Tls(why) => Obstacle::Tls(why),
            Broken::Late => Obstacle::Silent,
            Broken::Failed(error) => Obstacle::Unreachable(error),
            _ => Obstacle::Closed,
        })
    }

    /// Proves to the server that this process knows the secret, and checks the server's proof. Sends `first` with the
    /// proof.
    fn prove(&mut self, secret: &Secret, first: &[u8], deadline: Instant) -> Result<(), Obstacle> {
        let caller = match &self.tls {
            Some(session) => StoreCaller::over_tls(secret, session),
            None => StoreCaller::new(secret),
        };
        let caller = caller.map_err(|error| Obstacle::Unreachable(io::Error::other(error)))?;
        let answer = self
            .send(&caller.hello(), deadline)
            .and_then(|()| self.read_reply(StoreCaller::ANSWER_LEN, deadline))
            .map(|answer| answer.first_chunk().and_then(|answer| caller.proof(answer)));
        let proof = match answer {
            Ok(Some(proof)) => proof,
            Ok(None) if self.inbox.starts_with(&StoreCaller::ANSWER_START) => {
                return Err(Obstacle::WrongProof);
            }
            Ok(None) => return Err(Obstacle::Foreign(self.first_bytes())),
            Err(broken) => {
                let start = StoreCaller::ANSWER_START;
                return Err(self.no_answer(broken, &start, Obstacle::ClosedAtProof));
            }
        };
        let taken = self
            .send(&[&proof, first].concat(), deadline)
            .and_then(|()| self.read_answer(deadline));
        match taken {
            Ok(true) => Ok(()),
            Ok(false) => Err(Obstacle::Foreign(self.first_bytes())),
            Err(Broken::Refused(reason)) => Err(Obstacle::Refusal(reason)),
            Err(Broken::Late) => Err(Obstacle::SilentAfter(StoreCaller::ANSWER_LEN)),
            Err(Broken::Closed) => Err(Obstacle::ClosedAfter(StoreCaller::ANSWER_LEN)),
            Err(Broken::Tls(why)) => Err(Obstacle::Tls(why)),
            Err(Broken::Failed(error)) => Err(Obstacle::Unreachable(error)),
            Err(Broken::Garbled(_)) => Err(Obstacle::Foreign(self.first_bytes())),
        }
    }

    /// The address of the server; `None` if the connection is broken, or if the address says nothing without an
    /// interface.
    pub(super) fn server(&self) -> Option<String> {
        let address = self.socket.peer_addr().ok()?;
        let needs_interface = matches!(address, SocketAddr::V6(v6) if v6.scope_id() != 0);
        (!needs_interface).then(|| address.ip().to_string())
    }

    /// The first bytes received, for an error message.
    fn first_bytes(&self) -> String {
        let start = &self.inbox[..self.inbox.len().min(16)];
        format!("\"{}\"", start.escape_ascii())
    }

    /// Sends all of `bytes`.
    pub(super) fn send(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<(), Broken> {
        while !bytes.is_empty() {
            let sent = match &mut self.tls {
                Some(session) => session.write(&self.socket, bytes),
                None => send(
                    &self.socket,
                    bytes,
                    SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
                )
                .map_err(io::Error::from),
            };
            match sent {
                Ok(n) => bytes = &bytes[n..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.sleep(PollFlags::OUT, deadline)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads the next `length` bytes.
    pub(super) fn read_bytes(&mut self, length: usize, deadline: Instant) -> Result<&[u8], Broken> {
        while self.inbox.len() - self.used < length {
            self.fill(deadline)?;
        }
        let start = self.used;
        self.used += length;
        Ok(&self.inbox[start..self.used])
    }

    /// Like [`read_bytes`](Self::read_bytes), at the beginning of a reply, where a refusal may come instead. No
    /// reply begins with the bytes of a refusal, except one of the 2^64 values of a number.
    fn read_reply(&mut self, length: usize, deadline: Instant) -> Result<&[u8], Broken> {
        let compared = length.min(STORE_REFUSAL.len());
        loop {
            let received = &self.inbox[self.used..];
            let available = received.len().min(compared);
            if received[..available] != STORE_REFUSAL[..available] {
                return self.read_bytes(length, deadline);
            }
            if available == compared {
                break;
            }
            self.fill(deadline)?;
        }
        let start = self.used;
        while self.inbox.len() - start < MAX_REASON && !self.inbox[start..].contains(&b'\n') {
            match self.fill(deadline) {
                Ok(()) => {}
                Err(Broken::Closed) => break,
                Err(broken) => return Err(broken),
            }
        }
        let reason = self.inbox[start..].strip_prefix(&STORE_REFUSAL[..]);
        let line = reason.and_then(|text| text.split(|&byte| byte == b'\n').next());
        match line {
            Some(line) => Err(Broken::Refused(String::from_utf8_lossy(line).into_owned())),
            None => Err(Broken::Garbled(self.first_bytes())),
        }
    }

    /// Reads one byte.
    pub(super) fn read_u8(&mut self, deadline: Instant) -> Result<u8, Broken> {
        Ok(self.read_reply(1, deadline)?[0])
    }

    /// Reads an integer of 64 bits.
    pub(super) fn read_i64(&mut self, deadline: Instant) -> Result<i64, Broken> {
        let mut number = [0; 8];
        number.copy_from_slice(self.read_reply(8, deadline)?);
        Ok(i64::from_le_bytes(number))
    }

    /// Reads a string and the length before it.
    pub(super) fn read_string(&mut self, deadline: Instant) -> Result<Vec<u8>, Broken> {
        let length = self.read_i64(deadline)? as u64;
        if length > MAX_STRING {
            return Err(Broken::Garbled(format!("a value of {length} bytes")));
        }
        Ok(self.read_bytes(length as usize, deadline)?.to_vec())
    }

    /// Reads a yes-or-no byte, in which 0 is yes.
    pub(super) fn read_answer(&mut self, deadline: Instant) -> Result<bool, Broken> {
        match self.read_u8(deadline)? {
            0 => Ok(true),
            1 => Ok(false),
            other => Err(Broken::Garbled(format!("{other:#04x} instead of 0 or 1"))),
        }
    }

    /// Reads the reply to a PING that carried [`NONCE`].
    pub(super) fn read_nonce(&mut self, deadline: Instant) -> Result<(), Broken> {
        match self.read_reply(4, deadline)? {
            answer if answer == NONCE.to_le_bytes() => Ok(()),
            answer => Err(Broken::Garbled(format!("\"{}\"", answer.escape_ascii()))),
        }
    }

    /// Reads the reply to a WAIT or BARRIER that was sent. If no reply arrives by `deadline`, the wait is cancelled,
    /// and the connection stays usable.
    pub(super) fn read_wait(&mut self, deadline: Instant) -> Result<Waited, Broken> {
        match self.read_answer(deadline) {
            Ok(true) => return Ok(Waited::Ended),
            Ok(false) => {
                return Err(Broken::Garbled(
                    "a cancellation that was not requested".to_owned(),
                ));
            }
            Err(Broken::Late) => {}
            Err(broken) => return Err(broken),
        }
        let deadline = Instant::now() + GRACE;
        self.send(&[OpCode::CancelWait as u8], deadline)?;
        if self.read_u8(deadline)? == WAIT_CANCELED {
            return Ok(Waited::TimedOut);
        }
        // The keys were set during the cancellation; the server still replies to the CANCEL_WAIT.
        self.read_u8(deadline)?;
        Ok(Waited::Ended)
    }

    /// Reads the bytes that have arrived, or waits for some.
    fn fill(&mut self, deadline: Instant) -> Result<(), Broken> {
        if self.used == self.inbox.len() {
            self.inbox.clear();
            self.used = 0;
            self.inbox.shrink_to(READ);
        }
        if self.receive()? {
            return Ok(());
        }
        let idle_since = Instant::now();
        if self.spin.should_poll() {
            while idle_since.elapsed() < Spin::LONGEST {
                std::thread::yield_now();
                if self.receive()? {
                    self.spin.polled(idle_since.elapsed());
                    return Ok(());
                }
            }
            self.spin.poll_failed();
        }
        loop {
            self.sleep(PollFlags::IN, deadline)?;
            if self.receive()? {
                self.spin.slept(idle_since.elapsed());
                return Ok(());
            }
        }
    }

    /// Reads the bytes that have arrived, without waiting; returns whether there were any.
    fn receive(&mut self) -> Result<bool, Broken> {
        let held = self.inbox.len();
        if self.inbox.capacity() - held < READ / 4 {
            self.inbox.reserve(READ);
        }
        if let Some(session) = &mut self.tls {
            self.inbox.resize(held + READ, 0);
            let read = session.read(&self.socket, &mut self.inbox[held..]);
            self.inbox
                .truncate(held + read.as_ref().copied().unwrap_or(0));
            return match read {
                Ok(0) => Err(Broken::Closed),
                Ok(_) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
                Err(error) => Err(error.into()),
            };
        }
        let spare = rustix::buffer::spare_capacity(&mut self.inbox);
        match recv(&self.socket, spare, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(Broken::Closed),
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Sleeps until the socket reports `event` or the deadline passes; may wake earlier. `Late` if the deadline has
    /// already passed.
    fn sleep(&self, event: PollFlags, deadline: Instant) -> Result<(), Broken> {
        let left = left_until(deadline);
        if left.is_zero() {
            return Err(Broken::Late);
        }
        // One poll waits for at most an hour: the caller polls again until a later deadline.
        let limit = Timespec::try_from(left.min(Duration::from_secs(3600)));
        let limit = limit.map_err(|_| Broken::Late)?;
        match poll(&mut [PollFd::new(&self.socket, event)], Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

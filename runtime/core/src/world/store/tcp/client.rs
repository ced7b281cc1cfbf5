//! One connection to a server: dialled, greeted, and read with deadlines.

use super::protocol::{Encoder, MAGIC, OpCode, WAIT_CANCELED};
use super::spin::Spin;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::text;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// The pause between two attempts to connect: the first, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(100));
/// After this long without success a log line gives the obstacle.
const SAY_AFTER: Duration = Duration::from_secs(5);
/// A live server answers a request that needs no waiting at once. A reply may come this long after a
/// caller's time-out.
pub(super) const GRACE: Duration = Duration::from_secs(2);
/// The limit of one attempt to connect: the host's next address may be the one that answers.
const ATTEMPT: Duration = Duration::from_secs(10);
/// An attempt with less time than this may end without a reply for that reason alone.
const HEARING: Duration = Duration::from_secs(1);
/// The longest string to take from a server: PyTorch's older one has no limit of its own.
const MAX_STRING: u64 = 1 << 30;
const READ: usize = 16 << 10;
/// The nonce of a PING whose reply shows that the requests before it have landed.
pub(super) const NONCE: u32 = 0x5245_4144;

/// Why a connection is no longer usable.
#[derive(Debug)]
pub(super) enum Broken {
    /// The deadline passed.
    Late,
    /// The server closed the connection.
    Closed,
    Failed(io::Error),
    /// The server sent what it may not.
    Garbled(String),
}

impl From<Errno> for Broken {
    fn from(error: Errno) -> Self {
        match error {
            Errno::CONNRESET | Errno::PIPE => Broken::Closed,
            error => Broken::Failed(error.into()),
        }
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    Came,
    TimedOut,
}

pub(super) struct Connection {
    socket: TcpStream,
    /// Read from the socket and not used yet: `inbox[used..]`.
    inbox: Vec<u8>,
    used: usize,
    spin: Spin,
}

impl Connection {
    /// Connects to `host` and greets the server there; tries again until `deadline`.
    pub(super) fn dial(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let started = Instant::now();
        let deadline = started + timeout;
        let mut pause = RETRY.0;
        let mut said = false;
        let mut before = None;
        loop {
            let had = left_until(deadline);
            let obstacle = match Self::dial_once(host, port, deadline) {
                Ok(connection) => return Ok(connection),
                Err(obstacle @ Obstacle::Foreign(_)) => {
                    let message = format!("no store at {host} port {port}: {obstacle}");
                    return Err(Error::new(ErrorKind::Rendezvous, message));
                }
                // The last attempt begins shortly before the deadline: its silence is weaker evidence than the
                // obstacle that an earlier attempt met.
                Err(obstacle) if had < HEARING && obstacle.is_silence() => {
                    before.take().unwrap_or(obstacle)
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
            if !said && now - started > SAY_AFTER {
                said = true;
                tracing::warn!("no store at {host} port {port} yet: {obstacle}; trying on");
            }
            before = Some(obstacle);
            std::thread::sleep(pause.min(deadline - now));
            pause = (pause * 5 / 4).min(RETRY.1);
        }
    }

    /// Connects once more to a server that was there: if it does not listen now, it is gone.
    pub(super) fn dial_again(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::dial_once(host, port, Instant::now() + timeout).map_err(|obstacle| {
            Error::new(
                ErrorKind::Store,
                format!("the store at {host} port {port} is gone: {obstacle}"),
            )
        })
    }

    fn dial_once(host: &str, port: u16, deadline: Instant) -> Result<Self, Obstacle> {
        let addresses: Vec<SocketAddr> = (host, port)
            .to_socket_addrs()
            .map_err(Obstacle::NoAddress)?
            .collect();
        let mut obstacle = Obstacle::NoAddress(io::ErrorKind::NotFound.into());
        for address in addresses {
            // One try even if the deadline has passed: a server that is there answers at once.
            let left = left_until(deadline).max(Duration::from_millis(1));
            match Self::greet(address, left) {
                Ok(connection) => return Ok(connection),
                Err(found @ Obstacle::Foreign(_)) => return Err(found),
                Err(found) => obstacle = found,
            }
        }
        Err(obstacle)
    }

    fn greet(address: SocketAddr, timeout: Duration) -> Result<Self, Obstacle> {
        let deadline = Instant::now() + timeout;
        let socket = TcpStream::connect_timeout(&address, timeout.min(ATTEMPT)).map_err(|e| {
            if e.kind() == io::ErrorKind::ConnectionRefused {
                Obstacle::Refused
            } else {
                Obstacle::Unreachable(e)
            }
        })?;
        // A socket can connect to itself if its target is an ephemeral port without a listener.
        if socket.local_addr().ok() == socket.peer_addr().ok() {
            return Err(Obstacle::Refused);
        }
        socket.set_nodelay(true).map_err(Obstacle::Unreachable)?;
        let mut connection = Self {
            socket,
            inbox: Vec::new(),
            used: 0,
            spin: Spin::eager(),
        };
        // One write: PyTorch's server closes a connection whose VALIDATE comes in pieces.
        let nonce = std::process::id();
        let hello = Encoder::default()
            .op(OpCode::Validate)
            .u32(MAGIC)
            .op(OpCode::Ping)
            .u32(nonce);
        let greeted = connection
            .send(hello.bytes(), deadline)
            .and_then(|()| connection.read_bytes(4, deadline))
            .map(|answer| answer == nonce.to_le_bytes());
        match greeted {
            Ok(true) => Ok(connection),
            Ok(false) => Err(Obstacle::Foreign(connection.heard())),
            Err(_) if !connection.inbox.is_empty() => Err(Obstacle::Foreign(connection.heard())),
            Err(Broken::Late) => Err(Obstacle::Silent),
            Err(_) => Err(Obstacle::Closed),
        }
    }

    /// The first bytes that came, for a message.
    fn heard(&self) -> String {
        let start = &self.inbox[..self.inbox.len().min(16)];
        format!("\"{}\"", start.escape_ascii())
    }

    /// Sends all of `bytes`.
    pub(super) fn send(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<(), Broken> {
        while !bytes.is_empty() {
            match send(
                &self.socket,
                bytes,
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            ) {
                Ok(n) => bytes = &bytes[n..],
                Err(Errno::AGAIN) => self.sleep(PollFlags::OUT, deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The next `length` bytes that come.
    pub(super) fn read_bytes(&mut self, length: usize, deadline: Instant) -> Result<&[u8], Broken> {
        while self.inbox.len() - self.used < length {
            self.fill(deadline)?;
        }
        let start = self.used;
        self.used += length;
        Ok(&self.inbox[start..self.used])
    }

    /// One byte.
    pub(super) fn read_u8(&mut self, deadline: Instant) -> Result<u8, Broken> {
        Ok(self.read_bytes(1, deadline)?[0])
    }

    /// An integer of 64 bits.
    pub(super) fn read_i64(&mut self, deadline: Instant) -> Result<i64, Broken> {
        let mut number = [0; 8];
        number.copy_from_slice(self.read_bytes(8, deadline)?);
        Ok(i64::from_le_bytes(number))
    }

    /// A string behind its length.
    pub(super) fn read_string(&mut self, deadline: Instant) -> Result<Vec<u8>, Broken> {
        let length = self.read_i64(deadline)? as u64;
        if length > MAX_STRING {
            return Err(Broken::Garbled(format!("a value of {length} bytes")));
        }
        Ok(self.read_bytes(length as usize, deadline)?.to_vec())
    }

    /// Reads a yes-or-no byte.
    pub(super) fn read_answer(&mut self, deadline: Instant) -> Result<bool, Broken> {
        match self.read_u8(deadline)? {
            0 => Ok(true),
            1 => Ok(false),
            other => Err(Broken::Garbled(format!("{other:#04x} for yes or no"))),
        }
    }

    /// The reply to a PING that carried [`NONCE`].
    pub(super) fn read_nonce(&mut self, deadline: Instant) -> Result<(), Broken> {
        match self.read_bytes(4, deadline)? {
            answer if answer == NONCE.to_le_bytes() => Ok(()),
            answer => Err(Broken::Garbled(format!("{answer:02x?}"))),
        }
    }

    /// The reply to a WAIT or BARRIER that was sent. If it does not come, the wait is cancelled, and
    /// the connection stays usable.
    pub(super) fn read_wait(&mut self, deadline: Instant) -> Result<Waited, Broken> {
        match self.read_answer(deadline) {
            Ok(true) => return Ok(Waited::Came),
            Ok(false) => return Err(Broken::Garbled("a cancellation unasked".to_owned())),
            Err(Broken::Late) => {}
            Err(broken) => return Err(broken),
        }
        let deadline = Instant::now() + GRACE;
        self.send(&[OpCode::CancelWait as u8], deadline)?;
        if self.read_u8(deadline)? == WAIT_CANCELED {
            return Ok(Waited::TimedOut);
        }
        // The keys came while we gave up; the server still answers the cancellation.
        self.read_u8(deadline)?;
        Ok(Waited::Came)
    }

    /// Reads what has come, or waits for it.
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
        if self.spin.pays() {
            while idle_since.elapsed() < Spin::LONGEST {
                std::thread::yield_now();
                if self.receive()? {
                    return Ok(());
                }
            }
            self.spin.was_in_vain();
        }
        loop {
            self.sleep(PollFlags::IN, deadline)?;
            if self.receive()? {
                self.spin.slept(idle_since.elapsed());
                return Ok(());
            }
        }
    }

    /// Takes what has come; returns whether anything has.
    fn receive(&mut self) -> Result<bool, Broken> {
        let held = self.inbox.len();
        if self.inbox.capacity() - held < READ / 4 {
            self.inbox.reserve(READ);
        }
        let room = rustix::buffer::spare_capacity(&mut self.inbox);
        match recv(&self.socket, room, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(Broken::Closed),
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn sleep(&self, event: PollFlags, deadline: Instant) -> Result<(), Broken> {
        let left = left_until(deadline);
        if left.is_zero() {
            return Err(Broken::Late);
        }
        // One poll waits for an hour at most: the caller polls again until a later deadline.
        let limit = Timespec::try_from(left.min(Duration::from_secs(3600)));
        let limit = limit.map_err(|_| Broken::Late)?;
        match poll(&mut [PollFd::new(&self.socket, event)], Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn left_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Why there is no connection yet.
enum Obstacle {
    NoAddress(io::Error),
    Refused,
    Unreachable(io::Error),
    Closed,
    Silent,
    Foreign(String),
}

impl Obstacle {
    /// Whether it is only that no answer came in time.
    fn is_silence(&self) -> bool {
        match self {
            Obstacle::Silent => true,
            Obstacle::Unreachable(error) => error.kind() == io::ErrorKind::TimedOut,
            _ => false,
        }
    }
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Obstacle::NoAddress(error) => write!(f, "the name has no address ({error})"),
            Obstacle::Refused => f.write_str(
                "nothing listens there. Is rank 0 up, and do all ranks have its MASTER_ADDR and \
                 MASTER_PORT?",
            ),
            Obstacle::Unreachable(error) => write!(f, "it cannot be reached ({error})"),
            Obstacle::Closed => f.write_str(
                "what listens there closes the connection without a word. Is MASTER_PORT another \
                 program's port?",
            ),
            Obstacle::Silent => f.write_str(
                "what listens there accepts the connection and does not answer. Is MASTER_PORT another \
                 program's port?",
            ),
            Obstacle::Foreign(answer) => write!(
                f,
                "what listens there is not a store, it answered {answer}. Is MASTER_PORT another \
                 program's port?"
            ),
        }
    }
}

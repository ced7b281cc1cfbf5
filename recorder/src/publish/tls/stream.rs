//! [`TlsStream`]: the connection of a caller that blocks.

use super::{Handshake, Tls, TlsSession};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A connection with TLS, each of whose calls blocks until its deadline at the latest.
#[derive(Debug)]
pub struct TlsStream {
    socket: TcpStream,
    session: Box<TlsSession>,
}

impl TlsStream {
    /// Sets TLS up over a new connection to a server.
    ///
    /// # Errors
    /// [`TlsError`](super::TlsError), `TimedOut`, or the system's error.
    pub fn call(tls: &Tls, socket: TcpStream, deadline: Instant) -> io::Result<Self> {
        let mut session = tls.call();
        loop {
            match session.handshake(&socket)? {
                Handshake::Done => return Ok(Self { socket, session }),
                Handshake::Waits(event) => wait(&socket, event, deadline)?,
            }
        }
    }

    /// The session, which ties a proof to this connection.
    pub fn session(&self) -> &TlsSession {
        &self.session
    }

    /// Reads what has arrived, or waits for it; 0 at the end of the stream.
    ///
    /// # Errors
    /// Those of [`call`](Self::call).
    pub fn read(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            match self.session.read(&self.socket, into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait(&self.socket, PollFlags::IN, deadline)?;
                }
                read => return read,
            }
        }
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// Those of [`call`](Self::call).
    pub fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.session.write(&self.socket, bytes) {
                Ok(taken) => bytes = &bytes[taken..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait(&self.socket, PollFlags::OUT, deadline)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Waits for this event on the socket, for at most an hour.
///
/// # Errors
/// `TimedOut` if the deadline has passed; the system's error.
fn wait(socket: &TcpStream, event: PollFlags, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // A poll does not take every duration, so it waits for at most an hour: a caller with a later deadline waits again.
    let limit = Timespec::try_from(left.min(Duration::from_secs(3600)));
    let limit = limit.map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(socket, event)], Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

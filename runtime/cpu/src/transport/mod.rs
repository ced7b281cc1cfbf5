//! Moves bytes from one rank to another.
//!
//! All ranks of one host can exchange bytes with each other in one phase, through shared memory ([`shm`]). Between two
//! ranks, bytes go over a [`Channel`], a stream of bytes in both directions over sockets or in shared memory. A channel
//! never blocks: it moves the bytes that it can move now, and the callers decide how to wait before they try again.

pub(crate) mod fd_passing;
#[allow(unsafe_code)]
pub(crate) mod fill;
#[allow(unsafe_code)]
pub(crate) mod health;
#[allow(unsafe_code)]
pub(crate) mod interfaces;
pub(crate) mod shm;
#[cfg(test)]
#[allow(unsafe_code)]
mod shm_exchange_model;
#[cfg(test)]
#[allow(unsafe_code)]
mod stream_model;
pub(crate) mod tcp;

use rcomm_recorder::publish::TlsSession;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// A TCP connection to a rank, before a channel is made of it.
pub(crate) struct TcpConnection {
    pub(crate) socket: TcpStream,
    /// The connection's TLS session, if the job uses TLS.
    pub(crate) tls: Option<Box<TlsSession>>,
}

impl TcpConnection {
    /// Makes a connection without TLS.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn plain(socket: TcpStream) -> Self {
        Self { socket, tls: None }
    }

    /// Reads bytes that have arrived; returns how many, 0 at the end of the stream. Waits for the first byte only
    /// without TLS, on a socket that blocks.
    ///
    /// # Errors
    /// `WouldBlock` if no byte has arrived and this call does not wait;
    /// [`TlsError`](rcomm_recorder::publish::TlsError); the system's error.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&self.socket).read(into),
            Some(session) => session.read(&self.socket, into),
        }
    }

    /// Writes the first bytes of `from`, as many as fit; returns how many. Waits for room only without TLS, on a socket
    /// that blocks.
    ///
    /// # Errors
    /// `WouldBlock` if nothing fits and this call does not wait; the system's error.
    pub(crate) fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&self.socket).write(from),
            Some(session) => session.write(&self.socket, from),
        }
    }

    /// Writes a few bytes, for which a socket that was connected just now has room.
    ///
    /// # Errors
    /// Those of [`write`](Self::write). Some of the bytes may have been written before.
    pub(crate) fn write_few(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self.write(bytes)?;
            bytes = &bytes[written..];
        }
        Ok(())
    }
}

/// A stream of bytes to and from one peer.
pub(crate) enum Channel {
    /// One or more sockets.
    Tcp(tcp::TcpChannel),
    /// Shared memory.
    Shm(shm::ShmStream),
}

impl Channel {
    /// Reads bytes that have arrived, at most `into.len()`; 0 if there are none yet.
    ///
    /// # Errors
    /// `UnexpectedEof` once the peer has closed its end and all it sent was read; in memory only after
    /// [`prepare_sleep`](shm::ShmStream::prepare_sleep) has found that. On sockets also the system's error, and
    /// [`TlsError`](rcomm_recorder::publish::TlsError); in memory `Other` if the counts there are invalid.
    #[inline]
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(channel) => channel.read(into),
            Self::Shm(channel) => channel.read(into),
        }
    }

    /// Fills `into` if the next bytes of the stream are exactly `head` and all bytes of `into` have arrived after it.
    /// Returns [`Found::Other`](shm::Found::Other) also for bytes in several pieces, and always on a socket, to which
    /// bytes that do not match could not be put back.
    ///
    /// # Errors
    /// In memory `Other` if the counts there are invalid; none on a socket.
    #[inline]
    pub(crate) fn read_after<const HEAD: usize>(
        &mut self,
        head: &[u8; HEAD],
        into: &mut [u8],
    ) -> io::Result<shm::Found> {
        match self {
            Self::Tcp(_) => Ok(shm::Found::Other),
            Self::Shm(channel) => channel.read_after(head, into),
        }
    }

    /// Writes the first bytes of `from`, not always all that fit now; returns how many, 0 if nothing fits.
    ///
    /// # Errors
    /// On sockets the system's, if the connection has ended. In memory `BrokenPipe`, once
    /// [`prepare_sleep`](shm::ShmStream::prepare_sleep) has found that the peer has closed its end, and `Other` if the
    /// counts there are invalid.
    #[inline]
    pub(crate) fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(channel) => channel.write(from),
            Self::Shm(channel) => channel.write(from, &[]),
        }
    }

    /// Works like [`write`](Self::write), and has its errors, on `head` followed by `rest`.
    #[inline]
    pub(crate) fn write_both(&mut self, head: &[u8], rest: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(channel) => channel.write_both(head, rest),
            Self::Shm(channel) => channel.write(head, rest),
        }
    }

    /// The channel's sockets, so that another thread can shut them down.
    pub(crate) fn sockets(&self) -> &[Arc<TcpStream>] {
        match self {
            Self::Tcp(channel) => channel.streams(),
            Self::Shm(channel) => std::slice::from_ref(channel.socket()),
        }
    }
}

/// What a blocked thread waits for on a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Bytes to read.
    Read,
    /// Space to write.
    Write,
}

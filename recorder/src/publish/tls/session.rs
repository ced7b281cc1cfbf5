//! [`TlsSession`]: the state of one TLS connection, over a socket that its owner keeps.

use super::{Tls, TlsError};
use crate::publish::Secret;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

/// The first byte of a client's first record.
const HANDSHAKE_RECORD: u8 = 0x16;
/// Bytes before each record, the last two of which are its length.
const HEAD: usize = 5;
/// Maximum number of bytes that are encrypted before they are given to the socket.
const AHEAD: usize = 256 << 10;
/// The label under which a connection exports the key that ties a proof to it.
const LABEL: &[u8] = b"EXPORTER-rcomm-connection";

/// The state of a handshake that does not block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handshake {
    /// Both ends may send.
    Done,
    /// The handshake continues once the socket has this event.
    Waits(PollFlags),
}

/// One TLS connection. It never blocks, whatever the mode of the socket, and raises no SIGPIPE.
pub struct TlsSession {
    connection: Connection,
    incoming: Incoming,
    /// Whether the last byte of the last [`write`](Self::write) was taken and not reported.
    owed: bool,
    /// Whether the peer's first byte has been checked.
    has_peeked: bool,
}

impl std::fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsSession(..)")
    }
}

impl Tls {
    /// The session of a caller, which sends first.
    pub fn call(&self) -> Box<TlsSession> {
        // Names are not compared, and none is sent.
        let name = ServerName::try_from("rcomm").expect("a DNS name");
        let connection = ClientConnection::new(self.client.clone(), name);
        let connection = connection.expect("the configuration offers TLS 1.3 and its ciphers");
        TlsSession::new(connection.into(), true)
    }

    /// The session of the end that was called.
    pub fn answer(&self) -> Box<TlsSession> {
        let connection = ServerConnection::new(self.server.clone());
        let connection = connection.expect("the configuration offers TLS 1.3 and its ciphers");
        TlsSession::new(connection.into(), false)
    }
}

impl TlsSession {
    fn new(mut connection: Connection, has_peeked: bool) -> Box<Self> {
        connection.set_buffer_limit(Some(AHEAD));
        Box::new(Self {
            connection,
            incoming: Incoming::default(),
            owed: false,
            has_peeked,
        })
    }

    /// Whether this end's handshake is not done yet.
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Continues the handshake as far as it goes without waiting. After [`Handshake::Done`], no byte that the peer has
    /// sent after its handshake was taken from the socket.
    ///
    /// # Errors
    /// [`TlsError`], or the system's error. A peer that uses TLS gets the reason as an alert.
    pub fn handshake(&mut self, socket: impl AsFd) -> io::Result<Handshake> {
        let socket = socket.as_fd();
        loop {
            if !self.flush(socket)? {
                return Ok(Handshake::Waits(PollFlags::OUT));
            }
            if !self.connection.is_handshaking() {
                return Ok(Handshake::Done);
            }
            if !self.has_peeked {
                match peek(socket)? {
                    None => return Ok(Handshake::Waits(PollFlags::IN)),
                    Some(HANDSHAKE_RECORD) => self.has_peeked = true,
                    Some(_) => return Err(TlsError::Plain.into()),
                }
            }
            match self.take_record(socket) {
                Ok(0) => return Err(TlsError::Closed.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Handshake::Waits(PollFlags::IN));
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(TlsError::Closed.into());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// From now on reads up to this many bytes at once from the socket, which saves system calls.
    pub fn read_ahead(&mut self, bytes: usize) {
        self.incoming.buffer = vec![0; bytes].into_boxed_slice();
    }

    /// Ties a secret to this connection: both ends get the same key, and a man in the middle gets others. The
    /// handshake must be done.
    pub fn bind(&self, secret: &Secret) -> Secret {
        let exported = self.connection.export_keying_material([0; 32], LABEL, None);
        // Without a finished handshake the two ends have nothing in common, and no proof is accepted.
        let exported = exported.unwrap_or_default();
        Secret::from_bytes(secret.tag(&[b"connection", &exported]))
    }

    /// Reads the bytes that have arrived; 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` if there are none; [`TlsError`]; the system's error.
    pub fn read(&mut self, socket: impl AsFd, into: &mut [u8]) -> io::Result<usize> {
        let socket = socket.as_fd();
        loop {
            match self.connection.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The peer ended the connection without the notice of TLS: as after a plain end, callers know how many
                // bytes they expect.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                read => return read,
            }
            self.take_record(socket)?;
        }
    }

    /// For a server that waits for events: continues the handshake, then reads, and leaves nothing in the session for
    /// which the socket would have no event. Returns the number of bytes; 0 at the end of the stream. `into` must have
    /// room for 32 KiB, and [`read_ahead`](Self::read_ahead) must not have been called.
    ///
    /// # Errors
    /// Those of [`handshake`](Self::handshake) and [`read`](Self::read).
    pub fn serve(&mut self, socket: impl AsFd, into: &mut [u8]) -> io::Result<usize> {
        let socket = socket.as_fd();
        if let Handshake::Waits(_) = self.handshake(socket)? {
            // The answer to a caller's first message fits a new socket's buffer, so only the caller can be waited for.
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut read = self.read(socket, into)?;
        while read < into.len() {
            match self.connection.reader().read(&mut into[read..]) {
                Ok(count @ 1..) => read += count,
                // The end shows at the next read of the socket.
                _ => break,
            }
        }
        Ok(read)
    }

    /// Encrypts as much of `from` as fits, up to 256 KiB, and gives it to the socket; returns how many bytes were
    /// taken.
    ///
    /// If the socket does not take all at once, the last byte counts as not taken until the socket has taken all: a
    /// caller whose bytes were all taken knows that none is left in the session. The next call must begin with the
    /// first byte that was not taken.
    ///
    /// # Errors
    /// `WouldBlock` if nothing was taken; the system's error.
    pub fn write(&mut self, socket: impl AsFd, from: &[u8]) -> io::Result<usize> {
        self.write_both(socket, &[], from)
    }

    /// Like [`write`](Self::write) of `head` and then `rest`, in one record if they fit.
    ///
    /// # Errors
    /// Those of [`write`](Self::write).
    pub fn write_both(&mut self, socket: impl AsFd, head: &[u8], rest: &[u8]) -> io::Result<usize> {
        let socket = socket.as_fd();
        if head.len() + rest.len() == 0 {
            return Ok(0);
        }
        if !self.flush(socket)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut taken = usize::from(std::mem::take(&mut self.owed));
        let parts = match taken <= head.len() {
            true => [IoSlice::new(&head[taken..]), IoSlice::new(rest)],
            false => [IoSlice::new(&[]), IoSlice::new(&rest[taken..])],
        };
        if parts.iter().any(|part| !part.is_empty()) {
            taken += self.connection.writer().write_vectored(&parts)?;
        }
        if !self.flush(socket)? {
            self.owed = true;
            taken -= 1;
        }
        match taken {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            taken => Ok(taken),
        }
    }

    /// Gives the socket what was encrypted; returns whether the socket took all.
    fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Outgoing(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Reads from the socket and decrypts; returns the number of bytes read, 0 at the end of the stream.
    fn take_record(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut incoming = Source {
            socket,
            state: &mut self.incoming,
        };
        let read = self.connection.read_tls(&mut incoming)?;
        if let Err(error) = self.connection.process_new_packets() {
            let was_set_up = !self.connection.is_handshaking();
            // An alert tells the peer why. If the socket does not take the alert, the peer sees only the end.
            let _ = self.flush(socket);
            return Err(TlsError::from_rustls(error, was_set_up).into());
        }
        Ok(read)
    }
}

/// What arrived and was not decrypted.
#[derive(Default)]
struct Incoming {
    /// Space for bytes that are read ahead; empty unless [`TlsSession::read_ahead`] was called.
    buffer: Box<[u8]>,
    /// The bytes of `buffer` that were not decrypted yet.
    unread: std::ops::Range<usize>,
    /// Without a buffer, the bytes of the current record's head.
    head: [u8; HEAD],
    /// How many bytes of the head have arrived.
    head_len: usize,
    /// How many bytes of the current record are left after its head: no byte of the next record is taken.
    left: usize,
}

/// Reads at most one record from the socket, or as far ahead as [`Incoming`] has space for.
struct Source<'a> {
    socket: BorrowedFd<'a>,
    state: &'a mut Incoming,
}

impl Read for Source<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let state = &mut *self.state;
        if state.unread.is_empty() && !state.buffer.is_empty() {
            let received = receive(self.socket, &mut state.buffer)?;
            state.unread = 0..received;
        }
        if !state.buffer.is_empty() {
            let count = into.len().min(state.unread.len());
            let from = state.unread.start;
            into[..count].copy_from_slice(&state.buffer[from..from + count]);
            state.unread.start += count;
            return Ok(count);
        }
        if state.left > 0 {
            let max_len = into.len().min(state.left);
            let received = receive(self.socket, &mut into[..max_len])?;
            state.left -= received;
            return Ok(received);
        }
        let max_len = into.len().min(HEAD - state.head_len);
        let received = receive(self.socket, &mut into[..max_len])?;
        state.head[state.head_len..state.head_len + received].copy_from_slice(&into[..received]);
        state.head_len += received;
        if state.head_len == HEAD {
            state.head_len = 0;
            state.left = usize::from(u16::from_be_bytes([state.head[3], state.head[4]]));
        }
        Ok(received)
    }
}

/// Receives without blocking; returns the number of bytes, 0 at the end of the stream.
fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match recv(socket, &mut *into, RecvFlags::DONTWAIT) {
            Ok((received, _)) => return Ok(received),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The first byte that has arrived, which stays in the socket; `None` if there is none.
fn peek(socket: BorrowedFd<'_>) -> io::Result<Option<u8>> {
    let mut first = [0];
    match recv(socket, &mut first, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
        Ok((0, _)) => Err(TlsError::Closed.into()),
        Ok(_) => Ok(Some(first[0])),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Writes to the socket without blocking and without SIGPIPE.
struct Outgoing<'a>(BorrowedFd<'a>);

impl Write for Outgoing<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            let mut no_more = SendAncillaryBuffer::default();
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(self.0, from, &mut no_more, flags) {
                Err(Errno::INTR) => {}
                sent => return Ok(sent?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

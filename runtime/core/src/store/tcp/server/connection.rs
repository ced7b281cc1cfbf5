//! One client's socket, and its buffers of received and unsent bytes.

use crate::store::tcp::protocol::Scanner;
use rcomm_recorder::publish::{Secret, StoreChallenge, TlsSession};
use rustix::fd::OwnedFd;
use rustix::net::{SendFlags, send};
use std::borrow::Cow;
use std::io;
use std::net::IpAddr;
use std::time::Instant;

/// The pool to which connections return buffers that they do not need, so that an idle connection
/// holds none and a busy one need not allocate.
#[derive(Default)]
pub(super) struct Buffers(Vec<Vec<u8>>);

impl Buffers {
    /// The most buffers in the pool.
    const KEPT: usize = 64;
    /// The largest buffer that the pool takes, in bytes.
    const LARGEST: usize = 256 << 10;

    pub(super) fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_default()
    }

    pub(super) fn give(&mut self, mut buffer: Vec<u8>) {
        if self.0.len() < Self::KEPT && (1..=Self::LARGEST).contains(&buffer.capacity()) {
            buffer.clear();
            self.0.push(buffer);
        }
    }
}

/// Whether the connection is still usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkState {
    Open,
    Lost,
}

/// The state of a client's validation.
#[derive(Clone, Debug)]
pub(super) enum Admission {
    /// The client has not sent VALIDATE.
    New,
    /// The client has sent VALIDATE, to a store that asks for a proof.
    Validated,
    /// The server has sent its challenge.
    Challenged(StoreChallenge),
    /// The client may use the store. `proved`: it has proved the secret, and so understands a refusal.
    Served { proved: bool },
    /// The client was refused, and is sent the reason or an alert of TLS; bytes that it still sends are discarded.
    Refused,
}

/// One connection, as the server sees it.
pub(super) struct ClientConnection {
    pub(super) socket: OwnedFd,
    pub(super) tls: Option<Box<TlsSession>>,
    pub(super) host: Option<IpAddr>,
    pub(super) admission: Admission,
    /// The moment at which the connection is closed, unless the client has proved the secret, or finished its
    /// request, by then; `None` while neither is outstanding. A refused client has until then to read the reason.
    pub(super) deadline: Option<Instant>,
    /// Bytes of `inbox` that are counted as unfinished.
    pub(super) counted: usize,
    pub(super) scanner: Scanner,
    /// The beginning of a request whose end has not arrived, or requests held back with `paused`.
    pub(super) inbox: Vec<u8>,
    /// Replies that the socket has not accepted yet.
    pub(super) outbox: Vec<u8>,
    /// How much of `outbox` is sent.
    sent: usize,
    /// Whether too many replies are unread: no request is served until the peer has read enough of them.
    pub(super) paused: bool,
    /// The events of the socket that epoll reports.
    pub(super) interest: rustix::event::epoll::EventFlags,
}

impl ClientConnection {
    pub(super) fn new(socket: OwnedFd, host: Option<IpAddr>, tls: Option<Box<TlsSession>>) -> Self {
        Self {
            socket,
            tls,
            host,
            admission: Admission::New,
            deadline: None,
            counted: 0,
            scanner: Scanner::default(),
            inbox: Vec::new(),
            outbox: Vec::new(),
            sent: 0,
            paused: false,
            interest: rustix::event::epoll::EventFlags::IN,
        }
    }

    /// The key; over TLS, the key that is derived from it for this connection alone.
    pub(super) fn bound_key<'k>(&self, key: &'k Secret) -> Cow<'k, Secret> {
        match &self.tls {
            Some(session) => Cow::Owned(session.bind(key)),
            None => Cow::Borrowed(key),
        }
    }

    /// How many bytes of replies wait for the peer.
    pub(super) fn unsent(&self) -> usize {
        self.outbox.len() - self.sent
    }

    /// Sends what the socket accepts now.
    pub(super) fn flush(&mut self, buffers: &mut Buffers) -> LinkState {
        while self.unsent() > 0 {
            let unsent = &self.outbox[self.sent..];
            let sent = match &mut self.tls {
                Some(session) => session.write(&self.socket, unsent),
                None => send(&self.socket, unsent, SendFlags::NOSIGNAL).map_err(io::Error::from),
            };
            match sent {
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return LinkState::Open,
                Err(_) => return LinkState::Lost,
            }
        }
        self.sent = 0;
        buffers.give(std::mem::take(&mut self.outbox));
        LinkState::Open
    }
}

/// The address or the host of a client as logs name it.
pub(super) fn named(peer: Option<impl std::fmt::Display>) -> String {
    peer.map_or("an unknown host".to_owned(), |peer| peer.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_connection_takes_at_most_256_bytes() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut connection = ClientConnection::new(socket.into(), None, None);
        let mut buffers = Buffers::default();
        connection.outbox.extend_from_slice(b"a reply");
        assert_eq!(connection.flush(&mut buffers), LinkState::Open);
        // Its buffers were returned to the pool, so this is all the memory that it holds.
        let held = connection.inbox.capacity() + connection.outbox.capacity();
        assert_eq!(held, 0);
        assert!(size_of::<ClientConnection>() <= 256);
    }
}

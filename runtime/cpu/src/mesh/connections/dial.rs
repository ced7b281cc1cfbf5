//! How a rank connects to another: the address that it dials, and the handshake.

use super::Mesh;
use crate::mesh::address::MAX_ADDRESSES;
use crate::mesh::handshake::{ANSWER_LEN, Decision, End, Handshake};
use crate::mesh::listener::milliseconds;
use crate::mesh::shortage::is_shortage;
use crate::mesh::{address_key, fill_random};
use crate::transport::TcpConnection;
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::ErrorKind;
use rcomm_core::store::Store;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Handshake as TlsHandshake, Tls, TlsError};
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// The longest time-out of one try to connect.
const CONNECT_TIME: Duration = Duration::from_secs(2);
/// How much of an entry in the store that is not a rank's addresses the error shows.
const SHOWN_BYTES: usize = 256;
/// The time-out of a try that begins just before its caller's deadline.
const SHORTEST_TRY: Duration = Duration::from_millis(1);

impl Mesh {
    /// Connects to the peer and performs the handshake. While no address answers, tries one after the other until the
    /// policy ends the wait; a refusal ends it at once.
    pub(super) fn dial(
        &self,
        handshake: Handshake,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<TcpConnection, Failure> {
        let addresses = self.addresses_of(handshake.to, policy)?;
        // The sockets of one channel use one address after the other, and channels to different ranks begin with
        // different ones.
        let first =
            u64::from(handshake.stream) + u64::from(handshake.from) + u64::from(handshake.to);
        let mut next = addresses
            .iter()
            .cycle()
            .skip((first % addresses.len() as u64) as usize);
        let mut address = *next.next().ok_or(Failure::Closed)?;
        let gone = |error| Failure::Gone(handshake.to, Some(error));
        let (mut tries, mut unreachable) = (0, 0);
        // A refusal is not retried: a rank listens before it publishes its addresses, so a refusal means that
        // it has ended.
        let stream = loop {
            policy
                .check()
                .map_err(|interruption| Failure::of_wait_for(handshake.to, interruption))?;
            // A host that does not answer must not delay a caller beyond its own deadline. The system refuses a
            // time-out of zero.
            let time = policy.time_left().clamp(SHORTEST_TRY, CONNECT_TIME);
            match TcpStream::connect_timeout(&address, time) {
                Ok(stream) => break stream,
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    tries += 1;
                    if tries == 1 {
                        tracing::warn!(rank = handshake.to, %address, "the rank does not answer yet: retrying");
                    }
                    address = next.next().copied().unwrap_or(address);
                }
                // Another network may lead to the rank.
                Err(error) if is_unreachable(&error) && unreachable + 1 < addresses.len() => {
                    unreachable += 1;
                    tracing::warn!(rank = handshake.to, %address, %error, "trying the rank's next address");
                    address = next.next().copied().unwrap_or(address);
                }
                Err(error) if is_shortage(&error) => return Err(Failure::Io(error)),
                Err(error) => {
                    let message = format!("{address}: {error}");
                    return Err(gone(io::Error::new(error.kind(), message)));
                }
            }
        };
        stream.set_nodelay(true).map_err(gone)?;
        stream.set_nonblocking(true).map_err(gone)?;
        let mut nonce = [0; 32];
        fill_random(&mut nonce).map_err(Failure::Io)?;
        let mut handshake_stream = HandshakeStream {
            connection: TcpConnection {
                socket: stream,
                tls: self.tls.as_ref().map(Tls::call),
            },
            peer: handshake.to,
            address,
            policy,
        };
        handshake_stream.set_up_tls()?;
        let identity = self
            .identity
            .tied_to(handshake_stream.connection.tls.as_deref());
        let first = handshake.encode(&identity, &nonce);
        handshake_stream.send(&first)?;
        let mut answer = [0; ANSWER_LEN];
        handshake_stream.receive(&mut answer)?;
        let refuse = |decision: Option<Decision>| Failure::Refused {
            peer: handshake.to,
            address,
            kind: Decision::kind_of(decision),
            reason: Decision::reason_of(decision).into(),
        };
        let word = [answer[0], answer[1], answer[2], answer[3]];
        match Decision::from_bytes(word) {
            Some(Decision::Welcome) => {}
            other => return Err(refuse(other)),
        }
        let mut their_nonce = [0; 32];
        their_nonce.copy_from_slice(&answer[4..36]);
        let proof = &answer[36..];
        if !identity.verifies(End::Acceptor, &first, &their_nonce, proof) {
            return Err(refuse(Some(Decision::WrongSecret)));
        }
        handshake_stream.send(&identity.prove(End::Dialer, &first, &their_nonce))?;
        let mut last = [0; 4];
        handshake_stream.receive(&mut last)?;
        match Decision::from_bytes(last) {
            Some(Decision::Welcome) => Ok(handshake_stream.connection),
            other => Err(refuse(other)),
        }
    }

    /// Returns the addresses that `peer` has published, one at least; waits for them until the policy ends the wait.
    fn addresses_of(
        &self,
        peer: Rank,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Vec<SocketAddr>, Failure> {
        let key = address_key(peer);
        loop {
            policy.check()?;
            let key = key.clone();
            let look = move |store: &dyn Store| store.get(&key, Duration::from_millis(100));
            match self.ask(policy, look)? {
                Ok(bytes) => return parse(peer, &bytes),
                Err(error) if error.kind() == ErrorKind::Timeout => {}
                Err(error) => return Err(Failure::Store(error)),
            }
        }
    }
}

/// The addresses in a rank's entry in the store, which another program may have written.
fn parse(peer: Rank, entry: &[u8]) -> Result<Vec<SocketAddr>, Failure> {
    let refuse = || {
        let shown = &entry[..entry.len().min(SHOWN_BYTES)];
        let mut text = String::from_utf8_lossy(shown).into_owned();
        if entry.len() > SHOWN_BYTES {
            text = format!("{text}… ({} bytes)", entry.len());
        }
        Failure::Address { peer, text }
    };
    let text = std::str::from_utf8(entry).map_err(|_| refuse())?;
    let parts = text.split(',').take(MAX_ADDRESSES + 1);
    let addresses: Result<Vec<SocketAddr>, _> = parts.map(str::parse).collect();
    addresses
        .ok()
        .filter(|addresses| addresses.len() <= MAX_ADDRESSES)
        .ok_or_else(refuse)
}

/// Whether the error says that no network leads to an address.
fn is_unreachable(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable
    )
}

/// Sends and receives the bytes of a handshake over a non-blocking socket, until the policy ends the wait.
struct HandshakeStream<'a, 'p> {
    connection: TcpConnection,
    peer: Rank,
    address: SocketAddr,
    policy: &'a mut WaitPolicy<'p>,
}

impl HandshakeStream<'_, '_> {
    fn set_up_tls(&mut self) -> Result<(), Failure> {
        loop {
            let Some(session) = &mut self.connection.tls else {
                return Ok(());
            };
            match session.handshake(&self.connection.socket) {
                Ok(TlsHandshake::Done) => return Ok(()),
                Ok(TlsHandshake::Waits(event)) => self.wait(event)?,
                Err(error) => return Err(self.failed(error)),
            }
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let mut sent = 0;
        while sent < bytes.len() {
            match self.connection.write(&bytes[sent..]) {
                Ok(count) => sent += count,
                Err(error) => self.wait_or_fail(error, PollFlags::OUT)?,
            }
        }
        Ok(())
    }

    fn receive(&mut self, bytes: &mut [u8]) -> Result<(), Failure> {
        let mut received = 0;
        while received < bytes.len() {
            match self.connection.read(&mut bytes[received..]) {
                Ok(0) => {
                    let end = io::ErrorKind::UnexpectedEof.into();
                    return Err(Failure::Gone(self.peer, Some(end)));
                }
                Ok(count) => received += count,
                Err(error) => self.wait_or_fail(error, PollFlags::IN)?,
            }
        }
        Ok(())
    }

    fn wait_or_fail(&mut self, error: io::Error, event: PollFlags) -> Result<(), Failure> {
        if error.kind() != io::ErrorKind::WouldBlock && error.kind() != io::ErrorKind::Interrupted {
            return Err(self.failed(error));
        }
        self.wait(event)
    }

    /// The failure after this error. A peer that ended while TLS was set up is gone, as it is without TLS.
    fn failed(&self, error: io::Error) -> Failure {
        match TlsError::of(&error) {
            Some(TlsError::Closed) | None => Failure::Gone(self.peer, Some(error)),
            Some(refusal) => Failure::Refused {
                peer: self.peer,
                address: self.address,
                kind: ErrorKind::Unauthorized,
                reason: refusal.to_string().into(),
            },
        }
    }

    fn wait(&mut self, event: PollFlags) -> Result<(), Failure> {
        self.policy
            .check()
            .map_err(|interruption| Failure::of_wait_for(self.peer, interruption))?;
        let mut socket = [PollFd::new(&self.connection.socket, event)];
        match rustix::event::poll(&mut socket, Some(&milliseconds(10))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Failure::Io(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_at_most_64_addresses_and_an_error_shows_the_beginning_of_what_is_refused() {
        let list = |count: usize| {
            let addresses = (0..count).map(|at| format!("10.0.0.{at}:7"));
            addresses.collect::<Vec<_>>().join(",")
        };
        for count in [1, MAX_ADDRESSES] {
            let found = parse(3, list(count).as_bytes()).unwrap();
            assert_eq!(found.len(), count);
        }
        let refusal = |entry: &[u8]| match parse(3, entry) {
            Err(Failure::Address { peer: 3, text }) => text,
            other => panic!("{other:?}"),
        };
        assert_eq!(refusal(b"nowhere"), "nowhere");
        assert_eq!(refusal(b""), "");
        let entry = list(1 << 16);
        let text = refusal(entry.as_bytes());
        assert!(text.starts_with("10.0.0.0:7,10.0.0.1:7"), "{text}");
        assert!(
            text.ends_with(&format!("… ({} bytes)", entry.len())),
            "{text}"
        );
        assert!(text.len() < 400, "{text}");
    }
}

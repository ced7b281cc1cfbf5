//! A channel over TCP sockets.
//!
//! A channel may have several *streams*, a socket each, so that the window of one connection or one queue
//! of a network card does not limit its throughput. The bytes of the channel are sent over the streams in
//! turn, [`STRIPE`] at a time. The position of a byte among the bytes of the channel determines its stream, so no
//! bytes are marked or reordered: the reader reads the streams in the same turn, while bytes arrive on all of them.
//!
//! With TLS every stream has a session, and the positions count the bytes inside the sessions.

use super::{Interest, TcpConnection, health};
use rcomm_recorder::publish::TlsSession;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg, sockopt};
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of the buffer for small reads, which one system call fills.
const BUFFER: usize = 16 << 10;
/// Bytes that are sent over one stream before the turn of the next: fewer than a socket's buffer holds, so that all
/// streams are busy.
const STRIPE: usize = 64 << 10;

/// How many bytes of TLS are read from a socket at once.
const TLS_AHEAD: usize = 64 << 10;

/// The maximum number of bytes that a channel reads from each socket when it is dropped: more than a socket's buffer
/// holds.
const LAST_BYTES: usize = 64 << 20;

/// Connected sockets that never block.
pub(crate) struct TcpChannel {
    streams: Vec<Arc<TcpStream>>,
    /// The TLS session of each stream; empty without TLS.
    sessions: Vec<TlsSession>,
    read: Turn,
    written: Turn,
    /// Bytes for small reads.
    buffer: Box<[u8]>,
    /// The unread part of `buffer`.
    unread: std::ops::Range<usize>,
    counts: Option<Arc<Counts>>,
}

/// The numbers of bytes received and sent over all channels to one peer.
#[derive(Default)]
pub(crate) struct Counts {
    received: AtomicU64,
    sent: AtomicU64,
}

impl Counts {
    /// Bytes that were received, and bytes that were written to sockets.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (load(&self.received), load(&self.sent))
    }
}

/// The stream that is used next in one direction.
#[derive(Clone, Copy, Default)]
struct Turn {
    stream: usize,
    /// Bytes sent or received in this turn.
    done: usize,
}

impl Turn {
    /// How many of `len` bytes may still be sent or received in this turn.
    fn most(self, len: usize, streams: usize) -> usize {
        if streams == 1 {
            len
        } else {
            len.min(STRIPE - self.done)
        }
    }

    /// Counts bytes that were sent or received; begins the turn of the next stream when this one's is over.
    fn pass(&mut self, moved: usize, streams: usize) {
        self.done += moved;
        if self.done >= STRIPE {
            self.done = 0;
            self.stream = (self.stream + 1) % streams;
        }
    }
}

impl TcpChannel {
    /// Makes a channel of connected sockets, which are in the same order at both ends.
    ///
    /// # Panics
    /// If there is no socket, or if some sockets use TLS and others do not.
    pub(crate) fn new(connections: Vec<TcpConnection>) -> io::Result<Self> {
        assert!(!connections.is_empty(), "a channel without a socket");
        let mut streams = Vec::with_capacity(connections.len());
        let mut sessions = Vec::new();
        for TcpConnection { socket, tls } in connections {
            socket.set_nonblocking(true)?;
            socket.set_nodelay(true)?;
            streams.push(Arc::new(socket));
            if let Some(mut session) = tls {
                session.read_ahead(TLS_AHEAD);
                sessions.push(*session);
            }
        }
        assert!(
            sessions.is_empty() || sessions.len() == streams.len(),
            "only some sockets of a channel use TLS"
        );
        Ok(Self {
            streams,
            sessions,
            read: Turn::default(),
            written: Turn::default(),
            buffer: vec![0; BUFFER].into_boxed_slice(),
            unread: 0..0,
            counts: None,
        })
    }

    /// Adds the bytes that this channel moves from now on to `counts`.
    pub(crate) fn count_in(&mut self, counts: Arc<Counts>) {
        self.counts = Some(counts);
    }

    fn count_received(&self, moved: usize) {
        if let Some(counts) = &self.counts {
            counts.received.fetch_add(moved as u64, Ordering::Relaxed);
        }
    }

    fn count_sent(&self, moved: usize) {
        if let Some(counts) = &self.counts {
            counts.sent.fetch_add(moved as u64, Ordering::Relaxed);
        }
    }

    /// The sockets, so that another thread can shut them down.
    pub(crate) fn streams(&self) -> &[Arc<TcpStream>] {
        &self.streams
    }

    /// Returns the socket that carries the next bytes in this direction.
    pub(crate) fn stream(&self, interest: Interest) -> &Arc<TcpStream> {
        let turn = match interest {
            Interest::Read => self.read,
            Interest::Write => self.written,
        };
        &self.streams[turn.stream]
    }

    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        if self.unread.is_empty() {
            let count = self.streams.len();
            let mut stream = &*self.streams[self.read.stream];
            let mut session = self.sessions.get_mut(self.read.stream);
            let mut receive = |into: &mut [u8]| match &mut session {
                None => stream.read(into),
                Some(session) => session.read(stream, into),
            };
            if into.len() >= BUFFER {
                let most = self.read.most(into.len(), count);
                let received = zero_if_not_ready(receive(&mut into[..most]), true)?;
                self.read.pass(received, count);
                self.count_received(received);
                return Ok(received);
            }
            let most = self.read.most(BUFFER, count);
            let received = zero_if_not_ready(receive(&mut self.buffer[..most]), true)?;
            self.read.pass(received, count);
            self.count_received(received);
            self.unread = 0..received;
        }
        let moved = into.len().min(self.unread.len());
        let start = self.unread.start;
        into[..moved].copy_from_slice(&self.buffer[start..start + moved]);
        self.unread.start += moved;
        Ok(moved)
    }

    pub(super) fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        if from.is_empty() {
            return Ok(0);
        }
        let count = self.streams.len();
        let most = self.written.most(from.len(), count);
        let mut stream = &*self.streams[self.written.stream];
        let written = match self.sessions.get_mut(self.written.stream) {
            None => stream.write(&from[..most]),
            Some(session) => session.write(stream, &from[..most]),
        };
        let moved = zero_if_not_ready(written, false)?;
        self.written.pass(moved, count);
        self.count_sent(moved);
        Ok(moved)
    }

    pub(super) fn write_both(&mut self, head: &[u8], rest: &[u8]) -> io::Result<usize> {
        let count = self.streams.len();
        let most = self.written.most(head.len() + rest.len(), count);
        let head = &head[..head.len().min(most)];
        let rest = &rest[..rest.len().min(most - head.len())];
        let both = [IoSlice::new(head), IoSlice::new(rest)];
        let stream = &*self.streams[self.written.stream];
        // A vectored write raises SIGPIPE if the peer is gone, which ends programs that are not in Rust.
        let mut no_more = SendAncillaryBuffer::default();
        let sent = match self.sessions.get_mut(self.written.stream) {
            None => {
                sendmsg(stream, &both, &mut no_more, SendFlags::NOSIGNAL).map_err(io::Error::from)
            }
            Some(session) => session.write_both(stream, head, rest),
        };
        let moved = zero_if_not_ready(sent, false)?;
        self.written.pass(moved, count);
        self.count_sent(moved);
        Ok(moved)
    }
}

impl Drop for TcpChannel {
    /// Reads the bytes that have arrived and were never read, at most [`LAST_BYTES`] of each socket. If a socket is
    /// closed with unread bytes, the system resets the connection, and bytes that this rank has sent and the peer has
    /// not received yet are lost.
    fn drop(&mut self) {
        for stream in &self.streams {
            let mut taken = 0;
            while taken < LAST_BYTES
                && let Ok((moved @ 1.., _)) = recv(stream, &mut *self.buffer, RecvFlags::DONTWAIT)
            {
                taken += moved;
            }
        }
    }
}

/// Turns the errors of a socket that is not ready into 0, and the end of the stream into an error.
fn zero_if_not_ready(result: io::Result<usize>, is_read: bool) -> io::Result<usize> {
    match result {
        Ok(0) if is_read => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(moved) => Ok(moved),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ) =>
        {
            Ok(0)
        }
        Err(error) => Err(error),
    }
}

/// Makes the systems at both ends exchange a keep-alive packet every `interval` on this connection while the processes
/// send nothing. Makes this system retransmit unacknowledged data about every `interval`, and keep the connection for
/// `user_timeout` without an acknowledgement.
///
/// By default a system doubles the time between two retransmissions, so that after a short interruption of the network
/// the next one could come later than an operation's time-out.
///
/// # Errors
/// Those of the system, except those of limiting the pause between retransmissions, which some kernels cannot do.
pub(crate) fn keep_alive(
    socket: &TcpStream,
    interval: Duration,
    user_timeout: Duration,
) -> io::Result<()> {
    sockopt::set_tcp_keepidle(socket, interval)?;
    sockopt::set_tcp_keepintvl(socket, interval)?;
    // The largest count that the kernel accepts: `user_timeout` ends the connection first.
    sockopt::set_tcp_keepcnt(socket, 127)?;
    let user_timeout = u32::try_from(user_timeout.as_millis()).unwrap_or(0);
    sockopt::set_tcp_user_timeout(socket, user_timeout.min(i32::MAX as u32))?;
    sockopt::set_tcp_thin_linear_timeouts(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    // Linux before 6.15 does not have this option, and keeps its own intervals.
    let _ = health::limit_retransmission_pause(socket, interval);
    Ok(())
}

/// Sleeps until one of the sockets is ready, `doorbell` is written to, a signal arrives, or `time` has passed.
pub(crate) fn poll<'a>(
    sockets: impl Iterator<Item = (&'a TcpStream, Interest)>,
    doorbell: Option<&OwnedFd>,
    time: Duration,
) -> io::Result<()> {
    let mut fds: Vec<PollFd<'_>> = sockets
        .map(|(stream, interest)| {
            let flags = match interest {
                Interest::Read => PollFlags::IN,
                Interest::Write => PollFlags::OUT,
            };
            PollFd::new(stream, flags)
        })
        .collect();
    fds.extend(doorbell.map(|doorbell| PollFd::new(doorbell, PollFlags::IN)));
    let time = Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    match rustix::event::poll(&mut fds, Some(&time)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair(streams: usize) -> [TcpChannel; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for _ in 0..streams {
            here.push(TcpStream::connect(address).unwrap());
            there.push(listener.accept().unwrap().0);
        }
        [here, there].map(|end| {
            let connections = end.into_iter().map(TcpConnection::plain).collect();
            TcpChannel::new(connections).unwrap()
        })
    }

    #[test]
    fn bytes_arrive_in_order_over_any_number_of_streams() {
        for streams in [1, 2, 5] {
            let [mut here, mut there] = pair(streams);
            let sent: Vec<u8> = (0..3 * 5 * STRIPE + 77)
                .map(|index| (index * 7 / 3) as u8)
                .collect();
            let mut received = vec![0; sent.len()];
            let (mut out, mut into) = (0, 0);
            // Short and long pieces alternate, across the boundaries of buffers and stripes.
            let pieces = [1, 100, BUFFER, 3, STRIPE + 1, 7 * BUFFER];
            let mut turn = 0;
            while into < sent.len() {
                turn += 1;
                let piece = pieces[turn % pieces.len()];
                let end = sent.len().min(out + piece);
                let middle = (out + piece / 3).min(end);
                out += here
                    .write_both(&sent[out..middle], &sent[middle..end])
                    .unwrap();
                let piece = pieces[(turn / 2) % pieces.len()];
                let end = sent.len().min(into + piece);
                into += there.read(&mut received[into..end]).unwrap();
            }
            assert!(received == sent, "{streams} streams");
        }
    }

    #[test]
    fn each_stream_carries_its_stripes() {
        let [mut here, there] = pair(2);
        let sent = vec![1; STRIPE];
        let mut out = 0;
        while out < STRIPE {
            out += here.write(&sent[out..]).unwrap();
        }
        assert!(!Arc::ptr_eq(here.stream(Interest::Write), &here.streams[0]));
        assert_eq!(here.write(&[2]).unwrap(), 1);
        there.streams[1].set_nonblocking(false).unwrap();
        let mut first = [0];
        (&*there.streams[1]).read_exact(&mut first).unwrap();
        assert_eq!(first, [2]);
    }

    #[test]
    fn all_sent_bytes_arrive_although_the_sender_closes_with_unread_bytes() {
        let [mut here, mut there] = pair(1);
        assert_eq!(there.write(&[1; 10]).unwrap(), 10);
        // The bytes exceed the peer's buffer, so the rest is in this rank's socket when it is closed.
        let piece = vec![7; STRIPE];
        let (mut sent, mut idle) = (0, 0);
        while idle < 3 {
            let moved = here.write(&piece).unwrap();
            sent += moved;
            idle = if moved == 0 { idle + 1 } else { 0 };
        }
        drop(here);
        let mut received = 0;
        let mut into = vec![0; STRIPE];
        let end = loop {
            match there.read(&mut into) {
                Ok(moved) => received += moved,
                Err(error) => break error,
            }
        };
        assert_eq!(received, sent, "{end}");
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn end_of_any_stream_is_the_end_of_the_channel_when_it_is_its_turn() {
        let [mut here, mut there] = pair(2);
        there.read = Turn { stream: 1, done: 0 };
        here.written = there.read;
        here.streams[1].shutdown(std::net::Shutdown::Both).unwrap();
        let end = loop {
            match there.read(&mut [0; 8]) {
                Ok(0) => {}
                other => break other,
            }
        };
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}

//! A lane over a TCP socket.

use super::Interest;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Small reads are served from a buffer of this many bytes, filled by one system call.
const BUFFER: usize = 16 << 10;

/// A connected socket that never blocks.
pub(crate) struct TcpLane {
    stream: Arc<TcpStream>,
    buffer: Box<[u8]>,
    /// The unread part of `buffer`.
    unread: std::ops::Range<usize>,
}

impl TcpLane {
    /// Takes over a connected socket.
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: Arc::new(stream),
            buffer: vec![0; BUFFER].into_boxed_slice(),
            unread: 0..0,
        })
    }

    /// The socket, so that another thread can shut it down.
    pub(crate) fn stream(&self) -> &Arc<TcpStream> {
        &self.stream
    }

    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        if self.unread.is_empty() {
            if into.len() >= BUFFER {
                return none_if_not_ready((&*self.stream).read(into), true);
            }
            let got = none_if_not_ready((&*self.stream).read(&mut self.buffer), true)?;
            self.unread = 0..got;
        }
        let some = into.len().min(self.unread.len());
        let start = self.unread.start;
        into[..some].copy_from_slice(&self.buffer[start..start + some]);
        self.unread.start += some;
        Ok(some)
    }

    pub(super) fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        if from.is_empty() {
            return Ok(0);
        }
        none_if_not_ready((&*self.stream).write(from), false)
    }

    pub(super) fn write_both(&mut self, head: &[u8], rest: &[u8]) -> io::Result<usize> {
        let both = [IoSlice::new(head), IoSlice::new(rest)];
        none_if_not_ready((&*self.stream).write_vectored(&both), false)
    }
}

/// Turns "not now" into 0, and the end of the stream into an error.
fn none_if_not_ready(result: io::Result<usize>, is_read: bool) -> io::Result<usize> {
    match result {
        Ok(0) if is_read => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(some) => Ok(some),
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

/// Sleeps until one of the sockets is ready, something is written to `bell`, or `time` has passed.
pub(crate) fn poll<'a>(
    sockets: impl Iterator<Item = (&'a TcpStream, Interest)>,
    bell: Option<&OwnedFd>,
    time: Duration,
) -> io::Result<()> {
    let mut all: Vec<PollFd<'_>> = sockets
        .map(|(stream, interest)| {
            let flags = match interest {
                Interest::Read => PollFlags::IN,
                Interest::Write => PollFlags::OUT,
            };
            PollFd::new(stream, flags)
        })
        .collect();
    all.extend(bell.map(|bell| PollFd::new(bell, PollFlags::IN)));
    let time = Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    match rustix::event::poll(&mut all, Some(&time)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

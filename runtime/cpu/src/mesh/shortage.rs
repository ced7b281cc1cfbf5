//! [`Shortage`]: this rank lacks descriptors or memory, and so cannot accept its callers.
//!
//! Its peers see a rank that listens and does not answer. This rank itself observes peers that do not connect, although
//! they have tried. So its waits for these peers fail soon, with the system's error, which blames no rank.

use super::listener::milliseconds;
use super::lock;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A shortage that lasts less than this fails no wait: the program may close files again, and until then callers wait.
const FORGIVEN: Duration = Duration::from_millis(250);

/// The system's error because of which callers wait to be accepted, and since when; `None` if no caller waits.
#[derive(Default)]
pub(super) struct Shortage(Mutex<Option<(Errno, Instant)>>);

impl Shortage {
    /// Notes that a caller cannot be accepted.
    pub(super) fn note(&self, error: &io::Error) {
        let mut since = lock(&self.0);
        if let (None, Some(errno)) = (*since, Errno::from_io_error(error)) {
            *since = Some((errno, Instant::now()));
            tracing::warn!(%error, "cannot accept the connections of other ranks: they wait");
        }
    }

    /// Notes that no caller waits to be accepted.
    pub(super) fn end(&self) {
        lock(&self.0).take();
    }

    /// Fails if callers have waited to be accepted for longer than [`FORGIVEN`]: a peer that this rank waits for may be
    /// one of them.
    pub(super) fn check(&self) -> io::Result<()> {
        match *lock(&self.0) {
            Some((errno, since)) if since.elapsed() >= FORGIVEN => {
                let cause = io::Error::from(errno);
                let message = format!("cannot accept the connections of other ranks: {cause}");
                Err(io::Error::new(cause.kind(), message))
            }
            _ => Ok(()),
        }
    }
}

/// Whether a call failed because this process or its host lacks descriptors or memory, which is no fault of a peer.
pub(super) fn is_shortage(error: &io::Error) -> bool {
    let lacks = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| lacks.contains(&errno))
}

/// Whether a caller waits to be accepted. Without a free descriptor, `accept` fails whether or not one waits.
pub(super) fn has_caller(listener: &impl AsFd) -> bool {
    let mut sockets = [PollFd::new(listener, PollFlags::IN)];
    let ready = rustix::event::poll(&mut sockets, Some(&milliseconds(0)));
    ready.is_ok_and(|ready| ready > 0)
}

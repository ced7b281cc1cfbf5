//! The signals that this process receives, and their names.

use rustix::fd::{AsFd, BorrowedFd};
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use std::io;
use std::os::unix::net::UnixStream;

/// The signals that are forwarded to the ranks. When one arrives, its socket becomes readable.
pub(super) struct Signals(Vec<(i32, UnixStream)>);

impl Signals {
    /// Catches SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 in place of their usual effects, for the rest of the
    /// process's life.
    pub(super) fn catch() -> io::Result<Self> {
        let catch = |signal| {
            let (read, write) = UnixStream::pair()?;
            read.set_nonblocking(true)?;
            signal_hook::low_level::pipe::register(signal, write)?;
            Ok((signal, read))
        };
        let signals = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];
        signals
            .into_iter()
            .map(catch)
            .collect::<io::Result<_>>()
            .map(Self)
    }

    /// The sockets; one is readable once its signal has arrived.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|(_, read)| read.as_fd())
    }

    /// The signals received since the last call.
    pub(super) fn take(&self) -> Vec<Signal> {
        let received = self
            .0
            .iter()
            .filter(|(_, read)| rustix::io::read(read, &mut [0; 64]).is_ok_and(|count| count > 0));
        received
            .filter_map(|(signal, _)| Signal::from_named_raw(*signal))
            .collect()
    }
}

/// The name of a signal, for messages: `SIGTERM`.
pub(super) fn name_of(signal: Signal) -> String {
    let name = signal_hook::low_level::signal_name(signal.as_raw());
    name.map_or_else(|| format!("signal {}", signal.as_raw()), str::to_owned)
}

//! The signals that this process receives, and their names.

use super::{Failure, LAUNCHER_FAILED, Restart};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::RecvFlags;
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use std::io;
use std::os::unix::net::UnixStream;

/// The signals that are forwarded to the ranks. When one arrives, its socket becomes readable.
pub(super) struct Signals(Vec<(i32, UnixStream)>);

impl Signals {
    /// Catches SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 instead of their usual effects, for the rest of the
    /// process's life. If this process was started so that it ignores SIGHUP, as by `nohup`, it continues to ignore it,
    /// and so do the ranks.
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
            .filter(|&signal| signal != SIGHUP || !is_ignored(signal))
            .map(catch)
            .collect::<io::Result<_>>()
            .map(Self)
    }

    /// The sockets; one is readable once its signal has arrived.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|(_, read)| read.as_fd())
    }

    /// A signal that asks to end the job and was received since the last call, if any. Other signals are dropped.
    pub(super) fn take_stop(&self) -> Option<Signal> {
        self.take().into_iter().find(|&signal| asks_to_stop(signal))
    }

    /// Whether a signal that asks to end the job was received and not taken yet.
    pub(super) fn has_stop(&self) -> bool {
        let signals = self.0.iter();
        let mut stops =
            signals.filter(|(signal, _)| Signal::from_named_raw(*signal).is_some_and(asks_to_stop));
        stops.any(|(_, read)| {
            let peeked = rustix::net::recv(read, &mut [0], RecvFlags::PEEK | RecvFlags::DONTWAIT);
            peeked.is_ok_and(|(_, count)| count > 0)
        })
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

/// Whether this process ignores the signal, according to the kernel.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut lines = status.lines();
    let ignored = lines.find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Whether the signal asks to end the job.
pub(super) fn asks_to_stop(signal: Signal) -> bool {
    ![Signal::USR1, Signal::USR2].contains(&signal)
}

/// The failure of a job that this signal to the launcher has ended.
pub(super) fn stopped_by(signal: Signal) -> Failure {
    Failure {
        sentence: format!("stopped by {}", name_of(signal)),
        code: code_of(signal),
        restart: Restart::Never,
    }
}

/// The exit code of a launcher that this signal has ended.
pub(super) fn code_of(signal: Signal) -> u8 {
    u8::try_from(128 + signal.as_raw()).unwrap_or(LAUNCHER_FAILED)
}

/// The name of a signal, for messages: `SIGTERM`.
pub(super) fn name_of(signal: Signal) -> String {
    let name = signal_hook::low_level::signal_name(signal.as_raw());
    name.map_or_else(|| format!("signal {}", signal.as_raw()), str::to_owned)
}

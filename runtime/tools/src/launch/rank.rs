//! The process of one rank.

use super::LAUNCHER_FAILED;
use super::output::{Output, Stream};
use anyhow::{Context, Result};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::io;
use std::process::{Child, Command};

/// The error of a program that could not be started.
#[derive(Debug)]
pub(super) struct StartError {
    program: String,
    error: io::Error,
}

impl StartError {
    /// The exit code for this error: 127 or 126 as from a shell, otherwise [`LAUNCHER_FAILED`].
    pub(super) fn code(&self) -> u8 {
        match self.error.kind() {
            io::ErrorKind::NotFound => 127,
            io::ErrorKind::PermissionDenied => 126,
            _ if self.error.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()) => 126,
            _ => LAUNCHER_FAILED,
        }
    }
}

impl std::fmt::Display for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot start {:?}: {}", self.program, self.error)
    }
}

impl std::error::Error for StartError {}

/// A process of a rank.
pub(super) struct Rank {
    pub(super) rank: u32,
    pub(super) child: Child,
    /// The id of the rank's process, and of its process group.
    pub(super) pid: Pid,
    /// Readable once the process has ended.
    pub(super) pidfd: OwnedFd,
    pub(super) has_ended: bool,
    /// Standard output and standard error; `None` once closed.
    pub(super) outputs: [Option<Output>; 2],
}

impl Rank {
    /// Starts the process.
    ///
    /// # Errors
    /// [`StartError`] if the program cannot be started; those of the system.
    pub(super) fn start(mut command: Command, rank: u32) -> Result<Self> {
        let mut child = command.spawn().map_err(|error| StartError {
            program: command.get_program().to_string_lossy().into_owned(),
            error,
        })?;
        let stdout = child
            .stdout
            .take()
            .context("standard output is not piped")?;
        let stderr = child.stderr.take().context("standard error is not piped")?;
        let pid = Pid::from_child(&child);
        Ok(Self {
            rank,
            pid,
            pidfd: pidfd_open(pid, PidfdFlags::empty())?,
            child,
            has_ended: false,
            outputs: [
                Some(Output::new(stdout.into(), Stream::Stdout, rank)?),
                Some(Output::new(stderr.into(), Stream::Stderr, rank)?),
            ],
        })
    }

    /// The rank and its process, for messages.
    pub(super) fn name(&self) -> String {
        format!("rank {} (process {})", self.rank, self.child.id())
    }

    /// Sends a signal to the rank's process group; returns whether it was sent.
    pub(super) fn signal(&self, signal: Signal) -> bool {
        // The rank may have ended just now; the next poll detects that.
        !self.has_ended && kill_process_group(self.pid, signal).is_ok()
    }
}

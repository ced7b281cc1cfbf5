//! Identity of a process, which distinguishes it from a later one with the same pid.

use crate::record::layout::{halves, header};
use crate::record::sync::Read;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt;

/// A process, identified as precisely as the system allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessIdentity {
    pub(crate) pid: u32,
    /// Clock ticks from the boot to the start of the process; 0 if unknown.
    pub(crate) start: u64,
    /// Inode of the process's pid namespace; 0 if unknown.
    pub(crate) pid_namespace: u64,
    /// The id of the host's boot; zeros if unknown.
    pub(crate) boot_id: [u64; 2],
}

impl ProcessIdentity {
    /// The identity of this process.
    pub(crate) fn of_self() -> Self {
        let pid = std::process::id();
        Self {
            pid,
            start: start_of(pid).unwrap_or(0),
            pid_namespace: own_pid_namespace(),
            boot_id: boot_id(),
        }
    }

    /// The process that writes the ring with these words.
    pub(crate) fn of_ring(words: &impl Read) -> Self {
        Self {
            pid: halves(words.load(header::ATTEMPT)).1,
            start: words.load(header::PROCESS_START),
            pid_namespace: words.load(header::PID_NAMESPACE),
            boot_id: [words.load(header::BOOT_ID), words.load(header::BOOT_ID + 1)],
        }
    }

    /// A text that no other process of any host has; `None` if the identity is not wholly known.
    pub(crate) fn mark(&self) -> Option<String> {
        let [high, low] = self.boot_id;
        self.is_known().then(|| {
            let (pid, start, namespace) = (self.pid, self.start, self.pid_namespace);
            format!("{high:016x}{low:016x} {namespace} {pid} {start}")
        })
    }

    fn is_known(&self) -> bool {
        self.start != 0 && self.pid_namespace != 0 && self.boot_id != [0, 0]
    }

    /// Whether the process was started in the same boot of the same host as the caller, so that their monotonic clocks
    /// are the same.
    pub(crate) fn shares_clock(&self) -> bool {
        self.boot_id != [0, 0] && self.boot_id == boot_id()
    }

    /// Whether the process still exists; `None` if it is not visible from here.
    pub(crate) fn exists(&self) -> Option<bool> {
        self.state().map(|state| state != ProcessState::Gone)
    }

    /// The state of the process according to the system; `None` if it is not visible from here.
    pub(crate) fn state(&self) -> Option<ProcessState> {
        if !self.is_known()
            || self.boot_id != boot_id()
            || self.pid_namespace != own_pid_namespace()
        {
            return None;
        }
        Some(match stat_of(self.pid) {
            Some((state, start)) if start == self.start => state,
            _ => ProcessState::Gone,
        })
    }
}

/// The state of a process according to the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessState {
    /// The process has ended.
    Gone,
    /// The process runs, or waits for something.
    Runs,
    /// A signal stopped the process.
    Stopped,
    /// A debugger holds the process.
    Traced,
}

/// When a process started, in clock ticks from the boot.
fn start_of(pid: u32) -> Option<u64> {
    stat_of(pid).map(|(_, start)| start)
}

/// Fields 3 and 22 of `/proc/<pid>/stat`: the state and the start; `None` if the process has ended, as a zombie has.
/// Fields are counted from the last `)`, since the process's name may contain any characters.
fn stat_of(pid: u32) -> Option<(ProcessState, u64)> {
    let stat = read_short(&format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = match fields.next()? {
        "Z" | "X" => return None,
        "T" => ProcessState::Stopped,
        "t" => ProcessState::Traced,
        _ => ProcessState::Runs,
    };
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// Inode of this process's pid namespace; 0 if unknown.
fn own_pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino())
}

/// The id of this host's boot; zeros if unknown.
fn boot_id() -> [u64; 2] {
    let read = || {
        let text = read_short("/proc/sys/kernel/random/boot_id").ok()?;
        let id = u128::from_str_radix(&text.trim().replace('-', ""), 16).ok()?;
        Some([(id >> 64) as u64, id as u64])
    };
    read().unwrap_or([0, 0])
}

/// Reads a file of the kernel, of which the first kilobyte is enough, with one call: [`fs::read_to_string`] takes up to
/// nine, and every rank reads such files when it starts.
pub(crate) fn read_short(path: &str) -> io::Result<String> {
    let mut bytes = [0; 1024];
    let mut file = fs::File::open(path)?;
    let count = loop {
        match file.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => break read?,
        }
    };
    Ok(String::from_utf8_lossy(&bytes[..count]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_exists_and_one_with_another_start_time_does_not() {
        let this_process = ProcessIdentity::of_self();
        assert_eq!(this_process.state(), Some(ProcessState::Runs));
        let other = ProcessIdentity {
            start: this_process.start + 1,
            ..this_process
        };
        assert_eq!(other.exists(), Some(false));
        let elsewhere = ProcessIdentity {
            boot_id: [1, 2],
            ..this_process
        };
        assert_eq!(elsewhere.exists(), None);
    }
}

//! Makes ranks end with their launcher, however the launcher ends: the kernel kills them.
//!
//! This is one of the few places with `unsafe`, which `docs/ARCHITECTURE.md` lists: the code between fork and exec must
//! be async-signal-safe.

#![allow(unsafe_code)]

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the kernel kill the process that `command` starts, when the thread that starts it ends. The kernel does not
/// kill children of that process, nor a program with more privileges than its caller.
pub(super) fn die_with_this_thread(command: &mut Command) {
    let launcher = getpid();
    let prepare = move || prepare(launcher);
    // SAFETY: `prepare` makes two system calls and touches no memory that another thread of the parent could have
    // held locked or half changed when it forked: it allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(prepare);
    }
}

/// Runs in the child, before it executes the rank's program.
fn prepare(launcher: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The launcher may have ended before the request; in that case no signal is sent.
    match getppid() {
        Some(parent) if parent == launcher => Ok(()),
        _ => Err(io::ErrorKind::BrokenPipe.into()),
    }
}

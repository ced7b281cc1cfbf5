//! Reserves space in the file system for a ring's file.

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, Result};
use std::os::fd::OwnedFd;

/// Maximum number of system calls for one reservation: it needs another one after each that a signal has interrupted.
const MAX_CALLS: u32 = 100;

/// Reserves space for the bytes `from..to` of a ring file. A write to bytes without space, through the file's map,
/// raises SIGBUS if the file system is full.
///
/// # Errors
/// Those of fallocate(2), for example `NOSPC`; `INTR` only if a signal has interrupted each of [`MAX_CALLS`] calls.
pub(crate) fn reserve(file: &OwnedFd, from: usize, to: usize) -> Result<()> {
    let len = to.saturating_sub(from);
    uninterrupted(|| fallocate(file, FallocateFlags::empty(), from as u64, len as u64))
}

/// Makes a system call, and makes it again if a signal has interrupted it: that says nothing about the file system.
/// Returns the result of the last of at most [`MAX_CALLS`] calls.
fn uninterrupted(mut call: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 1..MAX_CALLS {
        match call() {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
    call()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_made_again_after_signals_and_not_after_other_errors_nor_without_end() {
        let tried = |interruptions: u32, then: Result<()>| {
            let mut calls = 0;
            let done = uninterrupted(|| {
                calls += 1;
                if calls <= interruptions {
                    Err(Errno::INTR)
                } else {
                    then
                }
            });
            (done, calls)
        };
        assert_eq!(tried(0, Ok(())), (Ok(()), 1));
        assert_eq!(tried(3, Ok(())), (Ok(()), 4));
        assert_eq!(tried(2, Err(Errno::NOSPC)), (Err(Errno::NOSPC), 3));
        let always = tried(u32::MAX, Ok(()));
        assert_eq!(always, (Err(Errno::INTR), MAX_CALLS));
    }
}

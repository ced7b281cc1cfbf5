//! Reserves space of a ring's file.

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, Result};
use std::os::fd::OwnedFd;

/// Maximum number of times that a signal may interrupt one reservation.
const INTERRUPTIONS: u32 = 100;

/// Reserves space for these bytes of a ring file, so that a write there cannot fail.
pub(crate) fn reserve(file: &OwnedFd, from: usize, to: usize) -> Result<()> {
    let len = to.saturating_sub(from);
    uninterrupted(|| fallocate(file, FallocateFlags::empty(), from as u64, len as u64))
}

/// Makes a system call again if a signal has interrupted it: that says nothing about the file system.
fn uninterrupted(mut call: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 1..INTERRUPTIONS {
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
        assert_eq!(always, (Err(Errno::INTR), INTERRUPTIONS));
    }
}

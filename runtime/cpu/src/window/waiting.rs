//! How a rank waits until another rank changes a word of memory.

use super::CpuWindow;
use crate::mesh::PeerState;
use crate::wait::{Interrupted, Pause, WaitPolicy};
use rcomm_core::{Deadline, Error, ErrorKind};
use rustix::event::Timespec;
use rustix::thread::futex;
use std::fmt;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

/// The interval at which a rank that waits for another checks whether that one is still alive.
const LIVENESS_CHECK: Duration = Duration::from_millis(50);

impl CpuWindow {
    /// Tries until `attempt` succeeds, which otherwise returns what it has seen in `word`. `peer` is the rank that must
    /// change the word, and `awaited` what it has to do (`send a signal`).
    pub(super) fn wait_for_peer(
        &self,
        peer: u32,
        word: &AtomicU32,
        deadline: Deadline,
        awaited: fmt::Arguments<'_>,
        attempt: impl Fn() -> Result<(), u32>,
    ) -> rcomm_core::Result<()> {
        let shared = &self.shared;
        let rank = shared.ranks[peer as usize];
        let mut policy = WaitPolicy::new(&shared.stop, deadline.started(), shared.wait_mode);
        let mut next_check = Instant::now() + LIVENESS_CHECK;
        while let Err(seen) = attempt() {
            match policy.pause() {
                Ok(Pause::Poll) => {}
                Ok(Pause::Sleep(time)) => {
                    let time = Timespec {
                        tv_sec: time.as_secs().cast_signed(),
                        tv_nsec: i64::from(time.subsec_nanos()),
                    };
                    // The word is read again, whatever has ended the sleep.
                    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&time));
                    let mesh = &shared.mesh;
                    if Instant::now() < next_check || rank == mesh.rank() {
                        continue;
                    }
                    next_check = Instant::now() + LIVENESS_CHECK;
                    // What the peer has done before it ended is still valid.
                    if matches!(mesh.find_gone(rank, &mut policy), Ok(PeerState::Gone))
                        && attempt().is_err()
                    {
                        return Err(Error::gone(&[rank], &format!(" and will not {awaited}")));
                    }
                }
                Err(Interrupted::Stopped(reason)) => return Err(reason),
                Err(Interrupted::TimedOut) => {
                    let message = format!("rank {rank} did not {awaited} before the deadline");
                    return Err(Error::new(ErrorKind::Timeout, message).with_rank(rank));
                }
            }
        }
        Ok(())
    }
}

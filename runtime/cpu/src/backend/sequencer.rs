//! [`Sequencer`]: the order in which a group's collectives run.

use crate::wait::{Interrupted, Pause, WaitPolicy};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Lets the collectives of a group run one at a time. Each has a *turn*: its number in order of issue, from 1.
pub(crate) struct Sequencer {
    current: AtomicU64,
    sleepers: Mutex<()>,
    sleeping: AtomicU64,
    turn_changed: Condvar,
}

impl Sequencer {
    /// The first turn is 1.
    pub(crate) fn new() -> Self {
        Self {
            current: AtomicU64::new(1),
            sleepers: Mutex::new(()),
            sleeping: AtomicU64::new(0),
            turn_changed: Condvar::new(),
        }
    }

    /// Waits until this turn begins; returns whether the caller had to wait.
    #[inline]
    pub(crate) fn take(&self, turn: u64, policy: &mut WaitPolicy<'_>) -> Result<bool, Interrupted> {
        if self.current.load(Ordering::Acquire) == turn {
            return Ok(false);
        }
        self.wait(turn, policy)?;
        Ok(true)
    }

    #[cold]
    fn wait(&self, turn: u64, policy: &mut WaitPolicy<'_>) -> Result<(), Interrupted> {
        while self.current.load(Ordering::Acquire) != turn {
            if let Pause::Sleep(time) = policy.pause()? {
                let sleepers = self.lock_sleepers();
                self.sleeping.fetch_add(1, Ordering::SeqCst);
                if self.current.load(Ordering::SeqCst) != turn {
                    drop(self.turn_changed.wait_timeout(sleepers, time));
                }
                self.sleeping.fetch_sub(1, Ordering::SeqCst);
            }
        }
        policy.refresh();
        Ok(())
    }

    fn lock_sleepers(&self) -> MutexGuard<'_, ()> {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends this turn; the next one begins.
    #[inline]
    pub(crate) fn pass(&self) {
        self.current.fetch_add(1, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            drop(self.lock_sleepers());
            self.turn_changed.notify_all();
        }
    }
}

//! [`Sequencer`]: the order in which a group's collectives run.

use crate::wait::{Interrupted, Pause, WaitPolicy};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Set in [`Sequencer::current`] once the group is given up.
const GIVEN_UP: u64 = 1 << 63;

/// Lets the collectives of a group run one at a time. Each has a *turn*: its number in order of issue, from 1.
pub(crate) struct Sequencer {
    /// The current turn, and [`GIVEN_UP`].
    current: AtomicU64,
    /// A thread locks it before it looks at the turn and sleeps, so that it misses no wake-up.
    sleepers: Mutex<()>,
    /// Number of threads that sleep. Without any, the wake-up, a system call, is skipped.
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

    /// Waits until this turn begins; returns whether the caller had to wait. After [`give_up`](Self::give_up), no turn
    /// begins: the policy's stop, which the caller of `give_up` has raised first, ends the wait.
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

    /// Gives the group up: no later turn begins, and [`pass`](Self::pass) returns true from now on. Returns the current
    /// turn.
    pub(crate) fn give_up(&self) -> u64 {
        self.current.fetch_or(GIVEN_UP, Ordering::SeqCst) & !GIVEN_UP
    }

    /// Ends this turn; the next one begins. Returns whether the group was given up before.
    #[inline]
    pub(crate) fn pass(&self) -> bool {
        let ended = self.current.fetch_add(1, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            drop(self.lock_sleepers());
            self.turn_changed.notify_all();
        }
        ended & GIVEN_UP != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::{Stop, WaitMode};
    use rcomm_core::{Deadline, Error, ErrorKind};
    use std::time::Duration;

    #[test]
    fn pass_returns_that_the_group_was_given_up_in_the_turn_and_no_later_turn_begins() {
        let stop = Stop::default();
        let forever = Deadline::In(Duration::MAX);
        let mut policy = WaitPolicy::new(&stop, forever, WaitMode::Oversubscribed);
        let turns = Sequencer::new();
        assert!(matches!(turns.take(1, &mut policy), Ok(false)));
        assert!(!turns.pass());
        assert!(matches!(turns.take(2, &mut policy), Ok(false)));
        stop.raise(Error::new(ErrorKind::Aborted, "by hand"));
        assert_eq!(turns.give_up(), 2);
        assert!(turns.pass());
        let next = turns.take(3, &mut policy);
        assert!(matches!(next, Err(Interrupted::Stopped(_))), "{next:?}");
    }
}

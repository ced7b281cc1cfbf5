//! Keeps the order of a group's collectives while several threads issue them.

use rcomm_core::Deadline;
use rcomm_core::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Hands out turns 1, 2, 3, ... in this order. A turn is a collective's number in the order of issue of the group's
/// NCCL lane.
#[derive(Default)]
pub(crate) struct Turns {
    state: Mutex<State>,
    /// Notified when turns have passed, and when the group has failed.
    changed: Condvar,
}

/// Which turns have passed, and which threads wait.
#[derive(Default)]
struct State {
    /// All turns up to this one have passed.
    last: u64,
    /// Turns after `last` that have passed before an earlier turn, because their operations failed.
    passed: BTreeSet<u64>,
    /// How many threads wait for their turn.
    waiting: usize,
    /// Whether the group has failed, so that no thread waits any more.
    closed: bool,
}

/// Whether the caller had to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TurnWait {
    /// The turn had already come.
    None,
    /// The turn had not come yet.
    Waited,
}

/// A turn in use, which passes when this value is dropped.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    number: u64,
    pub(crate) wait: TurnWait,
}

impl State {
    /// Notes that a turn has passed. Returns whether threads wait that may now have their turn.
    fn pass(&mut self, number: u64) -> bool {
        if number <= self.last {
            return false;
        }
        if number != self.last + 1 {
            self.passed.insert(number);
            return false;
        }
        self.last = number;
        while self.passed.remove(&(self.last + 1)) {
            self.last += 1;
        }
        self.waiting > 0
    }
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all earlier turns have passed. An operation without a turn (a send or receive) has the number 0 and
    /// does not wait. After [`close`](Self::close), no operation waits.
    ///
    /// # Errors
    /// `Timeout` if an earlier turn has not passed by the deadline; this turn then passes.
    pub(crate) fn take(&self, number: u64, deadline: Deadline) -> Result<Turn<'_>> {
        let mut turn = Turn {
            turns: self,
            number,
            wait: TurnWait::None,
        };
        let mut state = self.lock();
        while number != 0 && state.last + 1 != number && !state.closed {
            turn.wait = TurnWait::Waited;
            let rest = deadline.remaining();
            if rest.is_zero() {
                drop(state);
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "earlier collectives of the group were not issued before the deadline",
                ));
            }
            state.waiting += 1;
            let (guard, _) = self
                .changed
                .wait_timeout(state, rest)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.waiting -= 1;
        }
        drop(state);
        Ok(turn)
    }

    /// Notes that a turn has passed, used or not, so that the next one may be taken. Calls the system only if a thread
    /// waits.
    pub(crate) fn pass(&self, number: u64) {
        let mut state = self.lock();
        if state.pass(number) {
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Ends all waits for turns, since the group has failed.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.pass(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const LIMIT: Deadline = Deadline::In(Duration::from_secs(30));

    #[test]
    fn turns_are_taken_in_order_of_their_numbers_whichever_is_requested_first() {
        let turns = Turns::default();
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for number in [3, 2, 1] {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    let _turn = turns.take(number, LIMIT).unwrap();
                    order.lock().unwrap().push(number);
                });
            }
        });
        assert_eq!(*order.lock().unwrap(), [1, 2, 3]);
    }

    #[test]
    fn a_turn_wakes_threads_only_if_some_wait() {
        let mut state = State::default();
        assert!(!state.pass(1), "no thread waits");
        state.waiting = 1;
        assert!(!state.pass(3), "turn 2 is missing");
        assert!(state.pass(2));
        assert_eq!(state.last, 3);
    }

    #[test]
    fn a_turn_that_timed_out_does_not_hold_up_the_next_ones() {
        let turns = Turns::default();
        let late = turns.take(2, Deadline::In(Duration::ZERO));
        assert!(late.is_err());
        turns.pass(1);
        assert_eq!(turns.take(3, LIMIT).unwrap().wait, TurnWait::None);
    }
}

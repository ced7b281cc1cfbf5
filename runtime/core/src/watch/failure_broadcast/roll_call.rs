//! The roll call: before a time-out, a rank asks which ranks run, so that the error of the time-out need not wait for
//! those that do not.
//!
//! | key | holds | writer |
//! |---|---|---|
//! | `rcomm/roll/<attempt>` | how often the roll was called | a rank with an operation that comes near its time-out |
//! | `rcomm/here/<attempt>/<rank>` | the newest call that the rank has answered | every rank |
//!
//! All times here are those for which this process has run, as the rounds of its watchdog count them. After a job was
//! suspended, its ranks are continued one after another, and a rank that was just continued must not consider the
//! others silent.

use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{Store, which_are_set};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A rank joins a call that it has answered at most this long before: the members of a group come near a time-out at
/// about the same time.
const JOIN_TIME: Duration = Duration::from_millis(500);
/// The most ranks whose answers are read in one request to the store.
const CHUNK: usize = 256;

/// A call of the roll that this rank has made or joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RollCall {
    pub(crate) number: i64,
    /// How long ago the call was made.
    pub(crate) age: Duration,
}

impl RollCall {
    /// Those of `ranks` that have answered this call or a later one, as far as the store returns them by `until`.
    pub(crate) fn answered(
        &self,
        store: &dyn Store,
        attempt: u32,
        ranks: &[Rank],
        until: Instant,
    ) -> BTreeSet<Rank> {
        let mut answered = BTreeSet::new();
        for ranks in ranks.chunks(CHUNK) {
            let keys: Vec<String> = ranks.iter().map(|rank| here_key(attempt, *rank)).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let are_set = which_are_set(store, &keys, until);
            let (ranks, keys): (Vec<Rank>, Vec<&str>) = ranks
                .iter()
                .zip(keys)
                .zip(are_set)
                .filter_map(|((&rank, key), is_set)| is_set.then_some((rank, key)))
                .unzip();
            if ranks.is_empty() || Instant::now() >= until {
                continue;
            }
            // The keys exist, so this does not wait.
            let values = store.multi_get(&keys, Duration::from_millis(1));
            let numbers = values.unwrap_or_default();
            let numbers = numbers.iter().map(|value| number_in(value));
            let here = ranks.into_iter().zip(numbers);
            let here =
                here.filter(|(_, number)| number.is_some_and(|number| number >= self.number));
            answered.extend(here.map(|(rank, _)| rank));
        }
        answered
    }
}

/// What the watchdog and the thread `rcomm/dump` share.
#[derive(Debug, Default)]
pub(super) struct RollState {
    /// For how long this process has run, in ns.
    time: AtomicU64,
    /// Whether the roll must be called.
    is_due: AtomicBool,
    /// The newest call that this rank has made or joined: its number, and when.
    called: Mutex<Option<(i64, Duration)>>,
}

impl RollState {
    /// Adds to the time for which this process has run.
    pub(super) fn ran(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.time.fetch_add(ns, Ordering::Relaxed);
    }

    /// For how long this process has run.
    pub(super) fn time(&self) -> Duration {
        Duration::from_nanos(self.time.load(Ordering::Relaxed))
    }

    /// Asks the thread `rcomm/dump` to call the roll.
    pub(super) fn request(&self) {
        self.is_due.store(true, Ordering::Relaxed);
    }

    /// Whether a call was requested since the last question.
    pub(super) fn take_request(&self) -> bool {
        self.is_due.swap(false, Ordering::Relaxed)
    }

    /// Keeps what [`RollAnswers::call`] has returned.
    pub(super) fn keep(&self, called: (i64, Duration)) {
        *self.called.lock().unwrap_or_else(PoisonError::into_inner) = Some(called);
    }

    /// The newest call that this rank has made or joined.
    pub(super) fn newest(&self) -> Option<RollCall> {
        let called = self.called.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, at) = (*called)?;
        let age = self.time().saturating_sub(at);
        Some(RollCall { number, age })
    }
}

/// This rank's answers, on the thread that uses the store.
pub(super) struct RollAnswers {
    attempt: u32,
    rank: Rank,
    /// The newest call that this rank has answered, and when; 0 if none.
    answered: (i64, Duration),
}

impl RollAnswers {
    pub(super) fn new(attempt: u32, rank: Rank) -> Self {
        Self {
            attempt,
            rank,
            answered: (0, Duration::ZERO),
        }
    }

    fn roll_key(&self) -> String {
        format!("rcomm/roll/{}", self.attempt)
    }

    /// Answers the newest call, unless this rank has. `now` returns the time for which this process has run.
    pub(super) fn answer(&mut self, store: &dyn Store, now: &dyn Fn() -> Duration) -> Result<()> {
        let called = store.add(&self.roll_key(), 0)?;
        match called > self.answered.0 {
            true => self.note(store, called, now),
            false => Ok(()),
        }
    }

    /// Calls the roll, or joins a call that another rank has just made. Returns the call's number, and when this rank
    /// made or answered it.
    pub(super) fn call(
        &mut self,
        store: &dyn Store,
        now: &dyn Fn() -> Duration,
    ) -> Result<(i64, Duration)> {
        let key = self.roll_key();
        let called = store.add(&key, 0)?;
        let (answered, at) = self.answered;
        if called > answered {
            self.note(store, called, now)?;
        } else if called == 0 || now().saturating_sub(at) > JOIN_TIME {
            // All members call at about the same time: the compare-and-set makes it one call.
            let (held, next) = (called.to_string(), (called + 1).to_string());
            let held = store.compare_set(&key, held.as_bytes(), next.as_bytes())?;
            let number = number_in(&held).ok_or_else(|| {
                Error::new(ErrorKind::Store, format!("the key {key} holds no number"))
            })?;
            self.note(store, number, now)?;
        }
        Ok(self.answered)
    }

    fn note(&mut self, store: &dyn Store, called: i64, now: &dyn Fn() -> Duration) -> Result<()> {
        let key = here_key(self.attempt, self.rank);
        store.set(&key, called.to_string().as_bytes())?;
        // The other ranks may not have seen the call before the store replied, which may have taken long.
        self.answered = (called, now());
        Ok(())
    }
}

fn here_key(attempt: u32, rank: Rank) -> String {
    format!("rcomm/here/{attempt}/{rank}")
}

fn number_in(value: &[u8]) -> Option<i64> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::HashStore;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn ranks_that_call_at_about_the_same_time_make_one_call() {
        let store = HashStore::new();
        let mut ranks = [3, 5].map(|rank| RollAnswers::new(0, rank));
        let [first, second] = &mut ranks;
        assert_eq!(first.call(&store, &|| SECOND).unwrap(), (1, SECOND));
        assert_eq!(
            second.call(&store, &|| 9 * SECOND).unwrap(),
            (1, 9 * SECOND)
        );
        let soon = SECOND + JOIN_TIME;
        assert_eq!(first.call(&store, &|| soon).unwrap(), (1, SECOND));
        assert_eq!(first.call(&store, &|| 2 * SECOND).unwrap(), (2, 2 * SECOND));
        // The second rank answers that call before it comes near a time-out, too.
        second.answer(&store, &|| 10 * SECOND).unwrap();
        assert_eq!(
            second.call(&store, &|| 10 * SECOND).unwrap(),
            (2, 10 * SECOND)
        );
    }

    #[test]
    fn a_call_is_as_old_as_the_reply_of_the_store() {
        let store = HashStore::new();
        let clock = AtomicU64::new(0);
        // Each look at the clock is a second after the one before: the store takes that long.
        let now = || Duration::from_secs(clock.fetch_add(1, Ordering::Relaxed));
        let mut caller = RollAnswers::new(0, 3);
        assert_eq!(caller.call(&store, &now).unwrap(), (1, Duration::ZERO));
        clock.store(10, Ordering::Relaxed);
        assert_eq!(caller.call(&store, &now).unwrap(), (2, 11 * SECOND));
    }

    #[test]
    fn a_rank_is_here_if_it_has_answered_the_call_or_a_later_one() {
        let store = HashStore::new();
        let mut ranks = [0, 1, 2].map(|rank| RollAnswers::new(0, rank));
        let [caller, lively, frozen] = &mut ranks;
        let here = |number| {
            let call = RollCall {
                number,
                age: Duration::ZERO,
            };
            let until = Instant::now() + 60 * SECOND;
            let here = call.answered(&store, 0, &[0, 1, 2, 3], until);
            here.into_iter().collect::<Vec<_>>()
        };
        caller.call(&store, &|| SECOND).unwrap();
        assert_eq!(here(1), [0]);
        lively.answer(&store, &|| SECOND).unwrap();
        frozen.answer(&store, &|| SECOND).unwrap();
        assert_eq!(here(1), [0, 1, 2]);
        caller.call(&store, &|| 5 * SECOND).unwrap();
        lively.answer(&store, &|| 5 * SECOND).unwrap();
        assert_eq!((here(1), here(2)), (vec![0, 1, 2], vec![0, 1]));
    }

    #[test]
    fn the_age_of_a_call_is_the_time_for_which_the_process_has_run() {
        let calls = RollState::default();
        assert_eq!(calls.newest(), None);
        calls.ran(5 * SECOND);
        calls.keep((7, calls.time()));
        calls.ran(2 * SECOND);
        let expected = RollCall {
            number: 7,
            age: 2 * SECOND,
        };
        assert_eq!(calls.newest(), Some(expected));
    }
}

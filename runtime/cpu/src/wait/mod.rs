//! How a thread waits for a peer: it polls for a short time, then sleeps.
//!
//! A waiter polls for about as long as a wake-up takes. If ranks outnumber cores, the peer may need this core, so the
//! waiter yields between polls, and polls for longer. While yields take long, it polls only briefly and does not yield
//! ([`yielding`]). Then it sleeps; if the caller has announced a long wait, it sleeps at once. If the peer runs on the
//! waiter's own processor, it sleeps after a few polls: where other programs use the processors, the system often keeps
//! two ranks on one of them although there is one for each. It sleeps for at most ten milliseconds at a time, so that
//! it soon detects a stop, a deadline or a dead peer even without a wake-up.

mod failure;
pub(crate) mod processors;
mod yielding;

pub(crate) use failure::Failure;

use rcomm_core::Deadline;
use rcomm_core::Error;
use rcomm_core::WaitHint;
use rcomm_recorder::model::WaitingOperation;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a rank that has a core to itself polls before it sleeps: about the time to wake a sleeping thread.
const SPIN: Duration = Duration::from_micros(50);
/// How long a rank of an oversubscribed host yields before it sleeps: longer than the ranks of a host take
/// to wake each other one by one. If it yielded for a shorter time, ranks that have slept once would arrive so
/// late that the others sleep as well, in every later operation.
const YIELD: Duration = Duration::from_millis(1);
/// How long a helper thread yields to the other threads of its rank before it sleeps.
const HELPER_YIELD: Duration = Duration::from_micros(200);
/// How long a rank of an oversubscribed host polls before it sleeps, while yields take too long.
const SHORT_SPIN: Duration = Duration::from_micros(5);
/// Polls between two reads of the clock.
const POLLS_PER_CHECK: u32 = 64;
/// Number of polls before the waiter uses the processor's hint for spin loops.
const POLLS_BEFORE_HINT: u32 = 48;
/// The longest sleep between two checks of stop, deadline and peers.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);

/// How a waiter polls, yields and sleeps. For a rank, it depends on whether each rank of the host has a core
/// to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// There is a core for each rank: a waiter that spins slows no other rank.
    CorePerRank,
    /// Ranks outnumber cores: a waiter should yield.
    Oversubscribed,
    /// The waiter is a helper thread that waits for work, and not a rank that waits for its peers: it
    /// should yield to the rank, and only for a short time.
    Helper,
    /// The caller expects a long wait: the waiter should sleep at once.
    Sleep,
}

impl WaitMode {
    /// The mode for an operation with this hint from its caller; `self` if the caller gave none.
    #[inline]
    pub(crate) fn hinted(self, hint: WaitHint) -> Self {
        match hint {
            WaitHint::Unknown => self,
            WaitHint::Short => Self::CorePerRank,
            WaitHint::Long => Self::Sleep,
        }
    }

    /// The mode for this number of ranks on the host, compared with the cores that this process may use.
    pub(crate) fn for_local_ranks(local_ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if local_ranks <= cores {
            Self::CorePerRank
        } else {
            Self::Oversubscribed
        }
    }
}

/// Ends all waits of a group, with an error as the reason.
#[derive(Default)]
pub(crate) struct Stop {
    is_raised: AtomicBool,
    reason: Mutex<Option<Error>>,
}

impl Stop {
    /// Raises the stop; returns whether it was raised for the first time. The first reason is kept.
    pub(crate) fn raise(&self, reason: Error) -> bool {
        let mut kept = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = kept.is_none();
        kept.get_or_insert(reason);
        self.is_raised.store(true, Ordering::Release);
        is_first
    }

    /// Whether the stop was raised.
    #[inline]
    pub(crate) fn is_raised(&self) -> bool {
        self.is_raised.load(Ordering::Acquire)
    }

    /// The reason, once the stop was raised.
    pub(crate) fn reason(&self) -> Option<Error> {
        if !self.is_raised() {
            return None;
        }
        let kept = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        kept.clone()
    }
}

/// What a waiter does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Check again.
    Poll,
    /// Sleep until a wake-up, but at most for this long.
    Sleep(Duration),
}

/// Why a wait ends before its condition holds.
#[derive(Debug)]
pub(crate) enum Interrupted {
    /// The deadline passed.
    TimedOut,
    /// The group was stopped, for this reason.
    Stopped(Error),
}

/// One operation's wait: its deadline, its stop, and how often and since when it has polled without success.
pub(crate) struct WaitPolicy<'a> {
    stop: &'a Stop,
    deadline: Deadline,
    wait_mode: WaitMode,
    /// Number of polls without success since the last progress.
    polls: u32,
    waiting: Option<WaitingOperation>,
    /// When the clock was first read since the last progress.
    idle_since: Option<Instant>,
}

impl<'a> WaitPolicy<'a> {
    pub(crate) fn new(stop: &'a Stop, deadline: Deadline, wait_mode: WaitMode) -> Self {
        Self {
            stop,
            deadline,
            wait_mode,
            polls: 0,
            waiting: None,
            idle_since: None,
        }
    }

    /// Sets the operation that waits, for the record of what a rank waits for.
    pub(crate) fn for_operation(self, waiting: WaitingOperation) -> Self {
        Self {
            waiting: Some(waiting),
            ..self
        }
    }

    /// The operation that waits; `None` if the policy was made without one.
    pub(crate) fn waiting(&self) -> Option<WaitingOperation> {
        self.waiting
    }

    /// Restarts the wait, after progress.
    #[inline]
    pub(crate) fn refresh(&mut self) {
        self.polls = 0;
        self.idle_since = None;
    }

    /// Counts an unsuccessful poll; returns what to do next. Yields first, in the modes that yield. Fails if the wait
    /// should end now, which a rank with a core to itself checks only every [`POLLS_PER_CHECK`] polls.
    #[inline]
    pub(crate) fn pause(&mut self) -> Result<Pause, Interrupted> {
        self.pause_beside(|| false)
    }

    /// Does what [`pause`](Self::pause) does, but a rank with a core to itself sleeps after a few polls if `is_here`
    /// says that the peer runs on this thread's processor. Calls `is_here` only when it reads the clock.
    #[inline]
    pub(crate) fn pause_beside(
        &mut self,
        is_here: impl FnOnce() -> bool,
    ) -> Result<Pause, Interrupted> {
        self.polls += 1;
        if self.wait_mode == WaitMode::CorePerRank && !self.polls.is_multiple_of(POLLS_PER_CHECK) {
            // The hint takes about half as long as a load of another core's memory.
            if self.polls > POLLS_BEFORE_HINT {
                std::hint::spin_loop();
            }
            return Ok(Pause::Poll);
        }
        self.check_and_pause(is_here)
    }

    /// How long this wait has lasted since the last progress; zero until it has read the clock for the first time.
    pub(crate) fn idle(&self) -> Duration {
        self.idle_since
            .map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// The time until the deadline; zero once it has passed.
    pub(crate) fn time_left(&self) -> Duration {
        let deadline = self.deadline.start();
        deadline.saturating_duration_since(Instant::now())
    }

    /// Fails if the wait should end now. Starts the deadline if it was not started yet.
    pub(crate) fn check(&mut self) -> Result<(), Interrupted> {
        if let Some(reason) = self.stop.reason() {
            return Err(Interrupted::Stopped(reason));
        }
        self.deadline = self.deadline.started();
        if self.deadline.has_passed() {
            return Err(Interrupted::TimedOut);
        }
        Ok(())
    }

    /// Does what [`pause_beside`](Self::pause_beside) does when it reads the clock.
    #[cold]
    fn check_and_pause(&mut self, is_here: impl FnOnce() -> bool) -> Result<Pause, Interrupted> {
        if let Some(reason) = self.stop.reason() {
            return Err(Interrupted::Stopped(reason));
        }
        let now = Instant::now();
        let since = *self.idle_since.get_or_insert(now);
        let deadline = self.deadline.start();
        self.deadline = Deadline::At(deadline);
        if now >= deadline {
            return Err(Interrupted::TimedOut);
        }
        let idle = now - since;
        let (limit, yields) = match self.wait_mode {
            WaitMode::CorePerRank if is_here() => (Duration::ZERO, false),
            WaitMode::CorePerRank => {
                #[cfg(test)]
                counted::LONG_POLLS.set(counted::LONG_POLLS.get() + 1);
                (SPIN, false)
            }
            WaitMode::Oversubscribed if yielding::takes_too_long() => (SHORT_SPIN, false),
            WaitMode::Oversubscribed => (YIELD, true),
            WaitMode::Helper if yielding::takes_too_long() => (Duration::ZERO, false),
            WaitMode::Helper => (HELPER_YIELD, true),
            WaitMode::Sleep => (Duration::ZERO, false),
        };
        if idle < limit {
            if yields {
                yielding::yield_and_measure(now);
            }
            return Ok(Pause::Poll);
        }
        yielding::note_sleep();
        // If nothing has come by the next poll, the thread need not poll for long once more.
        self.polls = POLLS_PER_CHECK - 1;
        // The first sleep is short, since most waits are short, but not shorter than it takes to fall asleep and to
        // wake up.
        let sleep = idle.min(LONGEST_SLEEP);
        let left = deadline - now;
        Ok(Pause::Sleep(
            sleep.min(left).max(Duration::from_micros(100)),
        ))
    }
}

/// What tests count.
#[cfg(test)]
pub(crate) mod counted {
    use std::cell::Cell;

    thread_local! {
        /// How often this thread decided to poll for up to [`SPIN`](super::SPIN) since its peer runs elsewhere.
        pub(crate) static LONG_POLLS: Cell<u32> = const { Cell::new(0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_core::ErrorKind;

    #[test]
    fn a_waiter_polls_then_sleeps_then_times_out() {
        let stop = Stop::default();
        let deadline = Instant::now() + Duration::from_millis(500);
        let mut policy = WaitPolicy::new(&stop, Deadline::At(deadline), WaitMode::CorePerRank);
        let mut has_slept = false;
        let mut has_polled = false;
        loop {
            match policy.pause() {
                Ok(Pause::Poll) => has_polled = true,
                Ok(Pause::Sleep(time)) => {
                    has_slept = true;
                    assert!(time <= LONGEST_SLEEP);
                    std::thread::sleep(time);
                }
                Err(Interrupted::TimedOut) => break,
                Err(Interrupted::Stopped(_)) => unreachable!("the wait was stopped"),
            }
        }
        assert!(has_polled && has_slept);
        assert!(Instant::now() >= deadline);
    }

    #[test]
    fn a_waiter_sleeps_soon_if_its_peer_runs_on_the_same_processor() {
        let stop = Stop::default();
        let deadline = Deadline::In(Duration::MAX);
        let polls = |is_here: bool| {
            let mut policy = WaitPolicy::new(&stop, deadline, WaitMode::CorePerRank);
            let mut next = || policy.pause_beside(|| is_here).unwrap();
            let polls = std::iter::repeat_with(&mut next).take_while(|pause| *pause == Pause::Poll);
            (polls.count(), next())
        };
        // A waiter that has slept in vain sleeps again at once.
        let (before, then) = polls(true);
        assert!(before < POLLS_PER_CHECK as usize && then != Pause::Poll);
        let (before, then) = polls(false);
        assert!(before >= POLLS_PER_CHECK as usize && then != Pause::Poll);
    }

    #[test]
    fn a_hint_decides_whether_a_waiter_sleeps_at_once() {
        let stop = Stop::default();
        for (hint, wait_mode) in [
            (WaitHint::Long, WaitMode::CorePerRank),
            (WaitHint::Long, WaitMode::Oversubscribed),
        ] {
            let wait_mode = wait_mode.hinted(hint);
            let mut policy = WaitPolicy::new(&stop, Deadline::In(Duration::MAX), wait_mode);
            assert!(matches!(policy.pause(), Ok(Pause::Sleep(_))));
        }
        let wait_mode = WaitMode::Oversubscribed.hinted(WaitHint::Short);
        let mut policy = WaitPolicy::new(&stop, Deadline::In(Duration::MAX), wait_mode);
        assert!(matches!(policy.pause(), Ok(Pause::Poll)));
        assert_eq!(wait_mode, WaitMode::CorePerRank);
    }

    #[test]
    fn the_first_reason_to_stop_is_kept() {
        let stop = Stop::default();
        assert!(stop.raise(Error::new(ErrorKind::PeerLost, "rank 3 is gone")));
        assert!(!stop.raise(Error::new(ErrorKind::Aborted, "later")));
        let mut policy =
            WaitPolicy::new(&stop, Deadline::In(Duration::ZERO), WaitMode::CorePerRank);
        match policy.check() {
            Err(Interrupted::Stopped(reason)) => assert_eq!(reason.kind(), ErrorKind::PeerLost),
            other => panic!("{other:?}"),
        }
    }
}

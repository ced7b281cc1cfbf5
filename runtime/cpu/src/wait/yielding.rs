//! Whether yielding the processor is worthwhile for this thread.
//!
//! A yield takes about a microsecond if only ranks that wait as well share the processor. If another program, or a rank
//! that computes, keeps the processor busy, the scheduler may give it a whole time slice, some milliseconds, for each
//! yield. It may take that time from the share of the thread that yields. A thread that sleeps usually gets a processor
//! soon after it is woken. So a thread measures its yields: after one that took long it sleeps instead, for a number of
//! sleeps, and then tries again.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// A yield that takes this long is slow: another program or a rank that computes had the processor. A rank that waits
/// gives it back sooner.
const SLOW: Duration = Duration::from_micros(500);
/// The minimum and maximum number of sleeps that follow a slow yield.
const MIN_SLEEPS: u32 = 32;
const MAX_SLEEPS: u32 = 1024;
/// A fast yield lowers the number of sleeps by one part in this many, rounded up. So the number grows from
/// [`MIN_SLEEPS`] to [`MAX_SLEEPS`] if one yield in sixteen is slow, and then stays there if only one in about forty
/// is.
const DECAY: u32 = 64;

/// How a thread's yields have gone.
#[derive(Clone, Copy, Debug, Default)]
struct Yields {
    /// The number of sleeps after the next slow yield is twice this, but at least [`MIN_SLEEPS`] and at most
    /// [`MAX_SLEEPS`].
    sleeps: u32,
    /// Number of sleeps that remain before the thread yields again.
    remaining: u32,
}

impl Yields {
    const NONE: Self = Self {
        sleeps: 0,
        remaining: 0,
    };

    /// Takes the duration of a yield into account.
    fn record(&mut self, time: Duration) {
        if time < SLOW {
            self.sleeps -= self.sleeps.div_ceil(DECAY);
            return;
        }
        self.sleeps = (2 * self.sleeps).clamp(MIN_SLEEPS, MAX_SLEEPS);
        self.remaining = self.sleeps;
    }
}

thread_local! {
    static YIELDS: Cell<Yields> = const { Cell::new(Yields::NONE) };
}

/// Whether this thread should sleep rather than yield, since its last yield was slow.
#[inline]
pub(super) fn takes_too_long() -> bool {
    YIELDS.get().remaining > 0
}

/// Yields the processor, and takes into account how long that took since `start`, the time just before the call.
pub(super) fn yield_and_measure(start: Instant) {
    std::thread::yield_now();
    let mut yields = YIELDS.get();
    yields.record(start.elapsed());
    YIELDS.set(yields);
}

/// Notes that this thread is about to sleep.
pub(super) fn note_sleep() {
    let yields = YIELDS.get();
    YIELDS.set(Yields {
        remaining: yields.remaining.saturating_sub(1),
        ..yields
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_yields_are_tried_less_and_less_often() {
        let mut yields = Yields::NONE;
        yields.record(SLOW / 2);
        assert_eq!(yields.remaining, 0);
        let mut sleeps = Vec::new();
        for _ in 0..8 {
            yields.record(SLOW);
            sleeps.push(yields.remaining);
        }
        assert_eq!(sleeps, [32, 64, 128, 256, 512, 1024, 1024, 1024]);
        // One slow yield in twenty keeps the number of sleeps at the maximum.
        for _ in 0..20 {
            yields.record(SLOW / 100);
        }
        yields.record(SLOW);
        assert_eq!(yields.remaining, 1024);
        // After many fast yields a slow one counts as the first.
        for _ in 0..1000 {
            yields.record(SLOW / 100);
        }
        yields.record(SLOW);
        assert_eq!(yields.remaining, 32);
    }

    #[test]
    fn a_thread_yields_again_after_its_sleeps() {
        let far_back = Instant::now().checked_sub(SLOW).unwrap();
        assert!(!takes_too_long());
        yield_and_measure(far_back);
        for _ in 0..MIN_SLEEPS {
            assert!(takes_too_long());
            note_sleep();
        }
        assert!(!takes_too_long());
    }
}

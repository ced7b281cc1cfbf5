//! Whether it is worth while for this thread to yield its processor.
//!
//! A yield takes about a microsecond if the ranks of the job are alone on their processors. If another program keeps a
//! processor busy, the system gives it a whole time slice, some milliseconds, for each yield of a rank, and takes the
//! time from the rank's share. A thread that sleeps gets its processor back as soon as it is woken. So a thread
//! measures its yields: after one that took long it sleeps instead, for a number of waits, and then tries again.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// A yield that takes this long is slow: another program had the processor, not a rank that has just arrived.
const SLOW: Duration = Duration::from_micros(500);
/// How many sleeps follow a slow yield, at least and at most.
const LEAST: u32 = 32;
const MOST: u32 = 1024;
/// A fast yield lowers the number of sleeps by one part in this many, rounded up. So the number grows from the least to
/// the most if one yield in sixteen is slow, and then stays there if only one in about forty is.
const DECAY: u32 = 64;

/// How a thread's yields have gone.
#[derive(Clone, Copy, Debug, Default)]
struct Yields {
    /// The number of sleeps after the next slow yield is twice this, but at least [`LEAST`] and at most [`MOST`].
    sleeps: u32,
    /// Number of sleeps that remain before the thread yields again.
    left: u32,
}

impl Yields {
    const NONE: Self = Self { sleeps: 0, left: 0 };

    /// Takes a yield into account.
    fn took(&mut self, time: Duration) {
        if time < SLOW {
            self.sleeps -= self.sleeps.div_ceil(DECAY);
            return;
        }
        self.sleeps = (2 * self.sleeps).clamp(LEAST, MOST);
        self.left = self.sleeps;
    }
}

thread_local! {
    static YIELDS: Cell<Yields> = const { Cell::new(Yields::NONE) };
}

/// Whether this thread should sleep rather than yield.
#[inline]
pub(super) fn takes_too_long() -> bool {
    YIELDS.get().left > 0
}

/// Yields the processor; `now` is the present time.
pub(super) fn yield_from(now: Instant) {
    std::thread::yield_now();
    let mut yields = YIELDS.get();
    yields.took(now.elapsed());
    YIELDS.set(yields);
}

/// Notes that this thread is about to sleep.
pub(super) fn note_sleep() {
    let yields = YIELDS.get();
    YIELDS.set(Yields {
        left: yields.left.saturating_sub(1),
        ..yields
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_yields_are_tried_less_and_less_often() {
        let mut yields = Yields::NONE;
        yields.took(SLOW / 2);
        assert_eq!(yields.left, 0);
        let mut sleeps = Vec::new();
        for _ in 0..8 {
            yields.took(SLOW);
            sleeps.push(yields.left);
        }
        assert_eq!(sleeps, [32, 64, 128, 256, 512, 1024, 1024, 1024]);
        // One slow yield in twenty keeps the number of sleeps at the most.
        for _ in 0..20 {
            yields.took(SLOW / 100);
        }
        yields.took(SLOW);
        assert_eq!(yields.left, 1024);
        // Once all are fast again, that is forgotten.
        for _ in 0..1000 {
            yields.took(SLOW / 100);
        }
        yields.took(SLOW);
        assert_eq!(yields.left, 32);
    }

    #[test]
    fn a_thread_yields_again_after_its_sleeps() {
        let far_back = Instant::now().checked_sub(SLOW).unwrap();
        assert!(!takes_too_long());
        yield_from(far_back);
        for _ in 0..LEAST {
            assert!(takes_too_long());
            note_sleep();
        }
        assert!(!takes_too_long());
    }
}

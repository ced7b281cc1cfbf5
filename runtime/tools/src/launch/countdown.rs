//! [`Countdown`]: a time that passes only while this launcher runs.

use std::time::{Duration, Instant};

/// The interval at which a wait looks at a countdown.
const LOOK: Duration = Duration::from_millis(100);
/// Of the time between two looks, at most this much counts.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A time that ranks are given. If the launcher is stopped in that time, it does not know whether the ranks were
/// stopped too, as they are when a whole job is suspended: the time of the stop does not count.
pub(super) struct Countdown {
    left: Duration,
    /// When it was looked at last.
    looked: Instant,
}

impl Countdown {
    pub(super) const fn new(time: Duration, now: Instant) -> Self {
        Self {
            left: time,
            looked: now,
        }
    }

    /// Whether the time is over.
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        let passed = (now - self.looked).min(LONGEST_PAUSE);
        self.left = self.left.saturating_sub(passed);
        self.looked = now;
        self.left.is_zero()
    }

    /// When [`is_over`](Self::is_over) must be called next.
    pub(super) fn next_look(&self) -> Instant {
        self.looked + self.left.min(LOOK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_in_which_the_launcher_was_stopped_does_not_count() {
        let start = Instant::now();
        let mut countdown = Countdown::new(Duration::from_secs(5), start);
        let mut is_over = |millis| countdown.is_over(start + Duration::from_millis(millis));
        assert!((100..=4_700).step_by(100).all(|millis| !is_over(millis)));
        assert!(!is_over(3_600_000));
        // The look after the stop came late, and that counts as two.
        assert!(is_over(3_600_100));
        let mut countdown = Countdown::new(Duration::from_secs(5), start);
        let mut is_over = |millis| countdown.is_over(start + Duration::from_millis(millis));
        assert!(!is_over(3_600_000));
        let later = 3_600_000 + 4_800;
        assert!(
            (3_600_100..later)
                .step_by(100)
                .all(|millis| !is_over(millis))
        );
        assert!(is_over(later));
    }

    #[test]
    fn a_wait_looks_when_the_time_is_over() {
        let start = Instant::now();
        let mut countdown = Countdown::new(Duration::from_millis(150), start);
        let first = countdown.next_look();
        assert_eq!(first - start, LOOK);
        assert!(!countdown.is_over(first));
        let last = countdown.next_look();
        assert_eq!(last - start, Duration::from_millis(150));
        assert!(countdown.is_over(last));
        assert!(Countdown::new(Duration::ZERO, start).is_over(start));
    }
}

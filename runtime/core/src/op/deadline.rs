//! [`Deadline`]: the latest moment at which a wait ends.

use std::time::{Duration, Instant};

/// The latest moment at which a wait ends. Every wait for another rank has one.
///
/// A deadline made from a duration reads the clock only when a wait begins: an operation that takes a tenth
/// of a microsecond cannot afford to read the clock.
#[derive(Clone, Copy, Debug)]
pub enum Deadline {
    /// At this moment.
    At(Instant),
    /// This long after the wait began, that is, after [`Deadline::start`].
    In(Duration),
}

impl Deadline {
    /// The moment of the deadline; a duration counts from now.
    ///
    /// Call it once, when a wait turns out to be more than a few spins, and keep the answer.
    #[inline]
    pub fn start(self) -> Instant {
        match self {
            Self::At(at) => at,
            Self::In(duration) => after(Instant::now(), duration),
        }
    }

    /// The deadline as [`At`](Self::At) a moment; a duration counts from now.
    #[inline]
    pub fn started(self) -> Self {
        Self::At(self.start())
    }

    /// Like [`started`](Self::started), for a caller that has read the clock.
    #[inline]
    pub(crate) fn started_at(self, now: Instant) -> Self {
        Self::At(match self {
            Self::At(at) => at,
            Self::In(duration) => after(now, duration),
        })
    }

    /// How long there is still to wait: zero if the moment has passed, the whole duration if the wait has not
    /// begun.
    #[inline]
    pub fn remaining(self) -> Duration {
        match self {
            Self::At(at) => at.saturating_duration_since(Instant::now()),
            Self::In(duration) => duration,
        }
    }

    /// Whether no time remains.
    #[inline]
    pub fn has_passed(self) -> bool {
        self.remaining().is_zero()
    }
}

impl From<Duration> for Deadline {
    fn from(duration: Duration) -> Self {
        Self::In(duration)
    }
}

/// `now` plus `duration`; if that exceeds the range of the clock, plus thirty years.
#[inline]
fn after(now: Instant, duration: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
    now.checked_add(duration)
        .or_else(|| now.checked_add(FAR))
        .unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_beyond_the_range_of_the_clock_gives_a_deadline_in_the_future() {
        assert!(!Deadline::In(Duration::MAX).started().has_passed());
        assert!(Deadline::In(Duration::ZERO).started().has_passed());
    }
}

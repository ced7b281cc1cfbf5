//! Time: the monotonic clock, pinned once to wall time.
//!
//! A record holds nanoseconds of `CLOCK_MONOTONIC`, which never jumps. Where the ring was made, both
//! clocks were read together; a reader adds the difference. So the times of one ring are consistent
//! with each other whatever happens to the wall clock later.

use rustix::time::{ClockId, clock_gettime};

/// A moment, ns of the host's monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub(crate) u64);

impl Timestamp {
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub const fn as_ns(self) -> u64 {
        self.0
    }

    /// This many nanoseconds of `CLOCK_MONOTONIC`.
    pub const fn from_ns(ns: u64) -> Self {
        Self(ns)
    }
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    (time.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(time.tv_nsec as u64)
}

/// Now: one call of the vDSO, no system call.
#[inline]
pub(crate) fn now() -> Timestamp {
    Timestamp(read(ClockId::Monotonic))
}

/// Now, wall clock, ns since the epoch.
pub(crate) fn wall_now() -> i64 {
    read(ClockId::Realtime) as i64
}

/// One moment on both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Anchor {
    pub(crate) monotonic_ns: u64,
    pub(crate) wall_ns: i64,
}

impl Anchor {
    /// Reads both clocks several times and keeps the reading with the least time between them.
    pub(crate) fn take() -> Self {
        let reading = || {
            let before = now().0;
            let wall_ns = wall_now();
            let after = now().0;
            let width = after.wrapping_sub(before);
            let anchor = Self {
                monotonic_ns: before.wrapping_add(width / 2),
                wall_ns,
            };
            (width, anchor)
        };
        let first = reading();
        let best = (0..8).fold(first, |best, _| {
            let next = reading();
            if next.0 < best.0 { next } else { best }
        });
        best.1
    }

    /// Wall clock, ns since the epoch, of a monotonic time; 0 stays 0 ("not seen").
    pub(crate) fn wall_of(self, monotonic_ns: u64) -> i64 {
        if monotonic_ns == 0 {
            return 0;
        }
        let since = monotonic_ns.wrapping_sub(self.monotonic_ns) as i64;
        self.wall_ns.wrapping_add(since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wall_time_of_a_moment_counts_from_the_anchor_both_ways() {
        let anchor = Anchor {
            monotonic_ns: 1_000,
            wall_ns: 50_000,
        };
        assert_eq!(anchor.wall_of(1_500), 50_500);
        assert_eq!(anchor.wall_of(400), 49_400);
        assert_eq!(anchor.wall_of(0), 0);
    }
}

//! The records' clock: `CLOCK_MONOTONIC`, read cheaply and anchored once to wall time.
//!
//! A record holds nanoseconds of `CLOCK_MONOTONIC`, which never jumps. That clock and the wall clock are read
//! together when the ring is created, and readers add the difference. So the times of one ring stay consistent
//! when the wall clock is changed.
//!
//! Two clock reads through the vDSO cost more than the rest of a record (47 ns of 69 on an EPYC 9004).
//! Where the time-stamp counter is the kernel's clock source, [`Clock`] reads the counter itself and
//! scales it as the vDSO does, with a rate that it checks against the clock at least once a second; in
//! between it stays within a microsecond. In the first millisecond, before the rate is known, and on
//! other machines it reads the vDSO clock.

mod counter;

use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A moment, ns of the host's monotonic clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

fn monotonic() -> u64 {
    read(ClockId::Monotonic)
}

/// The clock of the records. Makes no system call, unless the kernel's clock source is one that the vDSO cannot read.
#[derive(Debug)]
pub(crate) enum Clock {
    /// The vDSO clock.
    Monotonic,
    /// The processor's counter, scaled.
    Counter(Scale),
}

impl Clock {
    /// The cheapest clock that is reliable on this machine.
    pub(crate) fn choose() -> Self {
        match counter::is_trusted() {
            true => Self::Counter(Scale::begin()),
            false => Self::Monotonic,
        }
    }

    /// The current time. Two readings on one thread can be out of order by a fraction of a microsecond.
    #[inline]
    pub(crate) fn now(&self) -> Timestamp {
        Timestamp(match self {
            Self::Monotonic => monotonic(),
            Self::Counter(scale) => scale.now(),
        })
    }
}

/// The rate of a constant-rate counter, and one moment on both the counter and the clock.
///
/// Guarded by a version that is odd while a thread updates the rest. Readers do not wait for the
/// update.
#[derive(Debug)]
pub(crate) struct Scale {
    version: AtomicU64,
    base_ticks: AtomicU64,
    base_ns: AtomicU64,
    /// Nanoseconds per tick, in units of 2^-32; 0 if not known yet.
    rate: AtomicU64,
    /// Number of ticks after the base for which the rate is accurate enough.
    valid_ticks: AtomicU64,
}

/// One moment on the counter and on the clock.
#[derive(Clone, Copy)]
struct Moment {
    ticks: u64,
    ns: u64,
}

impl Moment {
    /// Takes the best of a few readings: the one during which the counter moved least.
    fn take() -> Self {
        let reading = || {
            let before = counter::ticks();
            let ns = monotonic();
            let width = counter::ticks().wrapping_sub(before);
            let ticks = before.wrapping_add(width / 2);
            (width, Self { ticks, ns })
        };
        let first = reading();
        let best = (0..3).fold(first, |best, _| {
            let next = reading();
            if next.0 < best.0 { next } else { best }
        });
        best.1
    }

    /// The rate from `self` to a later moment; `None` if the readings are not usable.
    fn rate_to(self, later: Self) -> Option<u64> {
        let ns = later.ns.checked_sub(self.ns)?;
        let ticks = later.ticks.checked_sub(self.ticks)?;
        u64::try_from((u128::from(ns) << 32).checked_div(ticks.into())?).ok()
    }
}

const MILLISECOND: u64 = 1_000_000;

impl Scale {
    /// Takes the first of two moments. A reader takes the second one a millisecond later or more, so
    /// start-up does not wait for the rate.
    fn begin() -> Self {
        let base = Moment::take();
        Self {
            version: AtomicU64::new(0),
            base_ticks: AtomicU64::new(base.ticks),
            base_ns: AtomicU64::new(base.ns),
            rate: AtomicU64::new(0),
            valid_ticks: AtomicU64::new(0),
        }
    }

    /// The time by the scaled counter, or by the clock itself if the scale is not valid now.
    #[inline]
    fn now(&self) -> u64 {
        let version = self.version.load(Ordering::Acquire);
        let base_ticks = self.base_ticks.load(Ordering::Relaxed);
        let base_ns = self.base_ns.load(Ordering::Relaxed);
        let rate = self.rate.load(Ordering::Relaxed);
        let valid_ticks = self.valid_ticks.load(Ordering::Relaxed);
        let since = counter::ticks().wrapping_sub(base_ticks);
        fence(Ordering::Acquire);
        let is_consistent = version & 1 == 0 && self.version.load(Ordering::Relaxed) == version;
        if is_consistent && since < valid_ticks {
            base_ns.wrapping_add(((u128::from(since) * u128::from(rate)) >> 32) as u64)
        } else {
            self.correct(version)
        }
    }

    /// The time by the clock itself. The first of several threads that call this also corrects the scale, except in the
    /// first millisecond, when a measured rate would be too coarse.
    #[cold]
    fn correct(&self, version: u64) -> u64 {
        let old = self.rate.load(Ordering::Relaxed);
        let now = monotonic();
        if old == 0 && now < self.base_ns.load(Ordering::Relaxed) + MILLISECOND {
            return now;
        }
        let claim = version | 1;
        let claimed = version & 1 == 0
            && self
                .version
                .compare_exchange(version, claim, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        if !claimed {
            return monotonic();
        }
        fence(Ordering::Release);
        let base = Moment {
            ticks: self.base_ticks.load(Ordering::Relaxed),
            ns: self.base_ns.load(Ordering::Relaxed),
        };
        let now = Moment::take();
        let plausible = |rate: &u64| match old {
            // From 10 GHz to 100 MHz.
            0 => ((1 << 32) / 10..(1 << 32) * 10).contains(rate),
            old => rate.abs_diff(old) < old / 1_000,
        };
        let since = now.ticks.wrapping_sub(base.ticks);
        let (rate, valid_ticks) = match base.rate_to(now).filter(plausible) {
            Some(rate) => {
                let second = (u128::from(1_000 * MILLISECOND) << 32) / u128::from(rate.max(1));
                // A rate measured over a millisecond is accurate to about ten parts in a million, and is used for ten
                // milliseconds.
                (rate, since.saturating_mul(10).min(second as u64))
            }
            // On a machine that was suspended the counter advances and the clock does not. That happened now,
            // or when the rate was measured: the rate is measured again from here.
            None => (0, 0),
        };
        self.rate.store(rate, Ordering::Relaxed);
        self.valid_ticks.store(valid_ticks, Ordering::Relaxed);
        self.base_ticks.store(now.ticks, Ordering::Relaxed);
        self.base_ns.store(now.ns, Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
        monotonic()
    }
}

/// The current time, wall clock, ns since the epoch.
pub(crate) fn wall_now() -> i64 {
    read(ClockId::Realtime) as i64
}

/// One moment on the monotonic clock and on the wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Anchor {
    pub(crate) monotonic_ns: u64,
    pub(crate) wall_ns: i64,
}

impl Anchor {
    /// Reads both clocks several times and keeps the reading with the least time between them.
    pub(crate) fn take() -> Self {
        let reading = || {
            let before = monotonic();
            let wall_ns = wall_now();
            let after = monotonic();
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

    /// The current time, ns since the epoch, counted from the anchor: later jumps of the wall clock do not change it.
    pub(crate) fn now_ns(self) -> i64 {
        self.wall_of(monotonic())
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
    fn the_chosen_clock_stays_close_to_the_system_clock_across_corrections() {
        let clock = Clock::choose();
        let tolerance = 20_000;
        let started = monotonic();
        // Past the first three corrections, after about 1, 11 and 111 ms.
        while monotonic() < started + 150 * MILLISECOND {
            let before = monotonic();
            let now = clock.now().0;
            let after = monotonic();
            assert!(before <= now + tolerance, "{now} is {} early", before - now);
            assert!(now <= after + tolerance, "{now} is {} late", now - after);
        }
    }

    #[test]
    fn scale_survives_a_counter_that_moved_without_the_clock() {
        if !counter::is_trusted() {
            eprintln!("skipped: no counter on this machine");
            return;
        }
        let scale = Scale::begin();
        let measured = || loop {
            scale.now();
            match scale.rate.load(Ordering::Relaxed) {
                0 => std::thread::yield_now(),
                rate => break rate,
            }
        };
        let rate = measured();
        // As if the machine had been suspended: only the counter's base is far in the past.
        let base = scale.base_ticks.load(Ordering::Relaxed);
        scale
            .base_ticks
            .store(base.wrapping_sub(1 << 40), Ordering::Relaxed);
        let before = monotonic();
        let now = scale.now();
        assert!(before <= now && now <= monotonic());
        assert!(measured().abs_diff(rate) < rate / 1_000);
        let again = scale.now();
        assert!(again + 20_000 >= now && again <= monotonic() + 20_000);
    }

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

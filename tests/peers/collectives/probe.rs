//! Measures how far apart two cores are at this moment: the round trip of a cache line between them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Round trips in one probe; the first quarter is not timed.
const TRIPS: u32 = 4000;

/// A counter on cache lines of its own.
#[repr(align(128))]
struct Line(AtomicU32);

/// Nanoseconds of a round trip between the first two cores: the mean of 3000.
pub(crate) fn round_trip() -> f64 {
    let (there, back) = (Line(AtomicU32::new(0)), Line(AtomicU32::new(0)));
    let wait = |line: &Line, trip| {
        while line.0.load(Ordering::Acquire) != trip {
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin_to(1);
            for trip in 1..=TRIPS {
                wait(&there, trip);
                back.0.store(trip, Ordering::Release);
            }
        });
        let timing = scope.spawn(|| {
            pin_to(0);
            let mut start = Instant::now();
            for trip in 1..=TRIPS {
                if trip == TRIPS / 4 {
                    start = Instant::now();
                }
                there.0.store(trip, Ordering::Release);
                wait(&back, trip);
            }
            start.elapsed()
        });
        let time = timing.join().unwrap_or_default();
        time.as_secs_f64() * 1e9 / f64::from(TRIPS - TRIPS / 4)
    })
}

/// Keeps this thread on a core, if there is such a core.
pub(crate) fn pin_to(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    // If this fails, the thread runs on whichever cores the system chooses.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

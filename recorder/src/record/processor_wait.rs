//! Measures how long the threads that issue and run operations waited for a processor.
//!
//! The kernel counts for each thread how long it was ready to run without a processor (`schedstat`, in nanoseconds). A
//! rank that arrives late because of these waits is not at fault: its host has too few processors for its threads. The
//! sum covers the last one to two minutes, so that it can be compared with the time that the job lost in the same
//! minutes.

use rustix::fs::{Mode, OFlags};
use std::io::{Cursor, Write};
use std::time::Duration;

/// The window begins at least this long ago, unless the process is younger, and at most twice as long ago.
const WINDOW: Duration = Duration::from_secs(60);
/// At most this many threads are measured: those that issued or ran the first operations.
const MAX_THREADS: usize = 64;

/// The waits of the threads of one process.
#[derive(Debug)]
pub(super) struct ProcessorWaits {
    /// The thread of each row of the ring's table, with the kernel's count when it was read last; `None` once the
    /// thread has ended or cannot be read.
    threads: Vec<(u32, Option<u64>)>,
    /// The waits of all threads so far.
    total_ns: u64,
    /// The moments at which the current window and the next one begin, each with the total at that time.
    window: Option<(Mark, Mark)>,
}

/// A moment, and the waits of all threads until then.
#[derive(Clone, Copy, Debug)]
struct Mark {
    at_ns: u64,
    total_ns: u64,
}

/// The window as the ring's header holds it: its start, on the ring's clock, and the waits since then, both in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) since_ns: u64,
    pub(super) waited_ns: u64,
}

impl ProcessorWaits {
    pub(super) fn new() -> Self {
        Self {
            // Adding a thread later must not allocate.
            threads: Vec::with_capacity(MAX_THREADS),
            total_ns: 0,
            window: None,
        }
    }

    /// The number of threads that are measured.
    pub(super) fn thread_count(&self) -> usize {
        self.threads.len()
    }

    /// Adds a thread, whose waits count from now on. An earlier thread of the same id has ended.
    pub(super) fn add(&mut self, thread: u32) {
        for (known, last) in &mut self.threads {
            if *known == thread {
                *last = None;
            }
        }
        if self.threads.len() < MAX_THREADS {
            self.threads.push((thread, waited_ns(thread)));
        }
    }

    /// Reads the kernel's counts and returns the window. `None` if no thread's count can be read: the system does not
    /// report it, or all threads have ended.
    pub(super) fn measure(&mut self, now_ns: u64) -> Option<Window> {
        for (thread, last) in &mut self.threads {
            let Some(before) = *last else { continue };
            *last = waited_ns(*thread);
            self.total_ns += last.unwrap_or(before).saturating_sub(before);
        }
        if self.threads.iter().all(|(_, last)| last.is_none()) {
            return None;
        }
        Some(self.window_at(now_ns))
    }

    /// Returns the window at this moment; moves the window if the next one is long enough.
    fn window_at(&mut self, now_ns: u64) -> Window {
        let mark = Mark {
            at_ns: now_ns,
            total_ns: self.total_ns,
        };
        let (current, next) = self.window.get_or_insert((mark, mark));
        let length = WINDOW.as_nanos() as u64;
        if now_ns.saturating_sub(next.at_ns) >= length {
            (*current, *next) = (*next, mark);
        }
        Window {
            since_ns: current.at_ns,
            waited_ns: self.total_ns.saturating_sub(current.total_ns),
        }
    }
}

/// How long a thread of this process has waited for a processor: the second number of
/// `/proc/self/task/<thread>/schedstat`. Does not allocate.
fn waited_ns(thread: u32) -> Option<u64> {
    let mut path = Cursor::new([0; 64]);
    write!(path, "/proc/self/task/{thread}/schedstat").ok()?;
    let len = path.position() as usize;
    let path = &path.get_ref()[..len];
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0; 64];
    let len = rustix::io::read(&file, &mut text).ok()?;
    let text = std::str::from_utf8(&text[..len]).ok()?;
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_covers_between_one_and_two_minutes() {
        let second = 1_000_000_000;
        let mut waits = ProcessorWaits::new();
        let mut window_of = |seconds: u64, waited: u64| {
            waits.total_ns += waited;
            let window = waits.window_at(seconds * second);
            (window.since_ns / second, window.waited_ns)
        };
        assert_eq!(window_of(10, 5), (10, 0));
        assert_eq!(window_of(40, 7), (10, 7));
        assert_eq!(window_of(70, 1), (10, 8));
        assert_eq!(window_of(129, 1), (10, 9));
        assert_eq!(window_of(130, 2), (70, 3));
        assert_eq!(window_of(190, 4), (130, 4));
    }

    #[test]
    fn the_waits_of_a_thread_that_has_ended_still_count() {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let mut waits = ProcessorWaits::new();
        waits.add(thread.cast_unsigned());
        if waits.measure(1).is_none() {
            return; // This kernel does not count waits.
        }
        waits.total_ns += 50;
        waits.threads[0].0 = u32::MAX;
        assert_eq!(waits.measure(2), None, "an ended thread's waits were read");
        assert!(waits.total_ns >= 50);
    }

    #[test]
    fn the_waits_of_a_thread_that_has_the_id_of_an_earlier_one_count_once() {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let mut waits = ProcessorWaits::new();
        waits.add(thread.cast_unsigned());
        waits.add(thread.cast_unsigned());
        let counted = waits.threads.iter().filter(|(_, last)| last.is_some());
        assert!(counted.count() <= 1);
        assert_eq!(waits.thread_count(), 2);
    }
}

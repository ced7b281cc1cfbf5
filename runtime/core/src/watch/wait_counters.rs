//! Counters of waits: how often and for how long threads of this process wait, by the name of the wait. The runtime
//! has some of its own; the program makes others ([`World::wait_counter`](crate::World::wait_counter)).

use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::publish::{WaitStatistics, is_wait_name};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most names that the program may use.
const MAX_NAMES: usize = 256;
/// The beginning of the names of the runtime's waits.
const RESERVED: &str = "rcomm.";

/// What the runtime itself waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RuntimeWait {
    /// For the other ranks, when a world is made.
    Rendezvous,
    /// In the store: for keys, and in its barriers. Requests that wait for no other rank do not count.
    Store,
    /// For the end of an operation that was issued.
    Work,
    /// For the end of all operations.
    Pending,
    /// For the other ranks, at the end of a world.
    Shutdown,
}

impl RuntimeWait {
    /// The names of the counters, in the order of the variants.
    const NAMES: [&str; 5] = [
        "rcomm.rendezvous",
        "rcomm.store",
        "rcomm.work",
        "rcomm.pending",
        "rcomm.shutdown",
    ];
}

/// Counts the waits of one name, without a lock. Times are in ns.
#[derive(Debug)]
struct Counter {
    /// The moment from which `since` counts.
    began: Instant,
    /// How many waits have ended.
    count: AtomicU64,
    /// How long the waits that have ended took together.
    total: AtomicU64,
    /// How long the longest wait that has ended took.
    max: AtomicU64,
    /// How many threads wait now.
    waiting: AtomicU32,
    /// When a thread began to wait while no other did.
    since: AtomicU64,
}

impl Default for Counter {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            count: AtomicU64::new(0),
            total: AtomicU64::new(0),
            max: AtomicU64::new(0),
            waiting: AtomicU32::new(0),
            since: AtomicU64::new(0),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Counter {
    fn begin(&self) -> Waiting<'_> {
        let now = Instant::now();
        // Stored before the count is raised: a reader that sees a wait must not take the time of an earlier one for its
        // beginning. While others wait, theirs stays.
        if self.waiting.load(Ordering::Relaxed) == 0 {
            let since = nanoseconds(now.saturating_duration_since(self.began));
            self.since.store(since, Ordering::Relaxed);
        }
        self.waiting.fetch_add(1, Ordering::Release);
        Waiting {
            counter: self,
            began: now,
        }
    }

    fn end(&self, took: Duration) {
        let took = nanoseconds(took);
        self.total.fetch_add(took, Ordering::Relaxed);
        self.max.fetch_max(took, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    fn statistics(&self, name: &str) -> WaitStatistics {
        let waiting = self.waiting.load(Ordering::Acquire);
        let since = self.since.load(Ordering::Relaxed);
        WaitStatistics {
            name: name.to_owned(),
            count: self.count.load(Ordering::Relaxed),
            total_ns: self.total.load(Ordering::Relaxed),
            max_ns: self.max.load(Ordering::Relaxed),
            waiting,
            waiting_ns: match waiting {
                0 => 0,
                _ => nanoseconds(self.began.elapsed()).saturating_sub(since),
            },
        }
    }
}

/// A wait of a thread, which ends when this value is dropped.
#[must_use = "the wait ends when this is dropped"]
#[derive(Debug)]
pub struct Waiting<'a> {
    counter: &'a Counter,
    began: Instant,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.counter.end(self.began.elapsed());
    }
}

/// Counts the program's waits of one name, like c10d's `_WaitCounter`.
///
/// # Thread safety
/// May be used by several threads at a time; clones count together.
#[derive(Clone, Debug)]
pub struct WaitCounter(Arc<Counter>);

impl WaitCounter {
    /// Counts a wait of this thread, from now until the returned value is dropped. Reads the clock twice, takes no lock
    /// and allocates nothing.
    pub fn begin(&self) -> Waiting<'_> {
        self.0.begin()
    }

    /// Like [`begin`](Self::begin); the returned value keeps the counter.
    pub fn begin_owned(&self) -> OwnedWaiting {
        let waiting = self.0.begin();
        let began = waiting.began;
        // The wait continues: it ends with the returned value.
        std::mem::forget(waiting);
        OwnedWaiting {
            counter: self.clone(),
            began,
        }
    }
}

/// A wait that need not end on the thread on which it began. It ends when this value is dropped.
#[must_use = "the wait ends when this is dropped"]
#[derive(Debug)]
pub struct OwnedWaiting {
    counter: WaitCounter,
    began: Instant,
}

impl Drop for OwnedWaiting {
    fn drop(&mut self) {
        self.counter.0.end(self.began.elapsed());
    }
}

/// The counters of a world.
#[derive(Debug, Default)]
pub(crate) struct WaitCounters {
    runtime: [Counter; RuntimeWait::NAMES.len()],
    program: Mutex<Vec<(String, WaitCounter)>>,
}

impl WaitCounters {
    /// Counts a wait of the runtime, until the returned value is dropped.
    #[inline]
    pub(crate) fn begin(&self, wait: RuntimeWait) -> Waiting<'_> {
        self.runtime[wait as usize].begin()
    }

    /// The program's counter of this name, made if there is none.
    ///
    /// # Errors
    /// `InvalidArgument` if the name is malformed or reserved, or would be one more than [`MAX_NAMES`].
    pub(crate) fn named(&self, name: &str) -> Result<WaitCounter> {
        let refused = |reason: String| Err(Error::new(ErrorKind::InvalidArgument, reason));
        if !is_wait_name(name) {
            return refused(format!(
                "the name {name:?} of a wait must have 1 to 64 lower-case letters, digits, \"-\", \"_\" and \".\""
            ));
        }
        if name.starts_with(RESERVED) {
            return refused(format!(
                "the name {name:?} of a wait begins with {RESERVED:?}, as those of rcomm's own waits"
            ));
        }
        let mut program = self.program.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, counter)) = program.iter().find(|(known, _)| known == name) {
            return Ok(counter.clone());
        }
        if program.len() >= MAX_NAMES {
            return refused(format!(
                "there are counters for {MAX_NAMES} names of waits already: use one of them for {name:?}"
            ));
        }
        let counter = WaitCounter(Arc::default());
        program.push((name.to_owned(), counter.clone()));
        Ok(counter)
    }

    /// The waits of all names: the runtime's, then the program's in the order in which they were made.
    pub(crate) fn statistics(&self) -> Vec<WaitStatistics> {
        let runtime = RuntimeWait::NAMES.iter().zip(&self.runtime);
        let mut statistics: Vec<WaitStatistics> = runtime
            .map(|(name, counter)| counter.statistics(name))
            .collect();
        let program = self.program.lock().unwrap_or_else(PoisonError::into_inner);
        statistics.extend(
            program
                .iter()
                .map(|(name, counter)| counter.0.statistics(name)),
        );
        statistics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_counted_while_they_last_and_when_they_have_ended() {
        let counters = WaitCounters::default();
        let own = counters.named("checkpoint.disk").unwrap();
        let find = |name: &str| {
            let mut statistics = counters.statistics().into_iter();
            statistics.find(|wait| wait.name == name).unwrap()
        };
        let first = own.begin();
        let second = counters.named("checkpoint.disk").unwrap();
        let second = second.begin();
        std::thread::sleep(Duration::from_millis(2));
        let during = find("checkpoint.disk");
        assert_eq!((during.count, during.waiting, during.total_ns), (0, 2, 0));
        assert!(during.waiting_ns >= 2_000_000, "{during:?}");
        drop(first);
        assert_eq!(find("checkpoint.disk").waiting, 1);
        drop(second);
        let after = find("checkpoint.disk");
        assert_eq!((after.count, after.waiting, after.waiting_ns), (2, 0, 0));
        assert!(after.max_ns >= 2_000_000, "{after:?}");
        assert!(after.total_ns >= after.max_ns, "{after:?}");

        drop(counters.begin(RuntimeWait::Shutdown));
        assert_eq!(find("rcomm.shutdown").count, 1);
        assert_eq!(find("rcomm.rendezvous").count, 0);
    }

    #[test]
    fn malformed_reserved_and_surplus_names_are_refused() {
        let counters = WaitCounters::default();
        for name in ["", "Disk", "a b", "rcomm.work", &"x".repeat(65)] {
            let error = counters.named(name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{name}");
        }
        for number in 0..MAX_NAMES {
            counters.named(&format!("n{number}")).unwrap();
        }
        let error = counters.named("one-more").unwrap_err().to_string();
        assert!(error.contains("256 names"), "{error}");
        counters.named("n7").unwrap();
    }
}

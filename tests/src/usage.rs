//! Counts the descriptors, threads and memory of a process, so that tests find what a world leaves behind.

use std::time::{Duration, Instant};

/// The numbers of descriptors and threads of a process, or the differences between two such counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Open descriptors.
    pub fds: i64,
    /// Threads.
    pub threads: i64,
}

impl Usage {
    /// The numbers of this process; 0 for a number that the system does not tell.
    pub fn now() -> Self {
        let count = |path: &str| {
            let entries = std::fs::read_dir(path).map(|entries| entries.count());
            entries.map_or(0, |count| i64::try_from(count).unwrap_or(i64::MAX))
        };
        Self {
            fds: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
        }
    }

    /// How many more descriptors and threads this process has now than when `self` was counted. Waits up to `limit` for
    /// both differences to vanish, because threads may still be ending.
    pub fn left(&self, limit: Duration) -> Self {
        let until = Instant::now() + limit;
        loop {
            let now = Self::now();
            let (fds, threads) = (now.fds - self.fds, now.threads - self.threads);
            if (fds <= 0 && threads <= 0) || Instant::now() >= until {
                return Self { fds, threads };
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The most memory that this process has used, in KiB; 0 if the system does not tell.
pub fn peak_memory_kib() -> u64 {
    memory_kib("VmHWM:")
}

/// The memory that this process uses now (its resident set), in KiB; 0 if the system does not tell.
pub fn resident_memory_kib() -> u64 {
    memory_kib("VmRSS:")
}

fn memory_kib(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

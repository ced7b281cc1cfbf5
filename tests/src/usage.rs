//! Counts the descriptors, threads and memory of a process, so that tests find what a world leaves behind.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often [`Held::now`] counts, and the pause between two counts.
const COUNTS: (u32, Duration) = (10, Duration::from_millis(20));

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

/// What a process holds, without what its threads are just using or giving up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The number of descriptors of each kind: a path, or what the system calls the rest, such as `socket`.
    pub fds: BTreeMap<String, u64>,
    /// The number of threads.
    pub threads: u64,
}

impl Held {
    /// The smallest of ten counts within a fifth of a second. In a single count there may be the sockets of a group
    /// that a thread closes, or a file that one is reading.
    pub fn now() -> Self {
        let (counts, pause) = COUNTS;
        (1..counts).fold(Self::count(), |held, _| {
            std::thread::sleep(pause);
            held.smaller(&Self::count())
        })
    }

    fn count() -> Self {
        let mut fds = BTreeMap::new();
        let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
        for target in entries.flatten().flat_map(|entry| entry.path().read_link()) {
            *fds.entry(kind_of(&target.to_string_lossy())).or_default() += 1;
        }
        let threads = u64::try_from(Usage::now().threads).unwrap_or(0);
        Self { fds, threads }
    }

    fn smaller(mut self, other: &Self) -> Self {
        self.fds.retain(|kind, count| {
            *count = other.fds.get(kind).map_or(0, |&other| other.min(*count));
            *count > 0
        });
        self.threads = self.threads.min(other.threads);
        self
    }
}

/// The kind of the descriptor with this link in `/proc`: `socket:[4711]` is a `socket`.
fn kind_of(link: &str) -> String {
    match link.split_once(":[") {
        Some((kind @ ("socket" | "pipe"), _)) => kind.to_owned(),
        _ => link.to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_the_smallest_count_of_each_kind() {
        let held = |fds: &[(&str, u64)], threads| Held {
            fds: fds
                .iter()
                .map(|&(kind, count)| (kind.to_owned(), count))
                .collect(),
            threads,
        };
        let (first, next) = (
            held(&[("socket", 5), ("pipe", 2), ("/proc/7/task", 1)], 9),
            held(&[("socket", 3), ("pipe", 4)], 7),
        );
        assert_eq!(first.smaller(&next), held(&[("socket", 3), ("pipe", 2)], 7));
        assert_eq!(kind_of("socket:[4711]"), "socket");
        assert_eq!(kind_of("anon_inode:[pidfd]"), "anon_inode:[pidfd]");
    }

    #[test]
    fn an_open_descriptor_is_held() {
        let pair = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Held::now().fds["socket"] >= 2);
        drop(pair);
    }
}

//! Shares work on many records or groups among threads of the caller.
//!
//! Judgment starts no thread. A caller that has some lends them as [`Workers`]; the report is the same without.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Threads of a caller that share the work on large jobs.
pub trait Workers: Debug + Send + Sync {
    /// The number of threads, at least 1.
    fn threads(&self) -> usize;

    /// Calls `part` once with each number below `parts`, in any order and on any thread. Blocks until all calls have
    /// returned.
    fn each(&self, parts: usize, part: &(dyn Fn(usize) + Sync));
}

/// Fewer records or groups than this are not shared among threads: handing them out would take longer.
const MIN_SHARED: usize = 64;
/// Each thread gets this many parts on average, since some groups have far more operations than others.
const PARTS_PER_THREAD: usize = 16;

/// The results of `compute` for each number below `count`, in order.
pub(crate) fn map<T: Send>(
    workers: Option<&dyn Workers>,
    count: usize,
    compute: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let Some(workers) = workers.filter(|workers| count >= MIN_SHARED && workers.threads() > 1)
    else {
        return (0..count).map(compute).collect();
    };
    let parts = (workers.threads() * PARTS_PER_THREAD).min(count);
    let range = |part: usize| -> Range<usize> { count * part / parts..count * (part + 1) / parts };
    let results = |part: usize| -> Vec<T> { range(part).map(&compute).collect() };
    let mut ordered = Vec::with_capacity(count);
    ordered.extend(map_parts(workers, parts, results).into_iter().flatten());
    ordered
}

/// The results of `compute` for each number below `parts`, in order; each may be computed on another thread.
pub(crate) fn map_parts<T: Send>(
    workers: &dyn Workers,
    parts: usize,
    compute: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let done: Vec<Mutex<Option<T>>> = (0..parts).map(|_| Mutex::default()).collect();
    workers.each(parts, &|part| {
        let result = compute(part);
        *done[part].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
    });
    let results = done.into_iter().enumerate().map(|(part, done)| {
        let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.unwrap_or_else(|| compute(part))
    });
    results.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls the parts backwards, and none of the last third.
    #[derive(Debug)]
    struct Backwards;

    impl Workers for Backwards {
        fn threads(&self) -> usize {
            3
        }

        fn each(&self, parts: usize, part: &(dyn Fn(usize) + Sync)) {
            (0..parts - parts / 3).rev().for_each(part);
        }
    }

    #[test]
    fn results_are_in_order_whoever_computes_them() {
        for count in [0, 1, MIN_SHARED - 1, MIN_SHARED, 1000] {
            let squares: Vec<usize> = (0..count).map(|n| n * n).collect();
            assert_eq!(map(None, count, |n| n * n), squares);
            assert_eq!(map(Some(&Backwards), count, |n| n * n), squares);
        }
    }
}

//! Checks the pool under every order of events that loom explores, and checks that loom detects an error in the pool's
//! memory orderings.

use super::{Pool, SlotUse, Word};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize as Count, Ordering};

/// loom's atomic, as the code uses it.
#[derive(Debug, Default)]
pub(crate) struct Exact(AtomicU64);

impl Word for Exact {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }

    fn replace(&self, current: u64, new: u64, success: Ordering) -> bool {
        let replaced = self
            .0
            .compare_exchange(current, new, success, Ordering::Relaxed);
        replaced.is_ok()
    }

    fn fence_release() {
        loom::sync::atomic::fence(Ordering::Release);
    }
}

/// Defines a word like [`Exact`] with one weakness.
macro_rules! weaker {
    ($(#[$about:meta])* $name:ident, $store:expr, $fence:expr) => {
        $(#[$about])*
        #[derive(Debug, Default)]
        pub(crate) struct $name(Exact);

        impl Word for $name {
            fn load(&self, order: Ordering) -> u64 {
                self.0.load(order)
            }

            fn store(&self, value: u64, order: Ordering) {
                self.0.store(value, $store(order));
            }

            fn replace(&self, current: u64, new: u64, success: Ordering) -> bool {
                self.0.replace(current, new, success)
            }

            fn fence_release() {
                if $fence {
                    Exact::fence_release();
                }
            }
        }
    };
}

weaker! {
    /// Weakens every store to relaxed.
    NoRelease, |_| Ordering::Relaxed, true
}
weaker! {
    /// Leaves out the fences.
    NoFence, |order| order, false
}

/// Runs a model and returns how many orders of events loom visited.
pub(crate) fn count_orders(model: impl Fn() + Send + Sync + 'static) -> usize {
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let visited = std::sync::Arc::new(Count::new(0));
    let count = visited.clone();
    loom::model(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    visited.load(Ordering::Relaxed)
}

#[test]
fn two_threads_never_hold_one_slot_at_once() {
    let visited = count_orders(|| {
        let pool: Arc<Pool<AtomicUsize, Exact>> = Arc::new(Pool::new(1));
        let holders = Arc::new(AtomicUsize::new(0));
        let work = {
            let (pool, holders) = (pool.clone(), holders.clone());
            move |number: usize| {
                let Some(at) = pool.take(|value, _| value.store(number, Ordering::Relaxed)) else {
                    return;
                };
                assert_eq!(holders.fetch_add(1, Ordering::Relaxed), 0);
                let seen = pool.get(at).map(|value| value.load(Ordering::Relaxed));
                assert_eq!(seen, Some(number));
                holders.fetch_sub(1, Ordering::Relaxed);
                assert!(pool.give_back(at));
            }
        };
        let other = loom::thread::spawn({
            let work = work.clone();
            move || work(2)
        });
        work(1);
        other.join().expect("no panic");
        assert_eq!(pool.taken().count(), 0);
    });
    assert!(visited > 20, "{visited}");
}

#[test]
fn a_slot_is_given_back_once_and_its_next_use_is_unaffected() {
    let visited = count_orders(|| {
        let pool: Arc<Pool<AtomicUsize, Exact>> = Arc::new(Pool::new(1));
        let at = pool
            .take(|value, _| value.store(1, Ordering::Relaxed))
            .expect("a free slot");
        // NCCL's proxy thread ends an operation while its communicator is aborted.
        let other = loom::thread::spawn({
            let pool = pool.clone();
            move || pool.give_back(at)
        });
        let given_here = pool.give_back(at);
        let next = pool.take(|value, _| value.store(2, Ordering::Relaxed));
        let given_there = other.join().expect("no panic");
        assert!(given_here != given_there, "given back twice or never");
        if let Some(next) = next {
            assert!(!pool.give_back(at));
            let seen = pool.get(next).map(|value| value.load(Ordering::Relaxed));
            assert_eq!(seen, Some(2));
        }
    });
    assert!(visited > 2, "{visited}");
}

#[test]
fn a_slot_that_one_of_two_threads_releases_goes_to_one_next_use() {
    let visited = count_orders(|| {
        let pool: Arc<Pool<AtomicUsize, Exact>> = Arc::new(Pool::new(1));
        let at = pool
            .take(|value, _| value.store(1, Ordering::Relaxed))
            .expect("a free slot");
        // In the plug-in, the state of an operation decides in this way between its last channel and an abort.
        let is_over = Arc::new(AtomicUsize::new(0));
        let ends = {
            let (pool, is_over) = (pool.clone(), is_over.clone());
            move || {
                if is_over.swap(1, Ordering::AcqRel) == 0 {
                    pool.release(at);
                }
            }
        };
        let other = loom::thread::spawn(ends.clone());
        ends();
        let next = pool.take(|value, _| value.store(2, Ordering::Relaxed));
        other.join().expect("no panic");
        assert!(pool.get(at).is_none());
        assert_eq!(pool.taken().count(), usize::from(next.is_some()));
        if let Some(next) = next {
            let seen = pool.get(next).map(|value| value.load(Ordering::Relaxed));
            assert_eq!(seen, Some(2));
        }
    });
    assert!(visited > 2, "{visited}");
}

/// Passes a handle to another thread by relaxed accesses, as NCCL may do, so that only the pool orders the events.
/// Returns how many orders of events loom visited.
fn what_another_thread_finds<U: Word + Send + Sync + 'static>() -> usize {
    count_orders(|| {
        let pool: Arc<Pool<AtomicUsize, U>> = Arc::new(Pool::new(1));
        let handle = Arc::new(AtomicU64::new(0));
        let other = loom::thread::spawn({
            let (pool, handle) = (pool.clone(), handle.clone());
            move || {
                let at = SlotUse::from_word(handle.load(Ordering::Relaxed));
                if let Some(value) = pool.get(at) {
                    assert_eq!(value.load(Ordering::Relaxed), 7, "half set up");
                }
            }
        });
        let at = pool
            .take(|value, _| value.store(7, Ordering::Relaxed))
            .expect("a free slot");
        handle.store(at.to_word(), Ordering::Relaxed);
        other.join().expect("no panic");
    })
}

#[test]
fn a_handle_finds_a_slot_that_is_set_up_and_loom_detects_relaxed_stores() {
    assert!(what_another_thread_finds::<Exact>() > 2);
    let weaker = catch_unwind(AssertUnwindSafe(what_another_thread_finds::<NoRelease>));
    assert!(weaker.is_err());
}

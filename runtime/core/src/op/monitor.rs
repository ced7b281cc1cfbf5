//! [`Monitor`]: state that threads share under a lock, and whose changes they can wait for.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The functions of a [`Monitor`], as a trait: models replace its locks with loom's.
pub(crate) trait Shared<T> {
    /// Uses the state under the lock, and wakes no thread.
    fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R;

    /// Wakes all waiting threads, which look at the state again.
    fn wake_all(&self);

    /// Waits until `is_ready` holds, for at most `limit`; without a limit if that is `None`. Then uses the state under
    /// the same lock, even if the limit has passed.
    fn when<R>(
        &self,
        limit: Option<Duration>,
        is_ready: impl Fn(&T) -> bool,
        body: impl FnOnce(&mut T) -> R,
    ) -> R;
}

/// A mutex and the condition variable of its changes. The lock of a thread that panicked stays usable.
#[derive(Debug, Default)]
pub(crate) struct Monitor<T> {
    state: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Shared<T> for Monitor<T> {
    fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        body(&mut self.lock())
    }

    fn wake_all(&self) {
        self.changed.notify_all();
    }

    fn when<R>(
        &self,
        limit: Option<Duration>,
        is_ready: impl Fn(&T) -> bool,
        body: impl FnOnce(&mut T) -> R,
    ) -> R {
        let (state, waits) = (self.lock(), |state: &mut T| !is_ready(state));
        let mut state = match limit {
            None => self
                .changed
                .wait_while(state, waits)
                .unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                self.changed
                    .wait_timeout_while(state, limit, waits)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
        };
        body(&mut state)
    }
}

#[cfg(test)]
pub(crate) mod model {
    //! Locks of loom instead of a [`Monitor`](super::Monitor)'s. A wait has no time-out there, so a thread that is
    //! never woken is a deadlock, which loom reports.

    use super::Shared;
    use loom::sync::{Condvar, Mutex};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    /// How a monitor wakes the threads that wait for it.
    pub(crate) trait Wakes {
        fn wake(changed: &Condvar);
    }

    /// Wakes all threads, as a [`Monitor`](super::Monitor) does.
    pub(crate) struct WakeAll;

    impl Wakes for WakeAll {
        fn wake(changed: &Condvar) {
            changed.notify_all();
        }
    }

    /// Wakes one thread, perhaps one that waits for something else.
    pub(crate) struct WakeOne;

    impl Wakes for WakeOne {
        fn wake(changed: &Condvar) {
            changed.notify_one();
        }
    }

    /// Wakes no thread.
    pub(crate) struct WakeNone;

    impl Wakes for WakeNone {
        fn wake(_: &Condvar) {}
    }

    /// A monitor with loom's locks, which wakes threads as `W` does.
    pub(crate) struct Model<T, W = WakeAll> {
        state: Mutex<T>,
        changed: Condvar,
        wakes: std::marker::PhantomData<fn(W)>,
    }

    impl<T: Default, W> Default for Model<T, W> {
        fn default() -> Self {
            Self {
                state: Mutex::new(T::default()),
                changed: Condvar::new(),
                wakes: std::marker::PhantomData,
            }
        }
    }

    impl<T, W: Wakes> Shared<T> for Model<T, W> {
        fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
            body(&mut self.state.lock().expect("a thread has panicked"))
        }

        fn wake_all(&self) {
            W::wake(&self.changed);
        }

        fn when<R>(
            &self,
            _: Option<Duration>,
            is_ready: impl Fn(&T) -> bool,
            body: impl FnOnce(&mut T) -> R,
        ) -> R {
            let mut state = self.state.lock().expect("a thread has panicked");
            while !is_ready(&state) {
                state = self.changed.wait(state).expect("a thread has panicked");
            }
            body(&mut state)
        }
    }

    /// Runs a model in the orders of events with at most three preemptions, and returns how many of them loom has
    /// explored.
    pub(crate) fn count_orders(model: impl Fn() + Send + Sync + 'static) -> usize {
        static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _guard = ONE_AT_A_TIME.lock();
        let orders = std::sync::Arc::new(AtomicUsize::new(0));
        let count = orders.clone();
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            count.fetch_add(1, Ordering::Relaxed);
            model();
        });
        orders.load(Ordering::Relaxed)
    }
}

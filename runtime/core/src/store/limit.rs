//! A time by which all calls to a store that a thread makes must have ended.

use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    static LIMIT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Runs `body`. The calls that it makes on this thread, to a store whose [`Store::obeys_limits`] is true, end by
/// `until`, whatever their own time-outs are.
///
/// [`Store::obeys_limits`]: super::Store::obeys_limits
pub(crate) fn with_limit<T>(until: Instant, body: impl FnOnce() -> T) -> T {
    /// Restores the earlier limit, also after a panic.
    struct Restore(Option<Instant>);
    impl Drop for Restore {
        fn drop(&mut self) {
            LIMIT.set(self.0);
        }
    }
    let earlier = LIMIT.get();
    let _restore = Restore(earlier);
    LIMIT.set(Some(earlier.map_or(until, |earlier| earlier.min(until))));
    body()
}

/// The moment `timeout` from now, at most a year.
pub(super) fn after(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(Duration::from_secs(365 * 24 * 3600))
}

/// Returns `limited` if this thread has a limit, else `unlimited`.
pub(super) fn choose<'a>(limited: &'a str, unlimited: &'a str) -> &'a str {
    LIMIT.get().map_or(unlimited, |_| limited)
}

/// The time until `deadline`, or until this thread's limit if that is earlier; zero once it has passed.
pub(super) fn left_until(deadline: Instant) -> Duration {
    let deadline = LIMIT.get().map_or(deadline, |limit| limit.min(deadline));
    deadline.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_limit_holds_until_its_body_ends() {
        let (hour, minute) = (Duration::from_secs(3600), Duration::from_secs(60));
        let now = Instant::now();
        assert!(choose("limited", "free") == "free" && left_until(now + hour) > minute);
        with_limit(now + minute, || {
            with_limit(now + hour, || assert!(left_until(now + hour) <= minute));
            with_limit(now, || assert!(left_until(now + hour).is_zero()));
            assert!(choose("limited", "free") == "limited" && !left_until(now + hour).is_zero());
        });
        assert_eq!(choose("limited", "free"), "free");
    }
}

//! The time for which a world waits for the ends of all its communicators together.
//!
//! To free a communicator, NCCL waits for all kernels of the device. So a kernel that keeps one end from returning
//! keeps the others from returning too, and all ends have one deadline, which counts from the beginning of the oldest
//! end that has not returned.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The ends that have begun and not returned.
#[derive(Default)]
pub(crate) struct Ends {
    begun: Mutex<Vec<Instant>>,
}

/// An end that is in progress, until this value is dropped.
pub(crate) struct End {
    ends: Arc<Ends>,
    begun: Instant,
}

impl Ends {
    /// How long an end may take before its caller leaves the call to its thread.
    pub(crate) const LIMIT: Duration = Duration::from_secs(10);
    /// How long a later end may still take after the common time is over, since the others may wait for that end.
    const LEAST: Duration = Duration::from_secs(1);

    /// Notes that an end begins. Returns a value to be kept until the end has returned, and how long to wait for its
    /// return.
    pub(crate) fn begin(self: &Arc<Self>) -> (End, Duration) {
        self.begin_at(Instant::now())
    }

    fn begin_at(self: &Arc<Self>, now: Instant) -> (End, Duration) {
        let mut begun = self.begun();
        begun.push(now);
        let oldest = begun.iter().min().copied().unwrap_or(now);
        let ends = self.clone();
        let end = End { ends, begun: now };
        let elapsed = now.saturating_duration_since(oldest);
        (end, Self::LIMIT.saturating_sub(elapsed).max(Self::LEAST))
    }

    fn begun(&self) -> MutexGuard<'_, Vec<Instant>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let mut begun = self.ends.begun();
        if let Some(at) = begun.iter().position(|time| *time == self.begun) {
            begun.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_have_the_deadline_of_the_oldest_that_has_not_returned() {
        let (ends, start) = (Arc::new(Ends::default()), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let (stuck, limit) = ends.begin_at(at(0));
        assert_eq!(limit, Ends::LIMIT);
        let (second, limit) = ends.begin_at(at(4));
        assert_eq!(limit, Duration::from_secs(6));
        let (third, limit) = ends.begin_at(at(30));
        assert_eq!(limit, Ends::LEAST);
        drop(stuck);
        let (_, limit) = ends.begin_at(at(8));
        assert_eq!(limit, Duration::from_secs(6));
        drop((second, third));
        assert_eq!(ends.begin_at(at(40)).1, Ends::LIMIT);
    }
}

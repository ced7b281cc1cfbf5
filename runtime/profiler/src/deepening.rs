//! Asks NCCL for more events for some time after a hang or a stall.
//!
//! NCCL fixes the events of an operation when it is called, so nothing more can be learned of an operation that hangs.
//! But NCCL reads the mask of events at each call (`ncclProfilerEventMask`, plugin/profiler.cc:219 and 280 of NCCL
//! 2.30.7; in 2.26 as well), and a plug-in may change the mask at any time, as NVIDIA's example does
//! (plugins/profiler/example/plugin.cc, 1063). Since a hang or a stall often comes again, the operations after it are
//! recorded with the steps of their transfers.

use crate::abi::event;
use crate::process::Process;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// An operation that ran for this long on the device has stalled.
pub(crate) const STALL: Duration = Duration::from_secs(1);
/// The number of operations that are recorded with steps after a hang or a stall.
pub(crate) const DEEP: u32 = 4_096;
/// The number of operations after these [`DEEP`] ones during which a stall does not bring steps back. So in a job in
/// which long operations recur, at most one operation in sixteen is recorded with steps.
pub(crate) const REST: u32 = 15 * DEEP;

/// Where NCCL reads its mask of events.
#[derive(Debug, Default)]
pub(crate) struct MaskPlace(Mutex<Option<Place>>);

#[derive(Debug)]
struct Place {
    mask: *mut c_int,
    /// The number of communicators that have a context. NCCL is loaded while there is one.
    contexts: usize,
}

// SAFETY: the pointer is followed under the lock alone, and only by atomic stores.
unsafe impl Send for Place {}

impl MaskPlace {
    fn lock(&self) -> MutexGuard<'_, Option<Place>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a communicator with a context has begun, and where its NCCL reads the mask.
    ///
    /// # Safety
    /// The mask is valid for atomic access until [`ends`](Self::ends) was called for each context that has begun.
    pub(crate) unsafe fn begins(&self, mask: *mut c_int) {
        let mut place = self.lock();
        let contexts = place.as_ref().map_or(0, |place| place.contexts) + 1;
        *place = Some(Place { mask, contexts });
    }

    /// Notes that a communicator with a context has ended. After the end of the last one the mask is not changed.
    pub(crate) fn ends(&self) {
        let mut place = self.lock();
        if let Some(known) = &mut *place {
            known.contexts -= 1;
            if known.contexts == 0 {
                *place = None;
            }
        }
    }

    /// Asks NCCL for the events that `events` returns, from the program's next call of NCCL on.
    fn set(&self, events: impl FnOnce() -> u64) {
        if let Some(place) = &*self.lock()
            && !place.mask.is_null()
        {
            // The events are determined under the lock, so that of two threads the last one sets the newest events.
            let events = events();
            // SAFETY: not null (checked). A context has not ended, so the mask is valid for atomic access by the
            // contract of `begins`; and the lock is held, so the last context does not end during the access.
            unsafe { AtomicI32::from_ptr(place.mask) }.store(events as c_int, Relaxed);
        }
    }
}

impl Process {
    /// Asks NCCL for the steps of transfers too, for the next [`DEEP`] operations. Does nothing if the user has named
    /// events, or if NCCL is already asked for steps.
    pub(crate) fn deepen_after_hang(&self) {
        self.deepen(|left| left <= REST);
    }

    /// Does the same as [`deepen_after_hang`](Self::deepen_after_hang) if an operation of this duration has stalled,
    /// and NCCL was not asked for steps within the last [`REST`] operations.
    #[inline]
    pub(crate) fn deepen_after(&self, duration: Duration) {
        if duration >= STALL {
            self.deepen(|left| left == 0);
        }
    }

    fn deepen(&self, may_begin: impl Fn(u32) -> bool) {
        let counted = |left| may_begin(left).then_some(DEEP + REST);
        if self.events.deepens
            && self
                .deep_left
                .fetch_update(Relaxed, Relaxed, counted)
                .is_ok()
        {
            self.mask_place.set(|| self.current_mask());
        }
    }

    /// The events that NCCL is asked for now.
    pub(crate) fn current_mask(&self) -> u64 {
        match self.deep_left.load(Relaxed) > REST {
            false => self.events.mask,
            true => self.events.mask | event::PROXY_STEP,
        }
    }

    /// Counts an operation, if NCCL is asked for steps or was within the last [`REST`] operations. After [`DEEP`]
    /// operations, NCCL is no longer asked for steps.
    #[inline]
    pub(crate) fn count_deep(&self) {
        if self.deep_left.load(Relaxed) == 0 {
            return;
        }
        let counted = self
            .deep_left
            .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        if counted == Ok(REST + 1) {
            self.mask_place.set(|| self.current_mask());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Events;
    use rcomm_recorder::record::{Placement, RecorderConfig, RingPart};

    #[test]
    fn stalls_bring_steps_for_a_sixteenth_of_the_operations_and_a_hang_brings_them_at_once() {
        let config = RecorderConfig {
            placement: Placement::Memory,
            entries: 64,
            part: RingPart::NcclProfiler,
            ..RecorderConfig::new("job", 0, 2)
        };
        let events = Events::parse(None).expect("the default");
        let process = Process::open(&config, events).expect("memory for a ring");
        let asks_for_steps = || process.current_mask() & event::PROXY_STEP != 0;
        process.deepen_after(STALL - Duration::from_nanos(1));
        assert!(!asks_for_steps());
        process.deepen_after(STALL);
        let mut with_steps = 0;
        for _ in 0..2 * (DEEP + REST) {
            with_steps += u32::from(asks_for_steps());
            process.count_deep();
            // Each operation stalls.
            process.deepen_after(STALL);
        }
        assert_eq!(with_steps, 2 * DEEP);
        (0..DEEP).for_each(|_| process.count_deep());
        assert!(!asks_for_steps());
        process.deepen_after_hang();
        assert!(asks_for_steps());
    }
}

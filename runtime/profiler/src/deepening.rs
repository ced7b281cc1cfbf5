//! More events for some time after a hang.
//!
//! NCCL fixes the events of an operation when it is called, so nothing more can be learned of one that hangs. But it
//! reads the mask of events at each call (`ncclProfilerEventMask`, plugin/profiler.cc:219 and 280 of NCCL 2.30.7; in
//! 2.26 as well), and a plug-in may change it at any time, as NVIDIA's example does
//! (plugins/profiler/example/plugin.cc, 1063). A hang or a stall often comes again: the operations after it are
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
        let contexts = place.as_ref().map_or(0, |it| it.contexts) + 1;
        *place = Some(Place { mask, contexts });
    }

    /// Notes that a communicator with a context has ended. The mask is not followed after the last one.
    pub(crate) fn ends(&self) {
        let mut place = self.lock();
        if let Some(it) = &mut *place {
            it.contexts -= 1;
            if it.contexts == 0 {
                *place = None;
            }
        }
    }

    /// Asks NCCL for these events from its next call on.
    fn set(&self, events: u64) {
        if let Some(it) = &*self.lock()
            && !it.mask.is_null()
        {
            // SAFETY: not null (checked). A context has not ended, so the mask is valid for atomic access by the
            // contract of `begins`, and the lock is held, so that the last context does not end meanwhile.
            unsafe { AtomicI32::from_ptr(it.mask) }.store(events as c_int, Relaxed);
        }
    }
}

impl Process {
    /// Asks NCCL for the steps of transfers, too, for the next [`DEEP`] operations, unless the user has named events.
    pub(crate) fn deepen(&self) {
        if self.events.deepens && self.deep_left.swap(DEEP, Relaxed) == 0 {
            self.mask_place.set(self.current_mask());
        }
    }

    /// The events that are asked for now.
    pub(crate) fn current_mask(&self) -> u64 {
        match self.deep_left.load(Relaxed) {
            0 => self.events.mask,
            _ => self.events.mask | event::PROXY_STEP,
        }
    }

    /// Counts an operation of those that are recorded with steps.
    #[inline]
    pub(crate) fn count_deep(&self) {
        if self.deep_left.load(Relaxed) == 0 {
            return;
        }
        let counted = self
            .deep_left
            .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        if counted == Ok(1) {
            self.mask_place.set(self.current_mask());
        }
    }
}

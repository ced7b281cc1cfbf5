//! Events, which mark points in streams, and a pool that reuses them.

use super::device::CudaDevice;
use super::stream::CudaStream;
use crate::cuda::{self, CuEvent};
use rcomm_core::Result;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Whether events record the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventTiming {
    /// Events record the time, at a small cost on the device.
    Timed,
    /// Events do not record the time.
    Untimed,
}

/// An event of the driver, which marks a point in a stream.
pub(crate) struct Event {
    device: Arc<CudaDevice>,
    raw: CuEvent,
}

// SAFETY: events are handles of the driver that any thread may use, several at once.
unsafe impl Send for Event {}
// SAFETY: the driver lets several threads use an event at once, and nothing here changes after `new`.
unsafe impl Sync for Event {}

impl Event {
    fn new(device: &Arc<CudaDevice>, timing: EventTiming) -> Result<Self> {
        let flags = match timing {
            EventTiming::Timed => cuda::EVENT_TIMED,
            EventTiming::Untimed => cuda::EVENT_UNTIMED,
        };
        let mut raw: CuEvent = null_mut();
        // SAFETY: the call writes one handle to a local that outlives it.
        let status = unsafe { (device.driver().table().event_create)(&mut raw, flags) };
        device.driver().check("cuEventCreate", status)?;
        Ok(Self {
            device: device.clone(),
            raw,
        })
    }

    /// The driver's handle, live as long as this value.
    pub(crate) fn raw(&self) -> CuEvent {
        self.raw
    }

    /// Makes the event mark the end of the work that has been enqueued on `stream`.
    pub(crate) fn record(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: event and stream are live, as both values are borrowed, and both belong to the device's primary
        // context.
        let status = unsafe { (self.device.driver().table().event_record)(self.raw, stream.raw()) };
        self.device.driver().check("cuEventRecord", status)
    }

    /// Whether the work before the newest record is complete.
    ///
    /// # Errors
    /// `Backend` if the work failed. The context is then unusable.
    pub(crate) fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is live until `self` is dropped.
        let status = unsafe { (self.device.driver().table().event_query)(self.raw) };
        if status == cuda::NOT_READY {
            return Ok(false);
        }
        self.device.driver().check("cuEventQuery", status)?;
        Ok(true)
    }

    /// Returns the time from this event to a later one; `None` unless both are complete and timed.
    pub(crate) fn until(&self, later: &Event) -> Option<Duration> {
        let mut milliseconds = 0f32;
        let elapsed = self.device.driver().table().event_elapsed_time;
        // SAFETY: both events are live, as both values are borrowed; the call writes one float through a
        // reference.
        let status = unsafe { elapsed(&mut milliseconds, self.raw, later.raw) };
        if status != cuda::SUCCESS {
            return None;
        }
        Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).ok()
    }
}

impl CudaStream {
    /// Makes work that is enqueued here from now on wait until the newest record of `event` is complete.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: stream and event are live, as both values are borrowed. The wait does not need the event after the
        // call.
        let status = unsafe {
            (self.device().driver().table().stream_wait_event)(self.raw(), event.raw(), 0)
        };
        self.device().driver().check("cuStreamWaitEvent", status)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: `new` made the event, and it is destroyed once. Pending work may refer to it: the driver then frees
        // it later.
        let status = unsafe { (self.device.driver().table().event_destroy)(self.raw) };
        if let Err(error) = self.device.driver().check("cuEventDestroy", status) {
            tracing::warn!(%error, "an event could not be destroyed");
        }
    }
}

/// A pool of reusable events, which saves the driver's calls that make and destroy them.
pub(crate) struct EventPool {
    device: Arc<CudaDevice>,
    timing: EventTiming,
    free: Mutex<Vec<Arc<PooledEvent>>>,
    /// Whether there may be a free event, read without the lock.
    has_free: AtomicBool,
}

impl EventPool {
    /// The largest number of events that are kept for reuse.
    const MAX_FREE: usize = 4096;

    pub(crate) fn new(device: &Arc<CudaDevice>, timing: EventTiming) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            timing,
            free: Mutex::default(),
            has_free: AtomicBool::new(false),
        })
    }

    /// Returns an event that marks the end of the work that is enqueued on `stream`. The context must be current.
    pub(crate) fn mark(self: &Arc<Self>, stream: &CudaStream) -> Result<Mark> {
        let free = {
            let mut free = self.free();
            let event = free.pop();
            self.has_free.store(!free.is_empty(), Ordering::Relaxed);
            event
        };
        let event = match free {
            Some(event) => event,
            None => Arc::new(PooledEvent {
                event: Event::new(&self.device, self.timing)?,
                pool: Arc::downgrade(self),
            }),
        };
        event.event.record(stream)?;
        Ok(Mark(Some(event)))
    }

    /// Whether the next mark will probably need a new event.
    pub(crate) fn is_exhausted(&self) -> bool {
        !self.has_free.load(Ordering::Relaxed)
    }

    fn free(&self) -> MutexGuard<'_, Vec<Arc<PooledEvent>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An event, and the pool that it returns to.
struct PooledEvent {
    event: Event,
    pool: Weak<EventPool>,
}

/// An event of a pool, recorded once. Clones share the event, which returns to the pool when the last of them is
/// dropped. A mark of a used event allocates nothing.
#[derive(Clone)]
pub(crate) struct Mark(
    /// `None` only while this value is being dropped.
    Option<Arc<PooledEvent>>,
);

impl std::ops::Deref for Mark {
    type Target = Event;

    fn deref(&self) -> &Event {
        &self
            .0
            .as_ref()
            .expect("only drop takes the event out")
            .event
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let Some(mut event) = self.0.take() else {
            return;
        };
        // If the last two clones are dropped at the same moment, neither may find itself alone: the event is then
        // destroyed.
        if Arc::get_mut(&mut event).is_none() {
            return;
        }
        if let Some(pool) = event.pool.upgrade() {
            let mut free = pool.free();
            // The event may be recorded again at once: a wait that was enqueued refers to the earlier record. Events
            // beyond the limit, left over from a burst of operations, are destroyed.
            if free.len() < EventPool::MAX_FREE {
                free.push(event);
                pool.has_free.store(true, Ordering::Relaxed);
            }
        }
    }
}

//! A device, its streams and its events, as owned values.
//!
//! Every call that needs a context runs under [`Entered`]: the thread's own context is put back
//! afterwards, so that a program that uses CUDA by itself notices nothing. The guard also relaxes the
//! thread's capture mode, since a look at an event of ours would otherwise end a capture that another
//! thread of the program has begun (`cuThreadExchangeStreamCaptureMode` in the driver's manual).

use super::cuda::{self, CuContext, CuDevice, CuDevicePtr, CuEvent, CuGraph, CuStream, CudaDriver};
use super::graph::Graph;
use crate::buffer::Device;
use crate::error::{Error, ErrorKind, Result};
use std::any::Any;
use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One device of this process, with its primary context.
///
/// # Thread safety
/// May be used from any thread.
pub struct CudaDevice {
    driver: Arc<CudaDriver>,
    ordinal: u16,
    device: CuDevice,
    context: CuContext,
    uuid: [u8; 16],
    /// Memory that graphs have let go of. It refers back to the device: what nobody frees stays.
    aside: Mutex<Vec<Box<dyn Send>>>,
}

// SAFETY: the context is a handle of the driver, which may be pushed on any thread, on several at once.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; what is changed after `open` is behind a lock.
unsafe impl Sync for CudaDevice {}

impl CudaDevice {
    /// Takes a share of the primary context of this device.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such device; `Backend` with the driver's words.
    pub fn open(driver: &Arc<CudaDriver>, ordinal: u16) -> Result<Arc<Self>> {
        let count = driver.device_count()?;
        if u32::from(ordinal) >= count {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("there is no device cuda:{ordinal}: this process sees {count}"),
            ));
        }
        let table = driver.table();
        let mut device = 0;
        // SAFETY: writes one int through a valid pointer.
        let status = unsafe { (table.device_get)(&mut device, c_int::from(ordinal)) };
        driver.check("cuDeviceGet", status)?;
        let mut uuid = cuda::CuUuid { bytes: [0; 16] };
        // SAFETY: fills sixteen bytes through a valid pointer.
        let status = unsafe { (table.device_get_uuid)(&mut uuid, device) };
        driver.check("cuDeviceGetUuid", status)?;
        let mut context: CuContext = null_mut();
        // SAFETY: writes one pointer through a valid pointer.
        let status = unsafe { (table.primary_ctx_retain)(&mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", status)?;
        Ok(Arc::new(Self {
            driver: driver.clone(),
            ordinal,
            device,
            context,
            uuid: uuid.bytes,
            aside: Mutex::default(),
        }))
    }

    /// Its number in this process.
    pub fn ordinal(&self) -> u16 {
        self.ordinal
    }

    /// What buffers call it.
    pub(super) fn place(&self) -> Device {
        Device::Cuda(self.ordinal)
    }

    /// What tells it from every other device, in all processes, as hexadecimal digits.
    pub fn uuid(&self) -> String {
        self.uuid.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(super) fn driver(&self) -> &Arc<CudaDriver> {
        &self.driver
    }

    pub(super) fn has_context(&self, context: CuContext) -> bool {
        self.context == context
    }

    /// Takes memory that nothing on the device uses any more. Calls nothing of the driver's.
    pub(super) fn lay_aside(&self, memory: Box<dyn Send>) {
        self.aside().push(memory);
    }

    /// Frees what was laid aside.
    pub(super) fn free_aside(&self) {
        let aside = std::mem::take(&mut *self.aside());
        drop(aside);
    }

    fn aside(&self) -> MutexGuard<'_, Vec<Box<dyn Send>>> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the context current on this thread until the guard goes.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        let table = self.driver.table();
        // SAFETY: the context is retained for as long as `self` lives.
        let status = unsafe { (table.ctx_push_current)(self.context) };
        self.driver.check("cuCtxPushCurrent", status)?;
        let mut mode = cuda::CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges one int through a valid pointer.
        let status = unsafe { (table.thread_exchange_stream_capture_mode)(&mut mode) };
        let entered = Entered {
            device: self,
            mode,
            thread: PhantomData,
        };
        self.driver
            .check("cuThreadExchangeStreamCaptureMode", status)?;
        Ok(entered)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // SAFETY: gives back the share taken in `open`, once.
        let status = unsafe { (self.driver.table().primary_ctx_release)(self.device) };
        if let Err(error) = self.driver.check("cuDevicePrimaryCtxRelease", status) {
            tracing::warn!(%error, "a context could not be given back");
        }
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{}", self.ordinal)
    }
}

/// A thread that is in a device's context. Not `Send`: contexts are stacked on each thread.
pub(super) struct Entered<'a> {
    device: &'a CudaDevice,
    mode: c_int,
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let table = self.device.driver.table();
        let mut mode = self.mode;
        // SAFETY: exchanges one int through a valid pointer: the thread's own mode comes back.
        unsafe { (table.thread_exchange_stream_capture_mode)(&mut mode) };
        let mut popped: CuContext = null_mut();
        // SAFETY: as many are popped as `enter` pushed on this thread. Guards are held by scopes, so that is
        // the one; another order would leave a wrong context, which is an error of the next call.
        unsafe { (table.ctx_pop_current)(&mut popped) };
    }
}

/// Which of its streams a device prefers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// As all others.
    #[default]
    Normal,
    /// Kernels of this stream start before those that wait in others.
    High,
}

/// Whose stream it is.
enum Ownership {
    Own,
    /// The program's: never destroyed by us. `Some` keeps it alive.
    Borrowed(#[allow(dead_code, reason = "held, not read")] Option<Arc<dyn Any + Send + Sync>>),
}

/// A stream of a device: work on it runs in the order in which it was enqueued.
///
/// # Thread safety
/// May be used from any thread.
pub struct CudaStream {
    device: Arc<CudaDevice>,
    raw: CuStream,
    ownership: Ownership,
}

// SAFETY: streams are handles of the driver that any thread may use, several at once.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    /// Makes a stream that does not wait for the default stream.
    ///
    /// # Errors
    /// `Backend` with the driver's words.
    pub fn new(device: &Arc<CudaDevice>, priority: Priority) -> Result<Arc<Self>> {
        let _entered = device.enter()?;
        let (driver, table) = (device.driver(), device.driver().table());
        let priority = match priority {
            Priority::Normal => 0,
            Priority::High => {
                let (mut least, mut greatest) = (0, 0);
                // SAFETY: writes two ints through valid pointers.
                let status =
                    unsafe { (table.ctx_get_stream_priority_range)(&mut least, &mut greatest) };
                driver.check("cuCtxGetStreamPriorityRange", status)?;
                greatest
            }
        };
        let mut raw: CuStream = null_mut();
        // SAFETY: writes one handle through a valid pointer.
        let status = unsafe {
            (table.stream_create_with_priority)(&mut raw, cuda::STREAM_NON_BLOCKING, priority)
        };
        driver.check("cuStreamCreateWithPriority", status)?;
        Ok(Arc::new(Self {
            device: device.clone(),
            raw,
            ownership: Ownership::Own,
        }))
    }

    /// The default stream of the device, on which programs work that name none.
    pub fn default_of(device: &Arc<CudaDevice>) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            raw: null_mut(),
            ownership: Ownership::Borrowed(None),
        })
    }

    /// A stream of the program's own (`CUstream` or `cudaStream_t`).
    ///
    /// # Safety
    /// `raw` is a live stream and stays one for as long as `owner` is alive, which this value makes
    /// sure of.
    ///
    /// # Errors
    /// `InvalidArgument` if the stream belongs to another context than the primary one of `device`.
    pub unsafe fn borrow(
        device: &Arc<CudaDevice>,
        raw: *mut std::ffi::c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<Self>> {
        let mut context: CuContext = null_mut();
        {
            let _entered = device.enter()?;
            // SAFETY: the stream is live, by the contract; writes one pointer.
            let status = unsafe { (device.driver().table().stream_get_ctx)(raw, &mut context) };
            device.driver().check("cuStreamGetCtx", status)?;
        }
        if !device.has_context(context) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("the stream {raw:p} belongs to another context than that of {device:?}"),
            ));
        }
        Ok(Arc::new(Self {
            device: device.clone(),
            raw,
            ownership: Ownership::Borrowed(Some(owner)),
        }))
    }

    /// The device it works on.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// The driver's handle (`CUstream`, `cudaStream_t`), for kernels and libraries of the program's own;
    /// live as long as this value.
    pub fn as_raw(&self) -> *mut std::ffi::c_void {
        self.raw
    }

    pub(super) fn raw(&self) -> CuStream {
        self.raw
    }

    /// Waits until all work enqueued so far is done.
    ///
    /// # Blocking
    /// Without a deadline, as the driver has none: for streams of the program's own work.
    ///
    /// # Errors
    /// `Backend` if the work failed, or if the stream is being captured.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream is live.
        let status = unsafe { (self.device.driver().table().stream_synchronize)(self.raw) };
        self.device.driver().check("cuStreamSynchronize", status)
    }

    /// The graph that it is being captured into, if it is.
    pub(super) fn graph(&self) -> Result<Option<Graph>> {
        // The default stream cannot be captured, and asking it would disturb captures of others.
        if self.raw.is_null() {
            return Ok(None);
        }
        let (mut state, mut id) = (cuda::CAPTURE_STATUS_NONE, 0);
        let mut raw: CuGraph = null_mut();
        let ask = self.device.driver().table().stream_get_capture_info;
        // SAFETY: the stream is live; writes an int, an id and a handle through valid pointers, and the
        // manual lets the others be null.
        let status = unsafe {
            ask(
                self.raw,
                &mut state,
                &mut id,
                &mut raw,
                null_mut(),
                null_mut(),
            )
        };
        self.device
            .driver()
            .check("cuStreamGetCaptureInfo", status)?;
        Ok((state != cuda::CAPTURE_STATUS_NONE).then_some(Graph { id, raw }))
    }

    /// Enqueues a copy between two places of devices. The context is current.
    ///
    /// # Safety
    /// Both places hold that many bytes, until the stream is done with them.
    pub(super) unsafe fn copy(
        &self,
        to: CuDevicePtr,
        from: CuDevicePtr,
        bytes: usize,
    ) -> Result<()> {
        let driver = self.device.driver();
        // SAFETY: the stream is live; the caller vouches for both places.
        let status = unsafe { (driver.table().memcpy_on_device)(to, from, bytes, self.raw) };
        driver.check("cuMemcpyDtoDAsync", status)
    }

    /// Enqueues the writing of four bytes. The context is current.
    ///
    /// # Safety
    /// The place holds four bytes, aligned, until the stream is done with them.
    pub(super) unsafe fn fill_u32(&self, at: CuDevicePtr, value: u32) -> Result<()> {
        let driver = self.device.driver();
        // SAFETY: the stream is live; the caller vouches for the place.
        let status = unsafe { (driver.table().memset_u32)(at, value, 1, self.raw) };
        driver.check("cuMemsetD32Async", status)
    }

    /// Holds up what is enqueued here from now on until the newest record of `event` is done.
    pub(super) fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: stream and event are live; the driver keeps what it needs of the event.
        let status =
            unsafe { (self.device.driver().table().stream_wait_event)(self.raw, event.raw, 0) };
        self.device.driver().check("cuStreamWaitEvent", status)
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if !matches!(self.ownership, Ownership::Own) {
            return;
        }
        // SAFETY: made by `new`, destroyed once; the driver frees it when its work is done.
        let status = unsafe { (self.device.driver().table().stream_destroy)(self.raw) };
        if let Err(error) = self.device.driver().check("cuStreamDestroy", status) {
            tracing::warn!(%error, "a stream could not be destroyed");
        }
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {:p} of {:?}", self.raw, self.device)
    }
}

/// Whether events tell the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventTiming {
    /// They do, which costs the device a little.
    Timed,
    /// They do not.
    Untimed,
}

/// A mark in a stream.
pub(super) struct Event {
    device: Arc<CudaDevice>,
    raw: CuEvent,
}

// SAFETY: events are handles of the driver that any thread may use, several at once.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn new(device: &Arc<CudaDevice>, timing: EventTiming) -> Result<Self> {
        let flags = match timing {
            EventTiming::Timed => cuda::EVENT_TIMED,
            EventTiming::Untimed => cuda::EVENT_UNTIMED,
        };
        let mut raw: CuEvent = null_mut();
        // SAFETY: writes one handle through a valid pointer.
        let status = unsafe { (device.driver().table().event_create)(&mut raw, flags) };
        device.driver().check("cuEventCreate", status)?;
        Ok(Self {
            device: device.clone(),
            raw,
        })
    }

    /// Marks the end of what is enqueued on `stream` so far.
    pub(super) fn record(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: event and stream are live and of one context.
        let status = unsafe { (self.device.driver().table().event_record)(self.raw, stream.raw) };
        self.device.driver().check("cuEventRecord", status)
    }

    /// Whether everything before the mark is done.
    ///
    /// # Errors
    /// `Backend` if it failed: the context is of no use any more then.
    pub(super) fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is live.
        let status = unsafe { (self.device.driver().table().event_query)(self.raw) };
        if status == cuda::NOT_READY {
            return Ok(false);
        }
        self.device.driver().check("cuEventQuery", status)?;
        Ok(true)
    }

    /// The time from this mark to a later one; both are done and timed.
    pub(super) fn until(&self, later: &Event) -> Option<Duration> {
        let mut milliseconds = 0f32;
        let elapsed = self.device.driver().table().event_elapsed_time;
        // SAFETY: both events are live; writes one float through a valid pointer.
        let status = unsafe { elapsed(&mut milliseconds, self.raw, later.raw) };
        if status != cuda::SUCCESS {
            return None;
        }
        Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).ok()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once; the driver keeps what pending work needs of it.
        let status = unsafe { (self.device.driver().table().event_destroy)(self.raw) };
        if let Err(error) = self.device.driver().check("cuEventDestroy", status) {
            tracing::warn!(%error, "an event could not be destroyed");
        }
    }
}

/// Events that are used again and again: making one costs as much as several launches.
pub(super) struct EventPool {
    device: Arc<CudaDevice>,
    timing: EventTiming,
    free: Mutex<Vec<Event>>,
}

impl EventPool {
    pub(super) fn new(device: &Arc<CudaDevice>, timing: EventTiming) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            timing,
            free: Mutex::default(),
        })
    }

    /// An event, marked at the end of what is enqueued on `stream`. The context must be current.
    pub(super) fn mark(self: &Arc<Self>, stream: &CudaStream) -> Result<Mark> {
        let free = self.free().pop();
        let event = match free {
            Some(event) => event,
            None => Event::new(&self.device, self.timing)?,
        };
        event.record(stream)?;
        Ok(Mark {
            event: Some(event),
            pool: self.clone(),
        })
    }

    fn free(&self) -> MutexGuard<'_, Vec<Event>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An event of a pool, which goes back there.
pub(super) struct Mark {
    /// `None` only while it is dropped.
    event: Option<Event>,
    pool: Arc<EventPool>,
}

impl std::ops::Deref for Mark {
    type Target = Event;

    fn deref(&self) -> &Event {
        self.event.as_ref().expect("taken out by drop alone")
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            // Recording it again is allowed at any time: waits refer to the record that they saw.
            self.pool.free().push(event);
        }
    }
}

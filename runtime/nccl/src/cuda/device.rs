//! A device and its context, as owned values.
//!
//! Every call that needs a context runs under the guard [`Entered`], which restores the thread's own context
//! afterwards, so that a program that uses CUDA itself is not affected. The guard also relaxes the thread's capture
//! mode. Otherwise, a query of rcomm's events would invalidate a capture that another thread of the program has begun
//! (`cuThreadExchangeStreamCaptureMode` in the driver's manual).

use crate::cuda::{self, CuContext, CuDevice, CudaDriver};
use rcomm_core::Device;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::text;
use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One device of this process, with its primary context.
///
/// # Thread safety
/// Any thread may use it.
pub struct CudaDevice {
    driver: Arc<CudaDriver>,
    ordinal: u16,
    device: CuDevice,
    context: CuContext,
    uuid: [u8; 16],
    /// Whether memory can be allocated and freed in the order of a stream.
    has_pools: bool,
    /// The major number of the device's compute capability.
    capability: c_int,
    /// Memory that is still to be freed. Each entry refers to the device, so the device lives until all entries are
    /// freed.
    deferred: Arc<Deferred>,
}

/// Memory that is still to be freed.
#[derive(Default)]
struct Deferred {
    list: Mutex<Vec<DeferredFree>>,
    /// Whether there may be entries, read without the lock.
    has_entries: AtomicBool,
}

impl Deferred {
    fn add(&self, entry: DeferredFree) {
        lock(&self.list).push(entry);
        self.has_entries.store(true, Ordering::Release);
    }

    fn take(&self) -> Vec<DeferredFree> {
        if !self.has_entries.load(Ordering::Acquire) {
            return Vec::new();
        }
        // An entry that is added from now on sets this again.
        self.has_entries.store(false, Ordering::Release);
        std::mem::take(&mut *lock(&self.list))
    }
}

/// Memory to be freed later, with its device.
pub(crate) struct DeferredFree {
    #[allow(dead_code, reason = "held, not read")]
    memory: Box<dyn Send>,
    device: Arc<CudaDevice>,
}

impl DeferredFree {
    pub(crate) fn new(device: &Arc<CudaDevice>, memory: Box<dyn Send>) -> Self {
        let device = device.clone();
        Self { memory, device }
    }

    /// Defers the freeing of the memory to the next use of a queue of the device, which calls
    /// [`free_deferred`](CudaDevice::free_deferred). Never calls the driver, even if other threads free memory
    /// meanwhile: the entry goes into the list, and dropping `deferred` frees no entry, since each entry keeps the
    /// device alive, and the device keeps the list.
    pub(crate) fn defer_free(self) {
        let deferred = self.device.deferred.clone();
        deferred.add(self);
    }
}

fn lock(deferred: &Mutex<Vec<DeferredFree>>) -> MutexGuard<'_, Vec<DeferredFree>> {
    deferred.lock().unwrap_or_else(PoisonError::into_inner)
}

// SAFETY: the context is a handle of the driver, which may be pushed on any thread, on several at once.
unsafe impl Send for CudaDevice {}
// SAFETY: the driver lets several threads push the context at once. What changes after `open` is atomic or behind a
// lock.
unsafe impl Sync for CudaDevice {}

impl CudaDevice {
    /// Opens a device, and retains its primary context.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such device; `Backend` with the driver's message.
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
        // SAFETY: the call writes one int to a local that outlives it.
        let status = unsafe { (table.device_get)(&mut device, c_int::from(ordinal)) };
        driver.check("cuDeviceGet", status)?;
        let mut uuid = cuda::CuUuid { bytes: [0; 16] };
        // SAFETY: the call fills sixteen bytes of a local that outlives it.
        let status = unsafe { (table.device_get_uuid)(&mut uuid, device) };
        driver.check("cuDeviceGetUuid", status)?;
        let attribute = |attribute: c_int| -> Result<c_int> {
            let mut value = 0;
            // SAFETY: the call writes one int to a local that outlives it.
            let status = unsafe { (table.device_get_attribute)(&mut value, attribute, device) };
            driver.check("cuDeviceGetAttribute", status)?;
            Ok(value)
        };
        let has_pools = attribute(cuda::ATTRIBUTE_MEMORY_POOLS)? != 0;
        let capability = attribute(cuda::ATTRIBUTE_CAPABILITY)?;
        let mut context: CuContext = null_mut();
        // SAFETY: the call writes one pointer to a local that outlives it.
        let status = unsafe { (table.primary_ctx_retain)(&mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", status)?;
        Ok(Arc::new(Self {
            driver: driver.clone(),
            ordinal,
            device,
            context,
            uuid: uuid.bytes,
            has_pools,
            capability,
            deferred: Arc::default(),
        }))
    }

    /// The device's number in this process.
    pub fn ordinal(&self) -> u16 {
        self.ordinal
    }

    /// The device as buffers name it.
    pub(crate) fn place(&self) -> Device {
        Device::Cuda(self.ordinal)
    }

    /// The device's UUID, which is the same in all processes, as hexadecimal digits.
    pub fn uuid(&self) -> String {
        text::hex(&self.uuid)
    }

    pub(crate) fn has_pools(&self) -> bool {
        self.has_pools
    }

    /// Whether NCCL reduces 8-bit floats on this device: on 9.0 and later, if no device of the communicator is older
    /// (`taskAppend`, enqueue.cc).
    pub(crate) fn has_float8(&self) -> bool {
        const FIRST: c_int = 9;
        self.capability >= FIRST
    }

    pub(crate) fn driver(&self) -> &Arc<CudaDriver> {
        &self.driver
    }

    pub(crate) fn has_context(&self, context: CuContext) -> bool {
        self.context == context
    }

    /// Frees the deferred memory. Memory that cannot be freed yet is deferred again.
    pub(crate) fn free_deferred(&self) {
        drop(self.deferred.take());
    }

    /// Makes the context current on this thread until the guard is dropped. On a thread of the program, the context is
    /// mostly current already, and a query costs less than a push and a pop.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        let table = self.driver.table();
        let mut current: CuContext = null_mut();
        // SAFETY: the call writes one handle to a local that outlives it.
        let status = unsafe { (table.ctx_get_current)(&mut current) };
        self.driver.check("cuCtxGetCurrent", status)?;
        let is_pushed = current != self.context;
        if is_pushed {
            // SAFETY: the context is retained from `open` until `self` is dropped, and any thread may push it.
            let status = unsafe { (table.ctx_push_current)(self.context) };
            self.driver.check("cuCtxPushCurrent", status)?;
        }
        let mut mode = cuda::CAPTURE_MODE_RELAXED;
        // SAFETY: the call exchanges one int of a local that outlives it.
        let status = unsafe { (table.thread_exchange_stream_capture_mode)(&mut mode) };
        let entered = Entered {
            device: self,
            is_pushed,
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
        // SAFETY: `open` has retained the context, and it is released once.
        let status = unsafe { (self.driver.table().primary_ctx_release)(self.device) };
        if let Err(error) = self.driver.check("cuDevicePrimaryCtxRelease", status) {
            tracing::warn!(%error, "a CUDA context could not be released");
        }
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{}", self.ordinal)
    }
}

/// Keeps a device's context current on this thread. Not `Send`: each thread has its own stack of contexts.
pub(crate) struct Entered<'a> {
    device: &'a CudaDevice,
    /// Whether [`CudaDevice::enter`] has pushed the context.
    is_pushed: bool,
    /// The thread's own capture mode.
    mode: c_int,
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let table = self.device.driver.table();
        let mut mode = self.mode;
        // SAFETY: the call exchanges one int with a local that outlives it, and so restores the thread's own mode.
        unsafe { (table.thread_exchange_stream_capture_mode)(&mut mode) };
        if !self.is_pushed {
            return;
        }
        let mut popped: CuContext = null_mut();
        // SAFETY: the guard pops one context, as `enter` has pushed one on this thread. Scopes drop guards in
        // reverse order, so it is the same one; in another order the thread would have a wrong context, and its next
        // call would fail.
        unsafe { (table.ctx_pop_current)(&mut popped) };
    }
}

//! Streams of a device as owned values: streams of rcomm, and streams of the program.

use super::device::CudaDevice;
use super::graph::Graph;
use crate::cuda::{self, CuContext, CuDevicePtr, CuGraph, CuStream};
use rcomm_core::backend::Stream;
use rcomm_core::{Error, ErrorKind, Result};
use std::any::Any;
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The scheduling priority of a stream on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// The default priority.
    #[default]
    Normal,
    /// Kernels of this stream start before those that wait in streams of lower priority.
    High,
}

/// Whether rcomm owns a stream, and so destroys it.
enum Ownership {
    /// rcomm made the stream, and destroys it.
    Own,
    /// The program owns the stream, and rcomm never destroys it. `Some` keeps it alive.
    Borrowed(#[allow(dead_code, reason = "held, not read")] Option<Arc<dyn Any + Send + Sync>>),
}

/// A stream of a device. Work on the stream runs in the order in which it was enqueued.
///
/// # Thread safety
/// Any thread may use it.
pub struct CudaStream {
    device: Arc<CudaDevice>,
    raw: CuStream,
    ownership: Ownership,
    idleness: Idleness,
}

/// Decides when the driver is asked whether a stream has pending work.
///
/// For a stream without pending work, an operation spares the device an event that marks the end of that work, and the
/// wait for the event. If the program runs ahead of the device, its streams nearly always have pending work, and a
/// query is useless. So after each query that finds pending work, about twice as many operations pass before the next
/// query.
#[derive(Default)]
struct Idleness {
    /// How many operations pass before the next query; [`NEVER`](Self::NEVER) if the driver is never asked.
    skip: AtomicU32,
    /// What `skip` was set to by the last answer.
    last_skip: AtomicU32,
}

impl Idleness {
    const NEVER: u32 = u32::MAX;
    /// The largest number of operations between two queries.
    const MOST_SKIPPED: u32 = 63;

    /// Makes the value for a stream about which the driver is never asked.
    fn never() -> Self {
        Self {
            skip: AtomicU32::new(Self::NEVER),
            last_skip: AtomicU32::new(0),
        }
    }

    /// Makes the value for a stream with these flags. Work on a stream that synchronizes with the null stream also
    /// waits for the work of the null stream, of which the driver's answer says nothing.
    fn of_flags(flags: u32) -> Self {
        match flags & cuda::STREAM_NON_BLOCKING {
            0 => Self::never(),
            _ => Self::default(),
        }
    }

    /// Whether the stream is known to have no pending work. Calls `ask`, which asks the driver, if a query is due.
    fn is_idle(&self, ask: impl FnOnce() -> bool) -> bool {
        // Threads that use one stream at once may ask more or less often, which is all that a race can do.
        match self.skip.load(Ordering::Relaxed) {
            Self::NEVER => false,
            0 => {
                let is_idle = ask();
                let skip = match is_idle {
                    true => 0,
                    false => {
                        (self.last_skip.load(Ordering::Relaxed) * 2 + 1).min(Self::MOST_SKIPPED)
                    }
                };
                self.last_skip.store(skip, Ordering::Relaxed);
                self.skip.store(skip, Ordering::Relaxed);
                is_idle
            }
            skip => {
                self.skip.store(skip - 1, Ordering::Relaxed);
                false
            }
        }
    }
}

// SAFETY: streams are handles of the driver that any thread may use, several at once.
unsafe impl Send for CudaStream {}
// SAFETY: the driver lets several threads use a stream at once, and only atomics change here after it is made.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    /// Makes a stream that does not wait for the default stream.
    ///
    /// # Errors
    /// `Backend` with the driver's message.
    pub fn new(device: &Arc<CudaDevice>, priority: Priority) -> Result<Arc<Self>> {
        let _entered = device.enter()?;
        let (driver, table) = (device.driver(), device.driver().table());
        let priority = match priority {
            Priority::Normal => 0,
            Priority::High => {
                let (mut least, mut greatest) = (0, 0);
                // SAFETY: the call writes two ints to locals that outlive it.
                let status =
                    unsafe { (table.ctx_get_stream_priority_range)(&mut least, &mut greatest) };
                driver.check("cuCtxGetStreamPriorityRange", status)?;
                greatest
            }
        };
        let mut raw: CuStream = null_mut();
        // SAFETY: the call writes one handle to a local that outlives it.
        let status = unsafe {
            (table.stream_create_with_priority)(&mut raw, cuda::STREAM_NON_BLOCKING, priority)
        };
        driver.check("cuStreamCreateWithPriority", status)?;
        Ok(Arc::new(Self {
            device: device.clone(),
            raw,
            ownership: Ownership::Own,
            idleness: Idleness::default(),
        }))
    }

    /// The default stream of the device, which a program uses if it names no stream.
    pub fn default_of(device: &Arc<CudaDevice>) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            raw: null_mut(),
            ownership: Ownership::Borrowed(None),
            idleness: Idleness::never(),
        })
    }

    /// Wraps a stream of the program (`CUstream` or `cudaStream_t`).
    ///
    /// # Safety
    /// `raw` is a live stream and stays one for as long as `owner` is alive, and this value keeps `owner`
    /// alive.
    ///
    /// # Errors
    /// `InvalidArgument` if the stream belongs to another context than the primary one of `device`.
    pub unsafe fn borrow(
        device: &Arc<CudaDevice>,
        raw: *mut std::ffi::c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<Self>> {
        let (mut context, mut flags): (CuContext, _) = (null_mut(), 0);
        {
            let (_entered, driver) = (device.enter()?, device.driver());
            // SAFETY: the caller's `raw` is a live stream, which `owner` keeps; the call writes one handle
            // through a reference.
            let status = unsafe { (driver.table().stream_get_ctx)(raw, &mut context) };
            driver.check("cuStreamGetCtx", status)?;
            // SAFETY: as above, with one unsigned int.
            let status = unsafe { (driver.table().stream_get_flags)(raw, &mut flags) };
            driver.check("cuStreamGetFlags", status)?;
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
            idleness: Idleness::of_flags(flags),
        }))
    }

    /// The device of the stream.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// The driver's handle (`CUstream`, `cudaStream_t`), for the program's own kernels and libraries. It is valid as
    /// long as this value exists.
    pub fn as_raw(&self) -> *mut std::ffi::c_void {
        self.raw
    }

    pub(crate) fn raw(&self) -> CuStream {
        self.raw
    }

    /// Waits until all work that was enqueued so far is done.
    ///
    /// # Blocking
    /// Without a deadline, since the driver's call has none: call it only on streams whose work waits for no peer.
    ///
    /// # Errors
    /// `Backend` if the work failed, or if the stream is being captured.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream is live as long as `self`, which owns it or keeps its owner.
        let status = unsafe { (self.device.driver().table().stream_synchronize)(self.raw) };
        self.device.driver().check("cuStreamSynchronize", status)
    }

    /// Returns the graph into which the stream is being captured, if it is.
    pub(crate) fn graph(&self) -> Result<Option<Graph>> {
        // The default stream cannot be captured, and a query of it could invalidate captures of other streams.
        if self.raw.is_null() {
            return Ok(None);
        }
        let (mut state, mut id) = (cuda::CAPTURE_STATUS_NONE, 0);
        let mut raw: CuGraph = null_mut();
        let get_capture_info = self.device.driver().table().stream_get_capture_info;
        // SAFETY: the stream is live as long as `self`. The call writes an int, an id and a handle through
        // references; by the manual, the other pointers may be null.
        let status = unsafe {
            get_capture_info(
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

    /// Whether all work that was enqueued so far is known to be done. `false` also if the driver was not asked. The
    /// context must be current, and the stream must not be captured, since a query would end the capture.
    pub(crate) fn is_known_idle(&self) -> bool {
        self.idleness.is_idle(|| {
            // SAFETY: the stream is live as long as `self`.
            let status = unsafe { (self.device.driver().table().stream_query)(self.raw) };
            // If the stream has an error, the next call on it reports the error.
            status == cuda::SUCCESS
        })
    }

    /// Enqueues a copy between two addresses on devices. The context must be current.
    ///
    /// # Safety
    /// `bytes` bytes at both addresses stay until the stream is done with them.
    pub(crate) unsafe fn copy(
        &self,
        to: CuDevicePtr,
        from: CuDevicePtr,
        bytes: usize,
    ) -> Result<()> {
        let driver = self.device.driver();
        // SAFETY: the stream is live as long as `self`. The caller keeps `bytes` bytes at both addresses until the
        // stream is done with them.
        let status = unsafe { (driver.table().memcpy_on_device)(to, from, bytes, self.raw) };
        driver.check("cuMemcpyDtoDAsync", status)
    }

    /// Enqueues a write of four bytes. The context must be current.
    ///
    /// # Safety
    /// Four aligned bytes at the address stay until the stream is done with them.
    pub(crate) unsafe fn fill_u32(&self, at: CuDevicePtr, value: u32) -> Result<()> {
        let driver = self.device.driver();
        // SAFETY: the stream is live as long as `self`. The caller keeps four aligned bytes at `at` until
        // the stream is done with them.
        let status = unsafe { (driver.table().memset_u32)(at, value, 1, self.raw) };
        driver.check("cuMemsetD32Async", status)
    }
}

impl Stream for CudaStream {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if !matches!(self.ownership, Ownership::Own) {
            return;
        }
        // SAFETY: `new` made the stream, and it is destroyed once. The driver frees it when its work is done.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the numbers, from 0, of those among this many operations for which the driver is asked.
    fn asked(idleness: &Idleness, operations: u32, answer: bool) -> Vec<u32> {
        let mut asked = Vec::new();
        for operation in 0..operations {
            let is_idle = idleness.is_idle(|| {
                asked.push(operation);
                answer
            });
            assert_eq!(is_idle, answer && asked.last() == Some(&operation));
        }
        asked
    }

    #[test]
    fn a_stream_with_pending_work_is_asked_about_ever_more_rarely() {
        let idleness = Idleness::default();
        let busy = asked(&idleness, 260, false);
        assert_eq!(busy, [0, 2, 6, 14, 30, 62, 126, 190, 254]);
        // Of the 63 operations without a query, 58 are left.
        let idle = asked(&idleness, 61, true);
        assert_eq!(idle, [58, 59, 60]);
        assert_eq!(asked(&idleness, 4, false), [0, 2]);
    }

    #[test]
    fn the_driver_is_not_asked_about_streams_that_wait_for_the_null_stream() {
        assert!(asked(&Idleness::never(), 100, true).is_empty());
        assert!(asked(&Idleness::of_flags(0), 100, true).is_empty());
        let other = Idleness::of_flags(cuda::STREAM_NON_BLOCKING);
        assert_eq!(asked(&other, 2, true), [0, 1]);
    }
}

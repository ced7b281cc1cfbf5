//! Wraps cudarc's streams and memory as rcomm's (feature `cudarc`), for candle and for programs that launch their own
//! kernels with cudarc.
//!
//! Both sides use the device's primary context, so nothing is copied. cudarc tracks reads and writes of a
//! slice by events if it uses several streams. A buffer made here uses the slice's own stream, so that operations
//! start after the work that cudarc has recorded. Work that cudarc enqueues on that stream runs after the
//! operations if the program has called [`Work::wait_stream`](rcomm_core::Work::wait_stream) for the stream, or
//! `wait`.

use super::device::CudaDevice;
use super::memory::DeviceBuffer;
use super::stream::CudaStream;
use ::cudarc::driver::{CudaSlice, CudaStream as TheirStream, DevicePtr};
use rcomm_core::Element;
use rcomm_core::Result;
use std::any::Any;
use std::sync::Arc;

impl CudaStream {
    /// Wraps a stream of cudarc, and keeps it alive.
    ///
    /// # Errors
    /// `InvalidArgument` if the stream belongs to another context than the primary one of `device`.
    pub fn from_cudarc(device: &Arc<CudaDevice>, stream: &Arc<TheirStream>) -> Result<Arc<Self>> {
        // SAFETY: cudarc destroys a stream when its last `Arc` is dropped, and the new value holds one.
        unsafe { Self::borrow(device, stream.cu_stream().cast(), stream.clone()) }
    }
}

impl DeviceBuffer {
    /// Wraps a whole slice of cudarc, and keeps it alive. If another owner of the slice enqueues work at the same
    /// time, the elements can be a mix of the writes of that work and of operations; other memory is not affected.
    ///
    /// # Errors
    /// `InvalidArgument` if the slice is not memory of `device`.
    pub fn from_cudarc<T: Element>(
        device: &Arc<CudaDevice>,
        slice: &Arc<CudaSlice<T>>,
    ) -> Result<Self>
    where
        CudaSlice<T>: Any,
    {
        // SAFETY: the memory is freed when the last `Arc` of the slice is dropped, and the buffer holds one.
        unsafe { Self::from_cudarc_view(device, &**slice, slice.clone()) }
    }

    /// Wraps a part of a slice of cudarc (`CudaView`, `CudaViewMut`), kept alive by `owner`.
    ///
    /// # Safety
    /// The memory of the view stays for as long as `owner` is alive, and the returned value keeps `owner`
    /// alive. An example of an owner is the slice itself in an `Arc`.
    ///
    /// # Errors
    /// `InvalidArgument` if the view is not memory of `device`.
    pub unsafe fn from_cudarc_view<T: Element>(
        device: &Arc<CudaDevice>,
        view: &impl DevicePtr<T>,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let theirs = view.stream().clone();
        let stream = CudaStream::from_cudarc(device, &theirs)?;
        // This call makes the slice's stream wait for the pending work of cudarc's other streams.
        let (at, _sync) = view.device_ptr(&theirs);
        // SAFETY: cudarc has `len` elements of `T` at this address for as long as the view's memory stays. The caller
        // guarantees that `owner` keeps that memory.
        unsafe { Self::foreign(&stream, at, T::DTYPE, view.len(), owner) }
    }
}

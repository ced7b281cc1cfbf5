//! cudarc's streams and memory as ours (feature `cudarc`): what candle, and programs with kernels of their
//! own, already hold.
//!
//! Both sides use the device's primary context, so nothing is copied. cudarc follows reads and writes of a
//! slice by events where it uses several streams; a buffer made here joins in at the slice's own stream:
//! operations start after what cudarc knows of, and what cudarc enqueues there after
//! [`Work::wait_stream`](rcomm_core::Work::wait_stream) on that stream, or after `wait`, comes after them.

use super::device::CudaDevice;
use super::memory::DeviceBuffer;
use super::stream::CudaStream;
use ::cudarc::driver::{CudaSlice, CudaStream as TheirStream, DevicePtr};
use rcomm_core::Element;
use rcomm_core::Result;
use std::any::Any;
use std::sync::Arc;

impl CudaStream {
    /// A stream of cudarc's, which is kept alive.
    ///
    /// # Errors
    /// `InvalidArgument` if it belongs to another device or context than `device`.
    pub fn from_cudarc(device: &Arc<CudaDevice>, stream: &Arc<TheirStream>) -> Result<Arc<Self>> {
        // SAFETY: cudarc destroys a stream when its last owner goes, and the new value holds one.
        unsafe { Self::borrow(device, stream.cu_stream().cast(), stream.clone()) }
    }
}

impl DeviceBuffer {
    /// A whole slice of cudarc's, which is kept alive. Work that another holder of the slice enqueues at
    /// the same time can mix with what operations write, but does no further harm.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not memory of `device`.
    pub fn from_cudarc<T: Element>(
        device: &Arc<CudaDevice>,
        slice: &Arc<CudaSlice<T>>,
    ) -> Result<Self>
    where
        CudaSlice<T>: Any,
    {
        // SAFETY: the memory is freed when the last owner of the slice goes, and the buffer holds one.
        unsafe { Self::from_cudarc_view(device, &**slice, slice.clone()) }
    }

    /// Part of a slice of cudarc's (`CudaView`, `CudaViewMut`), kept alive by `owner`.
    ///
    /// # Safety
    /// The memory of the view stays for as long as `owner` is alive, which the value makes sure of: the
    /// slice itself in an `Arc`, say.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not memory of `device`.
    pub unsafe fn from_cudarc_view<T: Element>(
        device: &Arc<CudaDevice>,
        view: &impl DevicePtr<T>,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let theirs = view.stream().clone();
        let stream = CudaStream::from_cudarc(device, &theirs)?;
        // Makes the slice's stream wait for the pending work of cudarc's other streams.
        let (at, _noted) = view.device_ptr(&theirs);
        // SAFETY: cudarc has `len` elements of `T` at this address while the view's memory stays, which the
        // caller has `owner` keep.
        unsafe { Self::foreign(&stream, at, T::DTYPE, view.len(), owner) }
    }
}

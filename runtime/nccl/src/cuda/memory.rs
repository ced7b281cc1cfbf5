//! Memory of a device, which rcomm, NCCL or the program allocated, as buffers that name their stream.
//!
//! An operation of the backend starts after the work that is enqueued on the streams of its buffers. Memory whose
//! stream is not known is assumed to be used on the default stream.

use super::device::{CudaDevice, DeferredFree};
use super::event::{EventPool, Mark};
use super::stream::CudaStream;
use crate::cuda::{self, CuDevicePtr};
use crate::library::NcclLibrary;
use crate::library::sys::NcclResult;
use rcomm_core::Element;
use rcomm_core::{Access, Buffer};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::DType;
use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// The owner that keeps a device buffer's memory alive, and the stream on which the program uses it.
struct Owner {
    stream: Arc<CudaStream>,
    #[allow(dead_code, reason = "held, not read")]
    memory: Arc<dyn Any + Send + Sync>,
}

/// The stream on which the program uses this buffer, if the buffer names one.
pub(crate) fn stream_of<'b>(buffer: &'b Buffer<'_>) -> Option<&'b Arc<CudaStream>> {
    let owner = buffer.owner()?.downcast_ref::<Owner>()?;
    Some(&owner.stream)
}

/// Memory that the driver allocated.
struct Allocation {
    device: Arc<CudaDevice>,
    at: CuDevicePtr,
    /// The stream in whose order the memory is allocated and freed, without waiting for a kernel of another stream;
    /// `cuMemFree` waits for the whole device. `None` on a device without memory pools, and for memory that was
    /// allocated during a capture.
    stream: Option<Arc<CudaStream>>,
}

impl Allocation {
    /// Frees the memory, in the order of its stream if it has one. Must be called only once.
    fn free(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        let (driver, table) = (self.device.driver(), self.device.driver().table());
        match &self.stream {
            // SAFETY: `DeviceBuffer::uninitialized` allocated the memory, and it is freed once, after the work that
            // is enqueued on its stream. Operations on other streams keep the buffer until they are done.
            Some(stream) => driver.check("cuMemFreeAsync", unsafe {
                (table.mem_free_async)(self.at, stream.raw())
            }),
            // SAFETY: `DeviceBuffer::uninitialized` allocated the memory, and it is freed once. The driver waits for
            // the work that is enqueued on the device.
            None => driver.check("cuMemFree", unsafe { (table.mem_free)(self.at) }),
        }
    }

    /// Whether the free would become part of a CUDA graph, and run each time that the graph is launched. True also if
    /// the stream cannot be queried.
    fn is_captured(&self) -> bool {
        let is_captured = |stream: &Arc<CudaStream>| {
            let entered = self.device.enter();
            entered.is_ok() && !matches!(stream.graph(), Ok(None))
        };
        self.stream.as_ref().is_some_and(is_captured)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.is_captured() {
            // The next use of a queue of the device tries again.
            let deferred_free = Self {
                device: self.device.clone(),
                at: self.at,
                stream: self.stream.take(),
            };
            DeferredFree::new(&self.device, Box::new(deferred_free)).defer_free();
            return;
        }
        if let Err(error) = self.free() {
            tracing::warn!(%error, "device memory could not be freed");
        }
    }
}

/// Memory that NCCL allocated.
struct LibraryAllocation {
    device: Arc<CudaDevice>,
    library: Arc<NcclLibrary>,
    free: unsafe extern "C" fn(*mut c_void) -> NcclResult,
    at: CuDevicePtr,
    /// Marks the end of the filling with zeros, once that is enqueued.
    zeroed: Option<Mark>,
}

impl LibraryAllocation {
    /// Allocates `bytes` bytes, more than 0. The context must be current.
    fn new(library: &Arc<NcclLibrary>, device: &Arc<CudaDevice>, bytes: usize) -> Result<Self> {
        let (Some(alloc), Some(free)) = (library.table().mem_alloc, library.table().mem_free)
        else {
            return Err(library.lacks("memory that the library allocates", "ncclMemAlloc"));
        };
        let mut at: *mut c_void = std::ptr::null_mut();
        // SAFETY: the call writes one address to a local that outlives it.
        let status = unsafe { alloc(&mut at, bytes) };
        library
            .check("ncclMemAlloc", status)
            .map_err(|error| error.with_more(&format!("{bytes} bytes on {device:?}")))?;
        Ok(Self {
            device: device.clone(),
            library: library.clone(),
            free,
            at: at.expose_provenance() as CuDevicePtr,
            zeroed: None,
        })
    }

    /// Whether the fill with zeros is complete. This type enqueues no other work.
    fn is_zeroed(&self) -> bool {
        let Some(mark) = &self.zeroed else {
            return true;
        };
        let entered = self.device.enter();
        entered.is_ok() && matches!(mark.is_done(), Ok(true))
    }
}

impl Drop for LibraryAllocation {
    fn drop(&mut self) {
        if !self.is_zeroed() {
            // The library unmaps the memory without waiting for anything (`ncclMemFree`, allocator.cc). The next use
            // of a queue of the device tries again.
            let deferred_free = Self {
                device: self.device.clone(),
                library: self.library.clone(),
                free: self.free,
                at: self.at,
                zeroed: self.zeroed.take(),
            };
            DeferredFree::new(&self.device, Box::new(deferred_free)).defer_free();
            return;
        }
        let free = || -> Result<()> {
            let _entered = self.device.enter()?;
            // SAFETY: `new` allocated the memory, and it is freed once: memory that was
            // deferred above does not reach this line. The fill with zeros is complete, and operations keep a
            // buffer until they are done.
            let status =
                unsafe { (self.free)(std::ptr::with_exposed_provenance_mut(self.at as usize)) };
            self.library.check("ncclMemFree", status)
        };
        if let Err(error) = free() {
            tracing::warn!(%error, "memory that NCCL allocated could not be freed");
        }
    }
}

/// Elements in the memory of a device, used on one stream.
///
/// Clones refer to the same memory. If the device has memory pools, the memory is allocated and freed in the order of
/// that stream, without waiting for other streams. So the program's work on another stream must end before the last
/// clone is dropped.
///
/// # Thread safety
/// May be shared between threads. If two streams write to the same elements at once, these may be a mix of both
/// writes; other memory is not affected.
#[derive(Clone)]
pub struct DeviceBuffer {
    memory: Arc<Owner>,
    at: CuDevicePtr,
    len: usize,
    dtype: DType,
}

impl DeviceBuffer {
    /// Allocates memory for `len` elements, all zero.
    ///
    /// # Errors
    /// `InvalidArgument` for [`DType::Other`], for a size that exceeds the address space, and while the stream is
    /// being captured; `Backend` with the driver's message if there is not enough memory.
    pub fn zeroed(stream: &Arc<CudaStream>, dtype: DType, len: usize) -> Result<Self> {
        let _entered = stream.device().enter()?;
        refuse_to_zero(stream)?;
        let made = Self::uninitialized(stream, dtype, len)?;
        // SAFETY: the bytes were just allocated at this address, and are freed after the work that is enqueued on the
        // stream.
        unsafe { zero(stream, made.at, size_of(dtype, len)?)? };
        Ok(made)
    }

    /// Allocates memory with undefined contents, for data that are written before they are read.
    ///
    /// # Errors
    /// Same as [`zeroed`](Self::zeroed), except that a stream that is being captured is accepted.
    pub(crate) fn uninitialized(
        stream: &Arc<CudaStream>,
        dtype: DType,
        len: usize,
    ) -> Result<Self> {
        let bytes = size_of(dtype, len)?;
        let device = stream.device();
        let (driver, table) = (device.driver(), device.driver().table());
        let mut at: CuDevicePtr = 0;
        let _entered = device.enter()?;
        // An allocation on a stream that is being captured would belong to the graph.
        let is_ordered = device.has_pools() && stream.graph()?.is_none();
        let (call, status) = match is_ordered {
            // SAFETY: the call writes one address through a reference, the stream is live, as it is
            // borrowed, and the size is not 0.
            true => ("cuMemAllocAsync", unsafe {
                (table.mem_alloc_async)(&mut at, bytes.max(1), stream.raw())
            }),
            // SAFETY: the call writes one address through a reference; the size is not 0.
            false => ("cuMemAlloc", unsafe {
                (table.mem_alloc)(&mut at, bytes.max(1))
            }),
        };
        driver
            .check(call, status)
            .map_err(|error| error.with_more(&format!("{bytes} bytes on {device:?}")))?;
        let memory = Arc::new(Allocation {
            device: device.clone(),
            at,
            stream: is_ordered.then(|| stream.clone()),
        });
        Ok(Self::at_address(stream, at, (dtype, len), memory))
    }

    /// Makes a buffer of `len` elements at this address, for as long as `memory` lives.
    fn at_address(
        stream: &Arc<CudaStream>,
        at: CuDevicePtr,
        (dtype, len): (DType, usize),
        memory: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            memory: Arc::new(Owner {
                stream: stream.clone(),
                memory,
            }),
            at,
            len,
            dtype,
        }
    }

    /// Allocates memory through the library (`ncclMemAlloc`), all zero, which can be registered with the library and
    /// made into a window. The zeros are written on the stream `copies`, whose work waits for no peer.
    ///
    /// # Errors
    /// Same as [`zeroed`](Self::zeroed); `Unsupported` if the library is older than 2.19.
    pub(crate) fn from_library(
        library: &Arc<NcclLibrary>,
        (copies, marks): (&CudaStream, &Arc<EventPool>),
        stream: &Arc<CudaStream>,
        (dtype, len): (DType, usize),
    ) -> Result<Self> {
        let bytes = size_of(dtype, len)?.max(1);
        let device = stream.device();
        let _entered = device.enter()?;
        refuse_to_zero(stream)?;
        let mut memory = LibraryAllocation::new(library, device, bytes)?;
        let at = memory.at;
        // SAFETY: the bytes were just allocated at this address, and are freed only after the event below is complete.
        unsafe { zero(copies, at, bytes)? };
        // The event is on `copies`, not on the buffer's own stream, whose work may wait for a peer.
        memory.zeroed = match marks.mark(copies) {
            Ok(mark) => Some(mark),
            Err(error) => {
                // Without an event it is unknown when the fill is complete, and the library would unmap the memory
                // while the device writes to it. So the memory is leaked.
                std::mem::forget(memory);
                return Err(error);
            }
        };
        if let Some(mark) = &memory.zeroed {
            stream.wait_for(mark)?;
        }
        Ok(Self::at_address(stream, at, (dtype, len), Arc::new(memory)))
    }

    /// Allocates `bytes` bytes, more than 0, through the library (`ncclMemAlloc`), with undefined contents. The program
    /// uses them on this stream.
    ///
    /// # Errors
    /// Same as [`from_library`](Self::from_library), except that a stream that is being captured is accepted.
    pub(crate) fn segment_from_library(
        library: &Arc<NcclLibrary>,
        stream: &Arc<CudaStream>,
        bytes: usize,
    ) -> Result<Self> {
        let bytes = size_of(DType::U8, bytes)?;
        let device = stream.device();
        let _entered = device.enter()?;
        let memory = LibraryAllocation::new(library, device, bytes)?;
        let at = memory.at;
        Ok(Self::at_address(
            stream,
            at,
            (DType::U8, bytes),
            Arc::new(memory),
        ))
    }

    /// Allocates memory with a copy of these elements.
    ///
    /// # Blocking
    /// Until the copy is done.
    ///
    /// # Errors
    /// Same as [`zeroed`](Self::zeroed).
    pub fn copy_of<T: Element>(stream: &Arc<CudaStream>, elements: &[T]) -> Result<Self> {
        let memory = Self::zeroed(stream, T::DTYPE, elements.len())?;
        memory.fill_from(&Buffer::from_slice(elements))?;
        Ok(memory)
    }

    /// Wraps memory of the program, used on `stream`, for example of cudarc, candle or PyTorch.
    ///
    /// # Safety
    /// `at` is the address of `len` elements of `dtype` for as long as `owner` is alive, and the returned
    /// value keeps `owner` alive.
    ///
    /// # Errors
    /// `InvalidArgument` if the address is not in the memory of the stream's device, for [`DType::Other`], and for a
    /// size that exceeds the address space.
    pub unsafe fn foreign(
        stream: &Arc<CudaStream>,
        at: u64,
        dtype: DType,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        if size_of(dtype, len)? > 0 {
            check_device_address(stream.device(), at)?;
        }
        Ok(Self::at_address(stream, at, (dtype, len), owner))
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The address on the device, for kernels.
    pub fn address(&self) -> u64 {
        self.at
    }

    /// The stream on which the program uses the memory.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.memory.stream
    }

    /// Returns a buffer for operations over the same memory, which is kept alive until they are done.
    ///
    /// # Errors
    /// `InvalidArgument` if there are elements and their address is 0.
    pub fn buffer(&self) -> Result<Buffer<'static>> {
        let at = usize::try_from(self.at).ok();
        let data = match at.and_then(|at| NonNull::new(std::ptr::without_provenance_mut(at))) {
            Some(data) => data,
            // With no elements, there is nothing at the address.
            None if self.len == 0 => NonNull::dangling(),
            None => {
                let message = "the device memory is at address 0";
                return Err(Error::new(ErrorKind::InvalidArgument, message));
            }
        };
        let place = self.stream().device().place();
        // SAFETY: by the contracts of the constructors, the memory holds `len` elements for as long as its owner
        // lives. The host has no reference to it: only the device accesses it.
        unsafe {
            Buffer::from_raw(
                data,
                self.len,
                self.dtype,
                place,
                Access::Write,
                self.memory.clone(),
            )
        }
    }

    /// Overwrites the elements with those of a host buffer, after the work that is enqueued on the stream.
    ///
    /// # Blocking
    /// Until the copy is done.
    ///
    /// # Errors
    /// `InvalidArgument` if type or length differ, if `elements` is not in host memory, or if the stream is being
    /// captured; `Backend` with the driver's message.
    pub fn fill_from(&self, elements: &Buffer<'_>) -> Result<()> {
        self.check_same_shape(elements)?;
        let bytes = elements.as_bytes()?;
        if bytes.is_empty() {
            return Ok(());
        }
        let device = self.stream().device();
        let entered = device.enter()?;
        self.refuse_capture()?;
        let copy = device.driver().table().memcpy_to_device;
        // SAFETY: both sides hold that many bytes (`check_same_shape`), and live until the copy is done:
        // `synchronize` waits for it below, also after an error.
        let status = unsafe {
            copy(
                self.at,
                bytes.as_ptr().cast(),
                bytes.len(),
                self.stream().raw(),
            )
        };
        drop(entered);
        let copied = device.driver().check("cuMemcpyHtoDAsync", status);
        self.stream().synchronize()?;
        copied
    }

    /// Copies the elements to a host buffer, after the work that is enqueued on the stream.
    ///
    /// # Blocking
    /// Until the copy is done.
    ///
    /// # Errors
    /// `InvalidArgument` if type or length differ, if `elements` is not in host memory or may only be read, or if
    /// the stream is being captured; `Backend` with the driver's message.
    pub fn copy_to(&self, elements: &mut Buffer<'_>) -> Result<()> {
        self.check_same_shape(elements)?;
        let device = self.stream().device();
        elements.fill(|bytes| {
            if bytes.is_empty() {
                return Ok(());
            }
            let entered = device.enter()?;
            self.refuse_capture()?;
            let copy = device.driver().table().memcpy_to_host;
            // SAFETY: `bytes`, borrowed for writing, and the device's elements are equally long
            // (`check_same_shape`), and both live until the copy is done: `synchronize` waits for it below, also
            // after an error.
            let status = unsafe {
                copy(
                    bytes.as_mut_ptr().cast::<c_void>(),
                    self.at,
                    bytes.len(),
                    self.stream().raw(),
                )
            };
            drop(entered);
            let copied = device.driver().check("cuMemcpyDtoHAsync", status);
            self.stream().synchronize()?;
            copied
        })
    }

    /// Returns a copy of the elements.
    ///
    /// # Blocking
    /// Until the copy is done.
    ///
    /// # Errors
    /// Same as [`copy_to`](Self::copy_to); `InvalidArgument` if the elements are not `T`.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let mut elements = vec![T::default(); self.len];
        self.copy_to(&mut Buffer::from_mut(&mut elements))?;
        Ok(elements)
    }

    /// Refuses to copy while the stream is being captured: the copy would become part of the graph, and use the host's
    /// memory at each launch. The context must be current.
    fn refuse_capture(&self) -> Result<()> {
        match self.stream().graph()? {
            None => Ok(()),
            Some(graph) => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "the stream of {self:?} is being captured into graph {}: nothing runs during a capture, so a \
                     copy cannot be waited for",
                    graph.id
                ),
            )),
        }
    }

    /// Refuses a buffer with another element type or length.
    fn check_same_shape(&self, other: &Buffer<'_>) -> Result<()> {
        if other.dtype() == self.dtype && other.len() == self.len {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("{other:?} and {self:?} must have the same type and length"),
        ))
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.stream().device();
        write!(f, "{}[{}] on {device:?}", self.dtype, self.len)
    }
}

/// Refuses to fill memory with zeros on a stream that is being captured: the fill would become part of the graph,
/// so it would not run before the first launch, and would run again at each launch. The context must be current.
fn refuse_to_zero(stream: &CudaStream) -> Result<()> {
    match stream.graph()? {
        None => Ok(()),
        Some(graph) => Err(Error::new(
            ErrorKind::InvalidArgument,
            format!(
                "{stream:?} is being captured into graph {}, which would fill new memory with zeros whenever it \
                 is launched: make buffers before the capture",
                graph.id
            ),
        )),
    }
}

/// Fills memory with zeros, after the work that is enqueued on the stream. The context must be current.
///
/// # Safety
/// `bytes` bytes of the stream's device are at the address until the stream is done with them.
unsafe fn zero(stream: &CudaStream, at: CuDevicePtr, bytes: usize) -> Result<()> {
    let driver = stream.device().driver();
    // SAFETY: the caller keeps `bytes` bytes at `at` until the stream is done with them.
    let status = unsafe { (driver.table().memset)(at, 0, bytes, stream.raw()) };
    driver.check("cuMemsetD8Async", status)
}

/// Returns the size in bytes of `len` elements.
///
/// # Errors
/// `InvalidArgument` for [`DType::Other`], and for a size that exceeds the address space.
fn size_of(dtype: DType, len: usize) -> Result<usize> {
    let bytes = dtype.size().and_then(|size| size.checked_mul(len));
    bytes
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "{len} elements of {dtype} cannot be allocated: the type has no size, or the size exceeds \
                     the address space"
                ),
            )
        })
}

/// Refuses an address that the driver does not know as memory of this device.
fn check_device_address(device: &CudaDevice, at: CuDevicePtr) -> Result<()> {
    let _entered = device.enter()?;
    let refuse = |reason: String| {
        Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("{at:#x} is not memory of {device:?}: {reason}"),
        ))
    };
    let get_attribute = device.driver().table().pointer_get_attribute;
    let mut kind: c_uint = 0;
    // SAFETY: the attribute is an unsigned int, written through a valid pointer; any address may be queried.
    let status = unsafe { get_attribute((&raw mut kind).cast(), cuda::POINTER_MEMORY_TYPE, at) };
    if status != cuda::SUCCESS || kind != cuda::MEMORY_TYPE_DEVICE {
        return refuse("it is host memory, or no memory at all".to_owned());
    }
    let mut ordinal: c_int = -1;
    // SAFETY: the attribute is an int, written through a valid pointer; any address may be queried.
    let status =
        unsafe { get_attribute((&raw mut ordinal).cast(), cuda::POINTER_DEVICE_ORDINAL, at) };
    if status != cuda::SUCCESS || ordinal != c_int::from(device.ordinal()) {
        return refuse(format!("it is on cuda:{ordinal}"));
    }
    Ok(())
}

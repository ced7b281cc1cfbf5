//! C pointers as buffers.

use crate::status::refused;
use rcomm::backend::nccl::{CudaStream, DeviceBuffer};
use rcomm::{Access, Buffer, DType, Device, Result};
use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where C's memory is, and what keeps it while an operation uses it.
#[derive(Clone)]
pub(crate) struct Owner {
    kept: Arc<dyn Any + Send + Sync>,
    /// The stream on which C uses the memory, which is on the stream's device; `None` for the host's.
    stream: Option<Arc<CudaStream>>,
}

impl Owner {
    fn of_host(kept: Arc<dyn Any + Send + Sync>) -> Self {
        Self { kept, stream: None }
    }

    /// The owner of memory that is used on this stream.
    pub(crate) fn on(&self, stream: Option<Arc<CudaStream>>) -> Self {
        Self {
            kept: self.kept.clone(),
            stream,
        }
    }

    pub(crate) fn stream(&self) -> Option<Arc<CudaStream>> {
        self.stream.clone()
    }
}

/// The owner of memory that C itself keeps.
pub(crate) fn kept_by_caller() -> Owner {
    Owner::of_host(Arc::new(()))
}

/// An owner on C's side, which is released when this is dropped.
struct Released {
    owner: *mut c_void,
    release: unsafe extern "C" fn(owner: *mut c_void),
}

// SAFETY: the caller of `released_by` allows the release on any thread, once; nothing else uses the pointer.
unsafe impl Send for Released {}
// SAFETY: a shared reference gives no access to the pointer.
unsafe impl Sync for Released {}

impl Drop for Released {
    fn drop(&mut self) {
        // SAFETY: the caller of `released_by` allows this call with this pointer, once, on any thread.
        unsafe { (self.release)(self.owner) }
    }
}

/// An owner that a function of C releases.
///
/// # Safety
/// `release` may be called once with `owner`, on any thread.
pub(crate) unsafe fn released_by(
    owner: *mut c_void,
    release: unsafe extern "C" fn(owner: *mut c_void),
) -> Owner {
    Owner::of_host(Arc::new(Released { owner, release }))
}

/// Returns the element type with this code; an error if there is none.
pub(crate) fn dtype_of(code: u8) -> Result<DType> {
    let dtype = DType::from_code(code).filter(|dtype| dtype.size().is_some());
    dtype.ok_or_else(|| refused(format!("no element type has the code {code}")))
}

/// Makes an input buffer of `count` elements.
///
/// # Safety
/// `data` is NULL, or `count` elements lie there and stay unchanged until the operation has released
/// them. They need not be aligned.
pub(crate) unsafe fn input(
    data: *const c_void,
    count: usize,
    dtype: DType,
    owner: &Owner,
) -> Result<Buffer<'static>> {
    // SAFETY: the caller keeps the elements there, unchanged. With `Access::Read` nothing writes through
    // the pointer that was made mutable.
    unsafe { buffer(data.cast_mut(), count, dtype, Access::Read, owner) }
}

/// Makes an output buffer of `count` elements.
///
/// # Safety
/// `data` is NULL, or `count` elements lie there that no other code reads or writes until the operation
/// has released them. They need not be aligned.
pub(crate) unsafe fn output(
    data: *mut c_void,
    count: usize,
    dtype: DType,
    owner: &Owner,
) -> Result<Buffer<'static>> {
    // SAFETY: the caller keeps the elements there, and leaves them to the operation until it has released
    // them.
    unsafe { buffer(data, count, dtype, Access::Write, owner) }
}

/// Makes a buffer of `count` elements.
///
/// # Safety
/// See [`input`]; with [`Access::Write`], see [`output`].
unsafe fn buffer(
    data: *mut c_void,
    count: usize,
    dtype: DType,
    access: Access,
    owner: &Owner,
) -> Result<Buffer<'static>> {
    let data = match NonNull::new(data.cast::<u8>()) {
        Some(data) => data,
        None if count == 0 => NonNull::dangling(),
        None => {
            return Err(refused(format!(
                "the buffer for {count} elements of {dtype} is NULL"
            )));
        }
    };
    if let Some(stream) = &owner.stream {
        let (at, kept) = (data.addr().get() as u64, owner.kept.clone());
        let at = if count == 0 { 0 } else { at };
        // SAFETY: `count` elements lie at this address of the device; the driver refuses one that is not the device's.
        // C keeps the memory valid until the operation has released it, itself or through `owner`.
        return unsafe { DeviceBuffer::foreign(stream, at, dtype, count, kept) }?.buffer();
    }
    // SAFETY: `count` elements lie at `data` (none if the caller passed NULL). C has initialized them or lets
    // them be overwritten, and keeps the memory valid until the operation has released it, itself or through
    // `owner`. The caller of `input` or `output` guarantees that C uses the memory only as `access` allows.
    unsafe { Buffer::from_raw(data, count, dtype, Device::Cpu, access, owner.kept.clone()) }
}

/// Returns the array of `count` values at `data`.
///
/// # Safety
/// `data` is NULL, or `count` values lie there, aligned, that stay unchanged while the result is used.
pub(crate) unsafe fn array<'a, T>(data: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        return Err(refused(format!("{name} is NULL")));
    }
    // SAFETY: `data` is not NULL (checked above), so the caller has `count` aligned values there, which
    // stay unchanged while the result is used.
    Ok(unsafe { std::slice::from_raw_parts(data, count) })
}

/// Makes a list of input buffers of these lengths.
///
/// # Safety
/// `list` is NULL, or as long as `counts`, and stays unchanged during the call; each of its pointers fulfills
/// the contract of [`input`].
pub(crate) unsafe fn inputs(
    list: *const *const c_void,
    counts: &[usize],
    dtype: DType,
    owner: &Owner,
) -> Result<Vec<Buffer<'static>>> {
    // SAFETY: the caller's list is NULL or has as many pointers as there are counts; it is used during this
    // call only.
    let list = unsafe { array(list, counts.len(), "the list of inputs")? };
    let pairs = list.iter().zip(counts);
    // SAFETY: the caller leaves the `count` elements at each pointer unchanged until the operation has
    // released them.
    pairs
        .map(|(&data, &count)| unsafe { input(data, count, dtype, owner) })
        .collect()
}

/// Makes a list of output buffers of these lengths.
///
/// # Safety
/// `list` is NULL, or as long as `counts`, and stays unchanged during the call; each of its pointers fulfills
/// the contract of [`output`], and their elements do not overlap.
pub(crate) unsafe fn outputs(
    list: *const *mut c_void,
    counts: &[usize],
    dtype: DType,
    owner: &Owner,
) -> Result<Vec<Buffer<'static>>> {
    // SAFETY: the caller's list is NULL or has as many pointers as there are counts; it is used during this
    // call only.
    let list = unsafe { array(list, counts.len(), "the list of outputs")? };
    let pairs = list.iter().zip(counts);
    // SAFETY: the caller leaves the `count` elements at each pointer to the operation until it has
    // released them.
    pairs
        .map(|(&data, &count)| unsafe { output(data, count, dtype, owner) })
        .collect()
}

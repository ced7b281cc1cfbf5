//! C pointers as buffers.

use crate::status::refused;
use rcomm::{Access, Buffer, DType, Device, Result};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// The element type with this code.
pub(crate) fn dtype_of(code: u8) -> Result<DType> {
    let dtype = DType::from_code(code).filter(|dtype| dtype.size().is_some());
    dtype.ok_or_else(|| refused(format!("no element type has the code {code}")))
}

/// `count` elements to be read.
///
/// # Safety
/// They are there, and stay as they are until the operation has let go of them.
pub(crate) unsafe fn input(
    data: *const c_void,
    count: usize,
    dtype: DType,
) -> Result<Buffer<'static>> {
    // SAFETY: the caller leaves the elements unchanged; with `Access::Read` nothing writes through the
    // pointer that was made mutable.
    unsafe { buffer(data.cast_mut(), count, dtype, Access::Read) }
}

/// `count` elements to be written.
///
/// # Safety
/// They are valid, and used by no other code until the operation has released them.
pub(crate) unsafe fn output(
    data: *mut c_void,
    count: usize,
    dtype: DType,
) -> Result<Buffer<'static>> {
    // SAFETY: the caller leaves the elements to the operation until it has released them.
    unsafe { buffer(data, count, dtype, Access::Write) }
}

unsafe fn buffer(
    data: *mut c_void,
    count: usize,
    dtype: DType,
    access: Access,
) -> Result<Buffer<'static>> {
    let data = match NonNull::new(data.cast::<u8>()) {
        Some(data) => data,
        None if count == 0 => NonNull::dangling(),
        None => return Err(refused(format!("NULL for {count} elements of {dtype}"))),
    };
    // SAFETY: `data` is not NULL, and `input` and `output` were promised `count` elements there. The
    // memory is C's, which keeps it until the operation has released it: no owner here has to.
    unsafe { Buffer::from_raw(data, count, dtype, Device::Cpu, access, Arc::new(())) }
}

/// The array of `count` values at `data`.
///
/// # Safety
/// They are there for as long as the result is used.
pub(crate) unsafe fn array<'a, T>(data: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        return Err(refused(format!("{what} is NULL")));
    }
    // SAFETY: `data` is not NULL, and the caller keeps `count` values there while the result is used.
    Ok(unsafe { std::slice::from_raw_parts(data, count) })
}

/// A list of buffers to be read, of these lengths.
///
/// # Safety
/// As [`array`] and [`input`].
pub(crate) unsafe fn inputs(
    list: *const *const c_void,
    counts: &[usize],
    dtype: DType,
) -> Result<Vec<Buffer<'static>>> {
    // SAFETY: the caller's list has as many pointers as there are counts.
    let list = unsafe { array(list, counts.len(), "the list of inputs")? };
    let pairs = list.iter().zip(counts);
    // SAFETY: the caller leaves the `count` elements at each pointer unchanged until the operation has
    // released them.
    pairs
        .map(|(&data, &count)| unsafe { input(data, count, dtype) })
        .collect()
}

/// A list of buffers to be written, of these lengths.
///
/// # Safety
/// As [`array`] and [`output`].
pub(crate) unsafe fn outputs(
    list: *const *mut c_void,
    counts: &[usize],
    dtype: DType,
) -> Result<Vec<Buffer<'static>>> {
    // SAFETY: the caller's list has as many pointers as there are counts.
    let list = unsafe { array(list, counts.len(), "the list of outputs")? };
    let pairs = list.iter().zip(counts);
    // SAFETY: the caller leaves the `count` elements at each pointer to the operation until it has
    // released them.
    pairs
        .map(|(&data, &count)| unsafe { output(data, count, dtype) })
        .collect()
}

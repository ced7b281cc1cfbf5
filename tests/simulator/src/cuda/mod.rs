//! The symbols of `libcuda.so.1`. Contracts are those of `cuda.h`: a pointer to a result is null, or aligned and valid
//! for writing one value of its type; a text ends with a NUL; the caller keeps the memory of a stream's work as the
//! manual asks until that work is done. Any handle may be passed: one that is neither live nor null ends the process.
//!
//! There are eight devices, which share host memory. Contexts are primary contexts, stacked on each thread.

pub(crate) mod context;
pub(crate) mod event;
pub(crate) mod graph;
pub(crate) mod memory;
mod module;
pub(crate) mod stream;

pub(crate) use context::current_device;
pub(crate) use stream::stream_of;

use std::ffi::{CStr, c_char, c_int};

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
pub(crate) const NO_DEVICE: c_int = 100;
pub(crate) const INVALID_DEVICE: c_int = 101;
pub(crate) const INVALID_CONTEXT: c_int = 201;
pub(crate) const INVALID_PTX: c_int = 218;
pub(crate) const INVALID_HANDLE: c_int = 400;
pub(crate) const NOT_FOUND: c_int = 500;
pub(crate) const NOT_READY: c_int = 600;
pub(crate) const NOT_SUPPORTED: c_int = 801;

/// Writes a result through a pointer of the caller; returns `INVALID_VALUE` if the pointer is null.
///
/// # Safety
/// `out` is null, or aligned and valid for writes.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> c_int {
    if out.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null (checked), so aligned and valid for writes by the contract.
    unsafe { out.write(value) };
    SUCCESS
}

/// The first status that is not `SUCCESS`; `SUCCESS` if there is none.
pub(crate) fn first_bad(statuses: &[c_int]) -> c_int {
    let bad = statuses.iter().find(|&&status| status != SUCCESS);
    bad.copied().unwrap_or(SUCCESS)
}

/// `SUCCESS` if a call that may wait or allocate is allowed now (see `capture`), else the status that it
/// returns.
pub(crate) fn check_capture() -> c_int {
    if crate::capture::allows_unsafe_calls() {
        SUCCESS
    } else {
        crate::capture::UNSUPPORTED
    }
}

fn name_and_text(status: c_int) -> Option<(&'static CStr, &'static CStr)> {
    Some(match status {
        SUCCESS => (c"CUDA_SUCCESS", c"no error"),
        INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        OUT_OF_MEMORY => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        NO_DEVICE => (
            c"CUDA_ERROR_NO_DEVICE",
            c"no CUDA-capable device is detected",
        ),
        INVALID_DEVICE => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        INVALID_PTX => (c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
        INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        NOT_FOUND => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        NOT_READY => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        NOT_SUPPORTED => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        crate::capture::UNSUPPORTED => (
            c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            c"operation not permitted when stream is capturing",
        ),
        crate::capture::INVALIDATED => (
            c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            c"operation failed due to a previous error during capture",
        ),
        crate::capture::UNJOINED => (
            c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
            c"capturing stream has unjoined work",
        ),
        crate::capture::ISOLATION => (
            c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            c"dependency created on uncaptured work in another stream",
        ),
        crate::capture::CAPTURED_EVENT => (
            c"CUDA_ERROR_CAPTURED_EVENT",
            c"operation not permitted on an event last recorded in a capturing stream",
        ),
        _ => return None,
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(status: c_int, out: *mut *const c_char) -> c_int {
    crate::calls::note();
    let Some((name, _)) = name_and_text(status) else {
        return INVALID_VALUE;
    };
    // SAFETY: `out` is null, which `put` refuses, or the caller lets an address be written there.
    unsafe { put(out, name.as_ptr()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(status: c_int, out: *mut *const c_char) -> c_int {
    crate::calls::note();
    let Some((_, text)) = name_and_text(status) else {
        return INVALID_VALUE;
    };
    // SAFETY: `out` is null, which `put` refuses, or the caller lets an address be written there.
    unsafe { put(out, text.as_ptr()) }
}

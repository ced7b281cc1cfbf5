//! Memory that the library allocates, and buffers that are registered with a communicator.

use super::comm::comm_of;
use super::{INVALID_ARGUMENT, SUCCESS, UNHANDLED_CUDA_ERROR, fail, no_comm};
use crate::cuda::memory;
use crate::handles::Handles;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// A registered range.
struct Registered;

static REGISTERED: Handles<Registered> = Handles::new("registration");

/// `ncclMemAlloc`, allocator.cc:17.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(out: *mut *mut c_void, size: usize) -> c_int {
    if size == 0 {
        return fail(INVALID_ARGUMENT, "ncclMemAlloc of 0 bytes");
    }
    match memory::allocate_shared(size) {
        None => fail(UNHANDLED_CUDA_ERROR, "Cuda failure 2 'out of memory'"),
        Some(at) => {
            // SAFETY: the caller passes a valid pointer.
            unsafe { *out = std::ptr::with_exposed_provenance_mut(at as usize) };
            SUCCESS
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemFree(at: *mut c_void) -> c_int {
    if memory::free(at.addr() as u64) {
        SUCCESS
    } else {
        fail(
            INVALID_ARGUMENT,
            "ncclMemFree of memory that is not ncclMemAlloc's",
        )
    }
}

/// `ncclCommRegister`, register/register.cc:155.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    comm: *mut c_void,
    at: *mut c_void,
    size: usize,
    out: *mut *mut c_void,
) -> c_int {
    if comm_of(comm).is_none() {
        return no_comm();
    }
    if memory::device_of(at.addr() as u64, size as u64).is_none() {
        return fail(
            INVALID_ARGUMENT,
            "the range is not in one allocation of device memory",
        );
    }
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = REGISTERED.insert(Arc::new(Registered)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDeregister(comm: *mut c_void, handle: *mut c_void) -> c_int {
    if comm_of(comm).is_none() {
        return no_comm();
    }
    match REGISTERED.remove(handle) {
        None => fail(INVALID_ARGUMENT, "handle argument is NULL"),
        Some(_) => SUCCESS,
    }
}

//! Memory, which is the host's ("Memory Management" in the driver's manual).

use super::{
    INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, check_capture, current_device, put,
    stream_of,
};
use crate::stream::lock;
use crate::trouble;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Mutex};

const ALIGNMENT: usize = 4096;

struct Allocation {
    layout: Layout,
    device: c_int,
}

static MEMORY: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());

/// New memory of the current device, all zero; `None` if there is none left.
pub(crate) fn allocate(size: usize) -> Option<u64> {
    let layout = Layout::from_size_align(size.max(1), ALIGNMENT).ok()?;
    if !trouble::next_allocation_fits() {
        return None;
    }
    // SAFETY: the size is not zero.
    let at = unsafe { alloc_zeroed(layout) } as u64;
    if at == 0 {
        return None;
    }
    let device = current_device();
    lock(&MEMORY).insert(at, Allocation { layout, device });
    Some(at)
}

/// Frees what [`allocate`] made; `false` for anything else.
pub(crate) fn free(at: u64) -> bool {
    let Some(allocation) = lock(&MEMORY).remove(&at) else {
        return false;
    };
    // SAFETY: allocated with this layout by `allocate`, and freed once: it was in the map.
    unsafe { dealloc(at as *mut u8, allocation.layout) };
    true
}

/// The device of an address, if all these bytes are in one piece of its memory.
pub(crate) fn device_of(at: u64, size: u64) -> Option<c_int> {
    let memory = lock(&MEMORY);
    let (start, held) = memory.range(..=at).next_back()?;
    let end = start + held.layout.size() as u64;
    (at < end && at.checked_add(size)? <= end).then_some(held.device)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(out: *mut u64, size: usize) -> c_int {
    if size == 0 {
        return INVALID_VALUE;
    }
    if check_capture() != SUCCESS {
        return check_capture();
    }
    match allocate(size) {
        None => OUT_OF_MEMORY,
        // SAFETY: the caller's pointer.
        Some(at) => unsafe { put(out, at) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(at: u64) -> c_int {
    if check_capture() != SUCCESS {
        return check_capture();
    }
    if free(at) { SUCCESS } else { INVALID_VALUE }
}

fn copy(to: usize, from: usize, size: usize, stream: *mut c_void) -> c_int {
    stream_of(stream).push(Arc::new(move || {
        // SAFETY: the caller vouches for both ranges until the copy is done, as with the real driver.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) };
    }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    copy(to as usize, from as usize, size, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    copy(to as usize, from as usize, size, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(
    to: u64,
    value: u8,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    stream_of(stream).push(Arc::new(move || {
        // SAFETY: the caller vouches for the range until the work is done, as with the real driver.
        unsafe { std::ptr::write_bytes(to as *mut u8, value, size) };
    }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: u64,
    from: u64,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    copy(to as usize, from as usize, size, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: c_int,
    at: u64,
) -> c_int {
    // Plain host memory is unknown to the driver: CUDA_ERROR_INVALID_VALUE.
    let Some(device) = device_of(at, 0) else {
        return INVALID_VALUE;
    };
    match attribute {
        // SAFETY: the caller's pointer, to an unsigned int: CU_MEMORYTYPE_DEVICE.
        2 => unsafe { put(data.cast::<c_uint>(), 2) },
        // SAFETY: the caller's pointer, to an int: an ordinal.
        9 => unsafe { put(data.cast::<c_int>(), device) },
        _ => NOT_SUPPORTED,
    }
}

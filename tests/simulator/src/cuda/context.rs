//! Devices and contexts: primary contexts, stacked on each thread ("Context Management" in the driver's
//! manual). The handle of a context is the number of its device, counted from 1.

use super::{INVALID_CONTEXT, INVALID_DEVICE, NO_DEVICE, SUCCESS, first_bad, put};
use crate::callback;
use crate::trouble;
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// The number of devices.
pub(crate) const DEVICES: c_int = 8;

thread_local! {
    /// Devices whose contexts were pushed, counted from 1. The last one is current.
    static CONTEXTS: RefCell<Vec<c_int>> = const { RefCell::new(Vec::new()) };
}

/// The device whose context is current, counted from 1; 0 if none is.
pub(crate) fn current() -> c_int {
    CONTEXTS.with_borrow(|contexts| contexts.last().copied().unwrap_or(0))
}

/// The calling thread's device, counted from 0, as a communicator uses it; 0 also if no context is current.
pub(crate) fn current_device() -> c_int {
    (current() - 1).max(0)
}

/// The context's handle for a device that is counted from 1.
pub(crate) fn handle_of(device: c_int) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(device).unwrap_or(0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(_flags: c_uint) -> c_int {
    crate::calls::note();
    if trouble::setting("no_device").is_some() {
        NO_DEVICE
    } else {
        SUCCESS
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    crate::calls::note();
    // SAFETY: `count` is null, which `put` refuses, or the caller lets an int be written there.
    unsafe { put(count, DEVICES) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    crate::calls::note();
    if !(0..DEVICES).contains(&ordinal) {
        return INVALID_DEVICE;
    }
    // SAFETY: `device` is null, which `put` refuses, or the caller lets an int be written there.
    unsafe { put(device, ordinal) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    crate::calls::note();
    let mut bytes = *b"rcomm-simulator\0";
    bytes[15] = u8::try_from(device).unwrap_or(u8::MAX);
    // SAFETY: `uuid` is null, which `put` refuses, or the caller lets sixteen bytes be written there.
    unsafe { put(uuid, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut *mut c_void,
    device: c_int,
) -> c_int {
    crate::calls::note();
    // SAFETY: `context` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(context, handle_of(device + 1)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    crate::calls::note();
    callback::check();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
    crate::calls::note();
    callback::check();
    let device = c_int::try_from(context.addr()).unwrap_or(0);
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(device));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> c_int {
    crate::calls::note();
    let Some(device) = CONTEXTS.with_borrow_mut(Vec::pop) else {
        return INVALID_CONTEXT;
    };
    // SAFETY: `context` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(context, handle_of(device)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> c_int {
    crate::calls::note();
    // SAFETY: each is null, which `put` refuses, or the caller lets an int be written there.
    unsafe { first_bad(&[put(least, 0), put(greatest, -5)]) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    crate::calls::note();
    let device = c_int::try_from(context.addr()).unwrap_or(0);
    // This replaces the top of the stack, as documented; null removes it, and a context is pushed onto an empty stack.
    CONTEXTS.with_borrow_mut(|contexts| {
        contexts.pop();
        if device != 0 {
            contexts.push(device);
        }
    });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    crate::calls::note();
    // SAFETY: `context` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(context, handle_of(current())) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> c_int {
    crate::calls::note();
    if current() == 0 {
        return INVALID_CONTEXT;
    }
    // SAFETY: `device` is null, which `put` refuses, or the caller lets an int be written there.
    unsafe { put(device, current_device()) }
}

/// Reports that memory pools are supported, and a major compute capability of 9 or what `RCOMM_SIM` gives as
/// `capability`; 0 for every other attribute.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    _device: c_int,
) -> c_int {
    const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    const MEMORY_POOLS_SUPPORTED: c_int = 115;
    crate::calls::note();
    let found = match attribute {
        COMPUTE_CAPABILITY_MAJOR => trouble::setting("capability")
            .and_then(|major| c_int::try_from(major).ok())
            .unwrap_or(9),
        MEMORY_POOLS_SUPPORTED => 1,
        _ => 0,
    };
    // SAFETY: `value` is null, which `put` refuses, or the caller lets an int be written there.
    unsafe { put(value, found) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(
    name: *mut c_char,
    length: c_int,
    _device: c_int,
) -> c_int {
    crate::calls::note();
    const NAME: &[u8] = b"rcomm simulator\0";
    if usize::try_from(length).unwrap_or(0) < NAME.len() {
        return super::INVALID_VALUE;
    }
    // SAFETY: the caller's `name` takes `length` bytes, which are as many as `NAME` has or more (checked);
    // a constant does not overlap it.
    unsafe { std::ptr::copy_nonoverlapping(NAME.as_ptr().cast(), name, NAME.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    crate::calls::note();
    // SAFETY: `version` is null, which `put` refuses, or the caller lets an int be written there.
    unsafe { put(version, 13_000) }
}

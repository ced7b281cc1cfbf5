//! One-sided windows.

use crate::group::Group;
use crate::memory::{self, Owner, dtype_of, kept_by_caller};
use crate::status::{borrow, call, consume, free, give, put, refused};
use crate::work::{Made, WorkHandle, nothing_to_take, start_or_wait, start_with_value};
use rcomm::{Buffer, DeviceKind, Error, ErrorKind, ProcessGroup, RemoteMemory, Result};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// Memory of all members of a group that each of them reads and writes one-sidedly.
pub struct Window {
    window: rcomm::Window,
    group: ProcessGroup,
    /// The owner of the buffers of puts and gets.
    owner: Owner,
    /// The parts of peers that are mapped for C, until the window is closed or freed.
    mapped: Mutex<Vec<(u32, RemoteMemory)>>,
}

impl Made for Window {
    const HOLDS_MEMORY: bool = true;
}

/// Makes a window over the buffer that `memory` returns: writes it to `window`, or a handle of the operation to `work`.
///
/// # Safety
/// `group` is a valid handle; `window` and `work` are NULL or may be written; the ranks of the group may
/// use the buffer that `memory` returns until the window is closed or freed.
unsafe fn open(
    group: *const Group,
    window: *mut *mut Window,
    work: *mut *mut WorkHandle,
    memory: impl FnOnce(&ProcessGroup, &Owner) -> Result<Buffer<'static>>,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let Group {
            core: group, owner, ..
        } = unsafe { borrow(group, "the group")? };
        let owner = kept_by_caller().on(owner.stream());
        if window.is_null() && work.is_null() {
            return Err(refused(
                "`window` and `work` are both NULL: nothing would take the window",
            ));
        }
        let under_way = group.new_window_async(memory(group, &owner)?)?;
        let own_group = group.clone();
        let make = move |window| Window {
            window,
            group: own_group,
            owner,
            mapped: Mutex::default(),
        };
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        match unsafe { start_with_value(group, under_way, work, make)? } {
            // SAFETY: `window` is NULL, which is refused, or the caller guarantees that a handle may be written there.
            Some(made) => unsafe { give(window, made) },
            None => Ok(()),
        }
    })
}

/// Takes the window that `work` has made, once; fails with `RCOMM_INVALID_ARGUMENT` if there is none, or not yet. Does
/// not wait for the operation.
///
/// # Safety
/// `work` is a valid handle; `window` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_window(
    work: *const WorkHandle,
    window: *mut *mut Window,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        let made: Window = (work.take()).ok_or_else(|| refused(nothing_to_take("window")))?;
        // SAFETY: `window` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(window, made) }
    })
}

/// Makes a window over `count` new elements on this rank, all zero: other ranks access this memory faster than that of
/// `rcomm_new_window`. All members call this or `rcomm_new_window`, with the same element type; counts may differ, and
/// may be 0. With `work`, `window` is ignored and `rcomm_work_window` returns the window. With a handle of
/// `rcomm_group_on_stream` the elements are on the device, and so are the buffers of `rcomm_window_put` and
/// `rcomm_window_get`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h; `window` may be written unless there is a `work`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_window_allocate(
    group: *const Group,
    count: usize,
    dtype: u8,
    window: *mut *mut Window,
    work: *mut *mut WorkHandle,
) -> i32 {
    let memory = |group: &ProcessGroup, owner: &Owner| {
        let dtype = dtype_of(dtype)?;
        if owner.stream().is_none() {
            return group.allocate_of(dtype, count);
        }
        let backend = group.backend(DeviceKind::Cuda);
        let backend = backend.ok_or_else(|| {
            let message = "the group has no backend for devices";
            Error::new(ErrorKind::Unsupported, message)
        })?;
        backend.allocate(dtype, count)
    };
    // SAFETY: the caller keeps `group` alive during the call; `window` and `work` are NULL or writable.
    unsafe { open(group, window, work, memory) }
}

/// Makes a window over the caller's memory, which must stay valid and must not be used otherwise until the window is
/// closed or freed. `work` is as in `rcomm_window_allocate`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h; `window` may be written unless there is a `work`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_new_window(
    group: *const Group,
    memory: *mut c_void,
    count: usize,
    dtype: u8,
    window: *mut *mut Window,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: `memory` is NULL, or holds `count` elements that the caller leaves alone until the window
    // is closed or freed, or could not be made.
    let memory = |_: &ProcessGroup, owner: &Owner| unsafe {
        memory::output(memory, count, dtype_of(dtype)?, owner)
    };
    // SAFETY: the caller keeps `group` alive during the call; `window` and `work` are NULL or writable.
    unsafe { open(group, window, work, memory) }
}

/// Writes the number of elements in the part of `peer`.
///
/// # Safety
/// `window` is a valid handle; `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_window_count(
    window: *const Window,
    peer: u32,
    count: *mut usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `window` alive during the call.
        let window = unsafe { borrow(window, "the window")? };
        // SAFETY: `count` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(count, window.window.len_of(peer)) }
    })
}

/// Writes `count` elements into the part of `peer`, from element `offset` on; a signal tells the peer that they have
/// arrived. Puts, gets and signals that this rank calls with `work` are carried out in the order of the calls.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_window_put(
    window: *const Window,
    peer: u32,
    offset: usize,
    from: *const c_void,
    count: usize,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `window` alive during the call.
        let Window {
            window,
            group,
            owner,
            ..
        } = unsafe { borrow(window, "the window")? };
        // SAFETY: `from` is NULL, or holds `count` elements that the caller leaves unchanged until the
        // operation has released them.
        let from = unsafe { memory::input(from, count, window.dtype(), owner)? };
        if work.is_null() {
            return window.put_buffer(peer, offset, &from);
        }
        let under_way = window.put_buffer_async(peer, offset, from)?;
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        unsafe { start_or_wait(group, under_way, work) }
    })
}

/// Reads `count` elements of the part of `peer`, from element `offset` on. With `work`, the order is that of
/// `rcomm_window_put`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_window_get(
    window: *const Window,
    peer: u32,
    offset: usize,
    into: *mut c_void,
    count: usize,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `window` alive during the call.
        let Window {
            window,
            group,
            owner,
            ..
        } = unsafe { borrow(window, "the window")? };
        // SAFETY: `into` is NULL, or holds `count` elements that the caller leaves alone until the
        // operation has released them.
        let mut into = unsafe { memory::output(into, count, window.dtype(), owner)? };
        if work.is_null() {
            return window.get_buffer(peer, offset, &mut into);
        }
        let under_way = window.get_buffer_async(peer, offset, into)?;
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        unsafe { start_or_wait(group, under_way, work) }
    })
}

/// Signals to `peer` that everything that this rank has put into the part of `peer` before has arrived. Signals are
/// counted. With `work`, the order is that of `rcomm_window_put`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_window_signal(
    window: *const Window,
    peer: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `window` alive during the call.
        let Window { window, group, .. } = unsafe { borrow(window, "the window")? };
        if work.is_null() {
            return window.signal(peer);
        }
        let under_way = window.signal_async(peer)?;
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        unsafe { start_or_wait(group, under_way, work) }
    })
}

/// Consumes one signal of `peer`; if there is none, waits for one, for the group's time-out at most. With `work`, the
/// operation waits for no other call of this rank.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_window_wait_signal(
    window: *const Window,
    peer: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `window` alive during the call.
        let Window { window, group, .. } = unsafe { borrow(window, "the window")? };
        if work.is_null() {
            return window.wait_signal(peer);
        }
        let under_way = window.wait_signal_async(peer)?;
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        unsafe { start_or_wait(group, under_way, work) }
    })
}

/// Maps the part of `peer` into this process's address space, until the window is closed or freed: writes the part's
/// address to `*start` and its length to `*bytes`. The peer and other ranks may write there at any time, so use atomic
/// operations. Fails with `RCOMM_UNSUPPORTED` if the part is on another host, was not made by `rcomm_window_allocate`,
/// or could not be mapped.
///
/// # Safety
/// `window` is a valid handle; `start` and `bytes` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_window_map(
    window: *const Window,
    peer: u32,
    start: *mut *mut c_void,
    bytes: *mut usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `window` alive during the call.
        let window = unsafe { borrow(window, "the window")? };
        let mut mapped = window.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        if !mapped.iter().any(|(rank, _)| *rank == peer) {
            mapped.push((peer, window.window.map_remote(peer)?));
        }
        let entry = mapped.iter().find(|(rank, _)| *rank == peer);
        let Some((_, memory)) = entry else {
            return Ok(());
        };
        // SAFETY: `start` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(start, memory.as_ptr().cast())? };
        // SAFETY: `bytes` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(bytes, memory.len()) }
    })
}

/// Waits until all members have called this and this rank's puts, gets and signals have ended, for the group's time-out
/// at most, and closes the window. Frees the handle, also after an error.
///
/// # Safety
/// `window` is a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_window_close(window: *mut Window) -> i32 {
    call(|| {
        // SAFETY: `window` is NULL or a handle of this type that the caller gives up.
        let Window { window, mapped, .. } = *unsafe { consume(window, "the window")? };
        // Closing does not give memory back to the rank that owns it while another rank still maps it.
        drop(mapped);
        window.close().map(drop)
    })
}

/// Closes the window at once and frees the handle: pending accesses of peers fail. NULL has no effect.
///
/// # Safety
/// `window` is NULL or a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_window_free(window: *mut Window) {
    // SAFETY: `window` is NULL or a handle of this type that the caller gives up.
    unsafe { free(window) }
}

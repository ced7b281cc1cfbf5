//! Symmetric memory.

use crate::group::Group;
use crate::status::{borrow, call, consume, free, give, put};
use rcomm::{RemoteMemory, Result, SymmetricMemory};
use std::ffi::c_void;

/// Memory of the same size on each rank of a host, which all of them use in place.
pub struct Symmetric(SymmetricMemory);

/// Makes memory of `bytes` bytes on each rank, all zero, which all ranks of the group use in place. All members call
/// this, with the same size. Fails with `RCOMM_UNSUPPORTED`, on all members, if these are on several hosts or cannot
/// share memory.
///
/// # Safety
/// `group` is a valid handle; `memory` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_symmetric_new(
    group: *const Group,
    bytes: usize,
    memory: *mut *mut Symmetric,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        let made = group.symmetric_memory(bytes)?;
        // SAFETY: `memory` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(memory, Symmetric(made)) }
    })
}

/// Writes the address and the length of the buffer of `peer`, or of the caller, which are valid until the memory is
/// closed or freed. Other ranks may write there at any time: use atomic operations, or order accesses by signals.
///
/// # Safety
/// `memory` is a valid handle; `start` and `bytes` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_symmetric_buffer(
    memory: *const Symmetric,
    peer: u32,
    start: *mut *mut c_void,
    bytes: *mut usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `memory` alive during the call.
        let memory = unsafe { borrow(memory, "the memory")? };
        // SAFETY: each is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { give_range(&memory.0.buffer(peer)?, start, bytes) }
    })
}

/// Writes the address and the length of the signal pad of `peer`, or of the caller, like `rcomm_symmetric_buffer`: the
/// four bytes of channel `c` and sender `s` are at `4 * (c * size + s)`. A program that writes to a channel must set
/// its bytes to zero again before the functions below use the channel.
///
/// # Safety
/// `memory` is a valid handle; `start` and `bytes` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_symmetric_signal_pad(
    memory: *const Symmetric,
    peer: u32,
    start: *mut *mut c_void,
    bytes: *mut usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `memory` alive during the call.
        let memory = unsafe { borrow(memory, "the memory")? };
        // SAFETY: each is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { give_range(&memory.0.signal_pad(peer)?, start, bytes) }
    })
}

/// Signals to `peer` on a channel (0 to 63). First waits until `peer` has taken this rank's earlier signal on the
/// channel, for the group's time-out at most.
///
/// # Safety
/// `memory` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_symmetric_put_signal(
    memory: *const Symmetric,
    peer: u32,
    channel: u32,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `memory` alive during the call.
        let memory = unsafe { borrow(memory, "the memory")? };
        memory.0.put_signal(peer, channel)
    })
}

/// Waits for a signal of `peer` on a channel, for the group's time-out at most, and takes it.
///
/// # Safety
/// `memory` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_symmetric_wait_signal(
    memory: *const Symmetric,
    peer: u32,
    channel: u32,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `memory` alive during the call.
        let memory = unsafe { borrow(memory, "the memory")? };
        memory.0.wait_signal(peer, channel)
    })
}

/// Returns once all members have called this on this channel: signals to each other member, then waits for the signal
/// of each.
///
/// # Safety
/// `memory` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_symmetric_barrier(memory: *const Symmetric, channel: u32) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `memory` alive during the call.
        let memory = unsafe { borrow(memory, "the memory")? };
        memory.0.barrier(channel)
    })
}

/// Sets `count` words of four bytes of this rank's buffer, from word `offset` on. Other ranks see the words after a
/// signal.
///
/// # Safety
/// `memory` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_symmetric_fill(
    memory: *const Symmetric,
    offset: usize,
    value: u32,
    count: usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `memory` alive during the call.
        let memory = unsafe { borrow(memory, "the memory")? };
        memory.0.fill(offset, value, count)
    })
}

/// Waits until all members have called this, for the group's time-out at most, and frees memory and handle; the handle
/// also after an error.
///
/// # Safety
/// `memory` is a valid handle that is not used afterwards, nor is the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_symmetric_close(memory: *mut Symmetric) -> i32 {
    call(|| {
        // SAFETY: `memory` is NULL or a handle of this type that the caller gives up.
        unsafe { consume(memory, "the memory")? }.0.close()
    })
}

/// Frees memory and handle at once; other ranks that wait for a signal of this one get an error or reach their
/// time-out. NULL has no effect.
///
/// # Safety
/// `memory` is NULL or a valid handle that is not used afterwards, nor is the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_symmetric_free(memory: *mut Symmetric) {
    // SAFETY: `memory` is NULL or a handle of this type that the caller gives up.
    unsafe { free(memory) }
}

/// Writes an address and a length.
///
/// # Safety
/// `start` and `bytes` are NULL or may be written.
unsafe fn give_range(
    memory: &RemoteMemory,
    start: *mut *mut c_void,
    bytes: *mut usize,
) -> Result<()> {
    // SAFETY: `start` is NULL, which is refused, or the caller guarantees that one value may be written there.
    unsafe { put(start, memory.as_ptr().cast())? };
    // SAFETY: `bytes` is NULL, which is refused, or the caller guarantees that one value may be written there.
    unsafe { put(bytes, memory.len()) }
}

//! Messages between two ranks.

use crate::group::Group;
use crate::memory::{self, array, dtype_of};
use crate::operate::operate;
use crate::status::{borrow, call, put, refused};
use crate::work::{WorkHandle, issue};
use rcomm::{Op, Result};
use std::ffi::c_void;

/// One message of a batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Message {
    /// 1 to send, 0 to receive.
    pub is_send: i32,
    /// Address of the message's elements.
    pub buffer: *mut c_void,
    /// Number of elements.
    pub count: usize,
    /// Code of the element type.
    pub dtype: u8,
    /// The peer, as a rank of the group.
    pub peer: u32,
    /// Tag: a send matches receives with the same tag.
    pub tag: u32,
}

/// Sends `count` elements to `peer`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_send(
    group: *const Group,
    buffer: *const c_void,
    count: usize,
    dtype: u8,
    peer: u32,
    tag: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `buffer` has
    // the length given, and is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let buffer = maker.input(buffer, count)?;
            Ok(Op::Send { buffer, peer, tag })
        })
    }
}

/// Receives `count` elements from `peer`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recv(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u8,
    peer: u32,
    tag: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    // SAFETY: the caller keeps `group` alive during the call; `work` is NULL or writable; `buffer` has
    // the length given, and is left to the operation until it is released.
    unsafe {
        operate(group, dtype, work, |maker| {
            let buffer = maker.output(buffer, count)?;
            let peer = Some(peer);
            Ok(Op::Recv { buffer, peer, tag })
        })
    }
}

/// Receives `count` elements from any rank. A blocking call writes the sender's rank to `*source`, unless that is NULL;
/// with `work`, `rcomm_work_source` returns it.
///
/// # Safety
/// See "Handles and memory" in rcomm.h; `source` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recv_any(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u8,
    tag: u32,
    source: *mut u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        // SAFETY: the caller leaves the `count` elements at `buffer` alone until the operation has
        // released them.
        let buffer = unsafe { memory::output(buffer, count, dtype, &group.owner)? };
        let peer = None;
        let op = Op::Recv { buffer, peer, tag };
        if !work.is_null() || group.is_coalescing() {
            // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
            return unsafe { issue(group, op, work) };
        }
        let done = group.core.execute(op)?;
        match done.source {
            // SAFETY: `source` is not NULL, so the caller guarantees that one rank may be written there.
            Some(rank) if !source.is_null() => unsafe { put(source, rank) },
            _ => Ok(()),
        }
    })
}

/// Starts `length` sends and receives at once. They do not wait for each other, so both ends may list them in any
/// order.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_batch_isend_irecv(
    group: *const Group,
    messages: *const Message,
    length: usize,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        // SAFETY: `messages` is NULL, or holds `length` values that stay unchanged during the call.
        let messages = unsafe { array(messages, length, "the list of messages")? };
        if messages.is_empty() {
            return Err(refused("a batch needs at least one message"));
        }
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        let ops = messages.iter().map(|message| -> Result<Op<'static>> {
            let dtype = dtype_of(message.dtype)?;
            let (peer, tag) = (message.peer, message.tag);
            if message.is_send == 0 {
                // SAFETY: the caller leaves the `message.count` elements at `message.buffer` alone until
                // the operation has released them.
                let buffer =
                    unsafe { memory::output(message.buffer, message.count, dtype, &group.owner)? };
                let peer = Some(peer);
                return Ok(Op::Recv { buffer, peer, tag });
            }
            // SAFETY: the caller leaves the `message.count` elements at `message.buffer` unchanged until
            // the operation has released them.
            let buffer =
                unsafe { memory::input(message.buffer, message.count, dtype, &group.owner)? };
            Ok(Op::Send { buffer, peer, tag })
        });
        let op = Op::Coalesced(ops.collect::<Result<_>>()?);
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        unsafe { issue(group, op, work) }
    })
}

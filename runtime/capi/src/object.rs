//! Values other than arrays, as JSON texts: the Rust side sends and receives them as serde types.
//!
//! Input texts are C strings, and output texts are C strings that `rcomm_text_free` frees. A value may have
//! at most 64 MiB. If there is a `work`, `rcomm_work_text` takes the text from it, and `out` is ignored.

use crate::group::Group;
use crate::status::{borrow, call, put, refused, text};
use crate::work::{Made, WorkHandle, nothing_to_take, start_or_wait, start_with_value};
use rcomm::{ProcessGroup, Result, Work};
use serde_json::Value;
use std::ffi::{CString, c_char};

impl Made for Value {}

/// Parses a JSON text that C passed.
///
/// # Safety
/// `json` is NULL, or ends with a zero byte and stays unchanged during the call.
unsafe fn value_of(json: *const c_char) -> Result<Value> {
    // SAFETY: `json` is NULL, or ends with a zero byte and stays unchanged during the call.
    let json = unsafe { text(json, "the value")? };
    serde_json::from_str(json).map_err(|error| refused(format!("the value is not JSON: {error}")))
}

/// Writes to `*out` the value as a JSON text that C frees.
///
/// # Safety
/// `out` is NULL or may be written.
pub(crate) unsafe fn give_json(out: *mut *mut c_char, value: &Value) -> Result<()> {
    if out.is_null() {
        return Err(refused("the pointer for the text is NULL"));
    }
    // JSON escapes zero bytes, so the text contains none.
    let json = CString::new(value.to_string()).map_err(|error| refused(error.to_string()))?;
    // SAFETY: `out` is not NULL (checked above), so the caller guarantees that one address may be written there.
    unsafe { put(out, json.into_raw()) }
}

/// Starts an operation by `start`; `read` makes a value from the operation's result. If `work` is NULL, waits and
/// writes the value to `out`; otherwise C takes the value from the work.
///
/// # Safety
/// `group` is a valid handle; `out` and `work` are NULL or may be written.
unsafe fn exchange<T: Send + 'static>(
    group: *const Group,
    out: *mut *mut c_char,
    work: *mut *mut WorkHandle,
    start: impl FnOnce(&ProcessGroup) -> Result<Work<T>>,
    read: impl FnOnce(T) -> Value + Send + 'static,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        if out.is_null() && work.is_null() {
            return Err(refused(
                "`out` and `work` are both NULL: nothing would take the text",
            ));
        }
        let under_way = start(group)?;
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        match unsafe { start_with_value(group, under_way, work, read)? } {
            // SAFETY: `out` is NULL, which is refused, or the caller guarantees that the address of a text may be
            // written there.
            Some(value) => unsafe { give_json(out, &value) },
            None => Ok(()),
        }
    })
}

/// Writes the root's `json` to `*out` on every rank; the `json` of the other ranks is ignored.
///
/// # Safety
/// See "Handles and memory" in rcomm.h; `json` is NULL or a text that ends with a zero byte; `out`
/// may be written unless there is a `work`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_broadcast_object(
    group: *const Group,
    json: *const c_char,
    root: u32,
    out: *mut *mut c_char,
    work: *mut *mut WorkHandle,
) -> i32 {
    let start = |group: &ProcessGroup| {
        let value = match group.rank() == root {
            // SAFETY: `json` is NULL, or ends with a zero byte and stays unchanged during the call.
            true => unsafe { value_of(json)? },
            false => Value::Null,
        };
        group.broadcast_object_async(value, root)
    };
    // SAFETY: the caller keeps `group` alive during the call; `out` and `work` are NULL or writable.
    unsafe { exchange(group, out, work, start, |value| value) }
}

/// Writes to `*out` a JSON array of the `json` of all ranks, by rank.
///
/// # Safety
/// See "Handles and memory" in rcomm.h; `json` is a text that ends with a zero byte; `out` may be
/// written unless there is a `work`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_gather_object(
    group: *const Group,
    json: *const c_char,
    out: *mut *mut c_char,
    work: *mut *mut WorkHandle,
) -> i32 {
    let start = |group: &ProcessGroup| {
        // SAFETY: `json` is NULL, or ends with a zero byte and stays unchanged during the call.
        let value = unsafe { value_of(json)? };
        group.all_gather_object_async(&value)
    };
    // SAFETY: the caller keeps `group` alive during the call; `out` and `work` are NULL or writable.
    unsafe { exchange(group, out, work, start, Value::Array) }
}

/// Writes to `*out` a JSON array of the `json` of all ranks, by rank, on the root, and `null` on the other ranks.
///
/// # Safety
/// See "Handles and memory" in rcomm.h; `json` is a text that ends with a zero byte; `out` may be
/// written unless there is a `work`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_gather_object(
    group: *const Group,
    json: *const c_char,
    root: u32,
    out: *mut *mut c_char,
    work: *mut *mut WorkHandle,
) -> i32 {
    let start = |group: &ProcessGroup| {
        // SAFETY: `json` is NULL, or ends with a zero byte and stays unchanged during the call.
        let value = unsafe { value_of(json)? };
        group.gather_object_async(&value, root)
    };
    let read = |values: Option<Vec<Value>>| values.map_or(Value::Null, Value::Array);
    // SAFETY: the caller keeps `group` alive during the call; `out` and `work` are NULL or writable.
    unsafe { exchange(group, out, work, start, read) }
}

/// Writes to `*out` this rank's element of the root's `json`, an array with one element per rank; the `json` of the
/// other ranks is ignored.
///
/// # Safety
/// See "Handles and memory" in rcomm.h; `json` is NULL or a text that ends with a zero byte; `out`
/// may be written unless there is a `work`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_scatter_object(
    group: *const Group,
    json: *const c_char,
    root: u32,
    out: *mut *mut c_char,
    work: *mut *mut WorkHandle,
) -> i32 {
    let start = |group: &ProcessGroup| {
        let values = match group.rank() == root {
            // SAFETY: `json` is NULL, or ends with a zero byte and stays unchanged during the call.
            true => match unsafe { value_of(json)? } {
                Value::Array(values) => values,
                _ => return Err(refused("the root's value is not a JSON array")),
            },
            false => Vec::new(),
        };
        group.scatter_object_async(&values, root)
    };
    // SAFETY: the caller keeps `group` alive during the call; `out` and `work` are NULL or writable.
    unsafe { exchange(group, out, work, start, |value: Value| value) }
}

/// Sends a value to `peer`, which receives it with `rcomm_recv_object`.
///
/// # Safety
/// See "Handles and memory" in rcomm.h; `json` is a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_send_object(
    group: *const Group,
    json: *const c_char,
    peer: u32,
    tag: u32,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        // SAFETY: `json` is NULL, or ends with a zero byte and stays unchanged during the call.
        let value = unsafe { value_of(json)? };
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        unsafe { start_or_wait(group, group.send_object_async(&value, peer, tag)?, work) }
    })
}

/// Writes to `*out` the value that `peer` sends. With `work`, several receives of values may be in progress; until all
/// of them have ended, nothing else may be received from this peer with this tag.
///
/// # Safety
/// See "Handles and memory" in rcomm.h; `out` may be written unless there is a `work`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recv_object(
    group: *const Group,
    peer: u32,
    tag: u32,
    out: *mut *mut c_char,
    work: *mut *mut WorkHandle,
) -> i32 {
    let start = |group: &ProcessGroup| group.recv_object_async(peer, tag);
    // SAFETY: the caller keeps `group` alive during the call; `out` and `work` are NULL or writable.
    unsafe { exchange(group, out, work, start, |value: Value| value) }
}

/// Takes the text of the value that `work` has produced, once; fails with `RCOMM_INVALID_ARGUMENT` if there is none, or
/// not yet. Does not wait for the operation.
///
/// # Safety
/// `work` is a valid handle; `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_text(work: *const WorkHandle, out: *mut *mut c_char) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        let value: Value = (work.take()).ok_or_else(|| refused(nothing_to_take("value")))?;
        // SAFETY: `out` is NULL, which is refused, or the caller guarantees that the address of a text may be written
        // there.
        unsafe { give_json(out, &value) }
    })
}

/// Frees a text that a function of this header returned. NULL has no effect.
///
/// # Safety
/// `text` is NULL or such a text, and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: not NULL, so it came from `CString::into_raw` in `give_json` or in `give_text` of `world`, and the
        // caller gives it up.
        drop(unsafe { CString::from_raw(text) });
    }
}

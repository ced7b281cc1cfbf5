//! Values that are no arrays, as JSON texts: what the Rust side sends and receives as serde types.
//!
//! Texts come in as C strings and go out as C strings that `rcomm_text_free` frees. A value may have 64
//! MiB at most.

use crate::group::Group;
use crate::status::{borrow, call, put, refused, text};
use rcomm::{ProcessGroup, Result};
use serde_json::Value;
use std::ffi::{CString, c_char};

/// # Safety
/// `json` is NULL or ends with a zero byte.
unsafe fn value_of(json: *const c_char) -> Result<Value> {
    // SAFETY: by the contract.
    let json = unsafe { text(json, "the value")? };
    serde_json::from_str(json).map_err(|error| refused(format!("the value is not JSON: {error}")))
}

/// # Safety
/// `out` may be written.
unsafe fn give_value(out: *mut *mut c_char, value: &Value) -> Result<()> {
    // JSON escapes zero bytes, so there are none.
    let json = CString::new(value.to_string()).map_err(|error| refused(error.to_string()))?;
    if out.is_null() {
        return Err(refused("the place for the text is NULL"));
    }
    // SAFETY: by the contract.
    unsafe { put(out, json.into_raw()) }
}

/// # Safety
/// `group` is a living handle; `out` may be written.
unsafe fn exchange(
    group: *const Group,
    out: *mut *mut c_char,
    body: impl FnOnce(&ProcessGroup) -> Result<Value>,
) -> i32 {
    call(|| {
        // SAFETY: by the contract.
        let group = unsafe { &borrow(group, "the group")?.0 };
        if out.is_null() {
            return Err(refused("the place for the text is NULL"));
        }
        let value = body(group)?;
        // SAFETY: by the contract.
        unsafe { give_value(out, &value) }
    })
}

/// `*out` is the root's `json`; the others' is not looked at.
///
/// # Safety
/// `group` is a living handle, `json` NULL or a text that ends with a zero byte; `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_broadcast_object(
    group: *const Group,
    json: *const c_char,
    root: u32,
    out: *mut *mut c_char,
) -> i32 {
    let body = |group: &ProcessGroup| {
        let mut value = match group.rank() == root {
            // SAFETY: by the contract.
            true => unsafe { value_of(json)? },
            false => Value::Null,
        };
        group.broadcast_object(&mut value, root)?;
        Ok(value)
    };
    // SAFETY: by the contract.
    unsafe { exchange(group, out, body) }
}

/// `*out` is a JSON array of everybody's `json`, by rank.
///
/// # Safety
/// `group` is a living handle, `json` a text that ends with a zero byte; `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_gather_object(
    group: *const Group,
    json: *const c_char,
    out: *mut *mut c_char,
) -> i32 {
    let body = |group: &ProcessGroup| {
        // SAFETY: by the contract.
        let value = unsafe { value_of(json)? };
        Ok(Value::Array(group.all_gather_object(&value)?))
    };
    // SAFETY: by the contract.
    unsafe { exchange(group, out, body) }
}

/// On the root, `*out` is a JSON array of everybody's `json`, by rank; elsewhere `null`.
///
/// # Safety
/// `group` is a living handle, `json` a text that ends with a zero byte; `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_gather_object(
    group: *const Group,
    json: *const c_char,
    root: u32,
    out: *mut *mut c_char,
) -> i32 {
    let body = |group: &ProcessGroup| {
        // SAFETY: by the contract.
        let value = unsafe { value_of(json)? };
        let all = group.gather_object(&value, root)?;
        Ok(all.map_or(Value::Null, Value::Array))
    };
    // SAFETY: by the contract.
    unsafe { exchange(group, out, body) }
}

/// `*out` is this rank's value of the root's `json`, an array with one for each rank; the others' is
/// not looked at.
///
/// # Safety
/// `group` is a living handle, `json` NULL or a text that ends with a zero byte; `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_scatter_object(
    group: *const Group,
    json: *const c_char,
    root: u32,
    out: *mut *mut c_char,
) -> i32 {
    let body = |group: &ProcessGroup| {
        let values = match group.rank() == root {
            // SAFETY: by the contract.
            true => match unsafe { value_of(json)? } {
                Value::Array(values) => values,
                _ => return Err(refused("the root's value is no JSON array")),
            },
            false => Vec::new(),
        };
        group.scatter_object(&values, root)
    };
    // SAFETY: by the contract.
    unsafe { exchange(group, out, body) }
}

/// Sends a value to `peer`, which receives it with `rcomm_recv_object`.
///
/// # Safety
/// `group` is a living handle, `json` a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_send_object(
    group: *const Group,
    json: *const c_char,
    peer: u32,
    tag: u32,
) -> i32 {
    call(|| {
        // SAFETY: by the contract.
        let group = unsafe { &borrow(group, "the group")?.0 };
        // SAFETY: by the contract.
        let value = unsafe { value_of(json)? };
        group.send_object(&value, peer, tag)
    })
}

/// `*out` is the value that `peer` sends.
///
/// # Safety
/// `group` is a living handle; `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recv_object(
    group: *const Group,
    peer: u32,
    tag: u32,
    out: *mut *mut c_char,
) -> i32 {
    // SAFETY: by the contract.
    unsafe { exchange(group, out, |group| group.recv_object(peer, tag)) }
}

/// Frees a text that a function of this header gave. NULL is nothing.
///
/// # Safety
/// `text` is NULL or such a text, which nobody uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: by the contract: it came from `CString::into_raw`.
        drop(unsafe { CString::from_raw(text) });
    }
}

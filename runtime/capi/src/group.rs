//! Groups.

use crate::code::wait_hint;
use crate::status::{borrow, call, consume, free, give, put, text};
use crate::work::{WorkHandle, start_or_wait};
use rcomm::{GroupOptions, Hints, MissingRanks, ProcessGroup};
use std::ffi::c_char;
use std::time::Duration;

/// An ordered set of ranks that call operations together.
pub struct Group(pub(crate) ProcessGroup);

/// Writes this process's rank in the group, and the number of its ranks. Either pointer may be NULL.
///
/// # Safety
/// `group` is a valid handle; `rank` and `size` are NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_place(
    group: *const Group,
    rank: *mut u32,
    size: *mut u32,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        if !rank.is_null() {
            // SAFETY: `rank` is not NULL, so the caller lets this function write to it.
            unsafe { rank.write(group.0.rank()) };
        }
        if !size.is_null() {
            // SAFETY: `size` is not NULL, so the caller lets this function write to it.
            unsafe { size.write(group.0.size()) };
        }
        Ok(())
    })
}

/// Splits the group: members with the same color (0 or more) form a new group, ordered by key. A member with a negative
/// color gets NULL.
///
/// # Safety
/// `group` is a valid handle, `purpose` a text that ends with a zero byte; `part` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_split(
    group: *const Group,
    color: i64,
    key: i64,
    purpose: *const c_char,
    part: *mut *mut Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        // SAFETY: `purpose` is NULL, or ends with a zero byte and stays unchanged during the call.
        let purpose = unsafe { text(purpose, "the purpose")? };
        let color = u32::try_from(color).ok();
        match group.0.split(color, key, &GroupOptions::named(purpose))? {
            // SAFETY: `part` is NULL, which is refused, or the caller lets a handle be written there.
            Some(made) => unsafe { give(part, Group(made)) },
            // SAFETY: `part` is NULL, which is refused, or the caller lets one value be written there.
            None => unsafe { put(part, std::ptr::null_mut()) },
        }
    })
}

/// Sets the time-out of the group's operations on this rank from now on, in milliseconds.
///
/// # Safety
/// `group` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_set_timeout(group: *const Group, timeout_ms: u64) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        group.0.set_timeout(Duration::from_millis(timeout_ms));
        Ok(())
    })
}

/// Writes the time-out of the group's operations, in milliseconds.
///
/// # Safety
/// `group` is a valid handle; `timeout_ms` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_timeout(group: *const Group, timeout_ms: *mut u64) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        let ms = u64::try_from(group.0.timeout().as_millis()).unwrap_or(u64::MAX);
        // SAFETY: `timeout_ms` is NULL, which is refused, or the caller lets one value be written
        // there.
        unsafe { put(timeout_ms, ms) }
    })
}

/// Extends the time-out of the group's operations on this rank by `extra_ms`, until the first collective issued from
/// now on has ended.
///
/// # Safety
/// `group` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_extend_timeout(group: *const Group, extra_ms: u64) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        group.0.extend_timeout(Duration::from_millis(extra_ms));
        Ok(())
    })
}

/// Makes another handle of the same group, to be freed, with options for the operations called with it: `timeout_ms` is
/// their time-out (0 = that of `group`), and `wait` (`RCOMM_WAIT_UNKNOWN` and so on) hints how long the other ranks may
/// take, which only affects how long a waiting thread spins.
///
/// # Safety
/// `group` is a valid handle; `handle` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_on_terms(
    group: *const Group,
    timeout_ms: u64,
    wait: u8,
    handle: *mut *mut Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        let mut other = group.0.hinted(Hints::NONE.wait(wait_hint(wait)?));
        if timeout_ms > 0 {
            other = other.within(Duration::from_millis(timeout_ms));
        }
        // SAFETY: `handle` is NULL, which is refused, or the caller lets a handle be written there.
        unsafe { give(handle, Group(other)) }
    })
}

/// A barrier whose error names the lowest rank that did not arrive, or all such ranks if `all` is not 0. After a
/// failure the group is still usable.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_monitored_barrier(
    group: *const Group,
    all: i32,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.0 };
        let missing = if all == 0 {
            MissingRanks::First
        } else {
            MissingRanks::All
        };
        if work.is_null() {
            return group.monitored_barrier(missing);
        }
        // SAFETY: `work` is NULL, or the caller lets a handle be written there.
        unsafe { start_or_wait(group, group.monitored_barrier_async(missing)?, work) }
    })
}

/// Aborts the group: pending operations fail soon, and later ones at once, with this reason.
///
/// # Safety
/// `group` is a valid handle, `reason` a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_abort(group: *const Group, reason: *const c_char) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        // SAFETY: `reason` is NULL, or ends with a zero byte and stays unchanged during the call.
        group.0.abort(unsafe { text(reason, "the reason")? });
        Ok(())
    })
}

/// Waits for pending operations, closes the group, and frees this handle.
///
/// # Safety
/// `group` is a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_destroy(group: *mut Group) -> i32 {
    call(|| {
        // SAFETY: `group` is NULL or a handle of this type that the caller gives up.
        let group = unsafe { consume(group, "the group")? };
        group.0.destroy()
    })
}

/// Frees this handle; the group stays open. NULL has no effect.
///
/// # Safety
/// `group` is NULL or a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_free(group: *mut Group) {
    // SAFETY: `group` is NULL or a handle of this type that the caller gives up.
    unsafe { free(group) }
}

//! Groups: their handles, and calls that are about a whole group (this file); how a world makes them (`groups`);
//! functions that are called for each of their operations (`hook`).

pub mod groups;
pub mod hook;

use crate::code::wait_hint;
use crate::memory::{Owner, array, kept_by_caller, released_by};
use crate::object::give_json;
use crate::status::{borrow, call, consume, free, give, put, refused, text};
use crate::work::{WorkHandle, run_or_start, start_or_wait};
use rcomm::{GroupOptions, Hints, MissingRanks, Op, ProcessGroup, Result};
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// An ordered set of ranks that call operations together.
pub struct Group {
    pub(crate) core: ProcessGroup,
    /// Keeps the memory of the operations that are called with this handle.
    pub(crate) owner: Owner,
    /// The operations since `rcomm_start_coalescing`; `None` if no block is open.
    block: Mutex<Option<Vec<Op<'static>>>>,
}

impl Group {
    pub(crate) fn new(core: ProcessGroup) -> Self {
        Self::keeping(core, kept_by_caller())
    }

    pub(crate) fn keeping(core: ProcessGroup, owner: Owner) -> Self {
        Self {
            core,
            owner,
            block: Mutex::default(),
        }
    }

    fn block(&self) -> MutexGuard<'_, Option<Vec<Op<'static>>>> {
        self.block.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether operations are kept until `rcomm_end_coalescing`.
    pub(crate) fn is_coalescing(&self) -> bool {
        self.block().is_some()
    }

    /// Keeps an operation in an open block; returns it if no block is open.
    pub(crate) fn keep_in_block(
        &self,
        op: Op<'static>,
        wants_handle: bool,
    ) -> Result<Option<Op<'static>>> {
        match &mut *self.block() {
            None => Ok(Some(op)),
            Some(_) if wants_handle => Err(refused(
                "an operation in a coalesced block has no work of its own: pass NULL, and a place for the block's work \
                 to rcomm_end_coalescing",
            )),
            Some(block) => {
                block.push(op);
                Ok(None)
            }
        }
    }
}

/// Writes this process's rank in the group, and the number of the group's ranks. Either pointer may be NULL.
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
            // SAFETY: `rank` is not NULL, so the caller guarantees that this function may write to it.
            unsafe { rank.write(group.core.rank()) };
        }
        if !size.is_null() {
            // SAFETY: `size` is not NULL, so the caller guarantees that this function may write to it.
            unsafe { size.write(group.core.size()) };
        }
        Ok(())
    })
}

/// Splits the group: members with the same color (0 to 4294967295) form a new group, ordered by key. A member with a
/// negative color gets NULL. A color above 4294967295 is refused with `RCOMM_INVALID_ARGUMENT` before anything is sent.
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
        let color = match color {
            ..0 => None,
            _ => Some(u32::try_from(color).map_err(|_| {
                let message = format!(
                    "the color {color} is above {}: pass a smaller one, or a negative one for no group",
                    u32::MAX
                );
                refused(message)
            })?),
        };
        match group
            .core
            .split(color, key, &GroupOptions::named(purpose))?
        {
            // SAFETY: `part` is NULL, which is refused, or the caller guarantees that a handle may be written there.
            Some(made) => unsafe { give(part, Group::new(made)) },
            // SAFETY: `part` is NULL, which is refused, or the caller guarantees that one value may be written there.
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
        group.core.set_timeout(Duration::from_millis(timeout_ms));
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
        let ms = u64::try_from(group.core.timeout().as_millis()).unwrap_or(u64::MAX);
        // SAFETY: `timeout_ms` is NULL, which is refused, or the caller guarantees that one value may be written there.
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
        group.core.extend_timeout(Duration::from_millis(extra_ms));
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
        let mut other = group.core.hinted(Hints::NONE.wait(wait_hint(wait)?));
        if timeout_ms > 0 {
            other = other.within(Duration::from_millis(timeout_ms));
        }
        // SAFETY: `handle` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(handle, Group::keeping(other, group.owner.clone())) }
    })
}

/// Makes another handle of the same group, to be freed, that keeps `owner`, whatever that is: `release(owner)` is
/// called once, on any thread, when the handle is freed and every operation called with it has released its memory,
/// also after an error. So a caller can pass on the owner of its buffers, and need not call `rcomm_work_released`. If
/// this call itself fails, `release` is not called.
///
/// # Safety
/// `group` is a valid handle; `release` may be called once with `owner`, on any thread; `handle` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_keeping(
    group: *const Group,
    owner: *mut c_void,
    release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
    handle: *mut *mut Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        let release = release.ok_or_else(|| refused("the function that releases is NULL"))?;
        if handle.is_null() {
            return Err(refused("the pointer for the handle is NULL"));
        }
        // SAFETY: the caller allows one call of `release` with `owner`, on any thread.
        let owner = unsafe { released_by(owner, release) }.on(group.owner.stream());
        // SAFETY: `handle` is not NULL, so the caller guarantees that a handle may be written there.
        unsafe { give(handle, Group::keeping(group.core.clone(), owner)) }
    })
}

/// Keeps the operations on buffers that are called with this handle from now on, until `rcomm_end_coalescing` issues
/// them as one. They may differ in kind and in element type, but collectives must not be mixed with messages, and all
/// ranks must keep the same collectives. The memory of an operation is in use from its own call on.
///
/// # Safety
/// `group` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_start_coalescing(group: *const Group) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        let mut block = group.block();
        if block.is_some() {
            return Err(refused("a coalesced block is already open on this handle"));
        }
        *block = Some(Vec::new());
        Ok(())
    })
}

/// Issues the operations that were kept since `rcomm_start_coalescing` as one. If there are none, `*work` is NULL.
///
/// # Safety
/// See "Handles and memory" in rcomm.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_end_coalescing(
    group: *const Group,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        let ops = group.block().take();
        let ops = ops.ok_or_else(|| refused("no coalesced block is open on this handle"))?;
        if ops.is_empty() && work.is_null() {
            return Ok(());
        }
        if ops.is_empty() {
            // SAFETY: `work` is not NULL, so the caller guarantees that one value may be written there.
            return unsafe { put(work, std::ptr::null_mut()) };
        }
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        unsafe { run_or_start(&group.core, Op::Coalesced(ops), work) }
    })
}

/// Writes how long NCCL expects the collective that was kept since `rcomm_start_coalescing` to take on the device, in
/// nanoseconds, and drops it: nothing is sent. All members call this with the same collective. It fails with
/// `RCOMM_INVALID_ARGUMENT` if not exactly one operation was kept, and with `RCOMM_UNSUPPORTED` if the backend has no
/// model of the operation.
///
/// # Safety
/// `group` is a valid handle; `nanoseconds` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_estimate_coalesced(
    group: *const Group,
    nanoseconds: *mut u64,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        let ops = group.block().take();
        let ops = ops.ok_or_else(|| refused("no coalesced block is open on this handle"))?;
        let [op] = &ops[..] else {
            let count = ops.len();
            return Err(refused(format!(
                "the block has {count} operations: keep exactly one to have it estimated"
            )));
        };
        let expected = u64::try_from(group.core.estimate(op)?.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: `nanoseconds` is NULL, which is refused, or the caller guarantees that one value may be written
        // there.
        unsafe { put(nanoseconds, expected) }
    })
}

/// Makes a group of the members that are left when these ranks of the world are lost. All members that are left call
/// this with the same list. Waits for them, for the time-out of `group` at most. `group` may be open or aborted.
///
/// # Safety
/// `group` is a valid handle; `without` holds `count` ranks; `left` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_shrink(
    group: *const Group,
    without: *const u32,
    count: usize,
    left: *mut *mut Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        // SAFETY: `without` is NULL, or holds `count` values that stay unchanged during the call.
        let without = unsafe { array(without, count, "the list of ranks")? };
        let made = group.shrink(without, &GroupOptions::named(group.desc()))?;
        // SAFETY: `left` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(left, Group::new(made)) }
    })
}

/// For a group that has failed: writes to `*json` an array of the members that do not call this within `within_ms`, by
/// their ranks in the world. All members that call this get the same list.
///
/// # Safety
/// `group` is a valid handle; `json` may be written, and its text is freed with `rcomm_text_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_find_absent(
    group: *const Group,
    within_ms: u64,
    json: *mut *mut c_char,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        let absent = group.find_absent(Duration::from_millis(within_ms))?;
        // SAFETY: `json` is NULL, which is refused, or the caller guarantees that one address may be written there.
        unsafe { give_json(json, &serde_json::json!(absent)) }
    })
}

/// Writes to `*json` the group's progress on this rank: name, purpose, members, the numbers of the newest collective
/// that was issued, that has started and that has completed (-1 if none), and why the group refuses operations (null if
/// it does not). Takes no lock, so this works also while operations hang.
///
/// # Safety
/// `group` is a valid handle; `json` may be written, and its text is freed with `rcomm_text_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_status(group: *const Group, json: *mut *mut c_char) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        let status = group.status();
        let text = serde_json::json!({
            "name": group.name(),
            "desc": group.desc(),
            "ranks": group.ranks(),
            "last_enqueued": status.last_enqueued,
            "last_started": status.last_started,
            "last_completed": status.last_completed,
            "refused": group.refusal().map(ToString::to_string),
        });
        // SAFETY: `json` is NULL, which is refused, or the caller guarantees that one address may be written there.
        unsafe { give_json(json, &text) }
    })
}

/// A barrier whose error names the ranks that did not arrive: only the first, in the order of the group's ranks, or all
/// of them if `all` is not 0. After a failure the group is still usable.
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
        let group = unsafe { &borrow(group, "the group")?.core };
        let missing = if all == 0 {
            MissingRanks::First
        } else {
            MissingRanks::All
        };
        if work.is_null() {
            return group.monitored_barrier(missing);
        }
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
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
        group.core.abort(unsafe { text(reason, "the reason")? });
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
        group.core.destroy()
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

//! A program's own view of the operations of a group.

use crate::code::RCOMM_OK;
use crate::group::Group;
use crate::status::{borrow, call, refused};
use rcomm::{Error, OperationHook};
use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

/// One operation of a group, as the functions of a hook see it. The texts are valid until the function returns.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HookedOperation {
    /// The name of the group.
    pub group: *const c_char,
    /// The name of the operation, such as `all_reduce`.
    pub op: *const c_char,
    /// The operation's sequence number: sends and receives are counted apart from collectives.
    pub seq: u64,
    /// 1 for a send, a receive, and sends and receives that were issued as one; else 0.
    pub is_p2p: i32,
    /// The number of the operation's record in this rank's recorder.
    pub record_id: u64,
    /// The operation's time-out, in milliseconds.
    pub timeout_ms: u64,
}

type Begun = unsafe extern "C" fn(context: *mut c_void, operation: *const HookedOperation);
type Ended =
    unsafe extern "C" fn(context: *mut c_void, operation: *const HookedOperation, code: i32);

/// The functions that C gave, and their first argument.
struct Hook {
    begun: Option<Begun>,
    ended: Option<Ended>,
    context: *mut c_void,
}

// SAFETY: only the functions use the pointer, and their caller allows that on any thread.
unsafe impl Send for Hook {}
// SAFETY: as above, also at the same time.
unsafe impl Sync for Hook {}

/// Calls `then` with an operation as C sees it.
fn with_operation(
    operation: &rcomm::HookedOperation<'_>,
    then: impl FnOnce(*const HookedOperation),
) {
    // A text with a zero byte, which only a program in Rust can give, becomes an empty one.
    let group = CString::new(operation.group).unwrap_or_default();
    let op = CString::new(operation.op.name()).unwrap_or_default();
    let seen = HookedOperation {
        group: group.as_ptr(),
        op: op.as_ptr(),
        seq: operation.seq,
        is_p2p: i32::from(operation.is_p2p),
        record_id: operation.record_id,
        timeout_ms: u64::try_from(operation.timeout.as_millis()).unwrap_or(u64::MAX),
    };
    then(&raw const seen);
}

impl OperationHook for Hook {
    fn begun(&self, operation: &rcomm::HookedOperation<'_>) {
        if let Some(begun) = self.begun {
            with_operation(operation, |operation| {
                // SAFETY: the caller of `rcomm_group_set_hook` allows this call with its context, on any thread; the
                // operation is valid during the call.
                unsafe { begun(self.context, operation) }
            });
        }
    }

    fn ended(&self, operation: &rcomm::HookedOperation<'_>, error: Option<&Error>) {
        let code = error.map_or(RCOMM_OK, |error| error.kind().code().into());
        if let Some(ended) = self.ended {
            with_operation(operation, |operation| {
                // SAFETY: the caller of `rcomm_group_set_hook` allows this call with its context, on any thread; the
                // operation is valid during the call.
                unsafe { ended(self.context, operation, code) }
            });
        }
    }
}

/// Calls `begun(context, operation)` for each operation that this rank issues in the group from now on, and
/// `ended(context, operation, code)` when an operation ends; `code` is its result. For an operation that was issued
/// before and ends later, `ended` is called without `begun`. One of the two functions may be NULL. A hook cannot be
/// replaced: `RCOMM_INVALID_ARGUMENT` if the group has one.
///
/// `begun` is called on the thread that issues the operation, while the group takes no other operation; `ended` on a
/// thread of rcomm, or on one that waits for the operation or asks about it, and a thread that waits may go on
/// meanwhile. Both must be short, must not wait, and must not use the group.
///
/// # Safety
/// `group` is a valid handle; the functions may be called with `context`, on any thread, as long as the group exists.
/// The group may exist after `rcomm_world_free` has returned: as long as there is a handle of the group or of one of
/// its operations, and while one of them ends on a thread of rcomm. A `context` that stays valid until the process ends
/// is always right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_set_hook(
    group: *const Group,
    begun: Option<unsafe extern "C" fn(context: *mut c_void, operation: *const HookedOperation)>,
    ended: Option<
        unsafe extern "C" fn(context: *mut c_void, operation: *const HookedOperation, code: i32),
    >,
    context: *mut c_void,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        if begun.is_none() && ended.is_none() {
            return Err(refused("both functions of the hook are NULL"));
        }
        let hook = Hook {
            begun,
            ended,
            context,
        };
        group.core.set_hook(Arc::new(hook))
    })
}

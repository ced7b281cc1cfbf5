//! Results of calls: codes, texts and the last error.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The call succeeded.
pub const RCOMM_RECORDER_OK: i32 = 0;
/// The call failed; `rcomm_recorder_last_error` returns the reason.
pub const RCOMM_RECORDER_FAILED: i32 = 1;
/// A missing number: of a group or call site that did not fit in its table, or an unknown call site, peer or
/// root.
pub const RCOMM_RECORDER_NONE: u32 = u32::MAX;
/// The peer of a receive from any rank.
pub const RCOMM_RECORDER_ANY: u32 = u32::MAX - 1;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs a call that may fail. Both an error and a panic are returned as a code, with a text for
/// `rcomm_recorder_last_error`.
pub(crate) fn call(run: impl FnOnce() -> Result<(), String>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(run));
    let reason = match result {
        Ok(Ok(())) => return RCOMM_RECORDER_OK,
        Ok(Err(reason)) => reason,
        Err(_) => "the recorder panicked: please report it".to_owned(),
    };
    let text = CString::new(reason.replace('\0', " ")).unwrap_or_default();
    // The thread-local text may already be dropped in a thread that is ending.
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
    RCOMM_RECORDER_FAILED
}

/// Runs a call that records. If it returns `None` or panics, the caller gets `otherwise`.
#[inline]
pub(crate) fn quietly<T>(otherwise: T, run: impl FnOnce() -> Option<T>) -> T {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Some(value)) => value,
        Ok(None) | Err(_) => otherwise,
    }
}

/// A C string as a `str`, with U+FFFD for invalid UTF-8; empty for NULL.
///
/// # Safety
/// `text` is NULL or ends with a zero byte, and stays unchanged while the result is used.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> std::borrow::Cow<'a, str> {
    if text.is_null() {
        return "".into();
    }
    // SAFETY: not NULL (checked above), so the text ends with a zero byte. The caller leaves it as it is
    // while the result is used.
    unsafe { CStr::from_ptr(text) }.to_string_lossy()
}

/// The text of the last error of this thread; empty if no call of this thread has failed. Valid until the next call of
/// this thread fails.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_recorder_last_error() -> *const c_char {
    // The text's memory does not move until the value is replaced.
    LAST_ERROR
        .try_with(|last| last.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}

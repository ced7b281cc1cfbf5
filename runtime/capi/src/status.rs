//! Results of calls: a code, and the text of an error on request.

use crate::code::{RCOMM_OK, RCOMM_PANIC};
use rcomm::{Error, ErrorKind, Result};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Returns the text of the last error that a function returned to this thread; empty if none did. Valid until this
/// thread calls rcomm again, or ends.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_last_error() -> *const c_char {
    // A thread that is ending may already have freed its text.
    let last = LAST_ERROR.try_with(|text| text.borrow().as_ptr());
    last.unwrap_or_else(|_| c"".as_ptr())
}

/// Runs the body of a call, keeps the text of an error for `rcomm_last_error`, and returns the code. A panic is caught
/// here, since it must not unwind into C.
pub(crate) fn call(body: impl FnOnce() -> Result<()>) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => RCOMM_OK,
        Ok(Err(error)) => {
            set_last_error(&error.to_string());
            error.kind().code().into()
        }
        Err(_) => {
            set_last_error("rcomm panicked: its message is on standard error");
            RCOMM_PANIC
        }
    }
}

fn set_last_error(text: &str) {
    let text: Vec<u8> = text.bytes().filter(|&byte| byte != 0).collect();
    let text = CString::new(text).unwrap_or_default();
    // A thread that is ending may have freed its text; then only the code is returned.
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
}

/// The error of an invalid argument.
pub(crate) fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

/// Borrows a handle that C passed, perhaps on several threads at once; an error, with `name`, if it is NULL.
///
/// # Safety
/// `handle` is NULL, or came from [`give`] with this type and is not freed while the result is used.
pub(crate) unsafe fn borrow<'a, T: Sync>(handle: *const T, name: &str) -> Result<&'a T> {
    // SAFETY: NULL is `None`; any other handle is a box of a `T` made by `give`, which the caller frees
    // only after the last use of the result. Threads share it, as `Sync` allows; no code has it
    // exclusively.
    unsafe { handle.as_ref() }.ok_or_else(|| refused(format!("{name} is NULL")))
}

/// Takes back a handle that C no longer uses; an error, with `name`, if it is NULL.
///
/// # Safety
/// `handle` is NULL, or came from [`give`] with this type; no thread uses it afterwards.
pub(crate) unsafe fn consume<T>(handle: *mut T, name: &str) -> Result<Box<T>> {
    if handle.is_null() {
        return Err(refused(format!("{name} is NULL")));
    }
    // SAFETY: not NULL (checked above), so `give` made it from a box of this type. No thread uses it any
    // more, and the caller gives it up, so it is freed once.
    Ok(unsafe { Box::from_raw(handle) })
}

/// Frees a handle that C no longer uses. NULL has no effect.
///
/// # Safety
/// See [`consume`].
pub(crate) unsafe fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: not NULL, so it came from `give` with this type; no thread uses it any more.
        let take = || unsafe { consume(handle, "the handle") };
        call(|| take().map(drop));
    }
}

/// Writes a value to a pointer that C passed; an error if the pointer is NULL.
///
/// # Safety
/// `out` is NULL or may be written.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> Result<()> {
    if out.is_null() {
        return Err(refused("the pointer for the result is NULL"));
    }
    // SAFETY: not NULL (checked above), so the caller guarantees that one `T` may be written there.
    unsafe { out.write(value) };
    Ok(())
}

/// Makes a handle and writes it to a pointer that C passed; an error if the pointer is NULL.
///
/// # Safety
/// See [`put`].
pub(crate) unsafe fn give<T: Send + Sync>(out: *mut *mut T, value: T) -> Result<()> {
    if out.is_null() {
        return Err(refused("the pointer for the handle is NULL"));
    }
    // SAFETY: not NULL (checked above), so the caller guarantees that one address may be written there.
    unsafe { put(out, Box::into_raw(Box::new(value))) }
}

/// Returns a text that C passed; an error, with `name`, if it is NULL or not UTF-8.
///
/// # Safety
/// `text` is NULL, or ends with a zero byte and stays unchanged while the result is used.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(refused(format!("{name} is NULL")));
    }
    // SAFETY: not NULL (checked above), so it ends with a zero byte. The caller does not change it while the result is
    // used.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str()
        .map_err(|_| refused(format!("{name} is not UTF-8")))
}

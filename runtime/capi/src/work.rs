//! Operations in progress.

use crate::status::{borrow, call, free, give, put, refused};
use rcomm::{Done, ErrorKind, Op, ProcessGroup, Result, Work, WorkStatus};
use std::any::Any;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// An operation in progress.
pub struct WorkHandle {
    group: ProcessGroup,
    state: Mutex<State>,
}

enum State {
    UnderWay(Box<dyn UnderWay>),
    Ended(Ending),
}

/// The result of an operation.
pub(crate) struct Ending {
    result: Result<Done>,
    /// Whether the backend has released the memory.
    released: bool,
    /// The value that the operation has produced, until C takes it.
    made: Option<Box<dyn Any + Send>>,
}

impl Ending {
    fn of(result: Result<Done>, released: bool) -> Self {
        Self {
            result,
            released,
            made: None,
        }
    }
}

/// A value that an operation produces in addition to the memory that it writes.
pub(crate) trait Made: Any + Send {
    /// Whether the value continues to use C's memory.
    const HOLDS_MEMORY: bool = false;
}

/// An operation in progress, whatever its result type.
pub(crate) trait UnderWay: Send {
    /// Waits for at most this long.
    fn wait_timeout(&self, timeout: Duration) -> WorkStatus;

    /// Returns how the operation ended, once it has ended.
    fn end(self: Box<Self>) -> Ending;
}

impl UnderWay for Work<(Op<'static>, Done)> {
    fn wait_timeout(&self, timeout: Duration) -> WorkStatus {
        Work::wait_timeout(self, timeout)
    }

    fn end(self: Box<Self>) -> Ending {
        if self.is_success() {
            let result = self.wait();
            let released = result.is_ok();
            return Ending::of(result.map(|(_, done)| done), released);
        }
        let (result, op) = self.finish();
        Ending::of(result.map(|()| Done::default()), op.is_some())
    }
}

/// An operation that has its own memory, or holds C's memory until it ends, successfully or not.
struct Holding<T, F> {
    work: Work<T>,
    make: F,
}

impl<T, F, M> UnderWay for Holding<T, F>
where
    T: Send,
    F: FnOnce(T) -> Option<M> + Send,
    M: Made,
{
    fn wait_timeout(&self, timeout: Duration) -> WorkStatus {
        self.work.wait_timeout(timeout)
    }

    fn end(self: Box<Self>) -> Ending {
        let made = match self.work.wait() {
            Err(error) => return Ending::of(Err(error), true),
            Ok(value) => (self.make)(value),
        };
        Ending {
            result: Ok(Done::default()),
            released: made.is_none() || !M::HOLDS_MEMORY,
            made: made.map(|made| Box::new(made) as _),
        }
    }
}

impl WorkHandle {
    /// Waits for at most this long; returns whether the operation has ended, or its error.
    fn wait(&self, timeout: Duration) -> Result<bool> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::UnderWay(work) = &*state {
            let status = work.wait_timeout(timeout);
            if !matches!(status, WorkStatus::Completed | WorkStatus::Failed) {
                return Ok(false);
            }
            // This is the result if the code below panics.
            let lost = rcomm::Error::new(
                ErrorKind::Backend,
                "a panic has lost the operation's result",
            );
            let if_panicked = State::Ended(Ending::of(Err(lost), false));
            if let State::UnderWay(work) = std::mem::replace(&mut *state, if_panicked) {
                *state = State::Ended(work.end());
            }
        }
        match &*state {
            State::Ended(ending) => ending.result.clone().map(|_| true),
            State::UnderWay(_) => Ok(false),
        }
    }

    /// Takes the value that the operation has produced. `None` if the operation has not ended, if its value has another
    /// type, or if the value was taken before.
    pub(crate) fn take<M: Made>(&self) -> Option<M> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State::Ended(Ending { made, .. }) = &mut *state else {
            return None;
        };
        match made.take()?.downcast() {
            Ok(value) => Some(*value),
            Err(other) => {
                *made = Some(other);
                None
            }
        }
    }
}

/// The error of a work that has nothing of this kind to take.
pub(crate) fn nothing_to_take(kind: &str) -> String {
    format!(
        "this work has no {kind} to take: it is another operation, has not completed, has failed, \
         or its {kind} was taken before"
    )
}

/// The result type of operations that produce no value.
enum Nothing {}

impl Made for Nothing {}

/// Runs an operation, or starts it if C requests a handle.
///
/// # Safety
/// `work` is NULL or may be written.
pub(crate) unsafe fn issue(
    group: &ProcessGroup,
    op: Op<'static>,
    work: *mut *mut WorkHandle,
) -> Result<()> {
    if work.is_null() {
        return group.execute(op).map(drop);
    }
    let under_way = Box::new(group.execute_async(op)?);
    // SAFETY: `work` is not NULL (checked above), so the caller lets a handle be written there.
    unsafe { write_handle(group, under_way, work) }
}

/// Makes a handle of an operation in progress, or waits if C requests none.
///
/// # Safety
/// `handle` is NULL or may be written.
pub(crate) unsafe fn start_or_wait<T: Send + 'static>(
    group: &ProcessGroup,
    work: Work<T>,
    handle: *mut *mut WorkHandle,
) -> Result<()> {
    if handle.is_null() {
        return work.wait().map(drop);
    }
    let make = |_| None::<Nothing>;
    // SAFETY: `handle` is not NULL (checked above), so the caller lets a handle be written there.
    unsafe { write_handle(group, Box::new(Holding { work, make }), handle) }
}

/// Makes a handle of an operation in progress and keeps the value that it produces, or waits if C requests no handle.
///
/// # Safety
/// `handle` is NULL or may be written.
pub(crate) unsafe fn start_with_value<T: Send + 'static, M: Made>(
    group: &ProcessGroup,
    work: Work<T>,
    handle: *mut *mut WorkHandle,
    make: impl FnOnce(T) -> M + Send + 'static,
) -> Result<Option<M>> {
    if handle.is_null() {
        return work.wait().map(|value| Some(make(value)));
    }
    let make = |value| Some(make(value));
    // SAFETY: `handle` is not NULL (checked above), so the caller lets a handle be written there.
    unsafe { write_handle(group, Box::new(Holding { work, make }), handle) }?;
    Ok(None)
}

/// Makes a handle of an operation in progress.
///
/// # Safety
/// `work` may be written.
unsafe fn write_handle(
    group: &ProcessGroup,
    under_way: Box<dyn UnderWay>,
    work: *mut *mut WorkHandle,
) -> Result<()> {
    let handle = WorkHandle {
        state: Mutex::new(State::UnderWay(under_way)),
        group: group.clone(),
    };
    // SAFETY: the caller lets a handle be written to `work`.
    unsafe { give(work, handle) }
}

/// Waits for the end of the operation, which its time-out guarantees, and returns its result.
///
/// # Safety
/// `work` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_wait(work: *const WorkHandle) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        if !work.wait(Duration::MAX)? {
            let message = "the operation did not end at its deadline";
            return Err(rcomm::Error::new(ErrorKind::Timeout, message));
        }
        Ok(())
    })
}

/// Waits for at most `timeout_ms` (0 only checks). If the operation has ended, `*ended` is 1 and the returned code is
/// its result; otherwise `*ended` is 0 and the operation continues.
///
/// # Safety
/// `work` is a valid handle; `ended` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_test(
    work: *const WorkHandle,
    timeout_ms: u64,
    ended: *mut i32,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        let result = work.wait(Duration::from_millis(timeout_ms));
        let has_ended = *result.as_ref().unwrap_or(&true);
        // SAFETY: `ended` is NULL, which is refused, or the caller lets one value be written there.
        unsafe { put(ended, i32::from(has_ended))? };
        result.map(drop)
    })
}

/// Writes whether the memory may be used again: `*released` is 1 once `rcomm_work_wait` or `rcomm_work_test` has
/// reported the end of the operation and the backend has released the memory. After an error `*released` may stay 0:
/// the memory must then never be used again. The memory of a window belongs to the window until that is closed.
///
/// # Safety
/// `work` is a valid handle; `released` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_released(work: *const WorkHandle, released: *mut i32) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        let state = work.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_released = matches!(&*state, State::Ended(ending) if ending.released);
        // SAFETY: `released` is NULL, which is refused, or the caller lets one value be written there.
        unsafe { put(released, i32::from(is_released)) }
    })
}

/// Writes the sender, as a rank of the group, of a receive from any rank that has completed.
///
/// # Safety
/// `work` is a valid handle; `source` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_source(work: *const WorkHandle, source: *mut u32) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        let state = work.state.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = match &*state {
            State::Ended(Ending {
                result: Ok(done), ..
            }) => done.source,
            _ => None,
        };
        let message =
            "this work has no sender: it is not a receive, has not completed, or has failed";
        let sender = sender.ok_or_else(|| refused(message))?;
        // SAFETY: `source` is NULL, which is refused, or the caller lets one value be written there.
        unsafe { put(source, sender) }
    })
}

/// Aborts the operation and its group with this reason.
///
/// # Safety
/// `work` is a valid handle, `reason` a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_abort(
    work: *const WorkHandle,
    reason: *const std::ffi::c_char,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        // SAFETY: `reason` is NULL, or ends with a zero byte and stays unchanged during the call.
        work.group
            .abort(unsafe { crate::status::text(reason, "the reason")? });
        Ok(())
    })
}

/// Frees the handle; an operation that has not ended continues and still uses its memory. NULL has no effect.
///
/// # Safety
/// `work` is NULL or a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_free(work: *mut WorkHandle) {
    // SAFETY: `work` is NULL or a handle of this type that the caller gives up.
    unsafe { free(work) }
}

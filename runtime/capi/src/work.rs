//! Operations in progress.

use crate::code::RCOMM_OK;
use crate::group::Group;
use crate::status::{borrow, call, free, give, put, refused};
use rcomm::{Done, ErrorKind, Op, ProcessGroup, Result, Stream, Work, WorkStatus};
use std::any::Any;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

/// An operation in progress.
pub struct WorkHandle {
    group: ProcessGroup,
    /// Threads that wait hold this lock for reading, so that others can read the state. Once the operation has ended,
    /// all of them release the lock, and one replaces the state.
    state: RwLock<State>,
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
    made: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Ending {
    fn of(result: Result<Done>, released: bool) -> Self {
        Self {
            result,
            released,
            made: Mutex::new(None),
        }
    }
}

/// A value that an operation produces in addition to the memory that it writes.
pub(crate) trait Made: Any + Send {
    /// Whether the value continues to use C's memory.
    const HOLDS_MEMORY: bool = false;
}

/// An operation in progress, whatever its result type.
pub(crate) trait UnderWay: Send + Sync {
    /// Waits for at most this long, not at all if `timeout` is 0; returns the status then.
    fn wait_timeout(&self, timeout: Duration) -> WorkStatus;

    /// Lets a stream wait for the operation.
    fn wait_stream(&self, stream: &dyn Stream) -> Result<()>;

    /// Calls `callback` with the code of the result when the operation ends; at once if it has ended.
    fn on_completion(&self, callback: Box<dyn FnOnce(i32) + Send>);

    /// Returns how the operation ended. Called once it has.
    fn end(self: Box<Self>) -> Ending;
}

impl UnderWay for Work<(Op<'static>, Done)> {
    fn wait_timeout(&self, timeout: Duration) -> WorkStatus {
        if timeout.is_zero() {
            return self.status();
        }
        Work::wait_timeout(self, timeout)
    }

    fn wait_stream(&self, stream: &dyn Stream) -> Result<()> {
        Work::wait_stream(self, stream)
    }

    fn on_completion(&self, callback: Box<dyn FnOnce(i32) + Send>) {
        Work::on_completion(self, |result| callback(code_of(result)));
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

/// An operation that has its own memory, or that uses C's memory no longer once it has ended, with or without an error.
struct Holding<T, F> {
    work: Work<T>,
    /// Called once with the result, if the operation succeeds.
    make: Mutex<F>,
}

impl<T, F, M> UnderWay for Holding<T, F>
where
    T: Send,
    F: FnOnce(T) -> Option<M> + Send,
    M: Made,
{
    fn wait_timeout(&self, timeout: Duration) -> WorkStatus {
        if timeout.is_zero() {
            return self.work.status();
        }
        self.work.wait_timeout(timeout)
    }

    fn wait_stream(&self, stream: &dyn Stream) -> Result<()> {
        self.work.wait_stream(stream)
    }

    fn on_completion(&self, callback: Box<dyn FnOnce(i32) + Send>) {
        self.work.on_completion(|result| callback(code_of(result)));
    }

    fn end(self: Box<Self>) -> Ending {
        let made = match self.work.wait() {
            Err(error) => return Ending::of(Err(error), true),
            Ok(value) => {
                let make = self.make.into_inner();
                make.unwrap_or_else(PoisonError::into_inner)(value)
            }
        };
        Ending {
            result: Ok(Done::default()),
            released: made.is_none() || !M::HOLDS_MEMORY,
            made: Mutex::new(made.map(|made| Box::new(made) as _)),
        }
    }
}

impl WorkHandle {
    /// Waits for at most this long; returns whether the operation has ended, or the operation's error.
    fn wait(&self, timeout: Duration) -> Result<bool> {
        {
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            if let State::UnderWay(work) = &*state {
                let status = work.wait_timeout(timeout);
                if !matches!(status, WorkStatus::Completed | WorkStatus::Failed) {
                    return Ok(false);
                }
            }
        }
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(&*state, State::UnderWay(_)) {
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

    /// Lets a stream wait for the operation. If that has ended, nothing waits, and this returns its error, if any.
    pub(crate) fn wait_stream(&self, stream: &dyn Stream) -> Result<()> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            State::UnderWay(work) => work.wait_stream(stream),
            State::Ended(ending) => ending.result.clone().map(drop),
        }
    }

    /// The state: [`State::Ended`] if the operation has ended, also if no wait or test has seen that before.
    fn newest_state(&self) -> RwLockReadGuard<'_, State> {
        // An error of the operation is in the state as well.
        drop(self.wait(Duration::ZERO));
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the value that the operation has produced. `None` if the operation has not ended or has failed, if it
    /// produces no value of this type, or if the value was taken before.
    pub(crate) fn take<M: Made>(&self) -> Option<M> {
        let state = self.newest_state();
        let State::Ended(Ending { made, .. }) = &*state else {
            return None;
        };
        let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
        match made.take()?.downcast() {
            Ok(value) => Some(*value),
            Err(other) => {
                *made = Some(other);
                None
            }
        }
    }
}

/// The text of the error for a work that has nothing of this kind to take.
pub(crate) fn nothing_to_take(kind: &str) -> String {
    format!(
        "this work has no {kind} to take: it is another operation, it has not ended, it has failed, or its {kind} was \
         taken before"
    )
}

/// The type of value of operations that produce no value.
enum Nothing {}

impl Made for Nothing {}

fn code_of(result: &Result<Done>) -> i32 {
    match result {
        Ok(_) => RCOMM_OK,
        Err(error) => error.kind().code().into(),
    }
}

/// Runs an operation, or starts it if C requests a handle; between `rcomm_start_coalescing` and `rcomm_end_coalescing`
/// only keeps it.
///
/// # Safety
/// `work` is NULL or may be written.
pub(crate) unsafe fn issue(
    group: &Group,
    op: Op<'static>,
    work: *mut *mut WorkHandle,
) -> Result<()> {
    let Some(op) = group.keep_in_block(op, !work.is_null())? else {
        return Ok(());
    };
    // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
    unsafe { run_or_start(&group.core, op, work) }
}

/// Runs an operation, or starts it if C requests a handle.
///
/// # Safety
/// `work` is NULL or may be written.
pub(crate) unsafe fn run_or_start(
    group: &ProcessGroup,
    op: Op<'static>,
    work: *mut *mut WorkHandle,
) -> Result<()> {
    if work.is_null() {
        return group.execute(op).map(drop);
    }
    let under_way = Box::new(group.execute_async(op)?);
    // SAFETY: `work` is not NULL (checked above), so the caller guarantees that a handle may be written there.
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
    let make = Mutex::new(|_| None::<Nothing>);
    // SAFETY: `handle` is not NULL (checked above), so the caller guarantees that a handle may be written there.
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
    let make = Mutex::new(|value| Some(make(value)));
    // SAFETY: `handle` is not NULL (checked above), so the caller guarantees that a handle may be written there.
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
        state: RwLock::new(State::UnderWay(under_way)),
        group: group.clone(),
    };
    // SAFETY: the caller guarantees that a handle may be written to `work`.
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

/// Waits for at most `timeout_ms` (0 = does not wait, also while other threads wait for the operation). If the
/// operation has ended, `*ended` is 1 and the returned code is its result; otherwise `*ended` is 0 and the operation
/// continues. After an error that aborts the group this may wait until the rank's dump was made.
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
        // SAFETY: `ended` is NULL, which is refused, or the caller guarantees that one value may be written there.
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
        let state = work.state.read().unwrap_or_else(PoisonError::into_inner);
        let is_released = matches!(&*state, State::Ended(ending) if ending.released);
        // SAFETY: `released` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(released, i32::from(is_released)) }
    })
}

/// Calls `callback(context, code)` once, when the operation ends, or during this call if it has ended; `code` is the
/// operation's result.
///
/// The callback runs on a thread of rcomm, or on one that waits for the operation or asks about it. It must be short,
/// must not wait for an operation, and must not use `work`.
///
/// # Safety
/// `work` is a valid handle; `callback` may be called with `context`, on any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_on_completion(
    work: *const WorkHandle,
    callback: Option<unsafe extern "C" fn(context: *mut c_void, code: i32)>,
    context: *mut c_void,
) -> i32 {
    /// The argument of the callback, which the caller allows on any thread.
    struct Context(*mut c_void);
    // SAFETY: only the callback uses the pointer, and its caller allows that on any thread.
    unsafe impl Send for Context {}
    impl Context {
        fn get(self) -> *mut c_void {
            self.0
        }
    }
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        let callback = callback.ok_or_else(|| refused("the callback is NULL"))?;
        let context = Context(context);
        let run = move |code: i32| {
            // SAFETY: the caller allows this call with this argument, on any thread.
            unsafe { callback(context.get(), code) }
        };
        let state = work.state.read().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            State::UnderWay(under_way) => under_way.on_completion(Box::new(run)),
            State::Ended(ending) => {
                let code = code_of(&ending.result);
                drop(state);
                run(code);
            }
        }
        Ok(())
    })
}

/// Writes the sender, as a rank of the group, of a completed receive from any rank; fails with `RCOMM_INVALID_ARGUMENT`
/// for any other operation. Does not wait for the operation.
///
/// # Safety
/// `work` is a valid handle; `source` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_source(work: *const WorkHandle, source: *mut u32) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        let state = work.newest_state();
        let sender = match &*state {
            State::Ended(Ending {
                result: Ok(done), ..
            }) => done.source,
            _ => None,
        };
        let message = "this work has no sender: it is not a receive from any rank, it has failed, or it has not ended";
        let sender = sender.ok_or_else(|| refused(message))?;
        // SAFETY: `source` is NULL, which is refused, or the caller guarantees that one value may be written there.
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

//! Streams ("Stream Management" in the driver's manual).

use super::context::{current, handle_of};
use super::event::event_of;
use super::{INVALID_CONTEXT, INVALID_HANDLE, NOT_READY, SUCCESS, check_capture, first_bad, put};
use crate::callback::{self, HostFunction};
use crate::capture;
use crate::handles::Handles;
use crate::stream::{Stream, lock};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

static STREAMS: Handles<Stream> = Handles::new("stream");

/// All streams that were created, including destroyed ones whose work has not ended, without the default stream.
static CREATED: Mutex<Vec<Weak<Stream>>> = Mutex::new(Vec::new());

/// The stream behind a handle; null is the default stream.
pub(crate) fn stream_of(handle: *mut c_void) -> Arc<Stream> {
    static DEFAULT: OnceLock<Arc<Stream>> = OnceLock::new();
    let stream = STREAMS.get(handle);
    stream.unwrap_or_else(|| Arc::clone(DEFAULT.get_or_init(|| Stream::new(0, 0, 0))))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    out: *mut *mut c_void,
    flags: c_uint,
    priority: c_int,
) -> c_int {
    crate::calls::note();
    if current() == 0 {
        return INVALID_CONTEXT;
    }
    // The driver clamps a priority to the range of cuCtxGetStreamPriorityRange.
    let stream = Stream::new(current(), priority.clamp(-5, 0), flags);
    {
        let mut created = lock(&CREATED);
        created.retain(|stream| stream.strong_count() > 0);
        created.push(Arc::downgrade(&stream));
    }
    // SAFETY: `out` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(out, STREAMS.insert(stream)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(out: *mut *mut c_void, flags: c_uint) -> c_int {
    crate::calls::note();
    // SAFETY: `out` is as this function's caller passed it: null or valid for writing a handle, which is what
    // `cuStreamCreateWithPriority` asks.
    unsafe { cuStreamCreateWithPriority(out, flags, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetPriority(handle: *mut c_void, priority: *mut c_int) -> c_int {
    crate::calls::note();
    // SAFETY: `priority` is null, which `put` refuses, or the caller lets an int be written there.
    unsafe { put(priority, stream_of(handle).priority) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetFlags(handle: *mut c_void, flags: *mut c_uint) -> c_int {
    crate::calls::note();
    // SAFETY: `flags` is null, which `put` refuses, or the caller lets an int be written there.
    unsafe { put(flags, stream_of(handle).flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(handle: *mut c_void) -> c_int {
    crate::calls::note();
    match STREAMS.remove(handle) {
        None => INVALID_HANDLE,
        Some(stream) => {
            stream.close();
            SUCCESS
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(handle: *mut c_void) -> c_int {
    crate::calls::note();
    let stream = stream_of(handle);
    if let Some(capture) = stream.capture() {
        capture.invalidate();
        return capture::UNSUPPORTED;
    }
    let allowed = check_capture();
    if allowed != SUCCESS {
        return allowed;
    }
    stream.synchronize();
    SUCCESS
}

/// Waits for all streams of the current context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> c_int {
    crate::calls::note();
    if current() == 0 {
        return INVALID_CONTEXT;
    }
    let allowed = check_capture();
    if allowed != SUCCESS {
        return allowed;
    }
    synchronize(current());
    SUCCESS
}

/// Waits for the default stream and for all streams of a device, which is counted from 1; also for those that were
/// destroyed, whose work still runs to its end.
pub(crate) fn synchronize(device: c_int) {
    let streams: Vec<Arc<Stream>> = lock(&CREATED).iter().filter_map(Weak::upgrade).collect();
    let device_streams = streams.iter().filter(|stream| stream.device == device);
    device_streams.for_each(|stream| stream.synchronize());
    stream_of(std::ptr::null_mut()).synchronize();
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(handle: *mut c_void, status: *mut c_int) -> c_int {
    crate::calls::note();
    // SAFETY: `status` is null, which `put` refuses, or the caller lets an int be written there.
    unsafe { put(status, stream_of(handle).capture_status()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(handle: *mut c_void) -> c_int {
    crate::calls::note();
    let stream = stream_of(handle);
    if let Some(capture) = stream.capture() {
        capture.invalidate();
        return capture::UNSUPPORTED;
    }
    let allowed = check_capture();
    if allowed != SUCCESS {
        return allowed;
    }
    if stream.is_idle() { SUCCESS } else { NOT_READY }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(
    handle: *mut c_void,
    event: *mut c_void,
    _flags: c_uint,
) -> c_int {
    crate::calls::note();
    match event_of(event) {
        None => INVALID_HANDLE,
        Some(event) => capture::wait(&stream_of(handle), &event),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCtx(handle: *mut c_void, context: *mut *mut c_void) -> c_int {
    crate::calls::note();
    // The default stream belongs to the current context.
    let device = match handle.is_null() {
        true if current() == 0 => return INVALID_CONTEXT,
        true => current(),
        false => stream_of(handle).device,
    };
    // SAFETY: `context` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(context, handle_of(device)) }
}

/// Dependencies are not simulated: their number is always 0, and the pointer to them null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCaptureInfo_v2(
    handle: *mut c_void,
    status: *mut c_int,
    id: *mut u64,
    graph: *mut *mut c_void,
    dependencies: *mut *const c_void,
    count: *mut usize,
) -> c_int {
    crate::calls::note();
    let stream = stream_of(handle);
    let capture = stream.capture();
    // SAFETY: each is null, which `put` refuses, or the caller lets a value of its type be written there.
    unsafe {
        put(id, capture.as_ref().map_or(0, |capture| capture.id));
        let handle = capture.as_ref().map(|capture| capture.graph());
        put(graph, handle.unwrap_or(std::ptr::null_mut()));
        put(dependencies, std::ptr::null());
        put(count, 0);
        put(status, stream.capture_status())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    crate::calls::note();
    callback::check();
    // SAFETY: `mode` is null or points to an int of the caller's that no other code uses during this call.
    let Some(mode) = (unsafe { mode.as_mut() }) else {
        return super::INVALID_VALUE;
    };
    *mode = capture::exchange_mode(*mode);
    SUCCESS
}

/// Enqueues a function of the program as work of a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    handle: *mut c_void,
    function: Option<HostFunction>,
    data: *mut c_void,
) -> c_int {
    crate::calls::note();
    let Some(function) = function else {
        return first_bad(&[super::INVALID_VALUE]);
    };
    let data = data.expose_provenance();
    stream_of(handle).push(Arc::new(move || {
        // SAFETY: the caller lets `function` be called with `data` once this work runs, on whichever thread
        // that is.
        unsafe { callback::call(function, data) };
    }));
    SUCCESS
}

/// Holds the stream up until the word at `address` is at least `value`, compared cyclically: their difference, as a
/// signed number, is not negative (CU_STREAM_WAIT_VALUE_GEQ, which is 0, the only flag that is simulated).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitValue32_v2(
    handle: *mut c_void,
    address: u64,
    value: c_uint,
    flags: c_uint,
) -> c_int {
    crate::calls::note();
    if flags != 0 || address == 0 || !address.is_multiple_of(4) {
        return super::INVALID_VALUE;
    }
    stream_of(handle).push(Arc::new(move || {
        // SAFETY: the caller keeps the word for atomic access until the work is done, and `address` is not null and
        // a multiple of four (checked above).
        let word = unsafe { AtomicU32::from_ptr(address as *mut u32) };
        while (word.load(Ordering::Acquire).wrapping_sub(value)).cast_signed() < 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }));
    SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::Capture;
    use crate::cuda::INVALID_VALUE;

    #[test]
    fn the_default_stream_has_no_context_where_none_is_current() {
        let mut context = std::ptr::null_mut();
        // SAFETY: the context is written to a local; a null handle is the default stream.
        let status = unsafe { cuStreamGetCtx(std::ptr::null_mut(), &mut context) };
        assert_eq!(status, INVALID_CONTEXT);
    }

    #[test]
    fn a_word_at_null_is_not_waited_for() {
        // SAFETY: a null handle is the default stream, and a null address is refused.
        let status = unsafe { cuStreamWaitValue32_v2(std::ptr::null_mut(), 0, 1, 0) };
        assert_eq!(status, INVALID_VALUE);
    }

    #[test]
    fn an_invalidated_capture_is_neither_active_nor_none() {
        let stream = Stream::new(1, 0, 0);
        assert_eq!(stream.capture_status(), 0);
        // A capture that is not global forbids nothing to the tests beside this one.
        assert!(Capture::begin(&stream, 1));
        assert_eq!(stream.capture_status(), 1);
        let capture = stream.capture().expect("the stream is being captured");
        capture.invalidate();
        assert_eq!(stream.capture_status(), 2);
        assert!(Capture::end(&stream).is_err());
        assert_eq!(stream.capture_status(), 0);
    }
}

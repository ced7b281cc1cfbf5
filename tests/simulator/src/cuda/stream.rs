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

/// All streams but the default one, including destroyed ones whose work has not ended.
static MADE: Mutex<Vec<Weak<Stream>>> = Mutex::new(Vec::new());

/// The stream behind a handle; null is the default stream.
pub(crate) fn stream_of(handle: *mut c_void) -> Arc<Stream> {
    static DEFAULT: OnceLock<Arc<Stream>> = OnceLock::new();
    let stream = STREAMS.get(handle);
    stream.unwrap_or_else(|| Arc::clone(DEFAULT.get_or_init(|| Stream::new(0, 0))))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    out: *mut *mut c_void,
    _flags: c_uint,
    priority: c_int,
) -> c_int {
    crate::calls::note();
    if current() == 0 {
        return INVALID_CONTEXT;
    }
    // "clamped to the nearest value in the range" of cuCtxGetStreamPriorityRange.
    let stream = Stream::new(current(), priority.clamp(-5, 0));
    {
        let mut made = lock(&MADE);
        made.retain(|it| it.strong_count() > 0);
        made.push(Arc::downgrade(&stream));
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
    if check_capture() != SUCCESS {
        return check_capture();
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
    if check_capture() != SUCCESS {
        return check_capture();
    }
    synchronize(current());
    SUCCESS
}

/// Waits for the default stream and for all streams of a device that is counted from 1, also for those that were
/// destroyed: "the resources will be released automatically once all preceding work in the stream has completed"
/// (`cuStreamDestroy`).
pub(crate) fn synchronize(device: c_int) {
    let streams: Vec<Arc<Stream>> = lock(&MADE).iter().filter_map(Weak::upgrade).collect();
    let of_device = streams.iter().filter(|it| it.device == device);
    of_device.for_each(|stream| stream.synchronize());
    stream_of(std::ptr::null_mut()).synchronize();
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(handle: *mut c_void, status: *mut c_int) -> c_int {
    crate::calls::note();
    let is_captured = stream_of(handle).capture().is_some();
    // SAFETY: `status` is null, which `put` refuses, or the caller lets an int be written there.
    unsafe { put(status, c_int::from(is_captured)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(handle: *mut c_void) -> c_int {
    crate::calls::note();
    let stream = stream_of(handle);
    if let Some(capture) = stream.capture() {
        capture.invalidate();
        return capture::UNSUPPORTED;
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
    // The default stream is that of whichever context is current.
    let device = if handle.is_null() {
        current()
    } else {
        stream_of(handle).device
    };
    // SAFETY: `context` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(context, handle_of(device)) }
}

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
    let capture = stream_of(handle).capture();
    // SAFETY: each is null, which `put` refuses, or the caller lets a value of its type be written there.
    unsafe {
        put(id, capture.as_ref().map_or(0, |capture| capture.id));
        let handle = capture.as_ref().map(|capture| capture.graph());
        put(graph, handle.unwrap_or(std::ptr::null_mut()));
        put(dependencies, std::ptr::null());
        put(count, 0);
        put(status, c_int::from(capture.is_some()))
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

/// Holds the stream up until the word is at least `value` (flag 0, the only one that is simulated).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitValue32_v2(
    handle: *mut c_void,
    at: u64,
    value: c_uint,
    flags: c_uint,
) -> c_int {
    crate::calls::note();
    if flags != 0 || !at.is_multiple_of(4) {
        return super::INVALID_VALUE;
    }
    stream_of(handle).push(Arc::new(move || {
        // SAFETY: the caller keeps the word for atomic access until the work is done, and `at` is a
        // multiple of four (checked above).
        let word = unsafe { AtomicU32::from_ptr(at as *mut u32) };
        while (word.load(Ordering::Acquire).wrapping_sub(value)).cast_signed() < 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWriteValue32_v2(
    handle: *mut c_void,
    at: u64,
    value: c_uint,
    flags: c_uint,
) -> c_int {
    crate::calls::note();
    if flags != 0 || !at.is_multiple_of(4) {
        return super::INVALID_VALUE;
    }
    stream_of(handle).push(Arc::new(move || {
        // SAFETY: the caller keeps the word for atomic access until the work is done, and `at` is a
        // multiple of four (checked above).
        unsafe { AtomicU32::from_ptr(at as *mut u32) }.store(value, Ordering::Release);
    }));
    SUCCESS
}

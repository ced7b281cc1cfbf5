//! Events ("Event Management" in the driver's manual).

use super::context::current;
use super::stream::stream_of;
use super::{INVALID_CONTEXT, INVALID_HANDLE, NOT_READY, SUCCESS, check_capture, put};
use crate::capture::CAPTURED_EVENT;
use crate::handles::Handles;
use crate::stream::Event;
use crate::trouble;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

static EVENTS: Handles<Event> = Handles::new("event");

pub(crate) fn event_of(handle: *mut c_void) -> Option<Arc<Event>> {
    EVENTS.get(handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(out: *mut *mut c_void, flags: c_uint) -> c_int {
    crate::calls::note();
    if current() == 0 {
        return INVALID_CONTEXT;
    }
    // Flag 2 is CU_EVENT_DISABLE_TIMING.
    let event = Event::new(flags & 2 == 0);
    crate::calls::LIVE_EVENTS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: `out` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(out, EVENTS.insert(event)) }
}

/// Work that still refers to the event continues, as documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(handle: *mut c_void) -> c_int {
    crate::calls::note();
    match EVENTS.remove(handle) {
        None => INVALID_HANDLE,
        Some(_) => {
            crate::calls::LIVE_EVENTS.fetch_sub(1, Ordering::Relaxed);
            SUCCESS
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(handle: *mut c_void, stream: *mut c_void) -> c_int {
    crate::calls::note();
    let Some(event) = event_of(handle) else {
        return INVALID_HANDLE;
    };
    event.record(&stream_of(stream));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(handle: *mut c_void) -> c_int {
    crate::calls::note();
    trouble::hang_in_query();
    let Some(event) = event_of(handle) else {
        return INVALID_HANDLE;
    };
    if let Some((capture, _)) = event.captured() {
        capture.invalidate();
        return CAPTURED_EVENT;
    }
    let allowed = check_capture();
    if allowed != SUCCESS {
        return allowed;
    }
    if event.is_complete() {
        SUCCESS
    } else {
        NOT_READY
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(handle: *mut c_void) -> c_int {
    crate::calls::note();
    let Some(event) = event_of(handle) else {
        return INVALID_HANDLE;
    };
    if event.captured().is_some() {
        return CAPTURED_EVENT;
    }
    let allowed = check_capture();
    if allowed != SUCCESS {
        return allowed;
    }
    event.synchronize();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(
    milliseconds: *mut f32,
    from: *mut c_void,
    to: *mut c_void,
) -> c_int {
    crate::calls::note();
    crate::calls::note_time_read();
    let (Some(from), Some(to)) = (event_of(from), event_of(to)) else {
        return INVALID_HANDLE;
    };
    if !from.timed || !to.timed {
        return INVALID_HANDLE;
    }
    if !from.is_complete() || !to.is_complete() {
        return NOT_READY;
    }
    let (Some(from), Some(to)) = (from.completed_at(), to.completed_at()) else {
        return INVALID_HANDLE;
    };
    // SAFETY: `milliseconds` is null, which `put` refuses, or the caller lets a float be written there.
    unsafe {
        put(
            milliseconds,
            to.saturating_duration_since(from).as_secs_f32() * 1e3,
        )
    }
}

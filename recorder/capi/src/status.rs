//! Phase, step and heartbeat.

use crate::outcome::{quietly, text};
use crate::table::Handle;
use std::ffi::c_char;

/// Names the program's phase from now on; at most 104 bytes of the name are kept. An empty text ends a phase.
///
/// # Safety
/// `recorder` is NULL or a valid handle; `name` is NULL or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_phase(recorder: *const Handle, name: *const c_char) {
    quietly((), || {
        // SAFETY: `recorder` is NULL or a valid handle; `name` is NULL or ends with a zero byte and stays
        // unchanged during this call, which copies it.
        let (recorder, name) = unsafe { (Handle::recorder(recorder)?, text(name)) };
        recorder.phase(&name);
        Some(())
    });
}

/// Sets the program's step from now on.
///
/// # Safety
/// `recorder` is NULL or a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_step(recorder: *const Handle, step: i64) {
    quietly((), || {
        // SAFETY: `recorder` is NULL or a valid handle, which the caller keeps alive during this call.
        unsafe { Handle::recorder(recorder)? }.step(step);
        Some(())
    });
}

/// Updates the heartbeat. Call it about once a second, from a thread that never blocks.
///
/// # Safety
/// `recorder` is NULL or a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_heartbeat(recorder: *const Handle) {
    quietly((), || {
        // SAFETY: `recorder` is NULL or a valid handle, which the caller keeps alive during this call.
        unsafe { Handle::recorder(recorder)? }.heartbeat();
        Some(())
    });
}

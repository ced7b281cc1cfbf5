//! Records with which code the process exits.
//!
//! Python runs its own exit functions without telling them the code; the C library passes the code to functions that
//! were registered by `on_exit`. A process that a signal kills, or that calls `_exit`, runs no such function; for
//! SIGTERM see [`termination`](crate::termination).

use crate::ring::RingState;
use crate::termination;
use std::ffi::{c_int, c_void};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

unsafe extern "C" {
    /// Registers `function` (in glibc), which is called with the exit code and `argument` when the process exits.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Records the exit code in this ring when the process exits. If the code is 0 and [`RingState::closes`] is set, also
/// closes the ring.
///
/// # Errors
/// If the C library has no memory to register a function.
pub(crate) fn watch(state: &Arc<RingState>) -> io::Result<()> {
    let state = Arc::into_raw(state.clone());
    // SAFETY: `exited` has the type that `on_exit` calls; it gets a reference of its own to the state, which lives
    // until the process has exited.
    let refused = unsafe { on_exit(exited, state.cast_mut().cast()) };
    if refused != 0 {
        // SAFETY: nothing else has taken the reference.
        drop(unsafe { Arc::from_raw(state) });
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    Ok(())
}

extern "C" fn exited(code: c_int, state: *mut c_void) {
    // SAFETY: `watch` gave a reference to the state away for this call.
    let state = unsafe { &*state.cast::<RingState>() };
    let note = || {
        // There is no ring in a forked child, which inherits the function.
        let Some(ring) = state.ring.get() else { return };
        termination::forget();
        // The parent process gets only the lowest eight bits of the code.
        ring.note_exit(code.to_le_bytes()[0]);
        if code == 0 && state.closes.load(Ordering::Relaxed) {
            // The process exits: an error can no longer be reported.
            drop(ring.close());
        }
    };
    // A panic must not reach C.
    drop(catch_unwind(AssertUnwindSafe(note)));
}

//! Records that SIGTERM ended the process.
//!
//! A launcher sends SIGTERM to the other ranks of a host once one has failed. A rank that waits in C++ then ends without
//! running any Python code. If its ring did not show why it ended, it could not be told apart from the rank that was
//! killed first.

use crate::ring::RingState;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The code that shells and containers report for a process that SIGTERM ended.
const ENDED_BY_SIGTERM: u8 = 128 + libc::SIGTERM as u8;

/// The state whose ring gets the note; null before [`watch`] and once the process exits by itself.
static NOTED_IN: AtomicPtr<RingState> = AtomicPtr::new(null_mut());

/// From now on, a SIGTERM that ends the process is recorded in this ring as exit code 143, before it does. Does nothing
/// if another ring has been watched before, or if SIGTERM would not end the process: the program's own handler, set
/// before or later, is left alone.
pub(crate) fn watch(state: &Arc<RingState>) {
    let reference = Arc::into_raw(state.clone());
    let first = NOTED_IN.compare_exchange(
        null_mut(),
        reference.cast_mut(),
        Ordering::Release,
        Ordering::Relaxed,
    );
    if first.is_err() {
        // SAFETY: nothing else has taken the reference.
        drop(unsafe { Arc::from_raw(reference) });
        return;
    }
    // SAFETY: all bits zero are a valid value: the default action, no flags and an empty mask.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the call only writes what SIGTERM does now to `before`.
    let read = unsafe { libc::sigaction(libc::SIGTERM, std::ptr::null(), &raw mut before) };
    if read != 0 || before.sa_sigaction != libc::SIG_DFL {
        return;
    }
    let mut action = before;
    action.sa_sigaction = ended as extern "C" fn(c_int) as libc::sighandler_t;
    // The kernel restores the default action before it calls the handler.
    action.sa_flags = libc::SA_RESETHAND | libc::SA_ONSTACK;
    // SAFETY: `ended` has the type of a handler, and calls only what is allowed in one. Without the handler only the
    // note is missing, so an error is ignored.
    unsafe { libc::sigaction(libc::SIGTERM, &raw const action, null_mut()) };
}

/// From now on SIGTERM is no longer recorded: the process exits by itself.
pub(crate) fn forget() {
    // The reference is kept: the handler may be using it in another thread.
    NOTED_IN.store(null_mut(), Ordering::Relaxed);
}

/// The handler. It takes no lock and allocates nothing, since it may run in the middle of any function.
extern "C" fn ended(signal: c_int) {
    // SAFETY: `watch` gave away a reference that is never dropped.
    let state = unsafe { NOTED_IN.load(Ordering::Acquire).as_ref() };
    // There is no ring in a forked child, which inherits the handler.
    if let Some(ring) = state.and_then(|state| state.ring.get()) {
        ring.note_exit(ENDED_BY_SIGTERM);
    }
    // SAFETY: `raise` is allowed in a handler. The signal is delivered once the handler has returned, and its action is
    // the default one again: it ends the process.
    unsafe { libc::raise(signal) };
}

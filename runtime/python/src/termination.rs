//! Records that SIGTERM ended the process.
//!
//! A launcher sends SIGTERM to the other ranks of a host once one has failed. A rank that waits in C++ then ends
//! without running any Python code. If its ring did not show why it ended, it could not be distinguished from the rank
//! that was killed first.

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
/// if another ring of this process has been watched before, or if SIGTERM would not end the process: the program's own
/// handler, set before or later, is left alone.
pub(crate) fn watch(state: &Arc<RingState>) {
    // The kernel drops a SIGTERM for the first process of a container that has no handler for it: it does not end.
    if std::process::id() == 1 {
        return;
    }
    let former = NOTED_IN.load(Ordering::Acquire);
    // SAFETY: the pointer is null, or a reference that is never dropped.
    let noted_in = unsafe { former.as_ref() };
    // A forked child inherits the pointer to its parent's state; the child's own ring, if it makes one, replaces it.
    if noted_in.is_some_and(|state| state.ring.get().is_some()) {
        return;
    }
    let reference = Arc::into_raw(state.clone());
    let replaced = NOTED_IN.compare_exchange(
        former,
        reference.cast_mut(),
        Ordering::Release,
        Ordering::Relaxed,
    );
    if replaced.is_err() {
        // SAFETY: nothing else has taken the reference.
        drop(unsafe { Arc::from_raw(reference) });
        return;
    }
    // In a forked child the handler is there already.
    let Some(mut action) = default_action() else {
        return;
    };
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

/// What SIGTERM does now, if that is the default. May be called in a handler.
fn default_action() -> Option<libc::sigaction> {
    // SAFETY: all bits zero are a valid value: the default action, no flags and an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the call only writes what SIGTERM does now to `action`.
    let read = unsafe { libc::sigaction(libc::SIGTERM, std::ptr::null(), &raw mut action) };
    (read == 0 && action.sa_sigaction == libc::SIG_DFL).then_some(action)
}

/// The handler. It takes no lock and allocates nothing, since it may run in the middle of any function.
extern "C" fn ended(signal: c_int) {
    // A handler that was set later may call this one, as those of the crates `signal-hook` and `tokio` do. Then the
    // kernel has not restored the default action, and the program decides whether it ends: a signal that is raised here
    // would return to that handler, and so on without end.
    if default_action().is_none() {
        return;
    }
    // SAFETY: `watch` gave away a reference that is never dropped.
    let state = unsafe { NOTED_IN.load(Ordering::Acquire).as_ref() };
    // A forked child, which inherits the handler, may have no ring of its own.
    if let Some(ring) = state.and_then(|state| state.ring.get()) {
        ring.note_exit(ENDED_BY_SIGTERM);
    }
    // SAFETY: `raise` is allowed in a handler. The signal is delivered once the handler has returned, and its action is
    // the default one again: it ends the process.
    unsafe { libc::raise(signal) };
}

//! What tests count: calls of the driver by a thread (the host cost of an operation, whatever the machine's load), and
//! events that exist. The functions are none of CUDA's.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) static LIVE_EVENTS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// Counts one call of the calling thread.
pub(crate) fn note() {
    CALLS.set(CALLS.get() + 1);
}

/// Calls of the driver that the calling thread has made.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_driver_calls() -> u64 {
    CALLS.get()
}

/// Events that were made and not destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_live_events() -> u64 {
    LIVE_EVENTS.load(Ordering::Relaxed)
}

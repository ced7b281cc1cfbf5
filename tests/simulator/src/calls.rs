//! How often a thread has called the driver: the host cost of an operation, whatever the machine's load.

use std::cell::Cell;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// Counts one call of the calling thread.
pub(crate) fn note() {
    CALLS.set(CALLS.get() + 1);
}

/// Calls of the driver that the calling thread has made. No function of CUDA's.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_driver_calls() -> u64 {
    CALLS.get()
}

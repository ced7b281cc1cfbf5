//! Counters for tests. The number of a thread's driver calls, and of those that ask for the time between two events,
//! shows the host cost of an operation whatever the load of the machine. The process's live events, live
//! allocations of the library, destroys after an error, and joins are counted too. The functions exported here are not
//! part of CUDA.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Events that were created and not destroyed.
pub(crate) static LIVE_EVENTS: AtomicU64 = AtomicU64::new(0);
/// Allocations of `ncclMemAlloc` that were not freed.
pub(crate) static LIVE_MEMORY: AtomicU64 = AtomicU64::new(0);
/// Communicators that were destroyed after an error, which leaves a group of calls open on the thread.
pub(crate) static BAD_DESTROYS: AtomicU64 = AtomicU64::new(0);
/// Communicators that this process has joined, also by splits and shrinks.
pub(crate) static JOINED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Driver calls of this thread.
    static CALLS: Cell<u64> = const { Cell::new(0) };
    /// How often this thread has asked for the time between two events.
    static TIMES_READ: Cell<u64> = const { Cell::new(0) };
}

/// Counts that the calling thread asks for the time between two events.
pub(crate) fn note_time_read() {
    TIMES_READ.set(TIMES_READ.get() + 1);
}

/// Returns how often the calling thread has asked for the time between two events.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_times_read() -> u64 {
    TIMES_READ.get()
}

/// Counts one driver call of the calling thread.
pub(crate) fn note() {
    CALLS.set(CALLS.get() + 1);
}

/// Returns the number of driver calls that the calling thread has made.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_driver_calls() -> u64 {
    CALLS.get()
}

/// Returns the number of events of this process that were created and not destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_live_events() -> u64 {
    LIVE_EVENTS.load(Ordering::Relaxed)
}

/// Returns the number of allocations of `ncclMemAlloc` of this process that were not freed.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_live_memory() -> u64 {
    LIVE_MEMORY.load(Ordering::Relaxed)
}

/// Returns the number of communicators that this process has destroyed after an error.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_bad_destroys() -> u64 {
    BAD_DESTROYS.load(Ordering::Relaxed)
}

/// Returns the number of communicators that this process has joined.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_joined() -> u64 {
    JOINED.load(Ordering::Relaxed)
}

//! Calls functions of the program, as the driver does. They must not call CUDA or NCCL, since the driver may hold its
//! locks during the call ("CUDA User Objects" in the CUDA programming guide; `cuLaunchHostFunc` in the driver's
//! manual). A function that does so ends the process.

use crate::handles::end_process;
use std::cell::Cell;
use std::ffi::c_void;

pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

thread_local! {
    /// Whether the driver is calling a function of the program on this thread.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Calls `function` with `address`.
///
/// # Safety
/// The function may be called with this address now.
pub(crate) unsafe fn call(function: HostFunction, address: usize) {
    let before = INSIDE.replace(true);
    // SAFETY: the caller guarantees that `function` may be called with this address now; the address was exposed
    // (`expose_provenance`).
    unsafe { function(std::ptr::with_exposed_provenance_mut(address)) };
    INSIDE.set(before);
}

/// Ends the process if the driver is calling a function of the program on this thread.
pub(crate) fn check() {
    if INSIDE.get() {
        end_process("a function that the driver has called calls the driver or NCCL");
    }
}

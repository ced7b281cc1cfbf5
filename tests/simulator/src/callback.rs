//! Functions of the program's that the driver calls. They may not call CUDA or NCCL, since the driver may
//! hold locks of its own ("CUDA User Objects" in the CUDA programming guide; `cuLaunchHostFunc` in the
//! driver's manual). One that does ends the process.

use crate::handles::refuse;
use std::cell::Cell;
use std::ffi::c_void;

pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Calls it.
///
/// # Safety
/// The function may be called with this address now.
pub(crate) unsafe fn call(function: HostFunction, at: usize) {
    let before = INSIDE.replace(true);
    // SAFETY: the caller answers for this call of `function` with this address, which it has exposed
    // (`expose_provenance`).
    unsafe { function(std::ptr::with_exposed_provenance_mut(at)) };
    INSIDE.set(before);
}

/// Ends the process if such a function is on this thread's stack.
pub(crate) fn check() {
    if INSIDE.get() {
        refuse("a function that the driver has called calls the driver or NCCL");
    }
}

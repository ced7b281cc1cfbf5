//! Memory to which the library writes a handle, perhaps after the call that got its address has returned.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Memory on the heap for one handle.
///
/// The memory is in an `Arc`, not in a `Box`: each move of a `Box` asserts unique access to the contents, which would
/// invalidate the library's pointer to them.
#[derive(Clone, Default)]
pub(crate) struct HandleSlot(Arc<AtomicPtr<c_void>>);

impl HandleSlot {
    /// The pointer for the library. It is valid until the last clone of this value is dropped, even if the value moves.
    pub(crate) fn as_ptr(&self) -> *mut *mut c_void {
        self.0.as_ptr()
    }

    /// Returns the handle that the library has written; null if it has written none.
    pub(crate) fn handle(&self) -> *mut c_void {
        self.0.load(Ordering::Acquire)
    }

    /// Leaks the slot, since the library may write to it at any time.
    pub(crate) fn leak(self) {
        std::mem::forget(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This test is for Miri, which checks what a pointer may still access.
    #[test]
    fn a_handle_may_be_written_after_its_slot_was_moved() {
        let slot = HandleSlot::default();
        let at = slot.as_ptr();
        let moved = Box::new(slot);
        let mut written = 7u8;
        // SAFETY: `at` points into the slot's allocation, which `moved` keeps, and nothing else accesses
        // it now.
        unsafe { at.write((&raw mut written).cast()) };
        assert_eq!(moved.handle(), (&raw mut written).cast());
        let moved_again = *moved;
        // SAFETY: `at` points into the slot's allocation, which `moved_again` keeps, and nothing else accesses
        // it now.
        unsafe { at.write(std::ptr::null_mut()) };
        assert!(moved_again.handle().is_null());
    }
}

//! [`Mapping`]: addresses and atomic words in the memory of a segment.

use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::futex;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// A range of a segment that is mapped into this process until this value is dropped.
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the address belongs to this value, whichever thread has it. The bytes are accessed through the types that
// hand out references to them, each under its own contract.
unsafe impl Send for Mapping {}
// SAFETY: a reference gives addresses (`address`) and atomic words, which several threads may use at once.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of the file from `offset` on, which is a multiple of the page size.
    pub(super) fn new(file: &OwnedFd, offset: usize, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                MapFlags::SHARED,
                file,
                offset as u64,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Returns the address of the `len` bytes at `offset`.
    ///
    /// # Panics
    /// If they are not inside the mapping.
    pub(super) fn address(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "bytes outside the mapping"
        );
        // SAFETY: `offset` is at most `self.len` (checked), so the address is inside the mapping or one past its end.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// Returns the 32-bit word at `offset`; panics if it is not aligned or not inside the mapping.
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        assert_eq!(offset % 4, 0, "the word is not aligned");
        // SAFETY: these are four aligned bytes (checked) inside the mapping, which lives as long as `self`. All
        // processes access them only as an atomic word.
        unsafe { AtomicU32::from_ptr(self.address(offset, 4).cast()) }
    }

    /// Returns the 64-bit word at `offset`; panics if it is not aligned or not inside the mapping.
    pub(super) fn long(&self, offset: usize) -> &AtomicU64 {
        assert_eq!(offset % 8, 0, "the word is not aligned");
        // SAFETY: these are eight aligned bytes (checked) inside the mapping, which lives as long as `self`. All
        // processes access them only as an atomic word.
        unsafe { AtomicU64::from_ptr(self.address(offset, 8).cast()) }
    }

    /// Asks the system for huge pages; success does not mean that there are any.
    pub(super) fn request_huge_pages(&self) -> io::Result<()> {
        let start = self.start.as_ptr().cast();
        // SAFETY: the range is this whole mapping; the advice changes neither its bytes nor its address.
        unsafe { rustix::mm::madvise(start, self.len, Advice::LinuxHugepage)? };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: no reference into the mapping is left: atomic words borrow from `self`, and the slices that an owner
        // of this value makes of its addresses borrow from that owner.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap failed");
    }
}

/// Wakes all threads that sleep on this word.
pub(super) fn wake(flag: &AtomicU32) {
    // There may be no sleeper any more, which is not an error.
    let _ = futex::wake(flag, futex::Flags::empty(), i32::MAX as u32);
}

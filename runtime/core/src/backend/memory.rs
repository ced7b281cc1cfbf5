//! [`RemoteMemory`]: bytes that other ranks may read and write at any moment.
//!
//! Rust has no slice type for such bytes, so this module offers none: bytes are copied by atomic loads and
//! stores, up to eight at a time, or used in place as atomic integers. A copy is not one atomic step; order between
//! ranks comes from signals.
//!
//! So operations of several widths may access one address at once: for example, one copies eight bytes, and
//! another increments four of them. Rust's memory model, which is C++'s, does not define that. This module relies on
//! the processor instead, as processes that share memory must: each operation is one instruction on an
//! address that is a multiple of its width, and the processor's guarantees for such instructions do not
//! depend on the widths.

use crate::op::error::{Error, ErrorKind, Result};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// The bytes that a copy moves by one load or store of this memory, where its address is aligned.
const LONG: usize = size_of::<u64>();

/// Bytes that other ranks may read and write at any moment.
///
/// # Thread safety
/// All methods may be called from any thread at any time.
#[derive(Clone)]
pub struct RemoteMemory {
    start: NonNull<u8>,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: any thread may access the bytes, since all threads do so by atomic operations. Any thread may drop
// `owner`, which keeps the bytes mapped and is `Send + Sync`.
unsafe impl Send for RemoteMemory {}
// SAFETY: `&RemoteMemory` gives access to the bytes by atomic operations alone, and `owner` is `Send +
// Sync`.
unsafe impl Sync for RemoteMemory {}

impl RemoteMemory {
    /// Memory of `len` bytes at `start`.
    ///
    /// # Safety
    /// The bytes are initialized, readable and writable as long as `owner` is alive, and for that time
    /// this process accesses them only by atomic operations.
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, len, owner }
    }

    /// The size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the memory has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address, valid as long as `self` lives. Peers may write to the memory at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies the bytes from `offset` on to `into`.
    ///
    /// # Errors
    /// `InvalidArgument` if the range ends beyond the memory.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let from = self.range(offset, into.len())?;
        let lead = from.align_offset(LONG).min(into.len());
        let (first, rest) = into.split_at_mut(lead);
        let (words, last) = rest.as_chunks_mut::<LONG>();
        for (index, byte) in first.iter_mut().enumerate() {
            *byte = self.byte(offset + index).load(Ordering::Relaxed);
        }
        let start = offset + lead;
        for (index, word) in words.iter_mut().enumerate() {
            let long = self.long_at(start + index * LONG);
            *word = long.load(Ordering::Relaxed).to_ne_bytes();
        }
        let start = start + words.len() * LONG;
        for (index, byte) in last.iter_mut().enumerate() {
            *byte = self.byte(start + index).load(Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies `from` to the bytes from `offset` on.
    ///
    /// # Errors
    /// `InvalidArgument` if the range ends beyond the memory.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let to = self.range(offset, from.len())?;
        let lead = to.align_offset(LONG).min(from.len());
        let (first, rest) = from.split_at(lead);
        let (words, last) = rest.as_chunks::<LONG>();
        for (index, &byte) in first.iter().enumerate() {
            self.byte(offset + index).store(byte, Ordering::Relaxed);
        }
        let start = offset + lead;
        for (index, &word) in words.iter().enumerate() {
            let long = self.long_at(start + index * LONG);
            long.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        let start = start + words.len() * LONG;
        for (index, &byte) in last.iter().enumerate() {
            self.byte(start + index).store(byte, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The four bytes at `offset`; `None` unless they are inside the memory and aligned.
    pub fn word(&self, offset: usize) -> Option<&AtomicU32> {
        let address = self.range(offset, 4).ok()?.cast::<u32>();
        // SAFETY: `range` has checked that four bytes lie inside the memory, which `owner` keeps mapped as
        // long as `self` lives; aligned (checked here). This process accesses them only by atomic
        // operations (`new`).
        address
            .is_aligned()
            .then(|| unsafe { AtomicU32::from_ptr(address) })
    }

    /// The eight bytes at `offset`; `None` unless they are inside the memory and aligned.
    pub fn long(&self, offset: usize) -> Option<&AtomicU64> {
        let address = self.range(offset, 8).ok()?.cast::<u64>();
        // SAFETY: `range` has checked that eight bytes lie inside the memory, which `owner` keeps mapped as
        // long as `self` lives; aligned (checked here). This process accesses them only by atomic
        // operations (`new`).
        address
            .is_aligned()
            .then(|| unsafe { AtomicU64::from_ptr(address) })
    }

    /// Another handle for a part of this memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the part ends beyond the memory.
    pub fn part(&self, offset: usize, len: usize) -> Result<Self> {
        let start = self.range(offset, len)?;
        Ok(Self {
            start: NonNull::new(start).unwrap_or(self.start),
            len,
            owner: self.owner.clone(),
        })
    }

    /// Whether this is the only reference in this process to any part of the memory. If so, no former holder accesses
    /// the memory any more, and what former holders wrote is visible.
    pub fn is_alone(&self) -> bool {
        let is_alone = Arc::strong_count(&self.owner) == 1;
        // Other holders release their reference with `Release` order, and the count is read without order.
        fence(Ordering::Acquire);
        is_alone
    }

    /// The address at `offset`, if `len` bytes from there on lie inside the memory.
    fn range(&self, offset: usize, len: usize) -> Result<*mut u8> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "{len} bytes at offset {offset} reach beyond the memory, which has {} bytes",
                    self.len
                ),
            ));
        }
        // SAFETY: `offset` is at most `self.len` (checked above), so the address lies inside the memory or
        // is the one past its end.
        Ok(unsafe { self.start.as_ptr().add(offset) })
    }

    /// The byte at `offset`; the caller has had [`range`](Self::range) check that it lies inside the memory.
    fn byte(&self, offset: usize) -> &AtomicU8 {
        debug_assert!(offset < self.len);
        // SAFETY: `read` and `write` have had `range` check the byte, so it lies inside the memory, which
        // `owner` keeps mapped as long as `self` lives. This process accesses it only by atomic operations
        // (`new`).
        unsafe { AtomicU8::from_ptr(self.start.as_ptr().add(offset)) }
    }

    /// The eight bytes at `offset`, which is aligned; the caller has had [`range`](Self::range) check that they lie
    /// inside the memory.
    fn long_at(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset + LONG <= self.len);
        // SAFETY: `read` and `write` have had `range` check the eight bytes, so they lie inside the memory,
        // which `owner` keeps mapped as long as `self` lives. They begin at a multiple of eight: the callers
        // skip `lead` bytes first. This process accesses them only by atomic operations (`new`).
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }
}

impl fmt::Debug for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteMemory({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::UnsafeCell;

    struct Bytes(UnsafeCell<[u64; 8]>);
    // SAFETY: the array is only accessed through the atomic operations of `RemoteMemory`.
    unsafe impl Sync for Bytes {}

    fn memory() -> RemoteMemory {
        let owner = Arc::new(Bytes(UnsafeCell::new([0; 8])));
        let start = NonNull::new(owner.0.get()).unwrap().cast();
        // SAFETY: the array's 64 bytes are initialized, live as long as `owner`, and are accessed through
        // the result alone.
        unsafe { RemoteMemory::new(start, 64, owner) }
    }

    #[test]
    fn bytes_written_at_any_offset_are_read_back_there() {
        let bytes: Vec<u8> = (1..=64).collect();
        for offset in 0..20 {
            for len in 0..40 {
                let memory = memory();
                memory.write(offset, &bytes[..len]).unwrap();
                let mut back = vec![0; len];
                memory.read(offset, &mut back).unwrap();
                assert_eq!(back, bytes[..len]);
                let mut all = [0; 64];
                memory.read(0, &mut all).unwrap();
                assert_eq!(all.iter().filter(|&&byte| byte != 0).count(), len);
            }
        }
    }

    #[test]
    fn accesses_beyond_the_end_are_refused() {
        let memory = memory();
        assert!(memory.write(60, &[1; 5]).is_err());
        assert!(memory.write(usize::MAX, &[1; 2]).is_err());
        assert!(memory.read(64, &mut [0; 1]).is_err());
        assert!(memory.read(64, &mut []).is_ok());
        assert!(memory.word(62).is_none() && memory.word(1).is_none());
        assert!(memory.long(56).is_some() && memory.long(60).is_none());
        assert!(memory.part(60, 4).is_ok() && memory.part(60, 5).is_err());
    }
}

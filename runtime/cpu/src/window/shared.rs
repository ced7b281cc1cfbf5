//! Memory that is accessed only through [`RemoteMemory`]: shared with other processes, or given to a window.

use crate::registered::{Region, RegionHandle};
use rcomm_core::Buffer;
use rcomm_core::RemoteMemory;
use rcomm_core::Result;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// A mapping that holds no buffer of this process.
pub(super) struct SharedMemory(Region);

impl SharedMemory {
    /// Makes new memory, all zero.
    pub(super) fn create(len: usize) -> io::Result<Self> {
        Region::create(len).map(Self)
    }

    /// Maps the memory of another process of this host.
    pub(super) fn attach(handle: &RegionHandle) -> io::Result<Self> {
        Region::attach(handle).map(Self)
    }

    /// The handle by which other processes map this memory; only for memory that this process has made.
    pub(super) fn handle(&self) -> RegionHandle {
        self.0.handle()
    }

    /// Returns access to all of this memory.
    pub(super) fn access(self: &Arc<Self>) -> RemoteMemory {
        // SAFETY: the memory is mapped and initialized (the kernel zeroes it) until `self` is dropped. No buffer of
        // this process is in this mapping, so the process accesses it only through `RemoteMemory`.
        unsafe { RemoteMemory::new(self.0.start(), self.0.len(), self.clone()) }
    }
}

/// A buffer that was given to a window.
pub(super) struct WindowBuffer(Buffer<'static>);

impl WindowBuffer {
    /// Takes a buffer, and returns it with the window's access to its memory. The buffer lives at least as long as
    /// this access.
    ///
    /// # Errors
    /// `InvalidArgument` if the buffer is read-only.
    pub(super) fn from_buffer(mut memory: Buffer<'static>) -> Result<(Arc<Self>, RemoteMemory)> {
        let start = memory.as_mut_ptr()?;
        let start = NonNull::new(start).unwrap_or_else(NonNull::dangling);
        let len = memory.size_bytes();
        let kept = Arc::new(Self(memory));
        // SAFETY: start and length are those of a writable buffer in host memory. `kept` owns the buffer, and nothing
        // else uses it until no access is left (`into_buffer`).
        let access = unsafe { RemoteMemory::new(start, len, kept.clone()) };
        Ok((kept, access))
    }

    /// Returns the buffer; `None` if this process still has access to its memory elsewhere.
    pub(super) fn into_buffer(self: Arc<Self>) -> Option<Buffer<'static>> {
        Arc::into_inner(self).map(|kept| kept.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_memory_show_the_same_bytes() {
        let memory = Arc::new(SharedMemory::create(100).unwrap());
        let other = Arc::new(SharedMemory::attach(&memory.handle()).unwrap());
        memory.access().write(93, b"window!").unwrap();
        let mut bytes = [0; 7];
        other.access().read(93, &mut bytes).unwrap();
        assert_eq!(&bytes, b"window!");
    }
}

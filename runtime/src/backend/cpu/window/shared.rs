//! Memory of one rank that the other processes of its host can map: a sealed memfd. And any memory that
//! was given up to a window.
//!
//! Others open the file through `/proc/<pid>/fd/<n>`, which the kernel allows to processes of the same
//! user.

use crate::buffer::{Access, Buffer, Device, element_size};
use crate::error::{Error, ErrorKind, Result};
use crate::window::RemoteMemory;
use rcomm_recorder::model::DType;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// A mapping of such memory.
pub(super) struct SharedMemory {
    file: OwnedFd,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is memory of the process, usable from any thread under the rules of those who hand
// out access to it.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New memory, all zero.
    pub(super) fn create(len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("rcomm-window", flags)?;
        rustix::fs::ftruncate(&file, len.max(1) as u64)?;
        // Nobody can cut it and make the others fault.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Self::map(file, len)
    }

    /// The memory that another process of this host has under this number.
    pub(super) fn attach(pid: u32, number: i32, len: usize) -> io::Result<Self> {
        let path = format!("/proc/{pid}/fd/{number}");
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        let size = rustix::fs::fstat(&file)?.st_size;
        let sealed = rustix::fs::fcntl_get_seals(&file)?;
        if u64::try_from(size).ok() != Some(len.max(1) as u64)
            || !sealed.contains(SealFlags::SHRINK)
        {
            return Err(io::Error::other("the file is no window of this size"));
        }
        Self::map(file, len)
    }

    fn map(file: OwnedFd, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len.max(1),
                protection,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { file, start, len })
    }

    /// Under which number this process has it.
    pub(super) fn number(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// All of it as elements of one type.
    pub(super) fn into_buffer(self, dtype: DType, len: usize) -> Result<Buffer<'static>> {
        let start = self.start;
        if element_size(dtype)
            .checked_mul(len)
            .is_none_or(|bytes| bytes > self.len)
        {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{} bytes do not hold {len} elements of {dtype}", self.len),
            ));
        }
        let owner = Arc::new(Backing(self));
        // SAFETY: mapped and zeroed for at least this many elements (checked) while `owner` lives. It is
        // given to nobody else: what is inside a `Backing` has no other access.
        unsafe { Buffer::from_raw(start, len, dtype, Device::Cpu, Access::Write, owner) }
    }

    /// Access to all of it.
    pub(super) fn access(self: &Arc<Self>) -> RemoteMemory {
        // SAFETY: mapped, zeroed by the kernel, until `self` goes. A mapping that can be shared like this
        // has no buffer over it (`into_buffer` takes it), so atomic access is the only one.
        unsafe { RemoteMemory::new(self.start, self.len, self.clone()) }
    }
}

/// Memory that a buffer stands on.
struct Backing(SharedMemory);

/// The file that others can map to have all of this buffer's memory, and its bytes; `None` if there is none.
pub(super) fn file_of(memory: &Buffer<'_>) -> Option<(i32, u64)> {
    let Backing(backing) = memory.owner()?.downcast_ref()?;
    // What others map begins with the file.
    let is_whole = std::ptr::eq(backing.start.as_ptr(), memory.as_ptr());
    is_whole.then(|| (backing.number(), backing.len as u64))
}

/// A buffer that was given up to a window.
pub(super) struct Kept(Buffer<'static>);

impl Kept {
    /// Keeps the buffer as long as there is access to its memory.
    ///
    /// # Errors
    /// `InvalidArgument` if it may only be read.
    pub(super) fn give_up(mut memory: Buffer<'static>) -> Result<(Arc<Self>, RemoteMemory)> {
        let start = memory.as_mut_ptr()?;
        let start = NonNull::new(start).unwrap_or_else(NonNull::dangling);
        let len = memory.size_bytes();
        let kept = Arc::new(Self(memory));
        // SAFETY: start and length of a buffer of the host's that may be written, and that is in here from
        // now on, where nobody uses it: it comes out when no access is left (`into_buffer`).
        let access = unsafe { RemoteMemory::new(start, len, kept.clone()) };
        Ok((kept, access))
    }

    /// The buffer, unless somebody in this process still has access.
    pub(super) fn into_buffer(self: Arc<Self>) -> Option<Buffer<'static>> {
        Arc::into_inner(self).map(|kept| kept.0)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: whoever had access held an `Arc` of this.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len.max(1)) };
        debug_assert!(unmapped.is_ok(), "a mapping is unmapped once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_memory_show_the_same_bytes() {
        let own = Arc::new(SharedMemory::create(100).unwrap());
        let other = SharedMemory::attach(std::process::id(), own.number(), 100).unwrap();
        let other = Arc::new(other);
        own.access().write(93, b"window!").unwrap();
        let mut bytes = [0; 7];
        other.access().read(93, &mut bytes).unwrap();
        assert_eq!(&bytes, b"window!");
        assert!(SharedMemory::attach(std::process::id(), own.number(), 99).is_err());
    }
}

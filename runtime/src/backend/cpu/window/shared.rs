//! Memory of one rank that the other processes of its host can map: a sealed memfd.
//!
//! Others open it through `/proc/<pid>/fd/<n>`, which the kernel allows to processes of the same user.

use super::Kept;
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

    /// Bytes.
    pub(super) fn len(&self) -> usize {
        self.len
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
        let owner = Arc::new(self);
        // SAFETY: mapped and zeroed for at least this many elements (checked) while `owner` lives, and
        // given to nobody else.
        unsafe { Buffer::from_raw(start, len, dtype, Device::Cpu, Access::Write, owner) }
    }

    /// Access to all of it. Nobody holds a [`Buffer`](crate::Buffer) over it that is still in use.
    pub(super) fn access(self: &Arc<Self>) -> RemoteMemory {
        // SAFETY: mapped, zeroed by the kernel, until `self` goes. A buffer over it was made by
        // `CpuBackend::allocate` and given up to the window, so atomic access is the only one.
        unsafe { RemoteMemory::new(self.start, self.len, self.clone()) }
    }
}

/// Access to a caller's own memory, which `keeper` holds and nobody uses meanwhile.
pub(super) fn access_to(start: NonNull<u8>, len: usize, keeper: Arc<Kept>) -> RemoteMemory {
    // SAFETY: the start and length of the buffer that the keeper holds, given up to the window by its
    // owner; the keeper hands it to nobody before all access is gone.
    unsafe { RemoteMemory::new(start, len, keeper) }
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

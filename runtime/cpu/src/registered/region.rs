//! A sealed memfd mapped into this process: memory of one rank that the other ranks of the host can map.
//!
//! Other processes open the file through `/proc/<pid>/fd/<n>`, which the kernel allows only to processes of
//! the same user. The number of a descriptor may be reused, so the file is identified by its inode.

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

/// The values by which the processes of this host find a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionHandle {
    /// The process that made the region.
    pub(crate) pid: u32,
    /// The number of the region's file descriptor in that process.
    pub(crate) number: i32,
    /// The inode of the region's file, which no other region of the host has while this region exists; never 0.
    pub(crate) id: u64,
    /// The region's length in bytes.
    pub(crate) len: usize,
}

/// A sealed memfd, and the mapping of all of it in this process.
pub(crate) struct Region {
    file: OwnedFd,
    id: u64,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the address and the file belong to this value, whichever thread has it. The bytes are accessed only
// through the types that give access to them, each under its own contract.
unsafe impl Send for Region {}
// SAFETY: a reference gives the address, lengths and system calls on the file, which several threads may
// use at once.
unsafe impl Sync for Region {}

impl Region {
    /// Makes new memory, all zero.
    pub(crate) fn create(len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("rcomm-region", flags)?;
        rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&file, len.max(1) as u64)?;
        // The seals keep processes from truncating the file: access to a truncated part would end the other processes.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let id = rustix::fs::fstat(&file)?.st_ino;
        Self::map(file, id, len)
    }

    /// Maps the region of another process of this host.
    ///
    /// # Errors
    /// Those of the system; also if the handle now leads to another file, or if the file can be truncated.
    pub(crate) fn attach(handle: &RegionHandle) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{}", handle.pid, handle.number);
        // By now the path may lead to any file: the call must not block, and must not make a terminal the controlling
        // one.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        let found = rustix::fs::fstat(&file)?;
        let sealed = rustix::fs::fcntl_get_seals(&file)?;
        if found.st_ino != handle.id
            || u64::try_from(found.st_size).ok() != Some(handle.len.max(1) as u64)
            || !sealed.contains(SealFlags::SHRINK)
        {
            return Err(io::Error::other(
                "the file is not the memory to which the handle refers",
            ));
        }
        Self::map(file, handle.id, handle.len)
    }

    fn map(file: OwnedFd, id: u64, len: usize) -> io::Result<Self> {
        if isize::try_from(len).is_err() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
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
        Ok(Self {
            file,
            id,
            start,
            len,
        })
    }

    /// The values by which other processes find the region; only for a region that this process has made.
    pub(crate) fn handle(&self) -> RegionHandle {
        RegionHandle {
            pid: std::process::id(),
            number: self.file.as_raw_fd(),
            id: self.id,
            len: self.len,
        }
    }

    /// Address of the first byte in this process.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Asks the system for huge pages; success does not mean that there are any.
    pub(super) fn request_huge_pages(&self) -> io::Result<()> {
        let start = self.start.as_ptr().cast();
        // SAFETY: the range is this whole mapping; the advice changes neither its bytes nor its address.
        unsafe { rustix::mm::madvise(start, self.len.max(1), Advice::LinuxHugepage)? };
        Ok(())
    }

    /// Returns the memory to the system, even if other processes still have it mapped: they then read
    /// zeros.
    pub(super) fn empty(&self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Only whole pages are returned.
        let len = self.len.max(1).next_multiple_of(rustix::param::page_size());
        // A file that cannot be emptied is freed with its last mapping.
        let _ = rustix::fs::fallocate(&self.file, flags, 0, len as u64);
    }

    /// Whether the file has no memory: its owner has [emptied](Self::empty) it, or no process has used it yet.
    pub(super) fn is_empty(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|found| found.st_blocks == 0)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping that `map` made, and it is unmapped once, here. The types that give access
        // to its bytes own this value (`Backing`, `MappedRegion`, `SharedMemory`), so no access is left.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len.max(1)) };
        debug_assert!(unmapped.is_ok(), "munmap failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_file_of_the_handle_is_mapped() {
        let region = Region::create(100).unwrap();
        let handle = region.handle();
        assert!(Region::attach(&handle).is_ok());
        assert!(Region::attach(&RegionHandle { len: 99, ..handle }).is_err());
        let id = handle.id ^ 1;
        assert!(Region::attach(&RegionHandle { id, ..handle }).is_err());
        // Another region of the same length, as if it had reused the descriptor's number.
        let other = Region::create(100).unwrap();
        let number = other.handle().number;
        assert!(Region::attach(&RegionHandle { number, ..handle }).is_err());
    }

    #[test]
    fn emptied_memory_is_zero_in_other_mappings() {
        let region = Region::create(5000).unwrap();
        let other = Region::attach(&region.handle()).unwrap();
        // SAFETY: byte 4,999 of 5,000, which nothing else uses in this mapping.
        unsafe { region.start().as_ptr().add(4999).write(7) };
        assert!(!other.is_empty());
        // SAFETY: byte 4,999 of 5,000, initialized by the file, and not written during the read.
        assert_eq!(unsafe { other.start().as_ptr().add(4999).read() }, 7);
        region.empty();
        assert!(other.is_empty());
        // SAFETY: byte 4,999 of 5,000, initialized by the file, and not written during the read.
        assert_eq!(unsafe { other.start().as_ptr().add(4999).read() }, 0);
    }
}

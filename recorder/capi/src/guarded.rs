//! A recorder that a forked child may inherit, where it does nothing.
//!
//! The ring's memory is not inherited by fork, so touching it in the child would end the child. Getting the
//! process id costs a system call, which takes longer than a record; so the id is kept in one word of memory
//! that the kernel clears in every child (`MADV_WIPEONFORK`).

use rcomm_recorder::Error;
use rcomm_recorder::record::FlightRecorder;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::io::ErrorKind;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The id of this process, in memory that the kernel clears in a forked child.
struct Owner(&'static AtomicU64);

impl Owner {
    /// The word of this process; `None` if the kernel cannot clear it (before Linux 4.14).
    fn of_process() -> Option<&'static Self> {
        static OWNER: OnceLock<Option<Owner>> = OnceLock::new();
        OWNER.get_or_init(Self::map).as_ref()
    }

    fn map() -> Option<Self> {
        let bytes = rustix::param::page_size();
        // SAFETY: the kernel chooses a fresh range of this process, which is never unmapped.
        let start = unsafe {
            mm::mmap_anonymous(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let start = start.ok()?;
        // SAFETY: the advice changes what a child finds in this range and nothing in this process.
        unsafe { mm::madvise(start, bytes, Advice::LinuxWipeOnFork) }.ok()?;
        // SAFETY: the range is page-aligned, readable, writable, zeroed, and stays mapped.
        Some(Self(unsafe { AtomicU64::from_ptr(start.cast()) }))
    }
}

/// A recorder that belongs to the process that made it.
///
/// In a forked child [`get`](Self::get) returns `None`, and dropping it touches nothing. The child can create its own
/// recorder, even while it still has this one.
#[derive(Debug)]
pub struct ForkGuarded {
    recorder: ManuallyDrop<FlightRecorder>,
    /// The id of the process that made the recorder.
    process: u64,
    /// The id of this process; in a forked child 0, or the child's own id once it has made a recorder.
    word: &'static AtomicU64,
}

impl ForkGuarded {
    /// Guards a recorder that this process has just created. If that fails, its ring is removed: readers would take the
    /// file for the record of a rank that died.
    ///
    /// # Errors
    /// If the kernel cannot mark memory to be cleared in a forked child (before Linux 4.14).
    pub fn new(recorder: FlightRecorder) -> Result<Self, Error> {
        Self::with_owner(recorder, Owner::of_process())
    }

    fn with_owner(recorder: FlightRecorder, owner: Option<&'static Owner>) -> Result<Self, Error> {
        let Some(Owner(word)) = owner else {
            // A file that cannot be removed is left: the error below matters more.
            let _ = recorder.discard();
            let action =
                "mark memory to be cleared in forked children, as Linux 4.14 and later can";
            return Err(Error::Io {
                what: action.to_owned(),
                source: ErrorKind::Unsupported.into(),
            });
        };
        let process = u64::from(std::process::id());
        // The word is 0 before the first recorder of this process, also in a child.
        word.store(process, Ordering::Relaxed);
        Ok(Self {
            recorder: ManuallyDrop::new(recorder),
            process,
            word,
        })
    }

    /// The recorder; `None` in a forked child.
    #[inline]
    pub fn get(&self) -> Option<&FlightRecorder> {
        (self.word.load(Ordering::Relaxed) == self.process).then_some(&self.recorder)
    }
}

impl Drop for ForkGuarded {
    fn drop(&mut self) {
        if self.get().is_some() {
            // SAFETY: the recorder is dropped once, here, and never in a child, where the addresses of its
            // mapping may hold something else.
            unsafe { ManuallyDrop::drop(&mut self.recorder) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::record::{Placement, RecorderConfig};

    #[test]
    fn a_recorder_that_cannot_be_guarded_leaves_no_ring() {
        let directory = tempfile::tempdir().expect("a folder");
        let config = RecorderConfig {
            placement: Placement::Dir(directory.path().to_owned()),
            ..RecorderConfig::new("job", 0, 1)
        };
        let recorder = FlightRecorder::create(&config).expect("a ring");
        let ring = recorder.storage().path().expect("a file").to_owned();
        assert!(ring.exists());
        let refused = ForkGuarded::with_owner(recorder, None).expect_err("no owner");
        assert!(refused.to_string().contains("Linux 4.14"), "{refused}");
        assert!(!ring.exists());
    }
}

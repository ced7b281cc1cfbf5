//! The memory of a ring's owner: mapped from a file, or anonymous.
//!
//! The `unsafe` here is the system calls on a mapping, and the view of it as atomic words.
//! [`directory`](super::directory) decides which file is mapped. A file that is truncated while it is mapped does no
//! harm ([`truncation`](super::truncation)). Readers map nothing ([`view`](super::view)).

#![allow(unsafe_code)]

use super::truncation::TruncationGuard;
use crate::record::config::Touch;
use crate::record::sync::{self, Memory};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A mapping of whole words.
#[derive(Debug)]
struct Pages {
    start: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: this value owns the pages until it is dropped, and they are accessed only through atomics,
// which any thread may use.
unsafe impl Send for Pages {}
// SAFETY: shared references give access only to atomics (see `first_words`).
unsafe impl Sync for Pages {}

impl Pages {
    fn map(
        file: Option<BorrowedFd<'_>>,
        bytes: usize,
        prot: ProtFlags,
        flags: MapFlags,
    ) -> io::Result<Self> {
        let words = bytes / 8;
        if words == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        // SAFETY: the kernel chooses a fresh range, so no existing mapping is replaced.
        let start = unsafe {
            match file {
                Some(file) => mm::mmap(ptr::null_mut(), words * 8, prot, flags, file, 0)?,
                None => mm::mmap_anonymous(ptr::null_mut(), words * 8, prot, flags)?,
            }
        };
        let start = NonNull::new(start.cast())
            .ok_or_else(|| io::Error::other("the kernel mapped page zero"))?;
        Ok(Self { start, words })
    }

    /// The first words, at most as many as there are.
    #[inline]
    fn first_words(&self, words: usize) -> &[AtomicU64] {
        let words = words.min(self.words);
        // SAFETY: `start` is page-aligned and `self.words` words from it stay mapped, initialized (zero or
        // the file's) and readable until `self` is dropped. Another process may store there at any time, but the words
        // are accessed only as atomics, and every value of a word is valid.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), words) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the range came from mmap with this length, and no reference outlives `self`. An
        // error would mean that it is not mapped, and then there is nothing to do.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.words * 8) };
    }
}

/// The owner's mapping: read and written, not inherited by fork.
///
/// Its file may be reserved in steps ([`admit`](Self::admit)); words that are not reserved yet cannot be
/// accessed.
#[derive(Debug)]
pub(crate) struct Map {
    /// The first field, so that it is dropped before the mapping ends. `None` for anonymous memory.
    guard: Option<TruncationGuard>,
    pages: Pages,
    /// Number of words that may be used.
    usable: AtomicUsize,
}

impl Map {
    /// Zeroed memory of this process alone.
    pub(crate) fn anonymous(bytes: usize, touch: Touch) -> io::Result<Self> {
        let map = Self::new(None, bytes, MapFlags::PRIVATE, touch)?;
        map.admit(bytes / 8);
        Ok(map)
    }

    /// Maps the first `bytes` of an open file, which must be at least as long. No words are admitted yet.
    pub(crate) fn of_file(file: BorrowedFd<'_>, bytes: usize, touch: Touch) -> io::Result<Self> {
        let mut map = Self::new(Some(file), bytes, MapFlags::SHARED, touch)?;
        let start = map.pages.start.as_ptr().expose_provenance();
        map.guard = Some(TruncationGuard::of(start, map.pages.words * 8));
        Ok(map)
    }

    /// Whether the file was found to be truncated. The pages that it lacked are then in this process's memory only.
    pub(crate) fn is_truncated(&self) -> bool {
        self.guard
            .as_ref()
            .is_some_and(TruncationGuard::has_replaced)
    }

    fn new(
        file: Option<BorrowedFd<'_>>,
        bytes: usize,
        mut flags: MapFlags,
        touch: Touch,
    ) -> io::Result<Self> {
        flags.set(MapFlags::POPULATE, touch == Touch::AtOnce);
        let pages = Pages::map(file, bytes, ProtFlags::READ | ProtFlags::WRITE, flags)?;
        // A child that is forked from a rank must not write to its record. It has no use for this value either: between
        // a fork of a process with threads and the exec of another program, only async-signal-safe functions may be
        // called.
        // SAFETY: this advice changes what a child inherits and nothing in this process.
        unsafe {
            mm::madvise(
                pages.start.as_ptr().cast(),
                pages.words * 8,
                Advice::LinuxDontFork,
            )?;
        }
        Ok(Self {
            guard: None,
            pages,
            usable: AtomicUsize::new(0),
        })
    }

    /// Admits the use of the first `words` words.
    pub(crate) fn admit(&self, words: usize) {
        let words = words.min(self.pages.words);
        self.usable.fetch_max(words, Ordering::Release);
    }

    /// Causes the page faults of these words without changing them.
    pub(crate) fn touch(&self, words: std::ops::Range<usize>) {
        const PAGE: usize = 4096 / 8;
        for word in self.words()[words].iter().step_by(PAGE) {
            // A compare-exchange needs a writable page whether or not it succeeds. An addition of 0 does not:
            // the compiler turns it into a load.
            let _ = word.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl Memory for Map {
    type Word = AtomicU64;
    const TRIES: u32 = sync::TRIES;

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        self.pages.first_words(self.usable.load(Ordering::Acquire))
    }

    #[inline]
    fn fence(&self, order: Ordering) {
        sync::fence(order);
    }
}

//! The memory of an allocated buffer: a region of this rank to which other ranks may get access, and the revocation
//! of that access.

use super::region::{Region, RegionHandle};
use rcomm_core::backend::support::element_size;
use rcomm_core::{Access, Buffer, Device};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::DType;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The backings of this rank's buffers, by address. A backing is removed when it is dropped.
#[derive(Default)]
pub(super) struct LiveBackings(Mutex<BTreeMap<usize, Weak<Backing>>>);

impl LiveBackings {
    /// Adds the backing whose memory begins at this address.
    pub(super) fn add(&self, start: usize, backing: Weak<Backing>) {
        self.lock().insert(start, backing);
    }

    /// Returns the backing that contains all of these bytes, and their range in it.
    pub(super) fn find(&self, bytes: Range<usize>) -> Option<(Arc<Backing>, Range<usize>)> {
        let backing = {
            let live = self.lock();
            let (_, nearest) = live.range(..=bytes.start).next_back()?;
            // The reference outlives the guard: dropping the last reference takes the lock.
            nearest.upgrade()
        }?;
        let start = backing.region().start().addr().get();
        let inside = bytes.start.checked_sub(start)?..bytes.end.checked_sub(start)?;
        (inside.end <= backing.region().len()).then_some((backing, inside))
    }

    fn forget(&self, start: usize) {
        self.lock().remove(&start);
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Weak<Backing>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory of one allocated buffer.
pub(crate) struct Backing {
    region: Region,
    live: Weak<LiveBackings>,
    /// The id of the process that made the memory.
    maker: u32,
    /// Whether other ranks may have the memory mapped for collectives.
    is_lent: AtomicBool,
    /// Whether the memory was part of a window. Other ranks may then keep it mapped without limit.
    is_in_window: AtomicBool,
    /// Whether part of the memory was replaced by private memory of this process.
    is_cut: AtomicBool,
}

impl Backing {
    /// Makes new memory, all zero.
    pub(super) fn create(len: usize, live: Weak<LiveBackings>) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            region: Region::create(len)?,
            live,
            maker: std::process::id(),
            is_lent: AtomicBool::new(false),
            is_in_window: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
        }))
    }

    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    /// Makes a buffer of the first `len` elements, for the caller that has just made the backing.
    ///
    /// # Errors
    /// `InvalidArgument` if the memory is smaller, or there is another reference to the backing.
    pub(super) fn into_buffer(
        self: Arc<Self>,
        dtype: DType,
        len: usize,
    ) -> Result<Buffer<'static>> {
        let bytes = element_size(dtype).checked_mul(len);
        if Arc::strong_count(&self) != 1 || bytes.is_none_or(|bytes| bytes > self.region.len()) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "{} bytes do not hold {len} elements of {dtype}",
                    self.region.len()
                ),
            ));
        }
        let start = self.region.start();
        // SAFETY: the memory is mapped and initialized for at least this many elements (checked) as long as `self`
        // lives. No buffer was made of it before (checked). Later owners of the backing access its bytes only
        // through a loan of this buffer (`Exposed`), and other processes write to them only while a loan allows it.
        unsafe { Buffer::from_raw(start, len, dtype, Device::Cpu, Access::Write, self) }
    }

    /// Returns the handle by which other ranks map a buffer's memory for a window, and notes that they may. `None` if a
    /// group did not allocate the buffer, if the buffer does not begin where the memory begins, or if pages were
    /// [cut off](Self::cut_off).
    pub(crate) fn for_window(memory: &Buffer<'_>) -> Option<RegionHandle> {
        let backing = memory.owner()?.downcast_ref::<Self>()?;
        let begins = std::ptr::eq(backing.region.start().as_ptr(), memory.as_ptr());
        if !begins || backing.is_cut.load(Ordering::Acquire) {
            return None;
        }
        backing.is_in_window.store(true, Ordering::Release);
        Some(backing.region.handle())
    }

    /// Returns the handle by which other ranks map these bytes. `None` if there are no bytes, if their pages contain
    /// other bytes, or if pages were [cut off](Self::cut_off).
    pub(super) fn whole_pages(&self, bytes: &Range<usize>) -> Option<RegionHandle> {
        let page = rustix::param::page_size();
        let is_whole = bytes.start.is_multiple_of(page)
            && (bytes.end.is_multiple_of(page) || bytes.end == self.region.len());
        (is_whole && !bytes.is_empty() && !self.is_cut.load(Ordering::Acquire))
            .then(|| self.region.handle())
    }

    /// Records that other ranks may have the memory mapped from now on.
    pub(super) fn lend(&self) {
        self.is_lent.store(true, Ordering::Release);
    }

    /// Replaces these bytes with private memory of the same contents, so that processes that have the file mapped
    /// cannot change them any more. The region is not offered again.
    ///
    /// # Safety
    /// `place` is the address, in this region, of `len` bytes that were lent ([`Exposed`](super::Exposed)) and are
    /// [whole pages](Self::whole_pages). No thread of this process writes to them during the call.
    pub(super) unsafe fn cut_off(&self, place: NonNull<u8>, len: usize) {
        self.is_cut.store(true, Ordering::Release);
        let Ok(layout) = Layout::from_size_align(len, 1) else {
            return;
        };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
        let private = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                layout.size(),
                protection,
                MapFlags::PRIVATE,
            )
        };
        let moved = private.and_then(|private| {
            // SAFETY: the caller guarantees that `len` bytes are readable at `place`, the beginning of a page.
            // `private` is a mapping of the same length, which also begins with a page, and nothing else uses it.
            unsafe { copy_while_written(place, private.cast(), layout.size()) };
            // SAFETY: `private` is a mapping of this length that nothing else uses yet. It replaces whole pages (the
            // last one may extend beyond the region's end, where no bytes are) in one step for all threads of this
            // process. It contains the same bytes, since the caller guarantees that no thread of this process
            // writes to them during the call.
            unsafe {
                rustix::mm::mremap_fixed(
                    private,
                    layout.size(),
                    layout.size(),
                    MremapFlags::MAYMOVE,
                    place.as_ptr().cast(),
                )
            }
        });
        if moved.is_err() {
            // The system has no memory or no mapping left. The process ends, as after any allocation failure:
            // otherwise a caller would get memory back to which another rank may still write.
            std::alloc::handle_alloc_error(layout);
        }
    }
}

/// Copies bytes to which other processes may write during the copy. It copies 64 bits at a time, and makes no
/// reference, since the caller may hold a shared or an exclusive reference to the bytes.
///
/// # Safety
/// `len` bytes are readable at `from` and writable at `to`, both aligned like a `u64`. Nothing else uses those at
/// `to`.
unsafe fn copy_while_written(from: NonNull<u8>, to: *mut u8, len: usize) {
    const WORD: usize = size_of::<u64>();
    let words = len / WORD;
    for index in 0..words {
        // SAFETY: the word is inside both ranges, and aligned. If another process writes it at the same time, the
        // copy may be a mix of old and new bytes.
        unsafe {
            let word = from.cast::<u64>().add(index).read_volatile();
            to.cast::<u64>().add(index).write(word);
        }
    }
    for offset in words * WORD..len {
        // SAFETY: `offset` is less than `len`, so the byte is inside both ranges. If another process writes it at the
        // same time, the copy is the old or the new byte.
        unsafe { to.add(offset).write(from.add(offset).read_volatile()) };
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // The entry is removed before the address can be reused.
        if let Some(live) = self.live.upgrade() {
            live.forget(self.region.start().addr().get());
        }
        // A forked child inherits the mapping and a copy of the buffer, but the memory is its parent's.
        let is_maker = self.maker == std::process::id();
        let is_lent = self.is_lent.load(Ordering::Acquire);
        if is_maker && is_lent && !self.is_in_window.load(Ordering::Acquire) {
            // Other ranks keep the region mapped until they find it empty, but it then occupies no memory.
            self.region.empty();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_that_made_memory_empties_it() {
        let own_pid = std::process::id();
        for (maker, is_empty) in [(own_pid, true), (own_pid + 1, false)] {
            let mut backing = Backing::create(5000, Weak::new()).unwrap();
            Arc::get_mut(&mut backing).unwrap().maker = maker;
            backing.lend();
            let other = Region::attach(&backing.region().handle()).unwrap();
            // SAFETY: the mapping is 5,000 bytes long, and no reference to its bytes exists.
            unsafe { other.start().as_ptr().write(7) };
            drop(backing);
            assert_eq!(other.is_empty(), is_empty);
        }
    }

    #[test]
    fn bytes_that_were_cut_off_are_equal_and_private() {
        let page = rustix::param::page_size();
        let backing = Backing::create(3 * page + 5, Weak::new()).unwrap();
        let other = Region::attach(&backing.region().handle()).unwrap();
        let byte = |region: &Region, offset: usize| {
            // SAFETY: the callers pass offsets within the region's `3 * page + 5` bytes; no reference to
            // them exists.
            unsafe { region.start().as_ptr().add(offset) }
        };
        let cut = page..3 * page + 5;
        for offset in [0, cut.start, cut.end - 1] {
            // SAFETY: `offset` is less than the region's length, and nothing else uses the byte.
            unsafe { byte(backing.region(), offset).write(7) };
        }
        let place = NonNull::new(byte(backing.region(), cut.start)).unwrap();
        // SAFETY: `place` is the beginning of a page, `cut` reaches to the end of the region, and no other
        // thread uses either.
        unsafe { backing.cut_off(place, cut.len()) };
        for offset in [0, cut.start, cut.end - 1] {
            // SAFETY: `offset` is less than the region's length, and nothing uses the byte in this mapping at
            // the same time.
            unsafe { byte(&other, offset).write(9) };
            let expected = if cut.contains(&offset) { 7 } else { 9 };
            // SAFETY: `offset` is less than the region's length; the byte is initialized, as the file's is.
            assert_eq!(unsafe { byte(backing.region(), offset).read() }, expected);
        }
        assert!(backing.whole_pages(&(0..page)).is_none());
    }
}

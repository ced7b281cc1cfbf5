//! Device memory, which is memory of the host here ("Memory Management" in the driver's manual).

use super::stream::synchronize;
use super::{
    INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, check_capture, current_device, put,
    stream_of,
};
use crate::callback;
use crate::handles::end_process;
use crate::stream::lock;
use crate::trouble;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::sync::{Arc, Mutex};

const ALIGNMENT: usize = 4096;

struct Allocation {
    size: usize,
    device: c_int,
    kind: Kind,
}

enum Kind {
    /// Memory of `cuMemAlloc` and `cuMemAllocAsync`.
    Plain(Layout),
    /// Memory of `ncclMemAlloc`, which uses the virtual memory API: a handle that other processes can map.
    Shared(Shared),
}

static MEMORY: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());

/// Sizes of all mappings, by address.
static MAPPED: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// A file in memory, mapped here.
pub(crate) struct Shared {
    file: OwnedFd,
    mapping: Mapping,
}

impl Shared {
    /// New memory, all zero.
    pub(crate) fn create(size: usize) -> io::Result<Self> {
        let file = memfd_create("rcomm-sim", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, size as u64)?;
        let mapping = Mapping::of(&file, size)?;
        Ok(Self { file, mapping })
    }

    pub(crate) fn address(&self) -> u64 {
        self.mapping.address()
    }

    /// The file's descriptor in this process, and its length.
    pub(crate) fn file(&self) -> (c_int, u64) {
        (self.file.as_raw_fd(), self.mapping.size as u64)
    }
}

/// Part of this process's memory that is backed by a file.
pub(crate) struct Mapping {
    at: usize,
    size: usize,
}

impl Mapping {
    fn of(file: &OwnedFd, size: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a range where nothing is, and the file and its length are checked by
        // the kernel.
        let at = unsafe {
            mmap(
                std::ptr::null_mut(),
                size.max(1),
                protection,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        let at = at.expose_provenance();
        lock(&MAPPED).insert(at as u64, size);
        Ok(Self { at, size })
    }

    /// Maps the file at `path`, which holds the memory of another process.
    pub(crate) fn open(path: &str) -> io::Result<Self> {
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let size = rustix::fs::fstat(&file)?.st_size;
        Self::of(&file, usize::try_from(size).unwrap_or(0))
    }

    pub(crate) fn address(&self) -> u64 {
        self.at as u64
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        lock(&MAPPED).remove(&self.address());
        let at = std::ptr::with_exposed_provenance_mut(self.at);
        // SAFETY: `of` mapped this range, which is unmapped once, here. No reference to it exists: users
        // have its address only, and keep the mapping alive or look the address up before each use
        // (`check_reach`). A program that frees what a device still uses may crash, as with the driver.
        let _ = unsafe { munmap(at, self.size.max(1)) };
    }
}

/// New memory of the current device, all zero; `None` if there is none left.
pub(crate) fn allocate(size: usize) -> Option<u64> {
    callback::check();
    let layout = Layout::from_size_align(size.max(1), ALIGNMENT).ok()?;
    if !trouble::next_allocation_fits() {
        return None;
    }
    // SAFETY: the layout's size is at least 1.
    let at = unsafe { alloc_zeroed(layout) } as u64;
    if at == 0 {
        return None;
    }
    Some(note(at, layout.size(), Kind::Plain(layout)))
}

/// Works as [`allocate`], but returns memory of which windows can be made.
pub(crate) fn allocate_shared(size: usize) -> Option<u64> {
    callback::check();
    if !trouble::next_allocation_fits() {
        return None;
    }
    let size = size.next_multiple_of(ALIGNMENT);
    let shared = Shared::create(size).ok()?;
    Some(note(shared.address(), size, Kind::Shared(shared)))
}

/// Enters memory of the current device into the table; returns its address.
fn note(at: u64, size: usize, kind: Kind) -> u64 {
    let device = current_device();
    lock(&MEMORY).insert(at, Allocation { size, device, kind });
    at
}

/// Frees what [`allocate`] or [`allocate_shared`] made; `false` for anything else. Ends the process if the
/// memory is registered with a communicator: the network would go on using it.
pub(crate) fn free(at: u64) -> bool {
    callback::check();
    let Some(allocation) = lock(&MEMORY).remove(&at) else {
        return false;
    };
    if crate::nccl::is_registered(at, allocation.size as u64) {
        end_process(&format!("{at:#x} is freed and was not deregistered"));
    }
    match allocation.kind {
        // SAFETY: `allocate` got this address with this layout, and it was still in the map, so it is freed
        // once. The program has ended its work on it, as the driver asks.
        Kind::Plain(layout) => unsafe { dealloc(at as *mut u8, layout) },
        Kind::Shared(shared) => drop(shared),
    }
    true
}

/// The file behind these bytes ([`Shared::file`]), and their offset in it; `None` if they are not from
/// [`allocate_shared`].
pub(crate) fn file_of(at: u64, size: u64) -> Option<((c_int, u64), u64)> {
    let memory = lock(&MEMORY);
    let (start, held) = memory.range(..=at).next_back()?;
    let Kind::Shared(shared) = &held.kind else {
        return None;
    };
    (at + size <= start + held.size as u64).then(|| (shared.file(), at - start))
}

/// The device of an address, counted from 0; `None` unless all these bytes are in one allocation of its memory.
pub(crate) fn device_of(at: u64, size: u64) -> Option<c_int> {
    let memory = lock(&MEMORY);
    let (start, held) = memory.range(..=at).next_back()?;
    let end = start + held.size as u64;
    (at < end && at.checked_add(size)? <= end).then_some(held.device)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(out: *mut u64, size: usize) -> c_int {
    crate::calls::note();
    if size == 0 {
        return INVALID_VALUE;
    }
    let allowed = check_capture();
    if allowed != SUCCESS {
        return allowed;
    }
    match allocate(size) {
        None => OUT_OF_MEMORY,
        // SAFETY: `out` is null, which `put` refuses, or the caller lets an address be written there.
        Some(at) => unsafe { put(out, at) },
    }
}

/// Allocates at once, which the order of the stream permits ("Stream Ordered Memory Allocator" in the driver's
/// manual). An allocation in a capture is not simulated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(out: *mut u64, size: usize, stream: *mut c_void) -> c_int {
    crate::calls::note();
    if size == 0 {
        return INVALID_VALUE;
    }
    if stream_of(stream).capture().is_some() {
        return NOT_SUPPORTED;
    }
    match allocate(size) {
        None => OUT_OF_MEMORY,
        // SAFETY: `out` is null, which `put` refuses, or the caller lets an address be written there.
        Some(at) => unsafe { put(out, at) },
    }
}

/// Frees when the stream reaches this point, without blocking.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(at: u64, stream: *mut c_void) -> c_int {
    crate::calls::note();
    let stream = stream_of(stream);
    if stream.capture().is_some() {
        return NOT_SUPPORTED;
    }
    if !lock(&MEMORY).contains_key(&at) {
        return INVALID_VALUE;
    }
    stream.push(Arc::new(move || {
        if !free(at) {
            end_process(&format!("{at:#x} is freed twice"));
        }
    }));
    SUCCESS
}

/// Pinned memory of the host, by address, with its layout.
static PINNED: Mutex<BTreeMap<usize, Layout>> = Mutex::new(BTreeMap::new());

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(
    out: *mut *mut c_void,
    size: usize,
    _flags: c_uint,
) -> c_int {
    crate::calls::note();
    let Ok(layout) = Layout::from_size_align(size.max(1), ALIGNMENT) else {
        return INVALID_VALUE;
    };
    // SAFETY: the layout's size is at least 1.
    let at = unsafe { alloc_zeroed(layout) };
    if at.is_null() {
        return OUT_OF_MEMORY;
    }
    lock(&PINNED).insert(at.expose_provenance(), layout);
    // SAFETY: `out` is null, which `put` refuses, or the caller lets an address be written there.
    unsafe { put(out, at.cast()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(at: *mut c_void) -> c_int {
    crate::calls::note();
    match lock(&PINNED).remove(&at.addr()) {
        None => INVALID_VALUE,
        Some(layout) => {
            // SAFETY: `cuMemHostAlloc` got this address with this layout, and it was still in the map, so
            // it is freed once. The program has ended its work on it, as the driver asks.
            unsafe { dealloc(at.cast(), layout) };
            SUCCESS
        }
    }
}

/// Whether these bytes of the host are pinned.
fn is_pinned(at: usize, size: usize) -> bool {
    let pinned = lock(&PINNED);
    let below = pinned.range(..=at).next_back();
    below.is_some_and(|(start, layout)| at + size <= start + layout.size())
}

/// Waits for the device. The manual implies this by its exception for other memory: "This API will not perform any
/// implicit synchronization when the pointer was allocated with `cuMemAllocAsync`".
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(at: u64) -> c_int {
    crate::calls::note();
    let allowed = check_capture();
    if allowed != SUCCESS {
        return allowed;
    }
    let device = match lock(&MEMORY).get(&at) {
        Some(allocation) => allocation.device,
        None => return INVALID_VALUE,
    };
    synchronize(device + 1);
    if free(at) { SUCCESS } else { INVALID_VALUE }
}

/// Ends the process for memory that does not belong to a device, or was freed: the device would end the context
/// (`CUDA_ERROR_ILLEGAL_ADDRESS`).
pub(crate) fn check(at: usize, length: usize) {
    if length > 0 && device_of(at as u64, length as u64).is_none() {
        end_process(&format!(
            "{length} bytes at {at:#x} are not live memory of a device"
        ));
    }
}

/// Whether a device reaches all these bytes: they are memory of a device, or memory of another process that is
/// mapped here.
fn is_reached(at: u64, size: usize) -> bool {
    if device_of(at, size as u64).is_some() {
        return true;
    }
    let mapped = lock(&MAPPED);
    let below = mapped.range(..=at).next_back();
    below.is_some_and(|(start, &held)| (at - start) as usize + size <= held)
}

/// Works as [`check`], but allows memory of another process as well.
fn check_reach(at: usize, size: usize) {
    if size > 0 && !is_reached(at as u64, size) {
        end_process(&format!(
            "{size} bytes at {at:#x}, which are copied, are not live memory that a device reaches"
        ));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    crate::calls::note();
    // "The function will return once the pageable buffer has been copied to the staging memory" ("API
    // synchronization behavior" in the driver's manual); pinned memory is copied at once as well.
    // SAFETY: the caller's `from` is not null and holds `size` bytes that stay as they are during this
    // call, which copies them.
    let staged = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), size) }.to_vec();
    stream_of(stream).push(Arc::new(move || {
        check(to as usize, staged.len());
        // SAFETY: the bytes at `to` are live memory of a device (`check`), and `staged` is this closure's
        // own, so the two do not overlap. The caller keeps its other accesses apart by the order of
        // streams.
        unsafe { std::ptr::copy_nonoverlapping(staged.as_ptr(), to as *mut u8, staged.len()) };
    }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    crate::calls::note();
    let (to, stream) = (to.expose_provenance(), stream_of(stream));
    stream.push(Arc::new(move || {
        check_reach(from as usize, size);
        // SAFETY: the bytes at `from` are live memory that a device reaches (`check_reach`); the caller
        // keeps `size` bytes of the host at `to` for this copy alone until it is done. They may overlap.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) };
    }));
    // "The function will return only once the copy has completed" (the same section): so for pageable memory only.
    if stream.capture().is_none() && !is_pinned(to, size) {
        stream.synchronize();
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(
    to: u64,
    value: u8,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    crate::calls::note();
    stream_of(stream).push(Arc::new(move || {
        check(to as usize, size);
        // SAFETY: the bytes at `to` are live memory of a device (`check`). The caller keeps its other
        // accesses apart by the order of streams.
        unsafe { std::ptr::write_bytes(to as *mut u8, value, size) };
    }));
    SUCCESS
}

/// Sets `count` 32-bit words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD32Async(
    to: u64,
    value: c_uint,
    count: usize,
    stream: *mut c_void,
) -> c_int {
    crate::calls::note();
    if !to.is_multiple_of(4) {
        return INVALID_VALUE;
    }
    stream_of(stream).push(Arc::new(move || {
        check(to as usize, count * size_of::<c_uint>());
        for nth in 0..count {
            // SAFETY: the words at `to` are live memory of a device (`check`), at a multiple of four
            // (checked above). The caller keeps its other accesses apart by the order of streams.
            unsafe { (to as *mut u32).add(nth).write(value) };
        }
    }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: u64,
    from: u64,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    crate::calls::note();
    stream_of(stream).push(Arc::new(move || {
        check_reach(to as usize, size);
        check_reach(from as usize, size);
        // SAFETY: both ranges are live memory that a device reaches (`check_reach`), and may overlap. The
        // caller keeps its other accesses apart by the order of streams.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) };
    }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: c_int,
    at: u64,
) -> c_int {
    crate::calls::note();
    // Plain host memory is unknown to the driver: CUDA_ERROR_INVALID_VALUE.
    let Some(device) = device_of(at, 0) else {
        return INVALID_VALUE;
    };
    match attribute {
        // SAFETY: CU_POINTER_ATTRIBUTE_MEMORY_TYPE is an unsigned int, here CU_MEMORYTYPE_DEVICE: `data` is
        // null, which `put` refuses, or the caller lets one be written there.
        2 => unsafe { put(data.cast::<c_uint>(), 2) },
        // SAFETY: CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL is an int: `data` is null, which `put` refuses, or the
        // caller lets one be written there.
        9 => unsafe { put(data.cast::<c_int>(), device) },
        _ => NOT_SUPPORTED,
    }
}

/// Succeeds only for memory of the virtual memory functions, which `ncclMemAlloc` uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRetainAllocationHandle(out: *mut u64, at: *mut c_void) -> c_int {
    crate::calls::note();
    let at = at.addr() as u64;
    match file_of(at, 1) {
        // The handle is the address at which the allocation begins.
        // SAFETY: `out` is null, which `put` refuses, or the caller lets a handle be written there.
        Some((_, offset)) => unsafe { put(out, at - offset) },
        None => INVALID_VALUE,
    }
}

/// References are not counted: `ncclMemFree` frees the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRelease(_handle: u64) -> c_int {
    crate::calls::note();
    SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_reaches_memory_only_while_it_is_allocated_or_mapped() {
        let plain = allocate(100).unwrap();
        assert!(is_reached(plain, 100) && is_reached(plain + 99, 1));
        assert!(!is_reached(plain + 99, 2));
        assert!(free(plain));
        assert!(!is_reached(plain, 1));

        let shared = allocate_shared(100).unwrap();
        let ((file, size), offset) = file_of(shared, 100).unwrap();
        assert_eq!(offset, 0);
        let path = format!("/proc/self/fd/{file}");
        let mapping = Mapping::open(&path).unwrap();
        let at = mapping.address();
        assert_ne!(at, shared);
        assert!(is_reached(at, usize::try_from(size).unwrap()));
        assert!(!is_reached(at, usize::try_from(size).unwrap() + 1));
        drop(mapping);
        assert!(!is_reached(at, 1));
        assert!(free(shared));
        assert!(!is_reached(shared, 1));
    }
}

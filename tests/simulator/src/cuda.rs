//! The symbols of `libcuda.so.1`. Contracts are those of `cuda.h`.
//!
//! Eight devices that share host memory. Contexts are primary contexts, stacked on each thread. There is
//! nothing here that could run a kernel of a program's own.

use crate::stream::{Event, Stream, Work, lock};
use crate::trouble;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, OnceLock};

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const INVALID_CONTEXT: c_int = 201;
const INVALID_HANDLE: c_int = 400;
const NOT_READY: c_int = 600;
const NOT_SUPPORTED: c_int = 801;
const CAPTURE_UNSUPPORTED: c_int = 900;

const DEVICES: c_int = 8;
const ALIGNMENT: usize = 256;

thread_local! {
    /// Devices whose contexts were pushed, from 1: the last one is current.
    static CONTEXTS: RefCell<Vec<c_int>> = const { RefCell::new(Vec::new()) };
}

/// The device whose context is current, from 1; 0 = none.
fn current() -> c_int {
    CONTEXTS.with_borrow(|contexts| contexts.last().copied().unwrap_or(0))
}

struct Allocation {
    layout: Layout,
    device: c_int,
}

static MEMORY: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());

/// The calling thread's device, as a communicator takes it; 0 where none is current.
pub(crate) fn current_device() -> c_int {
    (current() - 1).max(0)
}

/// The stream behind a handle; null is the default stream.
pub(crate) fn stream_of(handle: *mut c_void) -> Arc<Stream> {
    static DEFAULT: OnceLock<Arc<Stream>> = OnceLock::new();
    if handle.is_null() {
        return Arc::clone(DEFAULT.get_or_init(|| Stream::new(0)));
    }
    // SAFETY: a handle that is not null is one of ours, from `Arc::into_raw`, not yet destroyed.
    unsafe {
        Arc::increment_strong_count(handle.cast::<Stream>());
        Arc::from_raw(handle.cast::<Stream>())
    }
}

fn event_of(handle: *mut c_void) -> Option<Arc<Event>> {
    if handle.is_null() {
        return None;
    }
    // SAFETY: as for streams.
    unsafe {
        Arc::increment_strong_count(handle.cast::<Event>());
        Some(Arc::from_raw(handle.cast::<Event>()))
    }
}

/// Writes a result through a pointer of the caller, unless it is null.
unsafe fn put<T>(out: *mut T, value: T) -> c_int {
    if out.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null; the caller vouches for the rest.
    unsafe { out.write(value) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(_flags: c_uint) -> c_int {
    if trouble::order("no_device").is_some() {
        NO_DEVICE
    } else {
        SUCCESS
    }
}

fn words(status: c_int) -> (&'static std::ffi::CStr, &'static std::ffi::CStr) {
    match status {
        SUCCESS => (c"CUDA_SUCCESS", c"no error"),
        INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        OUT_OF_MEMORY => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        NO_DEVICE => (
            c"CUDA_ERROR_NO_DEVICE",
            c"no CUDA-capable device is detected",
        ),
        INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        NOT_READY => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        NOT_SUPPORTED => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        CAPTURE_UNSUPPORTED => (
            c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            c"operation not permitted when stream is capturing",
        ),
        _ => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(status: c_int, out: *mut *const c_char) -> c_int {
    // SAFETY: the caller's pointer.
    unsafe { put(out, words(status).0.as_ptr()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(status: c_int, out: *mut *const c_char) -> c_int {
    // SAFETY: the caller's pointer.
    unsafe { put(out, words(status).1.as_ptr()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the caller's pointer.
    unsafe { put(count, DEVICES) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    if !(0..DEVICES).contains(&ordinal) {
        return 101;
    }
    // SAFETY: the caller's pointer.
    unsafe { put(device, ordinal) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    let mut bytes = *b"rcomm-simulator\0";
    bytes[15] = u8::try_from(device).unwrap_or(u8::MAX);
    // SAFETY: the caller's pointer.
    unsafe { put(uuid, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut *mut c_void,
    device: c_int,
) -> c_int {
    let number = usize::try_from(device + 1).unwrap_or(0);
    // SAFETY: the caller's pointer. A context is the number of its device and is never dereferenced.
    unsafe { put(context, std::ptr::without_provenance_mut(number)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
    let device = c_int::try_from(context.addr()).unwrap_or(0);
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(device));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> c_int {
    let Some(device) = CONTEXTS.with_borrow_mut(Vec::pop) else {
        return INVALID_CONTEXT;
    };
    let number = usize::try_from(device).unwrap_or(0);
    // SAFETY: the caller's pointer.
    unsafe { put(context, std::ptr::without_provenance_mut(number)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> c_int {
    // SAFETY: the caller's pointers.
    unsafe { put(least, 0).max(put(greatest, -5)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    out: *mut *mut c_void,
    _flags: c_uint,
    _priority: c_int,
) -> c_int {
    if current() == 0 {
        return INVALID_CONTEXT;
    }
    // SAFETY: the caller's pointer.
    unsafe { put(out, Arc::into_raw(Stream::new(current())).cast_mut().cast()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(handle: *mut c_void) -> c_int {
    if handle.is_null() {
        return INVALID_HANDLE;
    }
    stream_of(handle).close();
    // SAFETY: the handle's own count; the caller does not use the handle again.
    drop(unsafe { Arc::from_raw(handle.cast::<Stream>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(handle: *mut c_void) -> c_int {
    let stream = stream_of(handle);
    if stream.capture().is_some() {
        return CAPTURE_UNSUPPORTED;
    }
    stream.synchronize();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(
    handle: *mut c_void,
    event: *mut c_void,
    _flags: c_uint,
) -> c_int {
    let Some(event) = event_of(event) else {
        return INVALID_HANDLE;
    };
    event.hold(&stream_of(handle));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCtx(handle: *mut c_void, context: *mut *mut c_void) -> c_int {
    // The default stream is that of whichever context is current.
    let device = if handle.is_null() {
        current()
    } else {
        stream_of(handle).device
    };
    let number = usize::try_from(device).unwrap_or(0);
    // SAFETY: the caller's pointer.
    unsafe { put(context, std::ptr::without_provenance_mut(number)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCaptureInfo_v2(
    handle: *mut c_void,
    status: *mut c_int,
    id: *mut u64,
    graph: *mut *mut c_void,
    dependencies: *mut *const c_void,
    count: *mut usize,
) -> c_int {
    let capture = stream_of(handle).capture();
    // SAFETY: the caller's pointers; all but the first may be null.
    unsafe {
        put(id, capture.as_ref().map_or(0, |capture| capture.id));
        put(graph, std::ptr::null_mut());
        put(dependencies, std::ptr::null());
        put(count, 0);
        put(status, c_int::from(capture.is_some()))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    thread_local! {
        static MODE: Cell<c_int> = const { Cell::new(0) };
    }
    if mode.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null; the caller vouches for the rest.
    unsafe { *mode = MODE.replace(*mode) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(handle: *mut c_void, _mode: c_int) -> c_int {
    if stream_of(handle).begin_capture() {
        SUCCESS
    } else {
        INVALID_VALUE
    }
}

/// What a capture gathered.
struct Graph(Vec<Work>);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(handle: *mut c_void, graph: *mut *mut c_void) -> c_int {
    let Some(capture) = stream_of(handle).end_capture() else {
        return INVALID_VALUE;
    };
    let work = lock(&capture.work).clone();
    // SAFETY: the caller's pointer.
    unsafe {
        put(
            graph,
            Arc::into_raw(Arc::new(Graph(work))).cast_mut().cast(),
        )
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    exec: *mut *mut c_void,
    graph: *mut c_void,
    _flags: u64,
) -> c_int {
    // SAFETY: a graph of `cuStreamEndCapture`, not yet destroyed; one more count for the executable.
    unsafe {
        Arc::increment_strong_count(graph.cast::<Graph>());
        put(exec, graph)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphLaunch(exec: *mut c_void, handle: *mut c_void) -> c_int {
    // SAFETY: an executable of `cuGraphInstantiateWithFlags`, not yet destroyed.
    let graph = unsafe { &*exec.cast::<Graph>() };
    let stream = stream_of(handle);
    for work in &graph.0 {
        stream.push(Arc::clone(work));
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(exec: *mut c_void) -> c_int {
    // SAFETY: the executable's own count; the caller does not use it again.
    drop(unsafe { Arc::from_raw(exec.cast::<Graph>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: *mut c_void) -> c_int {
    // SAFETY: the graph's own count; the caller does not use it again.
    drop(unsafe { Arc::from_raw(graph.cast::<Graph>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(out: *mut *mut c_void, flags: c_uint) -> c_int {
    if current() == 0 {
        return INVALID_CONTEXT;
    }
    // SAFETY: the caller's pointer. Flag 2 is CU_EVENT_DISABLE_TIMING.
    unsafe {
        put(
            out,
            Arc::into_raw(Event::new(flags & 2 == 0)).cast_mut().cast(),
        )
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(handle: *mut c_void) -> c_int {
    if handle.is_null() {
        return INVALID_HANDLE;
    }
    // SAFETY: the handle's own count; work that still refers to the event holds counts of its own.
    drop(unsafe { Arc::from_raw(handle.cast::<Event>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(handle: *mut c_void, stream: *mut c_void) -> c_int {
    let Some(event) = event_of(handle) else {
        return INVALID_HANDLE;
    };
    event.record(&stream_of(stream));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(handle: *mut c_void) -> c_int {
    match event_of(handle) {
        None => INVALID_HANDLE,
        Some(event) if event.is_complete() => SUCCESS,
        Some(_) => NOT_READY,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(
    milliseconds: *mut f32,
    from: *mut c_void,
    to: *mut c_void,
) -> c_int {
    let (Some(from), Some(to)) = (event_of(from), event_of(to)) else {
        return INVALID_HANDLE;
    };
    if !from.timed || !to.timed {
        return INVALID_HANDLE;
    }
    if !from.is_complete() || !to.is_complete() {
        return NOT_READY;
    }
    let (Some(from), Some(to)) = (from.at(), to.at()) else {
        return INVALID_HANDLE;
    };
    // SAFETY: the caller's pointer.
    unsafe {
        put(
            milliseconds,
            to.saturating_duration_since(from).as_secs_f32() * 1e3,
        )
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(out: *mut u64, size: usize) -> c_int {
    if size == 0 {
        return INVALID_VALUE;
    }
    let Ok(layout) = Layout::from_size_align(size, ALIGNMENT) else {
        return OUT_OF_MEMORY;
    };
    if !trouble::next_allocation_fits() {
        return OUT_OF_MEMORY;
    }
    // SAFETY: the size is not zero.
    let at = unsafe { alloc_zeroed(layout) } as u64;
    if at == 0 {
        return OUT_OF_MEMORY;
    }
    lock(&MEMORY).insert(
        at,
        Allocation {
            layout,
            device: current_device(),
        },
    );
    // SAFETY: the caller's pointer.
    unsafe { put(out, at) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(at: u64) -> c_int {
    let Some(allocation) = lock(&MEMORY).remove(&at) else {
        return INVALID_VALUE;
    };
    // SAFETY: allocated with this layout by `cuMemAlloc_v2`, and freed once: it was in the map.
    unsafe { dealloc(at as *mut u8, allocation.layout) };
    SUCCESS
}

fn copy(to: usize, from: usize, size: usize, stream: *mut c_void) -> c_int {
    stream_of(stream).push(Arc::new(move || {
        // SAFETY: the caller vouches for both ranges until the copy is done, as with the real driver.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) };
    }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    copy(to as usize, from as usize, size, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    copy(to as usize, from as usize, size, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(
    to: u64,
    value: u8,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    stream_of(stream).push(Arc::new(move || {
        // SAFETY: the caller vouches for the range until the work is done, as with the real driver.
        unsafe { std::ptr::write_bytes(to as *mut u8, value, size) };
    }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: c_int,
    at: u64,
) -> c_int {
    let memory = lock(&MEMORY);
    let owner = memory
        .range(..=at)
        .next_back()
        .filter(|(start, held)| at < *start + held.layout.size() as u64);
    // Plain host memory is unknown to the driver: CUDA_ERROR_INVALID_VALUE.
    let Some((_, allocation)) = owner else {
        return INVALID_VALUE;
    };
    match attribute {
        // SAFETY: the caller's pointer, to an unsigned int: CU_MEMORYTYPE_DEVICE.
        2 => unsafe { put(data.cast::<c_uint>(), 2) },
        // SAFETY: the caller's pointer, to an int: an ordinal.
        9 => unsafe { put(data.cast::<c_int>(), allocation.device) },
        _ => NOT_SUPPORTED,
    }
}

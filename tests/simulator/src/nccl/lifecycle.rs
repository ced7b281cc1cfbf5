//! Makes, finalizes, destroys, aborts and revokes communicators. `derive` splits and shrinks them.

use super::comm::{Comm, admit, comm_of, dismiss};
use super::group::{is_in_group, leak_depth, run_or_defer};
use super::memory::forget_registrations;
use super::profiler::hash_of;
use super::{IN_PROGRESS, INVALID_ARGUMENT, SUCCESS, SYSTEM_ERROR, fail, no_comm};
use crate::calls::BAD_DESTROYS;
use crate::cuda;
use crate::hub;
use crate::trouble;
use crate::wire::{Request, RequestKind};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// `ncclUniqueId`: the name of the hub's socket.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId {
    internal: [u8; 128],
}

impl UniqueId {
    fn name(&self) -> &[u8] {
        let end = self
            .internal
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(self.internal.len());
        &self.internal[..end]
    }
}

/// The head of `ncclConfig_t`.
#[repr(C)]
pub struct ConfigHead {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    thread_blocks: [c_int; 3],
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
}

/// A communicator's name. The library keeps only its pointer (`parseCommConfig`, init.cc:2442). The profiler
/// plug-in gets the pointer when all ranks have joined, and may read the name until the communicator ends
/// (`ncclProfilerPluginInit`, profiler.cc:250; `plugins/profiler/example/plugin.cc`, 318 and 424).
pub(super) struct Name {
    at: *const c_char,
    original: Vec<u8>,
}

// SAFETY: the memory at the address is only read and never freed here, which any thread may do.
unsafe impl Send for Name {}
// SAFETY: through a reference the memory at the address is only read (`is_intact`), which several threads may do at
// once.
unsafe impl Sync for Name {}

impl Name {
    /// The name in a configuration; none if `config` or the name is null.
    ///
    /// # Safety
    /// `config` is null or points to an `ncclConfig_t` as long as [`ConfigHead`] or longer, whose name is
    /// null or ends with a NUL.
    pub(super) unsafe fn of(config: *const ConfigHead) -> Self {
        // SAFETY: `config` is null or points to a configuration that the caller does not change during this
        // call.
        let at = unsafe { config.as_ref() }.map_or(std::ptr::null(), |head| head.comm_name);
        let original = if at.is_null() {
            Vec::new()
        } else {
            // SAFETY: not null (checked), so the configuration's name ends with a NUL; it is copied here.
            unsafe { CStr::from_ptr(at) }.to_bytes_with_nul().to_vec()
        };
        Self { at, original }
    }

    /// The name's address; null if there is no name.
    pub(super) fn at(&self) -> *const c_char {
        self.at
    }

    /// Whether the name still has the bytes that it had when the communicator was made.
    fn is_intact(&self) -> bool {
        let byte = |nth: usize| {
            // SAFETY: `nth` is within what was a text when the communicator was made. The caller keeps that
            // for as long as the communicator, as the library asks. If the caller does not, this reads freed
            // memory, as the library does; that is what is tested.
            unsafe { self.at.add(nth).read_volatile() }.cast_unsigned()
        };
        self.original
            .iter()
            .enumerate()
            .all(|(nth, &original)| byte(nth) == original)
    }

    /// Reads the name, as the plug-in of a profiler would; an error if its bytes have changed.
    pub(super) fn poll(&self) -> Result<(), c_int> {
        match self.is_intact() {
            true => Ok(()),
            false => Err(fail(SYSTEM_ERROR, "the communicator's name has been freed")),
        }
    }
}

/// Whether a configuration asks for blocking calls ("blocking", nccl.h); `default` if there is no
/// configuration or it leaves this undefined. The error is the status with which a call refuses the configuration.
///
/// # Safety
/// `config` is null or points to an `ncclConfig_t` as long as [`ConfigHead`] or longer.
pub(super) unsafe fn is_blocking(config: *const ConfigHead, default: bool) -> Result<bool, c_int> {
    // SAFETY: `config` is null or points to a configuration that the caller does not change during this
    // call.
    let Some(head) = (unsafe { config.as_ref() }) else {
        return Ok(default);
    };
    // parseCommConfig, init.cc:2250: the magic number at 2265, blocking at 2314.
    if head.magic != 0xcafe_beef || head.size < size_of::<ConfigHead>() || head.version == 0 {
        let text = "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER";
        return Err(fail(INVALID_ARGUMENT, text));
    }
    match head.blocking {
        0 => Ok(false),
        1 => Ok(true),
        c_int::MIN => Ok(default),
        other => {
            let text = format!("Invalid config blocking attribute value {other}");
            Err(fail(INVALID_ARGUMENT, &text))
        }
    }
}

/// Runs a call's work here and returns its status, or starts it in the background, for a communicator that does not
/// block, and returns `IN_PROGRESS`.
pub(super) fn run_or_spawn(
    is_blocking: bool,
    work: impl FnOnce() -> c_int + Send + 'static,
) -> c_int {
    if is_blocking {
        return work();
    }
    let thread = std::thread::Builder::new().name("sim/async".into());
    match thread.spawn(work) {
        Ok(_) => IN_PROGRESS,
        Err(_) => fail(SYSTEM_ERROR, "cannot start a thread"),
    }
}

/// Starts a hub in this process (`bootstrapGetUniqueId`, bootstrap.cc:430).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos());
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("rcomm-sim-{}-{nanos:x}-{number}", std::process::id());
    if let Err(error) = hub::start(name.as_bytes()) {
        return fail(SYSTEM_ERROR, &format!("bootstrap: {error}"));
    }
    let mut internal = [0; 128];
    internal[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the caller lets an id be written to `id`, which is not null.
    unsafe { *id = UniqueId { internal } };
    SUCCESS
}

/// The handle is written at once, whether or not the communicator is ready (`ncclCommInitRankDev`, init.cc:2477; a
/// rank out of range, 2501).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    out: *mut *mut c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut ConfigHead,
) -> c_int {
    if ranks < 1 || rank < 0 || rank >= ranks {
        let text = format!("Invalid rank requested : {rank}/{ranks}");
        return fail(INVALID_ARGUMENT, &text);
    }
    // SAFETY: the caller's `config` is null or an `ncclConfig_t`.
    let is_blocking = match unsafe { is_blocking(config, true) } {
        Ok(is_blocking) => is_blocking,
        Err(status) => return status,
    };
    // SAFETY: the caller's `config` is null or an `ncclConfig_t`, whose length `is_blocking` has checked.
    let name = unsafe { Name::of(config) };
    let device = cuda::current_device();
    let hash = trouble::setting("comm_hash").unwrap_or_else(|| hash_of(&[&id.internal]));
    let named = (name, hash);
    let comm = Comm::new(id.name(), (rank, ranks), device, is_blocking, named);
    // SAFETY: the caller lets a handle be written to `out`, which is not null.
    unsafe { *out = admit(&comm) };
    if is_in_group() {
        // `ncclAsyncLaunch`: it joins when the group ends, and looks ready until then, without ranks.
        comm.set_state(SUCCESS);
        return run_or_defer(move || comm.join(0));
    }
    run_or_spawn(is_blocking, move || comm.join(0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    out: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    count: c_int,
    ids: *mut UniqueId,
    config: *mut ConfigHead,
) -> c_int {
    if count < 1 || count > ranks {
        // init.cc:2480.
        let text = format!("improper usage of ncclCommInitRank: nId = {count}, nranks={ranks}");
        return fail(INVALID_ARGUMENT, &text);
    }
    // SAFETY: `ids` holds `count` ids, of which there is one at least (checked). The first one's hub serves
    // all, which ranks cannot observe.
    let first = unsafe { *ids };
    // SAFETY: `out` and `config` are as this function's caller passed them, and `ncclCommInitRankConfig`
    // asks the same of both.
    unsafe { ncclCommInitRankConfig(out, ranks, first, rank, config) }
}

/// "Flushes all issued communications, and marks communicator state as ncclInProgress" (nccl.h;
/// `ncclCommFinalize`, init.cc:2783). It waits for graphs that hold operations (`commDestroySync`, 2751). After a
/// revoke, or for the second time, it is refused, and that is an error of the communicator (2796 and 2820).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(handle: *mut c_void) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return no_comm();
    };
    let before = comm.ensure_ready();
    if comm.finalizing.swap(true, Ordering::AcqRel) || before != SUCCESS {
        let status = match before {
            SUCCESS => fail(INVALID_ARGUMENT, "ncclCommFinalize for the second time"),
            _ => before,
        };
        return comm.refuse(status);
    }
    comm.set_state(IN_PROGRESS);
    let is_blocking = comm.is_blocking;
    run_or_spawn(is_blocking, move || {
        comm.drain();
        comm.wait_for_graphs();
        comm.finalized.store(true, Ordering::Release);
        comm.set_state(SUCCESS)
    })
}

/// Frees what a communicator holds. This waits for all kernels of its device, since memory is freed
/// (`commReclaim`, init.cc:2824, and `commFree`; "cudaFree" waits for the device). The status is an error if the
/// communicator's name was freed before.
fn reclaim(comm: &Arc<Comm>) -> c_int {
    if !comm.finalizing.load(Ordering::Acquire) {
        comm.drain();
        comm.wait_for_graphs();
    }
    cuda::stream::synchronize(comm.device + 1);
    forget_registrations(comm);
    if let Some(profiled) = comm.profiled() {
        profiled.finalize();
    }
    comm.name.poll().err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(handle: *mut c_void) -> c_int {
    // Null is accepted and ignored (`ncclCommDestroy`, init.cc:2880).
    let Some(comm) = comm_of(handle) else {
        return SUCCESS;
    };
    // A revoked communicator can be destroyed as well.
    let state = comm.async_error();
    if state != SUCCESS {
        // `NCCLCHECK(ncclCommEnsureReady(comm))`, init.cc:2901: the group that it has opened stays open.
        leak_depth();
        BAD_DESTROYS.fetch_add(1, Ordering::Relaxed);
        let text = "Attempt to use communicator before the previous operation returned ncclSuccess";
        return match state {
            IN_PROGRESS => fail(INVALID_ARGUMENT, text),
            error => error,
        };
    }
    drop(dismiss(handle));
    run_or_defer(move || {
        let status = reclaim(&comm);
        // The hub removes the rank, so that the other ranks see no failure.
        comm.ask(&Request::new(RequestKind::Leave, 0, 0), &[]);
        comm.abort();
        status
    })
}

/// Kernels that wait for peers see the flag and end; then everything is freed (`ncclCommAbort`,
/// init.cc:3025; `setCommAbortFlags`, 2915; `commReclaim`, 2824). In a group of calls the flag is raised at once,
/// and the communicator is freed when the group ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(handle: *mut c_void) -> c_int {
    trouble::hang_in_abort();
    let Some(comm) = dismiss(handle) else {
        return SUCCESS;
    };
    comm.abort();
    // Launches in progress are joined first (`ncclCommEnsureReady`, init.cc:3041).
    while comm.has_jobs() {
        std::thread::sleep(Duration::from_millis(1));
    }
    run_or_defer(move || {
        reclaim(&comm);
        SUCCESS
    })
}

/// "Stops all in-flight operations"; "management operations can proceed safely" afterwards (nccl.h;
/// `ncclCommRevoke`, init.cc:2965).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRevoke(handle: *mut c_void, flags: c_int) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return no_comm();
    };
    if flags != 0 {
        return fail(INVALID_ARGUMENT, "revokeFlags must be NCCL_REVOKE_DEFAULT");
    }
    if comm.finalizing.swap(true, Ordering::AcqRel) {
        return fail(INVALID_ARGUMENT, "revoke after finalize or revoke");
    }
    comm.revoked.store(true, Ordering::Release);
    comm.stop();
    let is_blocking = comm.is_blocking;
    // Work in progress is joined first, and its result is dropped (`ncclCommRevoke`: the error of
    // `ncclCommEnsureReady` is dropped, init.cc:2989). The flags are reset once the device has done the
    // earlier work (`commRevokeAsync`, 2958). An error of the connections stays.
    comm.set_state(IN_PROGRESS);
    let job = move || {
        comm.drain();
        if !comm.aborted.load(Ordering::Acquire) {
            comm.stopped.store(false, Ordering::Release);
        }
        comm.set_state(SUCCESS)
    };
    match is_blocking {
        true => run_or_defer(job),
        false => run_or_spawn(false, job),
    }
}

/// The number of ranks; 0 before all have joined (`ncclCommCount`, init.cc).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(handle: *mut c_void, count: *mut c_int) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return no_comm();
    };
    // SAFETY: the caller lets an int be written to `count`, which is not null.
    unsafe { *count = comm.joined.load(Ordering::Acquire) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(handle: *mut c_void, state: *mut c_int) -> c_int {
    let Some(comm): Option<Arc<Comm>> = comm_of(handle) else {
        return no_comm();
    };
    // SAFETY: the caller lets an int be written to `state`, which is not null.
    unsafe { *state = comm.async_error() };
    SUCCESS
}

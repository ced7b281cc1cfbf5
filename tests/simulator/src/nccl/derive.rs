//! Communicators made from others: split and shrink.
//!
//! As in init.cc (`ncclCommSplit`, 3392; `ncclCommShrink`, 3177; `ncclCommInitChildComm`, 3073 and 3098):
//! "*newcomm should be NCCL_COMM_NULL until comm split fully complete", and the parent is in progress until
//! then.

use super::comm::{Comm, WaitsFor, admit, comm_of};
use super::lifecycle::{ConfigHead, Name, is_blocking, run_or_spawn};
use super::profiler::hash_of;
use super::{IN_PROGRESS, INVALID_ARGUMENT, REMOTE_ERROR, SUCCESS, fail, no_comm};
use crate::trouble;
use crate::wire::{Request, RequestKind};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const NO_COLOR: c_int = -1;
const SHRINK_ABORT: c_int = 1;

/// Where the new handle is to be written: valid for writes until the parent is no longer in progress.
struct HandleOut(*mut *mut c_void);

// SAFETY: `derive` asks its caller to keep the pointer valid for writes until the parent is no longer in progress,
// whichever thread writes; the parent is in progress until `write` has returned.
unsafe impl Send for HandleOut {}

impl HandleOut {
    /// Takes `self` by value, so that a closure captures the whole `HandleOut`, which is `Send`.
    fn write(self, handle: *mut c_void) {
        // SAFETY: the pointer is valid for writes while the parent is in progress (`derive`), which it is until this
        // has returned. No other code writes there.
        unsafe { *self.0 = handle };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    handle: *mut c_void,
    color: c_int,
    key: c_int,
    out: *mut *mut c_void,
    config: *mut ConfigHead,
) -> c_int {
    let Some(parent) = comm_of(handle) else {
        return no_comm();
    };
    if color < NO_COLOR {
        return fail(INVALID_ARGUMENT, &format!("invalid color {color}"));
    }
    let mut request = Request::new(RequestKind::Split, 0, 0);
    request.rank = color;
    request.op = key;
    // SAFETY: the caller keeps `out` for a handle until the parent is no longer in progress, and `config`
    // is null or an `ncclConfig_t`.
    unsafe { derive(&parent, request, Vec::new(), out, config) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommShrink(
    handle: *mut c_void,
    excluded: *mut c_int,
    count: c_int,
    out: *mut *mut c_void,
    config: *mut ConfigHead,
    flags: c_int,
) -> c_int {
    let Some(parent) = comm_of(handle) else {
        return no_comm();
    };
    let Some(count) = usize::try_from(count).ok().filter(|count| *count > 0) else {
        return fail(INVALID_ARGUMENT, "excludeRanksCount must be greater than 0");
    };
    // SAFETY: `excluded` is not null and holds `count` ints, which the caller leaves as they are during this call. The
    // slice is not used afterwards.
    let excluded = unsafe { std::slice::from_raw_parts(excluded, count) };
    if excluded.contains(&parent.rank) {
        return fail(INVALID_ARGUMENT, "the calling rank is in excludeRanksList");
    }
    if flags & SHRINK_ABORT != 0 {
        parent.stop();
        while parent.pending.load(Ordering::Acquire) > 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // The flag is put back before the bootstrap (`ncclCommShrink`, init.cc:3187).
        parent.stopped.store(false, Ordering::Release);
    }
    let payload = excluded.iter().flat_map(|rank| rank.to_le_bytes());
    let request = Request::new(RequestKind::Shrink, 0, 0);
    // SAFETY: the caller keeps `out` for a handle until the parent is no longer in progress, and `config`
    // is null or an `ncclConfig_t`.
    unsafe { derive(&parent, request, payload.collect(), out, config) }
}

/// Makes a communicator as `request` asks and writes its handle to `out`; null for a rank that gets none. Returns the
/// status of the call.
///
/// # Safety
///
/// `out` stays valid until the parent is no longer in progress; `config` is null or a configuration.
unsafe fn derive(
    parent: &Arc<Comm>,
    request: Request,
    payload: Vec<u8>,
    out: *mut *mut c_void,
    config: *const ConfigHead,
) -> c_int {
    // SAFETY: the caller's `config` is null, and then the child is as its parent, or an `ncclConfig_t`.
    let is_blocking = match unsafe { is_blocking(config, parent.is_blocking) } {
        Ok(is_blocking) => is_blocking,
        Err(status) => return status,
    };
    // SAFETY: the caller's `config` is null or an `ncclConfig_t`, whose length `is_blocking` has checked.
    let name = unsafe { Name::of(config) };
    // A child can be made of a revoked communicator, but not after an error of its connections.
    let before = parent.async_error();
    if before != SUCCESS {
        return fail(before, "the parent communicator is not ready");
    }
    // SAFETY: the caller lets a handle be written to `out`, which is not null.
    unsafe { *out = std::ptr::null_mut() };
    let new_handle = HandleOut(out);
    // A shrink has neither number nor color.
    let (nth, color) = match request.kind {
        RequestKind::Split => (
            parent.splits.fetch_add(1, Ordering::AcqRel) + 1,
            request.rank,
        ),
        _ => (0, 0),
    };
    let parts: [&[u8]; 3] = [
        &parent.hash.to_le_bytes(),
        &nth.to_le_bytes(),
        &color.to_le_bytes(),
    ];
    let hash = match trouble::setting("comm_hash") {
        Some(_) => parent.hash + 1,
        None => hash_of(&parts),
    };
    parent.state.store(IN_PROGRESS, Ordering::Release);
    let parent = Arc::clone(parent);
    let job = parent.begin_job();
    run_or_spawn(parent.is_blocking, move || {
        let status = match ask(&parent, request, &payload) {
            Ok(None) => SUCCESS,
            Ok(Some((rank, size, key))) => {
                let named = (name, hash);
                let child = Comm::new(&parent.hub, (rank, size), parent.device, is_blocking, named);
                let status = child.join(key);
                if status == SUCCESS {
                    new_handle.write(admit(&child));
                }
                status
            }
            Err(status) => status,
        };
        // The state is set before the job ends: a thread that stops the communicator waits for the job, then
        // sets the final state.
        let status = parent.set_state(status);
        drop(job);
        status
    })
}

/// Asks the hub for the rank, size and key of the new communicator; `None` for a rank that gets none.
fn ask(
    parent: &Comm,
    mut request: Request,
    payload: &[u8],
) -> Result<Option<(c_int, c_int, u64)>, c_int> {
    request.id = parent.next_id();
    request.seq = parent.derivations.fetch_add(1, Ordering::AcqRel);
    if !parent.ask(&request, payload) {
        return Err(fail(
            REMOTE_ERROR,
            "the connection to the other ranks broke",
        ));
    }
    let reply = parent.answer(request.id, WaitsFor::Bootstrap)?;
    let int = |at: usize| {
        let bytes = reply.get(at..at + 4)?;
        Some(c_int::from_le_bytes(bytes.try_into().ok()?))
    };
    let key = reply.get(8..16).and_then(|bytes| bytes.try_into().ok());
    Ok(match (int(0), int(4), key) {
        (Some(rank), Some(size), Some(key)) => Some((rank, size, u64::from_le_bytes(key))),
        _ => None,
    })
}

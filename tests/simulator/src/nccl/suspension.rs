//! Suspends communicators, which releases their memory, and resumes them, which restores it (mem_manager.cc).

use super::IN_PROGRESS;
use super::comm::{Comm, WaitsFor, comm_of};
use super::lifecycle::run_or_spawn;
use super::{INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS, fail, no_comm};
use crate::handles::end_process;
use crate::wire::{Request, RequestKind};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// `NCCL_SUSPEND_MEM`.
const SUSPEND_MEM: c_int = 1;
/// Bytes that a communicator of the simulator reports: those that a suspension releases, and those that it keeps.
const RELEASABLE: u64 = 48 << 20;
const PERSISTENT: u64 = 16 << 20;

/// Waits for all ranks (`bootstrapBarrier`, mem_manager.cc:418 and 651).
fn meet(comm: &Comm) -> c_int {
    let mut request = Request::new(RequestKind::Exchange, comm.next_id(), 0);
    request.seq = comm.derivations.fetch_add(1, Ordering::AcqRel);
    if !comm.ask(&request, &[]) {
        return fail(REMOTE_ERROR, "the connection to the other ranks broke");
    }
    match comm.answer(request.id, WaitsFor::Bootstrap) {
        Ok(_) => SUCCESS,
        Err(status) => status,
    }
}

/// Suspends or resumes the communicator, once all its ranks have called; returns the status of the call.
fn change(comm: &Arc<Comm>, suspended: bool) -> c_int {
    let ready = comm.ensure_ready();
    if ready != SUCCESS {
        return ready;
    }
    if suspended && comm.is_busy() {
        end_process("ncclCommSuspend while operations use the communicator's memory");
    }
    comm.set_state(IN_PROGRESS);
    let (is_blocking, comm) = (comm.is_blocking, Arc::clone(comm));
    run_or_spawn(is_blocking, move || {
        let status = meet(&comm);
        comm.suspended.store(suspended, Ordering::Release);
        comm.set_state(status)
    })
}

/// `ncclCommSuspend`, mem_manager.cc:926. A call on a suspended communicator is refused and changes nothing. NCCL also
/// refuses a communicator that shares its memory with a split (943); this is not simulated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSuspend(handle: *mut c_void, flags: c_int) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return no_comm();
    };
    if flags & SUSPEND_MEM == 0 {
        return SUCCESS;
    }
    if comm.suspended.load(Ordering::Acquire) {
        return fail(INVALID_USAGE, "the communicator is suspended already");
    }
    change(&comm, true)
}

/// `ncclCommResume`, mem_manager.cc:969.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommResume(handle: *mut c_void) -> c_int {
    match comm_of(handle) {
        Some(comm) => change(&comm, false),
        None => no_comm(),
    }
}

/// `ncclCommMemStats`, mem_manager.cc:1010.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommMemStats(
    handle: *mut c_void,
    stat: c_int,
    value: *mut u64,
) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return no_comm();
    };
    let ready = comm.ensure_ready();
    if ready != SUCCESS {
        return ready;
    }
    let found = match stat {
        0 => RELEASABLE,
        1 => u64::from(comm.suspended.load(Ordering::Acquire)),
        2 => PERSISTENT,
        3 => RELEASABLE + PERSISTENT,
        _ => return fail(INVALID_ARGUMENT, "unknown statistic"),
    };
    // SAFETY: the caller lets a word be written to `value`, which is not null.
    unsafe { *value = found };
    SUCCESS
}

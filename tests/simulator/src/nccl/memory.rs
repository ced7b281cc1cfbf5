//! Allocates memory for the caller, and registers buffers with communicators.

use super::comm::{Comm, comm_of};
use super::{INVALID_ARGUMENT, SUCCESS, UNHANDLED_CUDA_ERROR, fail, no_comm};
use crate::calls::LIVE_MEMORY;
use crate::cuda::memory;
use crate::handles::{Handles, end_process};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages that a communicator has registered.
struct Registered {
    /// Address of the communicator.
    comm: usize,
    begin: u64,
    end: u64,
    references: AtomicU64,
}

static REGISTERED: Handles<Registered> = Handles::new("registration");

const PAGE: u64 = 4096;

/// Whether some of these bytes are on pages that are registered with a live communicator.
pub(crate) fn is_registered(at: u64, size: u64) -> bool {
    REGISTERED.any(|range| at < range.end && range.begin < at + size)
}

/// The number of ranges that are registered with live communicators, for tests.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_registered() -> u64 {
    let mut count = 0;
    REGISTERED.any(|_| {
        count += 1;
        false
    });
    count
}

/// Ends the registrations of a communicator that is freed (`ncclRegCleanup`, register/register.cc:141).
pub(super) fn forget_registrations(comm: &Comm) {
    let address = std::ptr::from_ref(comm).addr();
    drop(REGISTERED.take(|range| range.comm == address));
}

/// `ncclMemAlloc`, allocator.cc:17.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(out: *mut *mut c_void, size: usize) -> c_int {
    if size == 0 {
        return fail(INVALID_ARGUMENT, "ncclMemAlloc of 0 bytes");
    }
    match memory::allocate_shared(size) {
        None => fail(UNHANDLED_CUDA_ERROR, "Cuda failure 2 'out of memory'"),
        Some(at) => {
            // SAFETY: the caller lets an address be written to `out`, which is not null.
            unsafe { *out = std::ptr::with_exposed_provenance_mut(at as usize) };
            LIVE_MEMORY.fetch_add(1, Ordering::Relaxed);
            SUCCESS
        }
    }
}

/// `ncclMemFree`. It unmaps the memory at once, whatever the device is doing (`cuMemUnmap`, for which the manual
/// promises no wait).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemFree(at: *mut c_void) -> c_int {
    if memory::free(at.addr() as u64) {
        LIVE_MEMORY.fetch_sub(1, Ordering::Relaxed);
        SUCCESS
    } else {
        fail(
            INVALID_ARGUMENT,
            "ncclMemFree of an address that no allocation begins at",
        )
    }
}

/// `ncclCommRegister`, register/register.cc:155. A range within the pages of a registered one gets the same
/// handle, and is counted as a reference to it (`ncclRegister`, 82).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    comm: *mut c_void,
    at: *mut c_void,
    size: usize,
    out: *mut *mut c_void,
) -> c_int {
    let Some(comm) = comm_of(comm) else {
        return no_comm();
    };
    comm.end_if_launching("ncclCommRegister");
    let (at, size) = (at.addr() as u64, size as u64);
    if memory::device_of(at, size).is_none() {
        return fail(
            INVALID_ARGUMENT,
            "the range is not in one allocation of device memory",
        );
    }
    let comm_at = Arc::as_ptr(&comm).addr();
    let (begin, end) = (at / PAGE * PAGE, (at + size).next_multiple_of(PAGE));
    let covers =
        |range: &Registered| range.comm == comm_at && range.begin <= begin && end <= range.end;
    let handle = match REGISTERED.find(covers) {
        Some(handle) => {
            if let Some(range) = REGISTERED.get(handle) {
                range.references.fetch_add(1, Ordering::AcqRel);
            }
            handle
        }
        None => REGISTERED.insert(Arc::new(Registered {
            comm: comm_at,
            begin,
            end,
            references: AtomicU64::new(1),
        })),
    };
    // SAFETY: the caller lets a handle be written to `out`, which is not null.
    unsafe { *out = handle };
    SUCCESS
}

/// `ncclCommDeregister`, register/register.cc:203. When the last reference to a registration is given up, the mapping
/// through which kernels reach the memory is removed (`regCleanup`, 95), so the process ends if a kernel outside graphs
/// still uses the memory. NCCL counts the references of graphs apart (`graphRefs`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDeregister(comm: *mut c_void, handle: *mut c_void) -> c_int {
    let Some(comm) = comm_of(comm) else {
        return no_comm();
    };
    comm.end_if_launching("ncclCommDeregister");
    let Some(range) = REGISTERED.get(handle) else {
        return fail(INVALID_ARGUMENT, "handle argument is NULL");
    };
    if range.references.fetch_sub(1, Ordering::AcqRel) == 1 {
        if comm.uses(range.begin, range.end) {
            end_process("ncclCommDeregister of memory that an operation uses");
        }
        drop(REGISTERED.remove(handle));
    }
    SUCCESS
}

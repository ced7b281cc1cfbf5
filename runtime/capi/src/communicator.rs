//! The device memory of a group's communicators, and pools of NCCL's memory that they use directly.

use crate::device::device_of;
use crate::group::Group;
use crate::object::give_json;
use crate::status::{borrow, call, free, give, put, refused};
use crate::world::World;
use rcomm::backend::nccl::{MemoryPool, NcclOptions};
use rcomm::{Backend, Deadline, DeviceKind, Error, ErrorKind, ProcessGroup, Result};
use serde_json::json;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

/// The device memory of a group's communicators on one rank, in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CommunicatorMemory {
    /// All device memory that the library counts.
    pub total: u64,
    /// What `rcomm_group_suspend` keeps.
    pub persistent: u64,
    /// What `rcomm_group_suspend` releases, or has released.
    pub releasable: u64,
    /// 1 if the releasable memory is released now, else 0.
    pub is_released: i32,
}

/// Segments of device memory that NCCL allocates, for an allocator that cuts them into tensors. Groups with which the
/// pool is registered use the memory directly.
pub struct Pool(Arc<MemoryPool>);

/// Returns the group's backend for the memory of devices.
fn backend_of(group: &ProcessGroup) -> Result<&Arc<dyn Backend>> {
    group.backend(DeviceKind::Cuda).ok_or_else(|| {
        let message = "the group has no backend for the memory of devices";
        Error::new(ErrorKind::Unsupported, message)
    })
}

/// The moment at which an operation that begins now has reached the handle's time-out.
fn deadline_of(group: &ProcessGroup) -> Deadline {
    Deadline::In(group.timeout()).started()
}

/// Releases the device memory of the group's communicators that can be made again, for example while the program
/// generates between two phases of training. Operations on devices are refused until `rcomm_group_resume`. All members
/// call this. Waits for the other members and the operations under way, for the handle's time-out at most; after
/// `RCOMM_TIMEOUT` the group is unusable. `RCOMM_UNSUPPORTED` if the group has no backend for devices, or its NCCL is
/// too old; `RCOMM_INVALID_ARGUMENT` if the group is suspended.
///
/// # Safety
/// `group` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_suspend(group: *const Group) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        backend_of(group)?.suspend(deadline_of(group))
    })
}

/// Undoes `rcomm_group_suspend`. All members call it; it waits and fails as `rcomm_group_suspend` does.
/// `RCOMM_INVALID_ARGUMENT` if the group is not suspended.
///
/// # Safety
/// `group` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_resume(group: *const Group) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        backend_of(group)?.resume(deadline_of(group))
    })
}

/// Writes how much device memory the group's communicators have on this rank. `RCOMM_UNSUPPORTED` if the group has no
/// backend for devices, or its NCCL does not report it.
///
/// # Safety
/// `group` is a valid handle; `memory` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_comm_memory(
    group: *const Group,
    memory: *mut CommunicatorMemory,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        let found = backend_of(group)?.comm_memory()?;
        let value = CommunicatorMemory {
            total: found.total,
            persistent: found.persistent,
            releasable: found.releasable,
            is_released: i32::from(found.is_released),
        };
        // SAFETY: `memory` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(memory, value) }
    })
}

/// Makes a pool without segments for this rank's device. `RCOMM_BACKEND` if there is no NCCL; `RCOMM_UNSUPPORTED` if it
/// is too old to allocate or register memory.
///
/// # Safety
/// `world` is a valid handle; `pool` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_pool_new(world: *const World, pool: *mut *mut Pool) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let world = unsafe { borrow(world, "the world")? };
        let options = NcclOptions::of(world.core().config())?;
        let made = MemoryPool::new(&options, &device_of(world)?)?;
        // SAFETY: `pool` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(pool, Pool(made)) }
    })
}

/// Allocates a segment of `bytes` bytes, with undefined contents, registers it with the groups of the pool, and writes
/// its address on the device. If a group does not register it, the segment is freed again. Waits until no launch of a
/// group is in progress, at most 30 seconds for each registration.
///
/// # Safety
/// `pool` is a valid handle; `address` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_pool_allocate(
    pool: *const Pool,
    bytes: usize,
    address: *mut *mut c_void,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `pool` alive during the call.
        let pool = unsafe { borrow(pool, "the pool")? };
        if address.is_null() {
            return Err(refused("the pointer for the result is NULL"));
        }
        let at = pool.0.allocate(bytes)?;
        let at = std::ptr::without_provenance_mut(at as usize);
        // SAFETY: `address` is not NULL, so the caller guarantees that one value may be written there.
        unsafe { put(address, at) }
    })
}

/// Deregisters the segment at this address from all groups of the pool and frees it. Waits for the groups' operations
/// on it, at most 30 seconds for each group. `RCOMM_INVALID_ARGUMENT` if the pool has no such segment. After the error
/// of a group that does not deregister it the segment stays.
///
/// # Safety
/// `pool` is a valid handle; the operations on the segment have released it, and it is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_pool_deallocate(pool: *const Pool, address: *mut c_void) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `pool` alive during the call.
        let pool = unsafe { borrow(pool, "the pool")? };
        pool.0.free(address.addr() as u64)
    })
}

/// Registers all present and future segments of the pool with the communicator of a group. If the group has no
/// communicator yet, the segments are registered once it has one: at the next allocation, or when this is called again.
/// After an error the group stays in the pool until `rcomm_pool_deregister`.
///
/// # Safety
/// `pool` and `group` are valid handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_pool_register(pool: *const Pool, group: *const Group) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `pool` alive during the call.
        let pool = unsafe { borrow(pool, "the pool")? };
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        pool.0.register_with(backend_of(group)?)
    })
}

/// Undoes `rcomm_pool_register`. Waits for the group's operations on the segments, at most 30 seconds for each.
/// `RCOMM_INVALID_ARGUMENT` if the pool is not registered with the group. After any other error, the segments that are
/// left are still registered.
///
/// # Safety
/// `pool` and `group` are valid handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_pool_deregister(pool: *const Pool, group: *const Group) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `pool` alive during the call.
        let pool = unsafe { borrow(pool, "the pool")? };
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        pool.0.deregister_from(backend_of(group)?)
    })
}

/// Writes the segments of the pool, sorted by address, as JSON: a list of `{"address": .., "bytes": ..}`. Free the text
/// with `rcomm_text_free`.
///
/// # Safety
/// `pool` is a valid handle; `json` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_pool_segments(pool: *const Pool, json: *mut *mut c_char) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `pool` alive during the call.
        let pool = unsafe { borrow(pool, "the pool")? };
        let segments = pool.0.segments().into_iter();
        let segments = segments.map(|(at, bytes)| json!({"address": at, "bytes": bytes}));
        // SAFETY: `json` is NULL, which is refused, or the caller guarantees that one address may be written there.
        unsafe { give_json(json, &segments.collect()) }
    })
}

/// Makes this the pool from which the functions that are written to `allocate` and `release` take and return segments
/// of its device, until the process ends: they have the signatures of PyTorch's `CUDAPluggableAllocator`. Their stream
/// is not used; where they fail, the reason is logged, and `allocate` returns NULL. `RCOMM_INVALID_ARGUMENT` if another
/// pool is installed for the device.
///
/// # Safety
/// `pool` is a valid handle; `allocate` and `release` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_pool_install(
    pool: *const Pool,
    allocate: *mut Option<
        unsafe extern "C" fn(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void,
    >,
    release: *mut Option<
        unsafe extern "C" fn(at: *mut c_void, size: isize, device: c_int, stream: *mut c_void),
    >,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `pool` alive during the call.
        let pool = unsafe { borrow(pool, "the pool")? };
        if allocate.is_null() || release.is_null() {
            return Err(refused("the pointer for a function is NULL"));
        }
        let functions = pool.0.install()?;
        // SAFETY: `allocate` is not NULL, so the caller guarantees that one value may be written there.
        unsafe { put(allocate, Some(functions.allocate))? };
        // SAFETY: `release` is not NULL, so the caller guarantees that one value may be written there.
        unsafe { put(release, Some(functions.free)) }
    })
}

/// Frees the handle, and with it the pool unless it is installed. A segment of the pool is freed once no group has it
/// registered any more. NULL has no effect.
///
/// # Safety
/// `pool` is NULL or a valid handle that is not used afterwards; its segments are not used afterwards unless the pool
/// is installed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_pool_free(pool: *mut Pool) {
    // SAFETY: `pool` is NULL or a handle of this type that the caller gives up.
    unsafe { free(pool) }
}

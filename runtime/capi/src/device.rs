//! Devices: streams, their memory, and operations on it.

use crate::group::Group;
use crate::memory::{self, dtype_of, kept_by_caller};
use crate::object::give_json;
use crate::status::{borrow, call, free, give, put};
use crate::work::WorkHandle;
use crate::world::World;
use rcomm::Result;
use rcomm::backend::nccl::{
    CudaDevice, CudaStream, DeviceBuffer, DmaConnectivity, NcclOptions, Priority,
};
use serde_json::json;
use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

/// A stream of a CUDA device: its work runs in the order in which it was enqueued.
pub struct Stream(Arc<CudaStream>);

/// Elements in the memory of a device, used on one stream.
pub struct DeviceMemory(DeviceBuffer);

/// The device on which the groups of this world work, as the options say.
pub(crate) fn device_of(world: &World) -> Result<Arc<CudaDevice>> {
    let world = world.core();
    let local_rank = world.place().local_rank.unwrap_or(world.rank());
    NcclOptions::of(world.config())?.open_device(local_rank)
}

/// Makes a stream on the device of this rank, the one on which groups with the backend `nccl` work. `high_priority` is
/// 0 or 1. The driver is loaded at the first call: `RCOMM_BACKEND` if there is none.
///
/// # Safety
/// `world` is a valid handle; `stream` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_stream_new(
    world: *const World,
    high_priority: i32,
    stream: *mut *mut Stream,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let device = device_of(unsafe { borrow(world, "the world")? })?;
        let priority = match high_priority {
            0 => Priority::Normal,
            _ => Priority::High,
        };
        let made = CudaStream::new(&device, priority)?;
        // SAFETY: `stream` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(stream, Stream(made)) }
    })
}

/// Makes a handle of the default stream of this rank's device.
///
/// # Safety
/// `world` is a valid handle; `stream` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_stream_default(
    world: *const World,
    stream: *mut *mut Stream,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let device = device_of(unsafe { borrow(world, "the world")? })?;
        // SAFETY: `stream` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(stream, Stream(CudaStream::default_of(&device))) }
    })
}

/// Makes a handle of a stream of the program's (`CUstream`, `cudaStream_t`) on this rank's device.
/// `RCOMM_INVALID_ARGUMENT` if the stream is of another device.
///
/// # Safety
/// `world` is a valid handle; `raw` is a live stream, which stays one until the handle and all that was made with it
/// are freed and every operation on them has released its memory; `stream` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_stream_borrow(
    world: *const World,
    raw: *mut c_void,
    stream: *mut *mut Stream,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `world` alive during the call.
        let device = device_of(unsafe { borrow(world, "the world")? })?;
        // SAFETY: the caller keeps the stream alive as long as it is used.
        let made = unsafe { CudaStream::borrow(&device, raw, Arc::new(()))? };
        // SAFETY: `stream` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(stream, Stream(made)) }
    })
}

/// Writes the driver's handle of the stream (`CUstream`, `cudaStream_t`), for the program's own kernels and libraries.
/// It is valid until `stream` and all that was made with it are freed.
///
/// # Safety
/// `stream` is a valid handle; `raw` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_stream_raw(stream: *const Stream, raw: *mut *mut c_void) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `stream` alive during the call.
        let stream = unsafe { borrow(stream, "the stream")? };
        // SAFETY: `raw` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(raw, stream.0.as_raw()) }
    })
}

/// Writes the number of the stream's device in this process, as the CUDA driver counts.
///
/// # Safety
/// `stream` is a valid handle; `ordinal` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_stream_device(stream: *const Stream, ordinal: *mut u32) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `stream` alive during the call.
        let stream = unsafe { borrow(stream, "the stream")? };
        // SAFETY: `ordinal` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(ordinal, stream.0.device().ordinal().into()) }
    })
}

/// Waits without a deadline until all work that was enqueued on the stream is done. Do not call this while such work
/// may wait for other ranks.
///
/// # Safety
/// `stream` is a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_stream_synchronize(stream: *const Stream) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `stream` alive during the call.
        let stream = unsafe { borrow(stream, "the stream")? };
        stream.0.synchronize()
    })
}

/// Frees the handle; memory and handles of groups that were made with it keep the stream. NULL has no effect.
///
/// # Safety
/// `stream` is NULL or a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_stream_free(stream: *mut Stream) {
    // SAFETY: `stream` is NULL or a handle of this type that the caller gives up.
    unsafe { free(stream) }
}

/// Allocates `count` elements, all zero, in the memory of the stream's device. They are used on this stream: work on
/// other streams must have ended when the memory is freed.
///
/// # Safety
/// `stream` is a valid handle; `memory` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_device_new(
    stream: *const Stream,
    count: usize,
    dtype: u8,
    memory: *mut *mut DeviceMemory,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `stream` alive during the call.
        let stream = unsafe { borrow(stream, "the stream")? };
        let made = DeviceBuffer::zeroed(&stream.0, dtype_of(dtype)?, count)?;
        // SAFETY: `memory` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(memory, DeviceMemory(made)) }
    })
}

/// Writes the address of the elements, which is one of the device's: for kernels, and for operations with a handle of
/// `rcomm_group_on_stream`.
///
/// # Safety
/// `memory` is a valid handle; `address` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_device_address(
    memory: *const DeviceMemory,
    address: *mut *mut c_void,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `memory` alive during the call.
        let memory = unsafe { borrow(memory, "the memory")? };
        let at = std::ptr::without_provenance_mut(memory.0.address() as usize);
        // SAFETY: `address` is NULL, which is refused, or the caller guarantees that one value may be written there.
        unsafe { put(address, at) }
    })
}

/// Copies `count` elements of the host to the device, after the work that is enqueued on the stream. `count` is the
/// number of elements that `memory` has. Waits for the copy.
///
/// # Safety
/// `memory` is a valid handle; `count` elements lie at `elements`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_device_fill(
    memory: *const DeviceMemory,
    elements: *const c_void,
    count: usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `memory` alive during the call.
        let memory = unsafe { &borrow(memory, "the memory")?.0 };
        // SAFETY: `elements` is NULL, or holds `count` elements that stay unchanged during the call.
        let elements =
            unsafe { memory::input(elements, count, memory.dtype(), &kept_by_caller())? };
        memory.fill_from(&elements)
    })
}

/// Copies the elements to `count` elements of the host, after the work that is enqueued on the stream. `count` is the
/// number of elements that `memory` has. Waits for the copy.
///
/// # Safety
/// `memory` is a valid handle; `count` elements may be written at `elements`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_device_read(
    memory: *const DeviceMemory,
    elements: *mut c_void,
    count: usize,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `memory` alive during the call.
        let memory = unsafe { &borrow(memory, "the memory")?.0 };
        // SAFETY: `elements` is NULL, or holds `count` elements that only this call uses until it returns.
        let mut elements =
            unsafe { memory::output(elements, count, memory.dtype(), &kept_by_caller())? };
        memory.copy_to(&mut elements)
    })
}

/// Frees handle and memory, after the work that is enqueued on the stream. No operation may use the memory then. NULL
/// has no effect.
///
/// # Safety
/// `memory` is NULL or a valid handle that is not used afterwards, nor is the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_device_free(memory: *mut DeviceMemory) {
    // SAFETY: `memory` is NULL or a handle of this type that the caller gives up.
    unsafe { free(memory) }
}

/// Makes another handle of the same group, to be freed, whose buffers are addresses in the memory of the stream's
/// device: of `rcomm_device_new` or of another allocator. Operations that are called with it begin after the work that
/// is enqueued on the stream then. `rcomm_work_wait_stream` lets later work on a stream wait for them; a call without
/// `work`, and `rcomm_work_wait`, wait on the host. Lists of counts and ranks stay in the host's memory. The group
/// needs a backend for devices (in the environment, `RCOMM_BACKEND` = `cpu:cpu,cuda:nccl`), else operations fail with
/// `RCOMM_UNSUPPORTED`.
///
/// # Safety
/// `group` and `stream` are valid handles; `handle` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_group_on_stream(
    group: *const Group,
    stream: *const Stream,
    handle: *mut *mut Group,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        // SAFETY: the caller keeps the handle `stream` alive during the call.
        let stream = unsafe { borrow(stream, "the stream")? };
        let owner = group.owner.on(Some(stream.0.clone()));
        // SAFETY: `handle` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(handle, Group::keeping(group.core.clone(), owner)) }
    })
}

/// Lets the work that is enqueued on the stream from now on wait for the end of the operation. The host does not wait.
/// Returns the error of an operation that has failed; `RCOMM_UNSUPPORTED` if the operation does not run on a device.
///
/// # Safety
/// `work` and `stream` are valid handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_wait_stream(
    work: *const WorkHandle,
    stream: *const Stream,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        // SAFETY: the caller keeps the handle `stream` alive during the call.
        let stream = unsafe { borrow(stream, "the stream")? };
        work.wait_stream(&stream.0)
    })
}

/// Writes how many links of NVLink join each pair of devices of this host, directly or over switches, as JSON:
/// `bus_ids`, and in `links` a row for each device. Asks NVIDIA's management library, for `timeout_ms` at most;
/// `RCOMM_BACKEND` if there is none. Free the text with `rcomm_text_free`.
///
/// # Safety
/// `json` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_dma_connectivity(timeout_ms: u64, json: *mut *mut c_char) -> i32 {
    call(|| {
        let found = DmaConnectivity::nvlink(None, Duration::from_millis(timeout_ms))?;
        let value = json!({"bus_ids": found.bus_ids, "links": found.links});
        // SAFETY: `json` is NULL, which is refused, or the caller guarantees that one address may be written there.
        unsafe { give_json(json, &value) }
    })
}

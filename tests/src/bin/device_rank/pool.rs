//! Tests a pool of the library's memory from which a framework's allocator takes segments, by pointers to C functions.

use super::communicators::backend;
use super::ends::{counter, wait_until};
use super::{Gpu, all_reduce, count};
use rcomm::backend::nccl::{DeviceBuffer, MemoryPool, NcclOptions};
use rcomm::{DType, DeviceKind, GroupOptions, Result, World};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

/// The size of a segment in bytes.
const SEGMENT: usize = 2 << 20;

/// A pool registers its segments, also those that it allocates later, with every group that it is registered with. It
/// deregisters a segment before it frees it: the simulator ends a process that frees registered memory.
pub(super) fn pool(world: &World, gpu: &Gpu) -> Result<()> {
    let size = world.size() as f32;
    let (group, world_backend) = (world.group(), backend(world));
    let (live, registered) = (counter(world, "live_memory"), counter(world, "registered"));
    let expect_refusal = |what: &str, result: Result<()>| {
        let error = result.expect_err(what);
        eprintln!("refused {what}: {error}");
    };
    assert_eq!(count(group, gpu)?, size);
    let before = live();
    let pool = MemoryPool::new(&NcclOptions::of(world.config())?, &gpu.device)?;
    let functions = pool.install()?;
    let device = c_int::from(gpu.device.ordinal());
    // SAFETY: what the function returns is used as device memory of that size, until it is freed.
    let allocate = |size: usize| unsafe { (functions.allocate)(size as isize, device, null_mut()) };
    // SAFETY: `at` is a segment of this size that `allocate` returned, and the operations on it have ended.
    let free = |at| unsafe { (functions.free)(at, SEGMENT as isize, device, null_mut()) };

    let first = allocate(SEGMENT);
    assert!(!first.is_null());
    assert_eq!(registered(), 0);
    pool.register_with(world_backend)?;
    pool.register_with(world_backend)?;
    assert_eq!(registered(), 1);
    let second = allocate(SEGMENT);
    assert_eq!((live() - before, registered()), (2, 2));
    assert_eq!(pool.segments().len(), 2);

    // The pool is also registered with a second group of the same ranks.
    let split = group.split(Some(0), 0, &GroupOptions::named("second"))?;
    let split = split.expect("all ranks are members");
    assert_eq!(count(&split, gpu)?, size);
    let other = split
        .backend(DeviceKind::Cuda)
        .expect("the CUDA backend")
        .clone();
    pool.register_with(&other)?;
    assert_eq!(registered(), 4);

    // The framework cuts a tensor out of a segment.
    let at = second.addr() as u64 + 4096;
    let owner = Arc::new(());
    // SAFETY: the segment is longer, and is freed below, after the operation.
    let tensor = unsafe { DeviceBuffer::foreign(&gpu.stream, at, DType::F32, 256, owner)? };
    tensor.fill_from(&rcomm::Buffer::from_slice(&[1.0f32; 256]))?;
    for group in [group, &split] {
        group.execute_async(all_reduce(&tensor)?)?.wait()?;
    }
    assert_eq!(tensor.to_vec::<f32>()?, [size * size; 256]);

    free(second);
    assert_eq!((live() - before, registered()), (1, 2));
    pool.deregister_from(&other)?;
    assert_eq!(registered(), 1);
    expect_refusal(
        "a group that is not registered",
        pool.deregister_from(&other),
    );
    expect_refusal("a segment that is gone", pool.free(second.addr() as u64));
    expect_refusal("no bytes", pool.allocate(0).map(drop));
    let another = MemoryPool::new(&NcclOptions::of(world.config())?, &gpu.device)?;
    expect_refusal("a second pool of the device", another.install().map(drop));
    assert!(allocate(0).is_null());

    // A group that ends takes its registrations with it.
    pool.register_with(&other)?;
    drop(other);
    split.destroy()?;
    let third = allocate(SEGMENT);
    assert!(!third.is_null());
    free(third);
    free(first);
    // The group ends on a thread of its own, which may keep a segment for a moment longer.
    wait_until("the end of the pool's memory", || {
        (live(), registered()) == (before, 0)
    });
    eprintln!("the pool is empty");
    Ok(())
}

/// The library cannot allocate memory or register it.
pub(super) fn no_pool(world: &World, gpu: &Gpu) -> Result<()> {
    let pool = MemoryPool::new(&NcclOptions::of(world.config())?, &gpu.device);
    let refused = pool.map(drop).expect_err("the library has no call for it");
    eprintln!("refused: {refused}");
    Ok(())
}

//! Scenarios in which the device, the library or a rank is late for an operation that ends without it. The memory of an
//! aborted operation stays alive until neither the device nor the library uses it any more.

use super::ends::wait_until;
use super::stuck::Gate;
use super::{Gpu, all_reduce, count, stay_for, window};
use libloading::Library;
use rcomm::backend::nccl::{DeviceBuffer, NcclOptions};
use rcomm::backend::{AbortReason, Call, Observer, Progress};
use rcomm::{
    DType, Deadline, DeviceKind, Error, ErrorKind, Hints, Op, ProcessGroup, Result, WorkStatus,
    World,
};
use rcomm_tests::process::CULPRIT;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Memory of the group is dropped before the device has filled it with zeros.
pub(super) fn zeros(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let backend = group
        .backend(DeviceKind::Cuda)
        .expect("the CUDA backend is configured");
    let numbers = gpu.buffer(&[1.0f32; 256])?;
    let gate = Gate::shut(world, gpu)?;
    // The group's stream waits for the shut stream of the numbers, so that the zeros of the allocation wait as well.
    let work = group.execute_async(all_reduce(&numbers)?)?;
    drop(backend.allocate(DType::U8, 1 << 20)?);
    gate.open();
    work.wait()?;
    assert_eq!(count(group, gpu)?, world.size() as f32);
    eprintln!("given up and written");
    Ok(())
}

/// Device memory, with a weak reference to its owner.
fn with_weak_owner(gpu: &Gpu, elements: &[u32]) -> Result<(DeviceBuffer, Weak<DeviceBuffer>)> {
    let owner = Arc::new(gpu.buffer(elements)?);
    let (at, weak) = (owner.address(), Arc::downgrade(&owner));
    // SAFETY: the elements at `at` are all of the memory of `owner`.
    let memory =
        unsafe { DeviceBuffer::foreign(&gpu.stream, at, DType::U32, elements.len(), owner)? };
    Ok((memory, weak))
}

/// Waits until the library's state of the group's communicator satisfies `is_wanted`.
fn wait_for_state(group: &ProcessGroup, is_wanted: impl Fn(&str) -> bool) {
    let backend = group
        .backend(DeviceKind::Cuda)
        .expect("the CUDA backend is configured");
    let start = Instant::now();
    let is_reached = || {
        let facts = &backend.comm_state()[0].facts;
        let mut states = facts.iter().filter(|(name, _)| name == "async_state");
        states.any(|(_, state)| is_wanted(state))
    };
    while !is_reached() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "the library's state is not as expected within a minute"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for all work on the device, with the driver's `cuCtxSynchronize`.
fn wait_for_device(world: &World, gpu: &Gpu) {
    type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
    type Take = unsafe extern "C" fn(*mut c_void) -> c_int;
    type Call = unsafe extern "C" fn() -> c_int;
    let options =
        NcclOptions::of(world.config()).expect("the options that the world was made with");
    let path = options.driver.unwrap_or_else(|| "libcuda.so.1".into());
    let mut context = std::ptr::null_mut();
    // SAFETY: the world has loaded this library before; these are the functions' types in cuda.h. The
    // context is retained before it is pushed, and popped below.
    let statuses = unsafe {
        let driver = Library::new(path).expect("the CUDA driver can be loaded");
        let retain = driver.get::<Retain>(b"cuDevicePrimaryCtxRetain");
        let push = driver.get::<Take>(b"cuCtxPushCurrent_v2");
        let synchronize = driver.get::<Call>(b"cuCtxSynchronize");
        let pop =
            driver.get::<unsafe extern "C" fn(*mut *mut c_void) -> c_int>(b"cuCtxPopCurrent_v2");
        let ordinal = c_int::from(gpu.device.ordinal());
        [
            retain.expect("cuDevicePrimaryCtxRetain")(&mut context, ordinal),
            push.expect("cuCtxPushCurrent")(context),
            synchronize.expect("cuCtxSynchronize")(),
            pop.expect("cuCtxPopCurrent")(&mut context),
        ]
    };
    assert_eq!(statuses, [0; 4]);
}

/// Waits until the library has finished its calls, and then until the device has finished its work.
fn catch_up(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    // The state may never become "ready", since the other ranks may have left.
    wait_for_state(group, |state| {
        state != "in progress" && state != "inside a call"
    });
    wait_for_device(world, gpu);
    Ok(())
}

/// An operation is aborted while the library is launching it, and is launched nevertheless: a call into the
/// library cannot be canceled.
pub(super) fn launch(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let (numbers, owner) = with_weak_owner(gpu, &[1; 256])?;
    let op = all_reduce(&numbers)?;
    drop(numbers);
    let work = std::thread::scope(|scope| {
        let issuing = scope.spawn(|| group.execute_async(op));
        wait_for_state(group, |state| state == "in progress");
        group.abort("it takes too long");
        issuing.join().expect("the issuing thread does not panic")
    })?;
    // This waits only for the work that is on the device by now: the operation may still be launched later.
    wait_for_device(world, gpu);
    let error = work
        .wait()
        .map(|_| ())
        .expect_err("the operation was aborted");
    eprintln!("given up: {error}");
    catch_up(world, gpu)?;
    assert!(
        owner.upgrade().is_some(),
        "memory was freed that the library may still use"
    );
    Ok(())
}

/// One call of an NCCL group is refused, and with it all calls before it in the group: none of them is
/// launched.
pub(super) fn refused_group(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let input = gpu.buffer(&[1u32; 256])?;
    // The buffer that the first call, the broadcast of rank 0, would write.
    let (first, owner) = with_weak_owner(gpu, &[0; 256])?;
    let mut outputs = vec![first.buffer()?];
    drop(first);
    for _ in 1..group.size() {
        outputs.push(gpu.buffer(&[0u32; 256])?.buffer()?);
    }
    let input = input.buffer()?;
    let work = group.execute_async(Op::AllGather { input, outputs })?;
    let error = work.wait().map(|_| ()).expect_err("a call was refused");
    eprintln!("refused: {error}");
    let start = Instant::now();
    while owner.upgrade().is_some() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "a buffer is still held"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// An observer that ignores all events.
struct NoObserver;

impl Observer for NoObserver {
    fn started(&self) {}

    fn ended(&self) {}
}

/// An operation is polled only after the abort that has stopped it is over. The test calls the backend
/// without the group, since the group's watchdog would poll.
pub(super) fn poll_after_abort(world: &World, gpu: &Gpu) -> Result<()> {
    let backend = world.group().backend(DeviceKind::Cuda);
    let backend = backend.expect("the CUDA backend is configured");
    let numbers = gpu.buffer(&[1.0f32; 256])?;
    let call = Call {
        seq: 1,
        turn: 1,
        deadline: Deadline::In(Duration::from_secs(60)),
        hints: Hints::NONE,
    };
    let pending = backend.issue(all_reduce(&numbers)?, call, Arc::new(NoObserver))?;
    // For ranks that have not issued their operation, a rank that ends its communicator is another failure.
    super::stay_for(world, "issued", 0..world.size());
    let error = Error::new(ErrorKind::Aborted, "stopped by the test");
    let timeout = None;
    backend.abort(&AbortReason { error, timeout });
    wait_for_device(world, gpu);
    match pending.wait(Deadline::In(Duration::from_secs(60))) {
        Progress::Failed(error) => eprintln!("stopped: {error}"),
        other => panic!("the operation was not aborted: {other:?}"),
    }
    Ok(())
}

/// The library puts after the deadline has passed: the call cannot be canceled.
pub(super) fn put(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let (window, _) = window::open(group, 64)?;
    let next = (group.rank() + 1) % group.size();
    let (source, owner) = with_weak_owner(gpu, &[7; 64])?;
    group.set_timeout(Duration::from_secs(2));
    if group.rank() == CULPRIT {
        let error = window.put_buffer(next, 0, &source.buffer()?);
        eprintln!("put: {}", error.expect_err("the library is slow"));
        let after = window.put(next, 0, &[1u32]);
        eprintln!(
            "after: {}",
            after.expect_err("the first put may still arrive")
        );
    }
    drop(source);
    let closed = window.close().map(|_| ());
    let error = closed.expect_err("a put may still come");
    eprintln!("not closed: {error}");
    if group.rank() == CULPRIT {
        catch_up(world, gpu)?;
        assert!(
            owner.upgrade().is_some(),
            "memory was freed that the device was still to read"
        );
    }
    Ok(())
}

/// A rank comes to an operation when the others have given the group up, and their kernels have stopped.
pub(super) fn after_the_others(world: World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    // A rank that has not seen the end of the last operation might doubt it.
    stay_for(&world, "counted", 0..world.size());
    let numbers = gpu.buffer(&[1i64; 100])?;
    if world.rank() == CULPRIT {
        let others = (0..world.size()).filter(|&rank| rank != CULPRIT);
        stay_for(&world, "lost", others);
    }
    let ended = world.group().execute_async(all_reduce(&numbers)?)?.wait();
    eprintln!(
        "lost: {}",
        ended.map(|_| ()).expect_err("all came, but not together")
    );
    stay_for(&world, "lost", 0..world.size());
    // All ranks have aborted the group by now, and the last one removes the note that it was given up.
    let has_note = || {
        let keys = world.store().list_keys();
        let keys = keys.expect("the store answers");
        keys.iter().any(|key| key.contains("given-up"))
    };
    wait_until("the removal of the note", || !has_note());
    stay_for(&world, "seen", 0..world.size());
    Ok(())
}

/// The program of one rank aborts a group while all ranks but the culprit run an operation of it.
pub(super) fn aborted_elsewhere(world: World, gpu: &Gpu) -> Result<()> {
    // The end of an operation that has run for less than a second is believed.
    const LATER: Duration = Duration::from_secs(2);
    count(world.group(), gpu)?;
    let numbers = gpu.buffer(&[1i64; 100])?;
    let others = || (0..world.size()).filter(|&rank| rank != CULPRIT);
    if world.rank() != CULPRIT {
        let work = world.group().execute_async(all_reduce(&numbers)?)?;
        wait_until("the start of the kernel", || {
            work.status() == WorkStatus::Started
        });
        stay_for(&world, "started", others());
        if world.rank() == 0 {
            std::thread::sleep(LATER);
            world.group().abort("on purpose");
        }
        let ended = work.wait().map(|_| ());
        eprintln!("lost: {}", ended.expect_err("a rank aborted the group"));
    }
    stay_for(&world, "ended", 0..world.size());
    Ok(())
}

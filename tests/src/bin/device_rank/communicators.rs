//! Scenarios of what a program asks of communicators besides operations: to release their memory for some time, to pass
//! numbers to profiler plug-ins, to use certain algorithms only, to use one communicator for both directions of a pair,
//! and to estimate how long a collective takes. Also scenarios of how communicators end after an error.

use super::ends::{counter, end_in_time, wait_until};
use super::stuck::Gate;
use super::{Gpu, all_reduce, count, stay_for, window};
use libloading::{Library, Symbol};
use rcomm::backend::Backend;
use rcomm::backend::nccl::{CudaStream, DeviceBuffer, LaunchOrder, NcclOptions, Priority};
use rcomm::{
    DType, Deadline, DeviceKind, ErrorKind, GroupOptions, Op, ReduceOp, Reduction, Result, World,
};
use rcomm_tests::process::CULPRIT;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

const LIMIT: Deadline = Deadline::In(Duration::from_secs(60));

pub(super) fn backend(world: &World) -> &Arc<dyn Backend> {
    let backend = world.group().backend(DeviceKind::Cuda);
    backend.expect("the CUDA backend is configured")
}

/// Sends to `to` and receives from `from`, both at once. The lower rank of a pair sends first, so that one communicator
/// for both directions suffices.
fn exchange(world: &World, gpu: &Gpu, to: u32, from: u32) -> Result<()> {
    exchange_in_order(world, gpu, (to, from), world.rank() < to)
}

/// Works as [`exchange`], in this order of issue.
fn exchange_in_order(
    world: &World,
    gpu: &Gpu,
    (to, from): (u32, u32),
    sends_first: bool,
) -> Result<()> {
    let group = world.group();
    let (sent, received) = (gpu.buffer(&[world.rank(); 64])?, gpu.buffer(&[0u32; 64])?);
    let send = Op::Send {
        buffer: sent.buffer()?,
        peer: to,
        tag: 0,
    };
    let receive = Op::Recv {
        buffer: received.buffer()?,
        peer: Some(from),
        tag: 0,
    };
    let [first, second] = if sends_first {
        [send, receive]
    } else {
        [receive, send]
    };
    let works = [group.execute_async(first)?, group.execute_async(second)?];
    works
        .into_iter()
        .try_for_each(|work| work.wait().map(drop))?;
    assert_eq!(received.to_vec::<u32>()?, [from; 64]);
    Ok(())
}

/// The memory of the communicators is released and restored.
pub(super) fn suspension(world: &World, gpu: &Gpu) -> Result<()> {
    let (group, backend) = (world.group(), backend(world));
    let size = world.size() as f32;
    assert_eq!(count(group, gpu)?, size);
    // The exchange makes a second communicator.
    let peer = world.rank() ^ 1;
    exchange(world, gpu, peer, peer)?;
    let before = backend.comm_memory()?;
    assert!(!before.is_released && before.releasable > 0);
    assert_eq!(before.total, before.releasable + before.persistent);
    for _ in 0..2 {
        // An operation that is issued before the suspension ends before it.
        let numbers = gpu.buffer(&[1i64; 100])?;
        let work = group.execute_async(all_reduce(&numbers)?)?;
        backend.suspend(LIMIT)?;
        assert!(work.is_completed());
        assert!(backend.comm_memory()?.is_released);
        let again = backend
            .suspend(LIMIT)
            .expect_err("the backend is suspended");
        let refused = count(group, gpu).expect_err("the group is suspended");
        eprintln!("refused: {refused}; {again}");
        backend.resume(LIMIT)?;
        assert_eq!(backend.comm_memory()?, before);
        assert_eq!(count(group, gpu)?, size);
        exchange(world, gpu, peer, peer)?;
    }
    let refused = backend.resume(LIMIT);
    let refused = refused.expect_err("the backend is not suspended");
    eprintln!("refused: {refused}");
    Ok(())
}

/// The library has no functions that release the memory of communicators.
pub(super) fn no_suspension(world: &World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    let backend = backend(world);
    let refused = [
        backend.suspend(LIMIT).expect_err("the library cannot"),
        backend
            .comm_memory()
            .map(drop)
            .expect_err("the library cannot"),
    ];
    for error in refused {
        eprintln!("refused: {error}");
    }
    Ok(())
}

/// Prints the tag that the library got with the latest collective, and that collective's number.
pub(super) fn tags(world: &World, gpu: &Gpu) -> Result<()> {
    let tag = counter(world, "last_tag");
    for _ in 0..3 {
        count(world.group(), gpu)?;
        let seq = world.group().status().last_enqueued;
        eprintln!("tag: {} of #{seq}", tag());
    }
    Ok(())
}

/// All ranks issue an operation on each of two groups, in the same order; on one rank, the device reaches the second
/// operation first. A device that holds one kernel at a time then has the wrong one on that rank, unless launches are
/// ordered.
pub(super) fn shared_device(world: World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let second = group.split(Some(0), 0, &GroupOptions::named("second"))?;
    let second = second.expect("all ranks have the same color");
    count(group, gpu)?;
    count(&second, gpu)?;
    let options = NcclOptions::of(world.config())?;
    let is_ordered = options.launch_order == LaunchOrder::Implicit;
    let kernels = counter(&world, "kernels");
    let wait_for_start = |before: u64| {
        if !is_ordered {
            wait_until("the start of a kernel", || kernels() > before);
        }
    };
    let other = CudaStream::new(&gpu.device, Priority::Normal)?;
    let numbers = [
        gpu.buffer(&[1i64; 100])?,
        DeviceBuffer::copy_of(&other, &[1i64; 100])?,
    ];
    let is_late = world.rank() == CULPRIT;
    let gate = is_late.then(|| Gate::shut(&world, gpu)).transpose()?;
    let before = kernels();
    let first = group.execute_async(all_reduce(&numbers[0])?)?;
    if !is_late {
        wait_for_start(before);
    }
    let next = second.execute_async(all_reduce(&numbers[1])?)?;
    if let Some(gate) = &gate {
        wait_for_start(before);
        gate.open();
    }
    for work in [first, next] {
        if let Err(error) = work.wait() {
            eprintln!("lost: {error}");
            end_in_time(world);
            return Ok(());
        }
    }
    for numbers in numbers {
        assert_eq!(numbers.to_vec::<i64>()?, vec![i64::from(world.size()); 100]);
    }
    eprintln!("both are done");
    drop(second);
    world.shutdown()
}

/// Prints how long the library expects collectives to take. Nothing runs, and the group stays usable.
pub(super) fn estimates(world: &World, gpu: &Gpu) -> Result<()> {
    let (group, backend) = (world.group(), backend(world));
    count(group, gpu)?;
    let launched = || {
        let states = backend.comm_state();
        let mut facts = states.into_iter().flat_map(|state| state.facts);
        let fact = facts.find(|(name, _)| name == "launched");
        fact.map(|(_, number)| number)
    };
    let (before, size) = (launched(), group.size() as usize);
    let ones = gpu.buffer(&[1f32; 1 << 10])?;
    let large = gpu.buffer(&[1f32; 1 << 16])?;
    let parts_of_all_ranks = gpu.buffer(&vec![1f32; size << 10])?;
    let reduction = || Reduction::from(ReduceOp::Sum);
    let collectives = [
        all_reduce(&ones)?,
        all_reduce(&large)?,
        Op::Broadcast {
            buffer: ones.buffer()?,
            root: 0,
        },
        Op::Reduce {
            buffer: ones.buffer()?,
            op: reduction(),
            root: 1,
        },
        Op::AllGatherSingle {
            input: ones.buffer()?,
            output: parts_of_all_ranks.buffer()?,
        },
        Op::ReduceScatterSingle {
            input: parts_of_all_ranks.buffer()?,
            output: ones.buffer()?,
            op: reduction(),
        },
    ];
    let mut times = Vec::new();
    for op in &collectives {
        let time = group.estimate(op)?;
        eprintln!("estimate: {} {time:?}", op.op_type());
        times.push(time);
    }
    assert!(
        times[0] > Duration::ZERO && times[1] > times[0],
        "{times:?}"
    );
    let empty = DeviceBuffer::zeroed(&gpu.stream, DType::F32, 0)?;
    assert_eq!(group.estimate(&all_reduce(&empty)?)?, Duration::ZERO);
    // NCCL estimates neither messages nor several calls at once, and the last operation has an invalid root.
    let peer = world.rank() ^ 1;
    let exchanged = gpu.buffer(&vec![1f32; size << 10])?;
    let buffer = || ones.buffer();
    let refused = [
        Op::Send {
            buffer: buffer()?,
            peer,
            tag: 0,
        },
        Op::AllToAllSingle {
            input: parts_of_all_ranks.buffer()?,
            output: exchanged.buffer()?,
        },
        Op::Coalesced(vec![all_reduce(&ones)?, all_reduce(&large)?]),
        Op::Broadcast {
            buffer: buffer()?,
            root: world.size(),
        },
    ];
    for op in &refused {
        let error = group
            .estimate(op)
            .expect_err("the operation has no estimate");
        eprintln!("refused: {error}");
    }
    assert_eq!(launched(), before, "an operation was launched");
    assert!(ones.to_vec::<f32>()?.iter().all(|number| *number == 1.0));
    assert_eq!(count(group, gpu)?, world.size() as f32);
    exchange(world, gpu, peer, peer)
}

/// Prints why there is no estimate of a collective's time: because of the library, or because of the communicator.
pub(super) fn no_estimates(world: &World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    let ones = gpu.buffer(&[1f32; 1 << 10])?;
    let op = all_reduce(&ones)?;
    let group = world.group().within(Duration::from_secs(2));
    let error = group.estimate(&op).expect_err("there is no estimate");
    eprintln!("refused: {error}");
    if error.kind() == ErrorKind::Unsupported {
        assert_eq!(count(world.group(), gpu)?, world.size() as f32);
    } else {
        let again = group.estimate(&op).expect_err("the group is unusable");
        eprintln!("refused: {again}");
        // The world cannot be shut down cleanly.
        world.group().abort("on purpose");
    }
    Ok(())
}

/// Prints the algorithms to which the latest collective was limited, as bits.
pub(super) fn algorithms(world: &World, gpu: &Gpu) -> Result<()> {
    let algorithms = counter(world, "last_algorithms");
    count(world.group(), gpu)?;
    world.group().barrier()?;
    eprintln!("algorithms: {}", algorithms());
    Ok(())
}

/// Prints how many communicators are made for messages with both neighbors.
pub(super) fn pairs(world: &World, gpu: &Gpu) -> Result<()> {
    let joined = counter(world, "joined");
    let before = joined();
    let (rank, size) = (world.rank(), world.size());
    for round in 0..2 {
        // Pairs 0-1, 2-3, then 1-2, 3-0.
        for shift in [0, 1] {
            let partner = ((rank + size - shift) ^ 1) % size;
            let partner = (partner + shift) % size;
            exchange(world, gpu, partner, partner)?;
        }
        eprintln!("pairs: {} after round {round}", joined() - before);
    }
    Ok(())
}

/// Both ranks of a pair issue their send before their receive.
pub(super) fn both_send_first(world: World, gpu: &Gpu) -> Result<()> {
    let peer = world.rank() ^ 1;
    match exchange_in_order(&world, gpu, (peer, peer), true) {
        Ok(()) => {
            eprintln!("exchanged");
            world.shutdown()
        }
        Err(error) => {
            eprintln!("lost: {error}");
            Ok(())
        }
    }
}

/// A group of calls that was never ended is open on this thread, as after a failure inside the library: a communicator
/// that the thread makes has no ranks, and is refused.
pub(super) fn open_group_of_calls(
    world: World,
    make: impl FnOnce(&World) -> Result<()>,
) -> Result<()> {
    let path = NcclOptions::of(world.config())?.library;
    // SAFETY: loading runs the library's initializers, which have run: the world has loaded this library before.
    let library = unsafe { Library::new(path.expect("the simulator")) }.expect("the simulator");
    // SAFETY: this is the function's type in nccl.h.
    let status = unsafe {
        let start: Symbol<'_, unsafe extern "C" fn() -> c_int> =
            library.get(b"ncclGroupStart").expect("ncclGroupStart");
        start()
    };
    assert_eq!(status, 0, "ncclGroupStart");
    let refused = make(&world).expect_err("the communicator has no ranks");
    eprintln!("refused: {refused}");
    Ok(())
}

/// Makes a group by a split.
pub(super) fn split_off(world: &World) -> Result<()> {
    let options = GroupOptions::named("second");
    world.group().split(Some(0), 0, &options).map(drop)
}

/// Prints the keys that communicators and windows have left in the store.
pub(super) fn print_keys(world: &World) -> Result<()> {
    let keys = world.store().list_keys()?;
    let nccl_keys = keys.iter().filter(|key| key.contains("/nccl/"));
    nccl_keys.for_each(|key| eprintln!("key: {key}"));
    eprintln!("end of keys");
    Ok(())
}

/// Makes communicators by splits and for messages, and windows; prints the keys that they leave in the store.
pub(super) fn store_keys(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let peer = world.rank() ^ 1;
    for color in 0..3 {
        let part = group.split(Some(color), 0, &GroupOptions::named("part"))?;
        let part = part.expect("all ranks have the same color");
        exchange(world, gpu, peer, peer)?;
        let (window, _) = window::open(&part, 64)?;
        window.close()?;
    }
    stay_for(world, "made", 0..world.size());
    print_keys(world)
}

/// Splits a group off, and prints whether that succeeds.
pub(super) fn split_connects(world: World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    match split_off(&world) {
        Ok(()) => eprintln!("split: made"),
        Err(error) => eprintln!("split: {error}"),
    }
    Ok(())
}

/// The connections break after the last operation, so that no operation sees the error: the communicator is aborted
/// then.
pub(super) fn broken_at_the_end(world: World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    world.group().barrier()?;
    let bad_destroys = counter(&world, "bad_destroys");
    let broken = counter(&world, "break_connections")();
    assert!(broken > 0, "no connection was broken");
    backend(&world).shutdown(LIMIT)?;
    eprintln!("closed, {} destroyed after an error", bad_destroys());
    Ok(())
}

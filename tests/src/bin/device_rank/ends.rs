//! Scenarios of communicators that are in use when they end, or when the program calls again: by graphs that hold
//! operations, or by kernels that hang. One more scenario has calls that must not reach the library, and another counts
//! the events that a burst of operations keeps.

use super::graph::Graphs;
use super::stuck::Gate;
use super::{Gpu, all_reduce, count, print_communicators, stay_for};
use libloading::{Library, Symbol};
use rcomm::backend::nccl::{CudaStream, DeviceBuffer, NcclOptions, Priority};
use rcomm::{
    Config, DType, DeviceKind, GroupOptions, Op, PrefixStore, ProcessGroup, Result, World,
};
use rcomm_tests::process::CULPRIT;
use rustix::process::{Signal, getpid, kill_process};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Captures an all-reduce into a graph, which is never destroyed.
fn capture(world: &World, gpu: &Gpu, numbers: &DeviceBuffer) -> Result<()> {
    let graphs = Graphs::of(world);
    let stream = gpu.stream.as_raw();
    graphs.begin(stream);
    let work = world.group().execute_async(all_reduce(numbers)?)?;
    work.wait_stream(&gpu.stream)?;
    let (status, _executable) = graphs.end(stream);
    assert_eq!(status, 0, "the capture failed");
    Ok(())
}

/// A graph still exists at the end: the library would wait for it until the deadline.
pub(super) fn graph_at_shutdown(world: World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    let numbers = gpu.buffer(&[1i64; 100])?;
    capture(&world, gpu, &numbers)?;
    print_communicators(&world)?;
    let start = Instant::now();
    let error = world.shutdown().expect_err("a graph holds an operation");
    eprintln!("shutdown: {error}");
    let took = start.elapsed();
    assert!(took < Duration::from_secs(30), "{took:?}");
    Ok(())
}

/// A rank stays away from an operation, so that the others abort while they hold a graph, on a device as on the
/// simulator.
pub(super) fn graph_absent(world: World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    let numbers = gpu.buffer(&[1i64; 100])?;
    capture(&world, gpu, &numbers)?;
    if world.rank() == CULPRIT {
        let others = (0..world.size()).filter(|&rank| rank != CULPRIT);
        stay_for(&world, "absent", others);
        return Ok(());
    }
    let error = world.group().execute_async(all_reduce(&numbers)?)?.wait();
    let error = error.map(|_| ()).expect_err("a rank is missing");
    eprintln!("lost: {error}");
    stay_for(&world, "absent", std::iter::once(world.rank()));
    end_in_time(world);
    Ok(())
}

/// An operation hangs while a graph exists.
pub(super) fn graph_at_abort(world: World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    let numbers = gpu.buffer(&[1i64; 100])?;
    capture(&world, gpu, &numbers)?;
    let error = world.group().execute_async(all_reduce(&numbers)?)?.wait();
    let error = error.map(|_| ()).expect_err("the kernel hangs");
    eprintln!("lost: {error}");
    end_in_time(world);
    Ok(())
}

/// Two communicators hang at once: that of the group, and that of two ranks.
pub(super) fn two_hung(world: World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let peer = group.rank() ^ 1;
    let (sent, summed) = (gpu.buffer(&[1i64; 100])?, gpu.buffer(&[1i64; 100])?);
    // A first message makes the pair's communicator before anything hangs.
    let message = |sends: bool| -> Result<Op<'static>> {
        let buffer = sent.buffer()?;
        Ok(match sends {
            true => Op::Send {
                buffer,
                peer,
                tag: 0,
            },
            false => Op::Recv {
                buffer,
                peer: Some(peer),
                tag: 0,
            },
        })
    };
    let sends = group.rank() < peer;
    group.execute_async(message(sends)?)?.wait()?;
    // From here on everything hangs.
    let works = [
        group.execute_async(all_reduce(&summed)?)?,
        group.execute_async(message(sends)?)?,
    ];
    for work in works {
        let error = work.wait().map(|_| ()).expect_err("the kernels hang");
        eprintln!("lost: {error}");
    }
    drop((sent, summed));
    end_in_time(world);
    Ok(())
}

/// One rank stays away from an operation on each of two communicators, so that the kernels of the others hang on both,
/// on a device as on the simulator.
pub(super) fn two_absent(world: World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let second = group.split(Some(0), 0, &GroupOptions::named("second"))?;
    let second = second.expect("all ranks have the same color");
    count(group, gpu)?;
    count(&second, gpu)?;
    if world.rank() == CULPRIT {
        let others = (0..world.size()).filter(|&rank| rank != CULPRIT);
        stay_for(&world, "absent", others);
        return Ok(());
    }
    let buffers = [gpu.buffer(&[1i64; 100])?, gpu.buffer(&[1i64; 100])?];
    let works = [
        group.execute_async(all_reduce(&buffers[0])?)?,
        second.execute_async(all_reduce(&buffers[1])?)?,
    ];
    for work in works {
        let error = work.wait().map(|_| ()).expect_err("a rank is missing");
        eprintln!("lost: {error}");
    }
    drop((buffers, second));
    stay_for(&world, "absent", std::iter::once(world.rank()));
    end_in_time(world);
    Ok(())
}

/// The time-out of the group that is aborted while another group, whose time-out is much longer, hangs.
const SHORT_TIMEOUT: Duration = Duration::from_secs(3);

/// One rank stays away from an operation of the world's group, and from one of a group with a shorter time-out. When
/// that group has ended, so has the operation of the world's group, which was in its way.
pub(super) fn other_group_hung(world: World, gpu: &Gpu) -> Result<()> {
    let second = second_group(&world)?;
    lose_both(world, gpu, second, |second| second)
}

/// A group of all ranks with a shorter time-out than the world's group.
fn second_group(world: &World) -> Result<ProcessGroup> {
    let options = GroupOptions {
        timeout: Some(SHORT_TIMEOUT),
        ..GroupOptions::named("second")
    };
    let second = world.group().split(Some(0), 0, &options)?;
    Ok(second.expect("all ranks have the same color"))
}

/// Works as [`other_group_hung`], with a second world in the same process.
pub(super) fn other_world_hung(world: World, gpu: &Gpu) -> Result<()> {
    let mut config = Config::from_environment()?;
    config.backend = "cpu:cpu,cuda:nccl".to_owned();
    config.timeout = SHORT_TIMEOUT;
    let mut place = config.rendezvous()?;
    place.job.push_str("-second");
    config.rendezvous = Some(place);
    let store = PrefixStore::new("second", world.store().clone());
    let second = World::builder(config).store(Arc::new(store)).init()?;
    lose_both(world, gpu, second, World::group)
}

/// A graph with an operation of the world's group hangs while a group with a shorter time-out is aborted. Nothing shows
/// where the graph is, so it is named; when the program aborts the world's group, the other one ends.
pub(super) fn other_graph_hung(world: World, gpu: &Gpu) -> Result<()> {
    let second = second_group(&world)?;
    count(world.group(), gpu)?;
    count(&second, gpu)?;
    let numbers = [gpu.buffer(&[1i64; 100])?, gpu.buffer(&[1i64; 100])?];
    let graphs = Graphs::of(&world);
    let stream = CudaStream::new(&gpu.device, Priority::Normal)?;
    let captured = DeviceBuffer::copy_of(&stream, &[1i64; 100])?;
    graphs.begin(stream.as_raw());
    let work = world.group().execute_async(all_reduce(&captured)?)?;
    work.wait_stream(&stream)?;
    let (status, executable) = graphs.end(stream.as_raw());
    assert_eq!(status, 0, "the capture failed");
    if world.rank() == CULPRIT {
        let others = (0..world.size()).filter(|&rank| rank != CULPRIT);
        stay_for(&world, "absent", others);
        return Ok(());
    }
    graphs.launch(executable, stream.as_raw());
    let error = second.execute_async(all_reduce(&numbers[0])?)?.wait();
    eprintln!(
        "lost: {}",
        error.map(|_| ()).expect_err("a rank is missing")
    );
    let backend = second.backend(DeviceKind::Cuda).expect("CUDA").clone();
    let in_the_way = || {
        let states = backend.comm_state();
        let mut facts = states.into_iter().flat_map(|state| state.facts);
        facts.find(|(name, _)| name == "graphs_in_the_way")
    };
    wait_until("the search for what is in the way", || {
        in_the_way().is_some()
    });
    let (_, graphs_in_the_way) = in_the_way().expect("the fact was seen before");
    eprintln!("in the way: {graphs_in_the_way}");
    // An abort ends the graph's kernels on the other ranks too, and then nothing is in their way.
    let others = (0..world.size()).filter(|&rank| rank != CULPRIT);
    stay_for(&world, "seen", others);
    world.group().abort("its graph hangs");
    drop((second, backend, numbers, captured));
    stay_for(&world, "absent", std::iter::once(world.rank()));
    end_in_time(world);
    Ok(())
}

/// All ranks but one issue an operation on the world's group and on the one that `second` owns; then they drop
/// `second`.
fn lose_both<T>(
    world: World,
    gpu: &Gpu,
    second: T,
    short: impl Fn(&T) -> &ProcessGroup,
) -> Result<()> {
    let group = world.group();
    count(group, gpu)?;
    count(short(&second), gpu)?;
    if world.rank() == CULPRIT {
        let others = (0..world.size()).filter(|&rank| rank != CULPRIT);
        stay_for(&world, "absent", others);
        return Ok(());
    }
    let buffers = [gpu.buffer(&[1i64; 100])?, gpu.buffer(&[1i64; 100])?];
    let other = group.execute_async(all_reduce(&buffers[0])?)?;
    let lost = short(&second).execute_async(all_reduce(&buffers[1])?)?;
    let error = lost.wait().map(|_| ()).expect_err("a rank is missing");
    eprintln!("lost: {error}");
    drop(second);
    let error = other.wait().map(|_| ()).expect_err("a rank is missing");
    eprintln!("other: {error}");
    drop(buffers);
    stay_for(&world, "absent", std::iter::once(world.rank()));
    end_in_time(world);
    Ok(())
}

/// One rank stays away from an operation of a group. The world's group, which was not in use, stays usable.
pub(super) fn other_group_idle(world: &World, gpu: &Gpu) -> Result<()> {
    let second = second_group(world)?;
    count(world.group(), gpu)?;
    count(&second, gpu)?;
    if world.rank() != CULPRIT {
        let error = count(&second, gpu).expect_err("a rank is missing");
        eprintln!("lost: {error}");
    }
    stay_for(world, "lost", 0..world.size());
    drop(second);
    assert_eq!(count(world.group(), gpu)?, world.size() as f32);
    Ok(())
}

/// Ranks abort a group while an operation of the world's group waits for a rank that comes late. That operation, which
/// is in the way of the abort, succeeds: it has not taken as long as the aborted group's time-out.
pub(super) fn other_group_slow(world: &World, gpu: &Gpu) -> Result<()> {
    // An abort looks for groups in its way after five seconds.
    const LATE: Duration = Duration::from_secs(7);
    let group = world.group();
    let second = group.split(Some(0), 0, &GroupOptions::named("second"))?;
    let second = second.expect("all ranks have the same color");
    count(group, gpu)?;
    count(&second, gpu)?;
    // A rank that has not seen the end of the last operation would fail when another one aborts the group.
    stay_for(world, "counted", 0..world.size());
    let buffers = [gpu.buffer(&[1i64; 100])?, gpu.buffer(&[1i64; 100])?];
    if world.rank() == CULPRIT {
        stay_for(world, "aborted", 0..world.size());
        std::thread::sleep(LATE);
        group.execute_async(all_reduce(&buffers[0])?)?.wait()?;
    } else {
        let slow = group.execute_async(all_reduce(&buffers[0])?)?;
        let lost = second.execute_async(all_reduce(&buffers[1])?)?;
        second.abort("on purpose");
        // The abort of another rank may have ended the operation first. It then counts as completed, since it has run
        // for less than a second.
        let ended = lost.wait().map(|_| ());
        eprintln!("lost: {ended:?}");
        stay_for(world, "aborted", 0..world.size());
        drop(second);
        slow.wait()?;
    }
    assert_eq!(
        buffers[0].to_vec::<i64>()?,
        vec![i64::from(world.size()); 100]
    );
    Ok(())
}

/// A rank is killed while all capture an operation into a graph, which the others still hold at the end.
pub(super) fn kill_capturing(world: World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    let numbers = gpu.buffer(&[1i64; 100])?;
    let graphs = Graphs::of(&world);
    let stream = gpu.stream.as_raw();
    graphs.begin(stream);
    let issued = world.group().execute_async(all_reduce(&numbers)?);
    let captured = issued.and_then(|work| work.wait_stream(&gpu.stream));
    if world.rank() == CULPRIT {
        let _ = kill_process(getpid(), Signal::KILL);
    }
    let (status, _executable) = graphs.end(stream);
    let error = match captured {
        Ok(()) => {
            assert_eq!(status, 0, "the capture failed");
            count(world.group(), gpu).expect_err("a rank was killed")
        }
        // This rank came to its capture after the other was killed.
        Err(error) => error,
    };
    eprintln!("lost: {error}");
    end_in_time(world);
    Ok(())
}

/// Many communicators hang at once: that of the group, and those of all pairs of ranks, one for each direction.
pub(super) fn many_hung(world: World, gpu: &Gpu) -> Result<()> {
    let (group, this_rank) = (world.group(), world.rank());
    let peers = || (0..world.size()).filter(move |&peer| peer != this_rank);
    let summed = gpu.buffer(&[1i64; 100])?;
    let buffers = peers()
        .map(|_| Ok([gpu.buffer(&[1i64; 100])?, gpu.buffer(&[1i64; 100])?]))
        .collect::<Result<Vec<_>>>()?;
    let messages = |sends: bool| -> Result<Vec<_>> {
        let mut works = Vec::new();
        for (peer, [sent, received]) in peers().zip(&buffers) {
            let op = match sends {
                true => Op::Send {
                    buffer: sent.buffer()?,
                    peer,
                    tag: 0,
                },
                false => Op::Recv {
                    buffer: received.buffer()?,
                    peer: Some(peer),
                    tag: 0,
                },
            };
            works.push(group.execute_async(op)?);
        }
        Ok(works)
    };
    // First messages make the communicators of all pairs before anything hangs.
    let first = [messages(true)?, messages(false)?];
    first
        .into_iter()
        .flatten()
        .try_for_each(|work| work.wait().map(drop))?;
    // From here on everything hangs.
    let mut works = vec![group.execute_async(all_reduce(&summed)?)?];
    works.extend(messages(true)?);
    works.extend(messages(false)?);
    for work in works {
        let error = work.wait().map(|_| ()).expect_err("the kernels hang");
        eprintln!("lost: {error}");
    }
    drop((summed, buffers));
    end_in_time(world);
    Ok(())
}

/// Groups of all ranks, each of which has been used.
fn groups_in_use(world: &World, gpu: &Gpu, names: &[&str]) -> Result<Vec<ProcessGroup>> {
    let make = |name: &&str| {
        let group = world
            .group()
            .split(Some(0), 0, &GroupOptions::named(*name))?;
        let group = group.expect("all ranks have the same color");
        count(&group, gpu)?;
        Ok(group)
    };
    names.iter().map(make).collect()
}

/// Prints whether several ends, which `end` begins, take hardly longer than one: an end that never returns is left
/// behind after ten seconds.
fn end_together(end: impl FnOnce()) {
    let start = Instant::now();
    end();
    let took = start.elapsed();
    match took < Duration::from_secs(18) {
        true => eprintln!("ended in time"),
        false => eprintln!("left behind after {took:?}"),
    }
}

/// Aborts of three groups never return; each may take ten seconds, and all begin together.
pub(super) fn three_stuck(world: World, gpu: &Gpu) -> Result<()> {
    let mut groups = groups_in_use(&world, gpu, &["second", "third"])?;
    groups.push(world.group().clone());
    count(world.group(), gpu)?;
    end_together(|| {
        drop(world);
        drop(groups);
    });
    Ok(())
}

/// Three groups are dropped, not aborted, and the library never returns from the end of any communicator.
pub(super) fn three_dropped(world: World, gpu: &Gpu) -> Result<()> {
    let groups = groups_in_use(&world, gpu, &["second", "third", "fourth"])?;
    let backends = groups
        .iter()
        .map(|group| group.backend(DeviceKind::Cuda).map(Arc::downgrade));
    let backends: Vec<_> = backends
        .map(|backend| backend.expect("the CUDA backend is configured"))
        .collect();
    end_together(|| {
        drop(groups);
        // The watchdog may hold an operation of a group for a moment.
        wait_until("the end of the groups", || {
            backends.iter().all(|backend| backend.strong_count() == 0)
        });
    });
    // On a busy machine, ranks reach this seconds apart.
    world.shutdown_within(Duration::from_secs(60))
}

/// While one operation hangs, memory is allocated and freed, and another operation's input is searched for
/// NaNs.
pub(super) fn while_hung(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    count(group, gpu)?;
    let (hung, next) = (gpu.buffer(&[1f32; 100])?, gpu.buffer(&[1f32; 100])?);
    let work = group.execute_async(all_reduce(&hung)?)?;
    let backend = group.backend(DeviceKind::Cuda);
    let backend = backend.expect("the CUDA backend is configured");
    // The operation is launched when the ranks have compared it.
    wait_until("the launch of the kernel that hangs", || {
        let states = backend.comm_state();
        let mut facts = states.iter().flat_map(|state| &state.facts);
        facts.any(|(name, value)| name == "launched" && value == "2")
    });
    drop(gpu.buffer(&[1f32; 100])?);
    // The library's memory is filled with zeros on a stream that does not wait for the kernel that hangs, so the memory
    // can be freed before the kernel ends.
    let memory = counter(world, "live_memory");
    wait_until("the freeing of memory while a kernel hangs", || {
        let before = memory();
        let allocated = backend.allocate(DType::F32, 1 << 10);
        // Memory that is dropped before it is zeroed is freed only by a later operation.
        std::thread::sleep(Duration::from_millis(5));
        allocated.map(drop).is_ok() && memory() == before
    });
    let later = group.execute_async(all_reduce(&next)?)?;
    assert!(!work.is_completed(), "the kernel that hangs has ended");
    eprintln!("went on while it hung");
    for work in [work, later] {
        let error = work.wait().map(|_| ()).expect_err("the kernels hang");
        eprintln!("lost: {error}");
    }
    Ok(())
}

/// Calls that the library would refuse, and that would leave it in an error state, are refused before they
/// reach it; the group stays usable.
pub(super) fn refused_first(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let numbers = DeviceBuffer::zeroed(&gpu.stream, DType::F8E4M3, 100)?;
    let refused = group.execute_async(all_reduce(&numbers)?).map(|_| ());
    eprintln!("refused: {}", refused.expect_err("the device is too old"));
    assert_eq!(count(group, gpu)?, world.size() as f32);
    Ok(())
}

/// Drops the world, and prints whether the clean-up that the abort began has finished in time: the world waits at most
/// ten seconds for it.
pub(super) fn end_in_time(world: World) {
    let start = Instant::now();
    drop(world);
    let took = start.elapsed();
    match took < Duration::from_secs(9) {
        true => eprintln!("ended in time"),
        false => eprintln!("left behind after {took:?}"),
    }
}

/// Returns a function that reads a counter of the simulator.
pub(super) fn counter(world: &World, name: &'static str) -> impl Fn() -> u64 + use<> {
    let options = NcclOptions::of(world.config());
    let path = options
        .expect("the options that the world was made with")
        .driver;
    let path = path.expect("the driver is the simulator");
    // SAFETY: loading runs the library's initializers, which have run: the world has loaded this library
    // before.
    let simulator = unsafe { Library::new(path) }.expect("the simulator can be loaded");
    let name = format!("rcomm_simulator_{name}");
    // SAFETY: the simulator exports this function with this type, and it takes nothing.
    move || unsafe {
        let count: Symbol<'_, unsafe extern "C" fn() -> u64> = simulator
            .get(name.as_bytes())
            .expect("the simulator exports this counter");
        count()
    }
}

/// Waits for a condition; fails after two minutes, and names the `event` that did not happen.
pub(super) fn wait_until(event: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < deadline, "{event} did not happen in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Many operations are pending at once: only some of the events that they used are kept.
pub(super) fn burst(world: &World, gpu: &Gpu) -> Result<()> {
    const OPERATIONS: usize = 5_000;
    // There are two pools of events, one for the ends of operations and one for waits between streams. Each keeps
    // 4,096; the rest is slack for events that other code holds.
    const MAX_KEPT: u64 = 2 * 4_096 + 64;
    let events = counter(world, "live_events");
    let numbers = gpu.buffer(&[1i64; 8])?;
    count(world.group(), gpu)?;
    let gate = Gate::shut(world, gpu)?;
    let issued = (0..OPERATIONS).map(|_| world.group().execute_async(all_reduce(&numbers)?));
    let works = issued.collect::<Result<Vec<_>>>()?;
    let peak = events();
    gate.open();
    works
        .into_iter()
        .try_for_each(|work| work.wait().map(drop))?;
    eprintln!("events: {peak} at once");
    wait_until("the destruction of most events", || events() <= MAX_KEPT);
    Ok(())
}

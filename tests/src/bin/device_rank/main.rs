//! Runs one rank of a test job on device memory: over NCCL and a GPU, or over the simulator if the environment names
//! the simulator's library. `device_rank SCENARIO` prints the results of the scenario on standard error.
#![allow(clippy::print_stderr)]

mod communicators;
mod cost;
mod cudarc;
mod ends;
mod graph;
mod late;
mod lists;
mod pool;
mod registered;
mod stuck;
mod window;

use libloading::{Library, Symbol};
use rcomm::backend::nccl::{CudaDevice, CudaStream, DeviceBuffer, NcclOptions, Priority};
use rcomm::{
    Config, DeviceKind, Element, GroupOptions, Op, ProcessGroup, ReduceOp, Reduction, Result, World,
};
use rcomm_tests::process::CULPRIT;
use rustix::process::{Signal, getpid, kill_process};
use std::ffi::{c_int, c_void};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

const STEPS: u32 = 6;
const STEP_OF_FAULT: u32 = 3;

fn main() -> ExitCode {
    let scenario = std::env::args().nth(1).unwrap_or_default();
    match run(&scenario) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(scenario: &str) -> Result<()> {
    let mut config = Config::from_environment()?;
    config.backend = "cpu:cpu,cuda:nccl".to_owned();
    let world = World::init(config)?;
    let gpu = Gpu::open(&world)?;
    match scenario {
        "train" => train(&world, &gpu)?,
        "split" => split(&world, &gpu)?,
        "shrink" => return shrink(world, &gpu),
        "streams" => streams(&world, &gpu)?,
        "graph" => graph::capture(&world, &gpu)?,
        "replay_hung" => graph::replay_hung(&world, &gpu)?,
        "graph_at_shutdown" => return ends::graph_at_shutdown(world, &gpu),
        "graph_absent" => return ends::graph_absent(world, &gpu),
        "graph_at_abort" => return ends::graph_at_abort(world, &gpu),
        "two_hung" => return ends::two_hung(world, &gpu),
        "three_stuck" => return ends::three_stuck(world, &gpu),
        "three_dropped" => return ends::three_dropped(world, &gpu),
        "many_hung" => return ends::many_hung(world, &gpu),
        "two_absent" => return ends::two_absent(world, &gpu),
        "other_group_hung" => return ends::other_group_hung(world, &gpu),
        "other_world_hung" => return ends::other_world_hung(world, &gpu),
        "other_graph_hung" => return ends::other_graph_hung(world, &gpu),
        "other_group_slow" => ends::other_group_slow(&world, &gpu)?,
        "other_group_idle" => ends::other_group_idle(&world, &gpu)?,
        "kill_capturing" => return ends::kill_capturing(world, &gpu),
        "open_group_of_calls" => {
            return communicators::open_group_of_calls(world, communicators::split_off);
        }
        "open_group_of_calls_lazily" => {
            return communicators::open_group_of_calls(world, |world| {
                count(world.group(), &gpu).map(drop)
            });
        }
        "split_connects" => return communicators::split_connects(world, &gpu),
        "store_keys" => communicators::store_keys(&world, &gpu)?,
        "broken_at_the_end" => return communicators::broken_at_the_end(world, &gpu),
        "suspension" => communicators::suspension(&world, &gpu)?,
        "no_suspension" => communicators::no_suspension(&world, &gpu)?,
        "shared_device" => return communicators::shared_device(world, &gpu),
        "estimates" => communicators::estimates(&world, &gpu)?,
        "no_estimates" => communicators::no_estimates(&world, &gpu)?,
        "tags" => communicators::tags(&world, &gpu)?,
        "algorithms" => communicators::algorithms(&world, &gpu)?,
        "pool" => pool::pool(&world, &gpu)?,
        "no_pool" => pool::no_pool(&world, &gpu)?,
        "pairs" => communicators::pairs(&world, &gpu)?,
        "both_send_first" => return communicators::both_send_first(world, &gpu),
        "while_hung" => return ends::while_hung(&world, &gpu),
        "refused_first" => ends::refused_first(&world, &gpu)?,
        "burst" => ends::burst(&world, &gpu)?,
        "register_during_launches" => registered::register_during_launches(&world, &gpu)?,
        "deregister_used" => registered::deregister_used(&world, &gpu)?,
        "deregister_hung" => return registered::deregister_hung(world, &gpu),
        "host_cost" => cost::host_cost(&world, &gpu)?,
        "bursts" => cost::bursts(&world, &gpu)?,
        "switched_timing" => cost::switched_timing(&world, &gpu)?,
        "memory" => memory(&world, &gpu)?,
        "no_registration" => no_registration(&world, &gpu)?,
        "nan" => nan(&world, &gpu)?,
        "lists" => lists::gather_and_scatter(&world, &gpu)?,
        "stuck" => return stuck::stuck(world, &gpu),
        "cudarc" => cudarc::all_reduce_slices(&world, &gpu)?,
        "windows" => window::windows(&world, &gpu)?,
        "windows_beside_launches" => window::beside_launches(&world, &gpu)?,
        "no_windows" => window::refusals(&world, &gpu)?,
        "linger" => return linger(&world, &gpu),
        "late_zeros" => late::zeros(&world, &gpu)?,
        // After the late scenarios that return here, the world cannot be shut down cleanly.
        "late_launch" => return late::launch(&world, &gpu),
        "late_group" => return late::refused_group(&world, &gpu),
        "after_the_others" => return late::after_the_others(world, &gpu),
        "aborted_elsewhere" => return late::aborted_elsewhere(world, &gpu),
        "late_poll" => return late::poll_after_abort(&world, &gpu),
        "late_put" => return late::put(&world, &gpu),
        "late_split" => late_split(&world, &gpu)?,
        other => panic!("there is no scenario {other:?}"),
    }
    world.shutdown()
}

/// The rank's device, with a stream of the program.
struct Gpu {
    device: Arc<CudaDevice>,
    stream: Arc<CudaStream>,
}

impl Gpu {
    fn open(world: &World) -> Result<Self> {
        let local = world.place().local_rank.unwrap_or(world.rank());
        let device = NcclOptions::of(world.config())?.open_device(local)?;
        let stream = CudaStream::new(&device, Priority::Normal)?;
        make_current(world, &stream)?;
        Ok(Self { device, stream })
    }

    fn buffer<T: Element>(&self, elements: &[T]) -> Result<DeviceBuffer> {
        DeviceBuffer::copy_of(&self.stream, elements)
    }
}

/// Makes the context of a stream current on this thread for good, as every program that calls the driver itself does:
/// some functions of the driver take no stream and no context.
fn make_current(world: &World, stream: &CudaStream) -> Result<()> {
    type GetContext = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int;
    type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_int;
    let path = NcclOptions::of(world.config())?.driver;
    // SAFETY: loading runs the library's initializers, which have run: the world has loaded this library before.
    let driver = unsafe { Library::new(path.unwrap_or_else(|| "libcuda.so.1".into())) };
    let driver = driver.expect("the CUDA driver can be loaded");
    let mut context = std::ptr::null_mut();
    // SAFETY: these are the functions' types in cuda.h; the stream is live, its context is written to a local, and
    // stays as long as the device, which the world keeps.
    let statuses = unsafe {
        let get: Symbol<'_, GetContext> = driver.get(b"cuStreamGetCtx").expect("cuStreamGetCtx");
        let set: Symbol<'_, SetCurrent> = driver.get(b"cuCtxSetCurrent").expect("cuCtxSetCurrent");
        [get(stream.as_raw(), &mut context), set(context)]
    };
    assert_eq!(statuses, [0, 0], "cuStreamGetCtx, cuCtxSetCurrent");
    Ok(())
}

fn all_reduce(buffer: &DeviceBuffer) -> Result<Op<'static>> {
    Ok(Op::AllReduce {
        buffer: buffer.buffer()?,
        op: ReduceOp::Sum.into(),
    })
}

/// Counts the ranks of a group by an all-reduce: returns the sum of a one from each rank.
fn count(group: &ProcessGroup, gpu: &Gpu) -> Result<f32> {
    let ones = gpu.buffer(&[1.0f32; 256])?;
    group.execute_async(all_reduce(&ones)?)?.wait()?;
    let sums = ones.to_vec::<f32>()?;
    assert!(sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
    Ok(sums[0])
}

/// Writes a dump, and prints the communicators in it.
fn print_communicators(world: &World) -> Result<()> {
    let path = world.dump()?;
    let bytes = std::fs::read(&path).expect("the dump can be read");
    let (dump, _) = rcomm_recorder::publish::Dump::read(&bytes).expect("the file is a dump");
    for (id, facts) in dump.nccl_comm_state {
        eprintln!("communicator {id}: {facts:?}");
    }
    Ok(())
}

/// Prints the version of NCCL, and the sum of ones in every step.
fn train(world: &World, gpu: &Gpu) -> Result<()> {
    let backend = world.group().backend(DeviceKind::Cuda);
    let states = backend.map_or_else(Vec::new, |backend| backend.comm_state());
    let mut facts = states.iter().flat_map(|state| &state.facts);
    if let Some((_, version)) = facts.find(|(name, _)| name == "nccl_version") {
        eprintln!("NCCL {version}");
    }
    for step in 0..STEPS {
        world.step(i64::from(step));
        let sum = count(world.group(), gpu)?;
        eprintln!("sum: {sum}");
    }
    Ok(())
}

/// Splits groups off groups, and uses each.
fn split(world: &World, gpu: &Gpu) -> Result<()> {
    let (rank, group) = (world.rank(), world.group());
    // The even ranks form a part in reverse order, the odd ones one in their order. The last rank is in neither.
    let color = (rank + 1 < world.size()).then_some(rank % 2);
    let key = if rank % 2 == 0 { -i64::from(rank) } else { 0 };
    let part = group.split(color, key, &GroupOptions::named("part"))?;
    if let Some(part) = &part {
        eprintln!(
            "part: rank {} of {:?}, sum {}",
            part.rank(),
            part.ranks(),
            count(part, gpu)?
        );
    }
    let pair = group.new_subgroups(2, &GroupOptions::named("pair"))?;
    eprintln!("pair: {:?}, sum {}", pair.ranks(), count(&pair, gpu)?);
    // This group is split off one that was split off itself.
    let alone = pair.new_subgroups(1, &GroupOptions::named("alone"))?;
    eprintln!("alone: {:?}, sum {}", alone.ranks(), count(&alone, gpu)?);
    let list = [vec![1, 0]];
    let listed = group.new_subgroups_by_enumeration(&list, &GroupOptions::named("listed"))?;
    if let Some(listed) = &listed {
        eprintln!("listed: {:?}, sum {}", listed.ranks(), count(listed, gpu)?);
    }
    eprintln!("all: sum {}", count(group, gpu)?);
    let backend = communicators::backend(world);
    eprintln!("splits: {}", backend.split_count());
    print_communicators(world)
}

/// Publishes that this rank has reached `event`, and keeps its connections open until these ranks have reached it too,
/// for at most a minute.
fn stay_for(world: &World, event: &str, ranks: impl Iterator<Item = u32>) {
    let key = |rank: u32| format!("test/{event}/{rank}");
    let keys: Vec<String> = ranks.map(key).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let store = world.store();
    // The store may be gone when other ranks have left.
    let _ = store
        .set(&key(world.rank()), b"1")
        .and_then(|()| store.wait(&keys, Duration::from_secs(60)));
}

/// Works as `train`, but a rank whose operation failed stays until the operations of all ranks have failed:
/// for the others, a rank that leaves is another failure.
fn linger(world: &World, gpu: &Gpu) -> Result<()> {
    let trained = train(world, gpu);
    if trained.is_err() {
        stay_for(world, "failed", 0..world.size());
    }
    trained
}

/// The culprit does not take part in a split. The others get an error that names it, and shut down nevertheless.
fn late_split(world: &World, gpu: &Gpu) -> Result<()> {
    count(world.group(), gpu)?;
    if world.rank() == CULPRIT {
        // The culprit stays alive as long as the others wait for it.
        stay_for(
            world,
            "split",
            (0..world.size()).filter(|&rank| rank != CULPRIT),
        );
        return Ok(());
    }
    let pair = world.group().new_subgroups(2, &GroupOptions::named("pair"));
    let error = pair.map(|_| ()).expect_err("a rank is missing");
    eprintln!("split: {error}");
    let error = count(world.group(), gpu).expect_err("the parent group is unusable");
    eprintln!("after: {error}");
    stay_for(world, "split", std::iter::once(world.rank()));
    Ok(())
}

/// The culprit kills itself between two steps; the others shrink the world and go on without it.
fn shrink(mut world: World, gpu: &Gpu) -> Result<()> {
    for step in 0..STEPS {
        if step == STEP_OF_FAULT {
            // An operation that has ended on the culprit can still run on the others, which would lose it too.
            stay_for(&world, "fault", 0..world.size());
            if world.rank() == CULPRIT {
                // A signal to this process cannot fail.
                let _ = kill_process(getpid(), Signal::KILL);
            }
        }
        let sum = match count(world.group(), gpu) {
            Ok(sum) => sum,
            Err(error) => {
                eprintln!("lost: {error}");
                let absent = world.group().find_absent(Duration::from_secs(8))?;
                world.shrink(&absent)?;
                count(world.group(), gpu)?
            }
        };
        eprintln!("sum: {sum} of ranks {:?}", world.group().ranks());
    }
    print_communicators(&world)?;
    communicators::print_keys(&world)?;
    world.shutdown()
}

/// Lets device work follow operations, and operations follow device work, without waits of the host.
fn streams(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let other = CudaStream::new(&gpu.device, Priority::High)?;
    let numbers = gpu.buffer(&[1i64; 1000])?;
    for round in 1..=4i64 {
        let work = group.execute_async(all_reduce(&numbers)?)?;
        // The streams wait for the operation, not the host. The copy below is on the second stream, that of the buffer.
        work.wait_stream(&other)?;
        work.wait_stream(&gpu.stream)?;
        // The buffer is alive although the work was dropped.
        drop(work);
        let size = i64::from(world.size());
        let expected = size.pow(u32::try_from(round).expect("a small number"));
        assert_eq!(numbers.to_vec::<i64>()?, vec![expected; 1000]);
    }
    // An earlier operation computes the factor on the device: 1 / 2^n, the product of all ranks' halves.
    let scale = gpu.buffer(&[0.5f32])?;
    let product = group.execute_async(Op::AllReduce {
        buffer: scale.buffer()?,
        op: ReduceOp::Product.into(),
    })?;
    product.wait_stream(&gpu.stream)?;
    let sums = gpu.buffer(&[1024.0f32; 100])?;
    let scaled = |scale: rcomm::Buffer<'static>| -> Result<Op<'static>> {
        Ok(Op::AllReduce {
            buffer: sums.buffer()?,
            op: Reduction::premul_sum_by(scale),
        })
    };
    let sum = group.execute_async(scaled(scale.buffer()?)?)?;
    // The operation keeps the memory of its factor.
    drop((product, scale));
    sum.wait()?;
    let size = world.size();
    let expected = 1024.0 * size as f32 / f32::from(1u16 << size);
    assert_eq!(sums.to_vec::<f32>()?, vec![expected; 100]);
    // This factor is in the host's memory.
    let twice = scaled(rcomm::Buffer::from_vec(vec![2.0f32]))?;
    group.execute_async(twice)?.wait()?;
    let expected = 2.0 * size as f32 * expected;
    assert_eq!(sums.to_vec::<f32>()?, vec![expected; 100]);
    let double = scaled(gpu.buffer(&[2.0f64])?.buffer()?)?;
    let refused = group.execute_async(double).map(drop);
    eprintln!(
        "refused: {}",
        refused.expect_err("the factor has another type")
    );
    let host = group.execute_async(Op::AllReduce {
        buffer: rcomm::Buffer::from_vec(vec![1.0f32; 4]),
        op: ReduceOp::Sum.into(),
    })?;
    let refused = host
        .wait_stream(&other)
        .expect_err("the operation runs on no stream");
    eprintln!("refused: {refused}");
    host.wait()?;
    Ok(())
}

/// One rank has a NaN in its input, as the last of a million numbers.
fn nan(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let mut numbers = vec![1.0f64; 1_000_000];
    let without_nan = gpu.buffer(&numbers)?;
    group.execute_async(all_reduce(&without_nan)?)?.wait()?;
    if world.rank() == CULPRIT {
        numbers[999_999] = f64::NAN;
    }
    let with_nan = gpu.buffer(&numbers)?;
    group.execute_async(all_reduce(&with_nan)?)?.wait()?;
    Ok(())
}

/// Memory cannot be registered where the library has no call for it, and the group stays usable.
fn no_registration(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let backend = group
        .backend(DeviceKind::Cuda)
        .expect("the CUDA backend is configured");
    let program_memory = gpu.buffer(&[1.0f32; 512])?;
    let refused = backend.register(&program_memory.buffer()?).map(|_| ());
    let refused = refused.expect_err("the library has no call for it");
    eprintln!("refused: {refused}");
    assert_eq!(count(group, gpu)?, world.size() as f32);
    Ok(())
}

/// Registers and deregisters memory of the program and of the library, and prints what is refused.
fn memory(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let backend = group
        .backend(DeviceKind::Cuda)
        .expect("the CUDA backend is configured");
    let expect_refusal = |what: &str, result: Result<()>| {
        let error = result.expect_err(what);
        eprintln!("refused {what}: {error}");
    };
    let program_memory = gpu.buffer(&[1.0f32; 512])?;
    let registration = backend.register(&program_memory.buffer()?)?;
    assert_eq!(count(group, gpu)?, world.size() as f32);
    let again = registration.clone();
    backend.deregister(registration)?;
    expect_refusal("what was undone", backend.deregister(again));
    // The library counts how often memory is registered, and so does rcomm.
    let twice = [
        backend.register(&program_memory.buffer()?)?,
        backend.register(&program_memory.buffer()?)?,
    ];
    let [first, second] = twice;
    assert_eq!(first.id, second.id);
    backend.deregister(first)?;
    // The memory is still registered once, so it stays, though this program holds no handle to it any more.
    drop((second, program_memory));
    assert_eq!(count(group, gpu)?, world.size() as f32);
    let host = rcomm::Buffer::from_vec(vec![1.0f32; 4]);
    expect_refusal("host memory", backend.register(&host).map(|_| ()));
    let library_memory = backend.allocate(rcomm::DType::F32, 512)?;
    let registration = backend.register(&library_memory)?;
    backend.deregister(registration)?;
    let other_ordinal = (gpu.device.ordinal() + 1) % 8;
    let mut options = NcclOptions::of(world.config())?;
    options.device = Some(other_ordinal);
    let other_device = options.open_device(0)?;
    let stream = CudaStream::new(&other_device, Priority::Normal)?;
    let other_memory = DeviceBuffer::copy_of(&stream, &[1.0f32; 4])?;
    let op = Op::AllReduce {
        buffer: other_memory.buffer()?,
        op: ReduceOp::Sum.into(),
    };
    let brief = group.within(Duration::from_millis(100));
    expect_refusal(
        "memory of another device",
        brief.execute_async(op).map(|_| ()),
    );
    // A refused operation is never overdue: the group is used below.
    std::thread::sleep(Duration::from_secs(1));
    // SAFETY: the call refuses an address that is no memory of the device before anything uses it, which is
    // what is tested.
    let foreign =
        unsafe { DeviceBuffer::foreign(&gpu.stream, 4096, rcomm::DType::F32, 4, Arc::new(())) };
    expect_refusal("an address of nothing", foreign.map(|_| ()));
    assert_eq!(count(group, gpu)?, world.size() as f32);
    Ok(())
}

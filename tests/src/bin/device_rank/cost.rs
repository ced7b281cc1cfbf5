//! Counts what operations cost the thread that issues them (calls of the driver, allocations, events). Counts do not
//! depend on the machine.

use super::ends::counter;
use super::stuck::Gate;
use super::{Gpu, all_reduce, count};
use allocation_counter::measure;
use rcomm::{Buffer, DType, DeviceKind, Op, ReduceOp, Result, Timing, World};

/// Prints how many calls of the driver operations make, as the simulator counts them, and how many allocations.
pub(super) fn host_cost(world: &World, gpu: &Gpu) -> Result<()> {
    let backend = world.group().backend(DeviceKind::Cuda);
    let backend = backend.expect("the CUDA backend is configured");
    let numbers = gpu.buffer(&[1i64; 100])?;
    let program_buffer = || numbers.buffer();
    let group_buffer = || backend.allocate(DType::I64, 100);
    let idle = || Ok(None);
    print_cost(
        world,
        "an idle stream of the program",
        &program_buffer,
        &idle,
    )?;
    let busy = || Gate::shut(world, gpu).map(Some);
    print_cost(
        world,
        "a busy stream of the program",
        &program_buffer,
        &busy,
    )?;
    print_cost(world, "the group's stream", &group_buffer, &idle)?;
    // This thread has the device's context; other threads of a program may have none.
    std::thread::scope(|scope| {
        let print = || print_cost(world, "a thread without context", &program_buffer, &idle);
        let thread = scope.spawn(print);
        thread.join().expect("the thread does not panic")
    })
}

/// Prints the counts for operations on buffers that `make` returns. If `shut` returns a gate, it is opened once all
/// operations are issued.
fn print_cost(
    world: &World,
    name: &str,
    make: &dyn Fn() -> Result<Buffer<'static>>,
    shut: &dyn Fn() -> Result<Option<Gate>>,
) -> Result<()> {
    const MANY: u64 = 100;
    let driver_calls = counter(world, "driver_calls");
    let round = || -> Result<[u64; 2]> {
        let buffers = (0..MANY).map(|_| make()).collect::<Result<Vec<_>>>()?;
        let mut works = Vec::with_capacity(buffers.len());
        let gate = shut()?;
        let before = driver_calls();
        let mut issued: Result<()> = Ok(());
        let used = measure(|| {
            issued = buffers.into_iter().try_for_each(|buffer| {
                let op = ReduceOp::Sum.into();
                let op = Op::AllReduce { buffer, op };
                works.push(world.group().execute_async(op)?);
                Ok(())
            });
        });
        issued?;
        let calls = driver_calls() - before;
        if let Some(gate) = gate {
            gate.open();
        }
        works
            .into_iter()
            .try_for_each(|work| work.wait().map(drop))?;
        Ok([calls, used.count_total])
    };
    // Events and the memory of lists are kept for later operations: after some rounds there is enough of both.
    let mut least = round()?;
    for _ in 0..20 {
        let next = round()?;
        least = std::array::from_fn(|at| least[at].min(next[at]));
    }
    let [calls, allocations] = least;
    eprintln!("cost on {name}: {calls} calls, {allocations} allocations for {MANY} operations");
    Ok(())
}

/// Switches timing on and off. Prints each time the cost of operations, and whether an operation on the device and one
/// on the host have a duration.
pub(super) fn switched_timing(world: &World, gpu: &Gpu) -> Result<()> {
    let numbers = gpu.buffer(&[1i64; 100])?;
    let group = world.group();
    let has_durations = || -> Result<[bool; 2]> {
        let on_device = group.execute_async(all_reduce(&numbers)?)?;
        let on_host = group.all_reduce_async(vec![1u32], ReduceOp::Sum)?;
        let ended = [on_device.join()?, on_host.join()?];
        Ok(ended.map(|done| done.duration.is_some()))
    };
    for timing in [Timing::Off, Timing::On, Timing::Off] {
        world.set_timing(timing)?;
        print_cost(world, "the program's stream", &|| numbers.buffer(), &|| {
            Ok(None)
        })?;
        eprintln!("timed: {:?}", has_durations()?);
    }
    // An operation keeps the events with which it was issued.
    world.set_timing(Timing::On)?;
    let gate = Gate::shut(world, gpu)?;
    let timed = group.execute_async(all_reduce(&numbers)?)?;
    world.set_timing(Timing::Off)?;
    let untimed = group.execute_async(all_reduce(&numbers)?)?;
    world.set_timing(Timing::On)?;
    gate.open();
    let durations = [timed.join()?, untimed.join()?].map(|done| done.duration.is_some());
    eprintln!("issued while on and off: {durations:?}");
    Ok(())
}

/// Issues bursts of operations, each of which the device ends before the next, and looks at none of them. Prints how
/// many events the operations have used, and how many times of events the thread has read from the driver.
pub(super) fn bursts(world: &World, gpu: &Gpu) -> Result<()> {
    let events = counter(world, "live_events");
    let times_read = counter(world, "times_read");
    let numbers = gpu.buffer(&[1i64; 8])?;
    count(world.group(), gpu)?;
    let (before, read_before) = (events(), times_read());
    let mut works = Vec::new();
    for _ in 0..40 {
        for _ in 0..50 {
            works.push(world.group().execute_async(all_reduce(&numbers)?)?);
        }
        if let Some(last) = works.last() {
            last.wait_stream(&gpu.stream)?;
        }
        gpu.stream.synchronize()?;
    }
    let made = events().saturating_sub(before);
    let read = times_read() - read_before;
    eprintln!("events: {made} for {} operations", works.len());
    eprintln!("times read: {read}");
    works.into_iter().try_for_each(|work| work.wait().map(drop))
}

//! The measurement: every rank times every call. The maximum over the ranks of each percentile is reported.

use super::cli::{Args, Calls, Dtype};
use super::operation::{BufferOwner, Case, Operation, Whole};
use super::print::{Printer, Row};
use super::ranks;
use anyhow::{bail, ensure};
use rcomm::{Config, ProcessGroup, ReduceOp, Rendezvous, World};
use std::time::Instant;

/// Maximum number of iterations per size, unless `--iterations` sets it.
const MAX_ITERATIONS: usize = 100_000;
/// Minimum number of iterations per size, unless `--iterations` sets it.
const MIN_ITERATIONS: usize = 8;

/// Checks the arguments as far as they do not depend on the number of ranks, before a rank is started.
pub(crate) fn check(args: &Args) -> anyhow::Result<()> {
    ensure!(
        args.min_bytes <= args.max_bytes,
        "--min-bytes {} is larger than --max-bytes {}",
        args.min_bytes,
        args.max_bytes
    );
    if args.calls != Calls::Blocking {
        let other = args
            .operations
            .iter()
            .find(|&&operation| operation != Operation::AllReduce);
        if let Some(other) = other {
            bail!(
                "--calls async and --calls overlap measure all_reduce only: leave out {}",
                other.name()
            );
        }
        ensure!(
            !args.registered,
            "--calls async and --calls overlap do not measure registered buffers: leave out --registered"
        );
    }
    Ok(())
}

/// Runs all requested measurements; returns the number of wrong elements.
pub(crate) fn run(args: &Args) -> anyhow::Result<u64> {
    ranks::pin_to_core()?;
    let world = World::init(Config::from_environment()?).map_err(|error| {
        let launched = Rendezvous::from_environment(|name| std::env::var(name).ok()).is_ok();
        let explanation = if args.ranks.is_none() && !launched {
            "-n is not given, and the variables of a launcher are missing or wrong"
        } else {
            "failed to start"
        };
        anyhow::Error::new(error).context(explanation)
    })?;
    ensure!(
        args.root < world.size(),
        "root {} is not one of {} ranks",
        args.root,
        world.size()
    );
    let mut printer = Printer::new(args, world.size(), world.rank() == 0);
    let errors = match args.dtype {
        Dtype::F32 => sweep::<f32>(args, world.group(), &mut printer),
        Dtype::F64 => sweep::<f64>(args, world.group(), &mut printer),
        Dtype::F16 => sweep::<rcomm::f16>(args, world.group(), &mut printer),
        Dtype::Bf16 => sweep::<rcomm::bf16>(args, world.group(), &mut printer),
        Dtype::I32 => sweep::<i32>(args, world.group(), &mut printer),
        Dtype::I64 => sweep::<i64>(args, world.group(), &mut printer),
        Dtype::U8 => sweep::<u8>(args, world.group(), &mut printer),
    }?;
    printer.end()?;
    world.shutdown()?;
    Ok(errors)
}

/// Measures every operation at every size, and prints the rows. Returns the number of wrong elements.
fn sweep<T: Whole>(
    args: &Args,
    group: &ProcessGroup,
    printer: &mut Printer,
) -> anyhow::Result<u64> {
    let mut errors = 0;
    for &operation in &args.operations {
        ensure!(
            operation != Operation::SendRecv || group.size() >= 2,
            "send_recv needs at least two ranks; this job has {}",
            group.size()
        );
        let mut bytes = args.min_bytes.max(size_of::<T>());
        loop {
            let row = measure_size::<T>(args, group, operation, bytes)?;
            errors += row.errors.unwrap_or(0);
            printer.print_row(&row)?;
            let next = bytes.saturating_mul(args.factor as usize);
            if operation == Operation::Barrier || next > args.max_bytes {
                break;
            }
            bytes = next;
        }
    }
    Ok(errors)
}

/// Measures an operation at one size. All ranks get the same row.
fn measure_size<T: Whole>(
    args: &Args,
    group: &ProcessGroup,
    operation: Operation,
    bytes: usize,
) -> anyhow::Result<Row> {
    let op = ReduceOp::from(args.op);
    let owner = match args.registered {
        true => BufferOwner::Group,
        false => BufferOwner::Caller,
    };
    let mut case = Case::<T>::new(group, operation, op, args.root, bytes, owner)?;
    let errors = if args.check {
        case.run()?;
        // Every rank counts its wrong elements; one rank reports the sum.
        let mut wrong = [case.errors() as f64];
        group.all_reduce(&mut wrong, ReduceOp::Sum)?;
        Some(wrong[0] as u64)
    } else {
        None
    };
    let count = case.count();
    let mut case = Case::<T>::new(group, operation, op, args.root, bytes, owner)?;
    // Zeros stay zeros: sums that grow from call to call would overflow to infinity, which changes the time of a call.
    case.clear();
    let iterations = match args.iterations {
        Some(iterations) => iterations.get() as usize,
        None => iterations_within(args, group, &mut case)?,
    };
    let (mut call_us, mut issue_us) = (Vec::with_capacity(iterations), Vec::new());
    // Microseconds per call: the operation without computation (median, slowest rank), and the computation without
    // operation.
    let (mut alone_us, mut compute_us) = (0.0, 0.0);
    // Warm-up calls, which are not measured.
    for _ in 0..args.warmup.unwrap_or(iterations / 10) {
        case.run()?;
    }
    group.barrier()?;
    match args.calls {
        Calls::Blocking => {
            let mut start = Instant::now();
            for _ in 0..iterations {
                case.run()?;
                let now = Instant::now();
                call_us.push((now - start).as_secs_f64() * 1e6);
                start = now;
            }
        }
        Calls::Async | Calls::Overlap => {
            let mut buffer = vec![T::whole(0); count];
            let mut loops = 0;
            if args.calls == Calls::Overlap {
                let mut times = Vec::with_capacity(iterations);
                for _ in 0..iterations {
                    let start = Instant::now();
                    buffer = group.all_reduce_async(buffer, op)?.wait()?;
                    times.push(micros_since(start));
                }
                let mut slowest = [percentile(&mut times, 0.5)];
                group.all_reduce(&mut slowest, ReduceOp::Max)?;
                alone_us = slowest[0];
                loops = loops_within(alone_us);
                let start = Instant::now();
                (0..iterations).for_each(|_| compute(loops));
                compute_us = micros_since(start) / iterations as f64;
                group.barrier()?;
            }
            for _ in 0..iterations {
                let start = Instant::now();
                let work = group.all_reduce_async(buffer, op)?;
                issue_us.push(micros_since(start));
                compute(loops);
                buffer = work.wait()?;
                call_us.push(micros_since(start));
            }
        }
    }
    let operations_per_call = if operation == Operation::SendRecv {
        2.0
    } else {
        1.0
    };
    let takes_no_part = operation == Operation::SendRecv && group.rank() > 1;
    let mut times = if takes_no_part {
        [0.0; 6]
    } else {
        [
            percentile(&mut call_us, 0.5) / operations_per_call,
            percentile(&mut call_us, 0.99) / operations_per_call,
            percentile(&mut call_us, 0.0) / operations_per_call,
            percentile(&mut issue_us, 0.5),
            alone_us,
            compute_us,
        ]
    };
    group.all_reduce(&mut times, ReduceOp::Max)?;
    let [p50_us, p99_us, min_us, issue_us, alone_us, compute_us] = times;
    // In a gather or a scatter, the root has all elements, and the others have a part.
    let mut largest_count = [count as f64];
    group.all_reduce(&mut largest_count, ReduceOp::Max)?;
    let count = match operation {
        Operation::Barrier => 0,
        _ => largest_count[0] as usize,
    };
    Ok(Row {
        operation,
        bytes: count * size_of::<T>(),
        count,
        iterations,
        p50_us,
        p99_us,
        min_us,
        issue_us: (args.calls != Calls::Blocking).then_some(issue_us),
        overlap: (args.calls == Calls::Overlap).then(|| overlap(alone_us, compute_us, p50_us)),
        errors,
    })
}

/// Returns the number of calls that fit into the time for one size (`--time`), between [`MIN_ITERATIONS`] and
/// [`MAX_ITERATIONS`]. All ranks use rank 0's number.
fn iterations_within<T: Whole>(
    args: &Args,
    group: &ProcessGroup,
    case: &mut Case<'_, T>,
) -> anyhow::Result<usize> {
    for _ in 0..3 {
        case.run()?;
    }
    group.barrier()?;
    let start = Instant::now();
    for _ in 0..3 {
        case.run()?;
    }
    let each = start.elapsed().as_secs_f64() / 3.0;
    let mut iterations = [(args.time.as_secs_f64() / each.max(1e-9)).min(MAX_ITERATIONS as f64)];
    group.broadcast(&mut iterations, 0)?;
    Ok((iterations[0] as usize).clamp(MIN_ITERATIONS, MAX_ITERATIONS))
}

fn micros_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

/// Keeps a core busy for `loops` iterations of a loop that does not access memory.
fn compute(loops: u64) {
    let mut value = std::hint::black_box(1_u64);
    for loop_index in 0..loops {
        value = value.rotate_left(7) ^ loop_index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    std::hint::black_box(value);
}

/// Returns the number of loops with which [`compute`] takes about this many microseconds.
fn loops_within(micros: f64) -> u64 {
    const TRIED: u64 = 1 << 20;
    let start = Instant::now();
    compute(TRIED);
    (micros / micros_since(start).max(1e-3) * TRIED as f64) as u64
}

/// Returns the share of the shorter duration that was hidden by the longer one, 0 to 1, if both together took `both`.
fn overlap(alone: f64, computing: f64, both: f64) -> f64 {
    ((alone + computing - both) / alone.min(computing).max(1e-3)).clamp(0.0, 1.0)
}

/// Sorts the values, and returns the value below which this share of them lies (0.5 is the median); 0 if there are no
/// values.
fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let index = (values.len() as f64 * share) as usize;
    values
        .get(index.min(values.len().saturating_sub(1)))
        .copied()
        .unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_the_hidden_share_of_the_shorter_duration() {
        assert_eq!(overlap(10.0, 20.0, 20.0), 1.0);
        assert_eq!(overlap(10.0, 20.0, 25.0), 0.5);
        assert_eq!(overlap(10.0, 20.0, 33.0), 0.0);
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let mut values = vec![5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!(percentile(&mut values, 0.5), 3.0);
        assert_eq!(percentile(&mut values, 0.99), 5.0);
        assert_eq!(percentile(&mut [], 0.5), 0.0);
    }
}

//! One rank of the job that is observed.

use rcomm::{Config, ReduceOp, World};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::io::BufRead;
use std::time::Instant;

/// How one message size is measured: in at most `batches` batches of `per_batch` operations; the median batch counts.
pub(crate) struct Size {
    pub(crate) bytes: usize,
    batches: usize,
    per_batch: u32,
}

const fn size(bytes: usize, batches: usize, per_batch: u32) -> Size {
    Size {
        bytes,
        batches,
        per_batch,
    }
}

/// The longest measurement of one size, in ns. Five batches are measured even if they take longer.
const MOST_NS: f64 = 1e9;
/// Every size takes about a tenth of a second on a quiet machine.
pub(crate) const SIZES: [Size; 7] = [
    size(8, 500, 200),
    size(256, 500, 200),
    size(8 << 10, 300, 100),
    size(256 << 10, 300, 5),
    size(1 << 20, 200, 2),
    size(16 << 20, 20, 1),
    size(64 << 20, 8, 1),
];

/// What one size took.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Time per operation, in nanoseconds: the median of the batches.
    pub(crate) ns: f64,
    /// The process's processor time per operation, in nanoseconds.
    pub(crate) processor_ns: f64,
}

/// Measures all sizes for each line of standard input, and prints the results as a line of JSON.
///
/// # Errors
/// If the world cannot be made, or an operation fails.
#[expect(clippy::print_stdout, reason = "the results go to the driver")]
pub(crate) fn run(largest: usize) -> anyhow::Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let sizes = || SIZES.iter().filter(|size| size.bytes <= largest);
    for line in std::io::stdin().lock().lines() {
        line?;
        let measured: Vec<Measured> = sizes()
            .map(|size| measure(&world, size))
            .collect::<rcomm::Result<_>>()?;
        println!("{}", serde_json::to_string(&measured)?);
    }
    Ok(world.shutdown()?)
}

fn measure(world: &World, size: &Size) -> rcomm::Result<Measured> {
    let mut buffer = vec![0.0_f32; size.bytes / size_of::<f32>()];
    let group = world.group();
    let mut batch = || -> rcomm::Result<f64> {
        let began = Instant::now();
        for _ in 0..size.per_batch {
            group.all_reduce(&mut buffer, ReduceOp::Sum)?;
        }
        Ok(began.elapsed().as_nanos() as f64)
    };
    batch()?;
    let mut longest = [batch()?];
    // All ranks must run the same number of batches.
    group.all_reduce(&mut longest, ReduceOp::Max)?;
    let count = (MOST_NS / longest[0].max(1.0)) as usize;
    let count = count.clamp(5, size.batches);
    group.barrier()?;
    let began = processor_ns();
    let mut batches = Vec::with_capacity(count);
    for _ in 0..count {
        batches.push(batch()? / f64::from(size.per_batch));
    }
    let operations = count as f64 * f64::from(size.per_batch);
    Ok(Measured {
        ns: crate::median(batches),
        processor_ns: (processor_ns() - began) / operations,
    })
}

fn processor_ns() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

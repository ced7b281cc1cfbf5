//! Works as one rank of the job that is observed.

use crate::train::Trainer;
use rcomm::{Config, ProcessGroup, ReduceOp, World};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::io::BufRead;
use std::time::Instant;

/// What is measured.
#[derive(Clone, Copy)]
enum Work {
    /// An all_reduce of this many bytes.
    AllReduce(usize),
    /// A step of the example `ddp`.
    Training,
}

/// How work is measured: in at most `batches` batches of `per_batch` repetitions; the median batch counts.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    work: Work,
    batches: usize,
    per_batch: u32,
}

impl Row {
    /// Whether the cost of an observer is judged as a share of the work's time.
    pub(crate) fn is_large(&self) -> bool {
        !matches!(self.work, Work::AllReduce(bytes) if bytes < 1 << 20)
    }
}

const fn all_reduce(name: &'static str, bytes: usize, batches: usize, per_batch: u32) -> Row {
    Row {
        name,
        work: Work::AllReduce(bytes),
        batches,
        per_batch,
    }
}

/// The longest measurement of one row, in ns. Five batches are measured even if they take longer.
const MAX_NS: f64 = 1e9;
/// The rows. Each takes about a tenth of a second on a quiet machine.
const ROWS: [Row; 8] = [
    Row {
        name: "DDP step",
        work: Work::Training,
        batches: 100,
        per_batch: 5,
    },
    all_reduce("8 B", 8, 500, 200),
    all_reduce("256 B", 256, 500, 200),
    all_reduce("8 KiB", 8 << 10, 300, 100),
    all_reduce("256 KiB", 256 << 10, 300, 5),
    all_reduce("1 MiB", 1 << 20, 200, 2),
    all_reduce("16 MiB", 16 << 20, 20, 1),
    all_reduce("64 MiB", 64 << 20, 8, 1),
];

/// The rows whose messages are not larger than this.
pub(crate) fn rows(largest: usize) -> impl Iterator<Item = &'static Row> {
    ROWS.iter()
        .filter(move |row| !matches!(row.work, Work::AllReduce(bytes) if bytes > largest))
}

/// What a repetition of a row took.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Time in nanoseconds: the median of the batches.
    pub(crate) ns: f64,
    /// The process's processor time, in nanoseconds.
    pub(crate) processor_ns: f64,
}

/// Measures all rows for each line of standard input, and prints the results as a line of JSON.
///
/// # Errors
/// The world cannot be made or shut down, an operation fails, or standard input cannot be read.
#[expect(clippy::print_stdout, reason = "the results go to the driver")]
pub(crate) fn run(largest: usize) -> anyhow::Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let mut trainer = Trainer::new(world.group())?;
    for line in std::io::stdin().lock().lines() {
        line?;
        let measured: Vec<Measured> = rows(largest)
            .map(|row| measure_row(world.group(), &mut trainer, row))
            .collect::<anyhow::Result<_>>()?;
        println!("{}", serde_json::to_string(&measured)?);
    }
    Ok(world.shutdown()?)
}

fn measure_row(group: &ProcessGroup, trainer: &mut Trainer, row: &Row) -> anyhow::Result<Measured> {
    match row.work {
        Work::AllReduce(bytes) => {
            let mut buffer = vec![0.0_f32; bytes / size_of::<f32>()];
            measure(group, row, || {
                Ok(group.all_reduce(&mut buffer, ReduceOp::Sum)?)
            })
        }
        // Every step trains on the same batch: the work of a step does not depend on the numbers.
        Work::Training => measure(group, row, || trainer.step(0).map(|_| ())),
    }
}

fn measure(
    group: &ProcessGroup,
    row: &Row,
    mut repetition: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Measured> {
    let mut batch = || -> anyhow::Result<f64> {
        let began = Instant::now();
        for _ in 0..row.per_batch {
            repetition()?;
        }
        Ok(began.elapsed().as_nanos() as f64)
    };
    batch()?;
    let mut longest = [batch()?];
    // All ranks must run the same number of batches.
    group.all_reduce(&mut longest, ReduceOp::Max)?;
    let count = (MAX_NS / longest[0].max(1.0)) as usize;
    let count = count.clamp(5, row.batches);
    group.barrier()?;
    let began = processor_ns();
    let mut batches = Vec::with_capacity(count);
    for _ in 0..count {
        batches.push(batch()? / f64::from(row.per_batch));
    }
    let repetitions = count as f64 * f64::from(row.per_batch);
    Ok(Measured {
        ns: crate::median(batches),
        processor_ns: (processor_ns() - began) / repetitions,
    })
}

fn processor_ns() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

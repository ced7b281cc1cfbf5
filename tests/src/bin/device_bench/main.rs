//! Measures the overhead of the NCCL backend on a real device: calls through it are compared with direct calls of NCCL,
//! alone and while the device does other work.
//!
//! `device_bench [--quiet | --host]` is started once for each rank, as `device_rank` is. Every rank measures; rank 0
//! prints the results on its standard output. With `--quiet`, all measurements run on small sizes and nothing is
//! printed, since numbers have no meaning over a simulator. With `--host`, only the host's nanoseconds of a small call
//! are measured: over a simulator, the difference from a raw call is the overhead of the backend without that of the
//! driver.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod driver;

use driver::{Events, Gemm, RawComm};
use rcomm::backend::nccl::{CudaDevice, CudaStream, DeviceBuffer, NcclOptions, Priority};
use rcomm::{Config, DType, Op, ReduceOp, Result, World};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// The sizes of all-reduces that are measured, in bytes.
const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20];
/// The largest number of calls before those that are measured.
const WARM_UP: u32 = 20;

fn main() -> ExitCode {
    let mode = match std::env::args().nth(1).as_deref() {
        None => Mode::Numbers,
        Some("--quiet") => Mode::Quiet,
        Some("--host") => Mode::Host,
        Some(other) => {
            eprintln!("unknown option {other:?}: give --quiet, --host, or none");
            return ExitCode::FAILURE;
        }
    };
    match run(mode) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// What is measured and printed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// All measurements.
    Numbers,
    /// All measurements, with small sizes and few calls; nothing is printed.
    Quiet,
    /// Only the host's times of small calls.
    Host,
}

/// The state that all measurements use.
struct Bench {
    world: World,
    device: Arc<CudaDevice>,
    stream: Arc<CudaStream>,
    raw: RawComm,
    events: Events,
    mode: Mode,
}

/// The time that a call takes on the device and on the host.
#[derive(Clone, Copy)]
struct Cost {
    device_us: f64,
    host_ns: f64,
}

fn run(mode: Mode) -> Result<()> {
    let mut config = Config::from_environment()?;
    config.backend = "cpu:cpu,cuda:nccl".to_owned();
    let world = World::init(config)?;
    let local = world.place().local_rank.unwrap_or(world.rank());
    let device = NcclOptions::of(world.config())?.open_device(local)?;
    let stream = CudaStream::new(&device, Priority::Normal)?;
    let events = Events::new(&world, &stream);
    let raw = RawComm::new(&world)?;
    let bench = Bench {
        world,
        device,
        stream,
        raw,
        events,
        mode,
    };
    if mode == Mode::Host {
        bench.compare_hosts()?;
        return bench.world.shutdown();
    }
    bench.say(
        "# all_reduce: device us and host ns of a call, raw NCCL and ProcessGroup, and their ratio",
    );
    // A simulator moves bytes as messages, so large sizes would take long.
    let sizes = match mode {
        Mode::Numbers => &SIZES[..],
        Mode::Quiet | Mode::Host => &SIZES[..2],
    };
    for &bytes in sizes {
        bench.compare(bytes)?;
    }
    bench.overlap()?;
    bench.world.shutdown()
}

impl Bench {
    fn say(&self, line: &str) {
        if self.world.rank() == 0 && self.mode != Mode::Quiet {
            println!("{line}");
        }
    }

    /// The number of calls in one measurement.
    fn calls(&self, bytes: usize) -> u32 {
        match self.mode {
            Mode::Quiet => 3,
            Mode::Host => 1_000,
            // The calls reduce 20 GiB in all, but are at least 50 and at most 2,000.
            Mode::Numbers => u32::try_from((20_usize << 30) / bytes.max(1))
                .unwrap_or(u32::MAX)
                .clamp(50, 2_000),
        }
    }

    /// Prints medians, so that one round during which the machine was busy decides nothing, and the range of the
    /// backend's overhead.
    fn compare_hosts(&self) -> Result<()> {
        let timing = NcclOptions::of(self.world.config())?.timing;
        let bytes = SIZES[0];
        let rounds = self.rounds(bytes, 9)?;
        let sorted = |number: fn(&(Cost, Cost)) -> f64| {
            let mut numbers: Vec<f64> = rounds.iter().map(number).collect();
            numbers.sort_by(f64::total_cmp);
            numbers
        };
        let median = |numbers: &[f64]| numbers[numbers.len() / 2];
        let more = sorted(|(raw, ours)| ours.host_ns - raw.host_ns);
        self.say(&format!(
            "{} rounds of {} calls, raw and ProcessGroup in turn: more by {:.0} to {:.0} host ns",
            rounds.len(),
            self.calls(bytes),
            more[0],
            more[more.len() - 1]
        ));
        self.say(&format!(
            "timing {timing:?}, {bytes} bytes: host ns of a call: raw {:.0}, ProcessGroup {:.0}, more {:.0}",
            median(&sorted(|(raw, _)| raw.host_ns)),
            median(&sorted(|(_, ours)| ours.host_ns)),
            median(&more)
        ));
        Ok(())
    }

    fn compare(&self, bytes: usize) -> Result<()> {
        let (raw_cost, our_cost) = self.costs(bytes)?;
        self.say(&format!(
            "{bytes:>10} bytes: device {:9.1} {:9.1} x{:.3}; host {:8.0} {:8.0}",
            raw_cost.device_us,
            our_cost.device_us,
            our_cost.device_us / raw_cost.device_us,
            raw_cost.host_ns,
            our_cost.host_ns
        ));
        Ok(())
    }

    /// The least costs of raw calls, and of calls through rcomm.
    fn costs(&self, bytes: usize) -> Result<(Cost, Cost)> {
        let (raw_costs, our_costs): (Vec<_>, Vec<_>) = self.rounds(bytes, 3)?.into_iter().unzip();
        Ok((best(&raw_costs), best(&our_costs)))
    }

    /// Measures raw calls and calls through rcomm in turn, so that both meet the same temperature of the device and the
    /// same load of the machine.
    fn rounds(&self, bytes: usize, rounds: usize) -> Result<Vec<(Cost, Cost)>> {
        let buffer = DeviceBuffer::zeroed(&self.stream, DType::F32, bytes / 4)?;
        let calls = self.calls(bytes);
        let raw = |many: u32| {
            for _ in 0..many {
                self.raw.all_reduce(&buffer, &self.stream);
            }
            Ok(())
        };
        let ours = |many: u32| self.issue(&buffer, many);
        (0..rounds)
            .map(|_| Ok((self.measure(calls, raw)?, self.measure(calls, ours)?)))
            .collect()
    }

    /// Issues this many all-reduces and makes the stream wait for the last.
    fn issue(&self, buffer: &DeviceBuffer, many: u32) -> Result<()> {
        let mut last = None;
        for _ in 0..many {
            let op = Op::AllReduce {
                buffer: buffer.buffer()?,
                op: ReduceOp::Sum.into(),
            };
            last = Some(self.world.group().execute_async(op)?);
        }
        last.map_or(Ok(()), |work| work.wait_stream(&self.stream))
    }

    fn measure(&self, calls: u32, make: impl Fn(u32) -> Result<()>) -> Result<Cost> {
        make(calls.min(WARM_UP))?;
        self.stream.synchronize()?;
        self.world.group().barrier()?;
        self.events.start(&self.stream);
        let start = Instant::now();
        make(calls)?;
        let host = start.elapsed();
        self.events.stop(&self.stream);
        self.stream.synchronize()?;
        Ok(Cost {
            device_us: self.events.milliseconds() * 1e3 / f64::from(calls),
            host_ns: host.as_secs_f64() * 1e9 / f64::from(calls),
        })
    }

    /// Runs a matrix product and an all-reduce on another stream at the same time, and prints how much longer both take
    /// than the longer of them alone.
    fn overlap(&self) -> Result<()> {
        let side = if self.mode == Mode::Quiet { 32 } else { 4096 };
        let gemm = Gemm::load(&self.world, &self.device, &self.stream, side)?;
        let bytes = if self.mode == Mode::Quiet {
            1 << 16
        } else {
            256 << 20
        };
        let other = CudaStream::new(&self.device, Priority::Normal)?;
        let buffer = DeviceBuffer::zeroed(&other, DType::F32, bytes / 4)?;
        let timing = NcclOptions::of(self.world.config())?.timing;
        let alone = self.time(|| {
            gemm.launch(&self.stream);
            Ok(())
        })?;
        for (name, call_path) in [
            ("raw NCCL, no record", CallPath::Raw),
            ("ProcessGroup", CallPath::Ours),
        ] {
            let comm = self.time(|| self.communicate(call_path, &buffer, &other))?;
            let both = self.time(|| {
                // The product is enqueued first, and the all-reduce must not wait for it.
                gemm.launch(&self.stream);
                self.communicate(call_path, &buffer, &other)
            })?;
            self.say(&format!(
                "overlap, {name}, timing {timing:?}: product {alone:.3} ms, all_reduce {comm:.3} ms, \
                 both {both:.3} ms, x{:.3} of the longer",
                both / alone.max(comm)
            ));
        }
        Ok(())
    }

    /// Enqueues an all-reduce of a buffer of the stream `other`, and makes the bench's stream wait for it. A raw call
    /// runs on `other`, the group's on the group's own stream.
    fn communicate(
        &self,
        call_path: CallPath,
        buffer: &DeviceBuffer,
        other: &Arc<CudaStream>,
    ) -> Result<()> {
        match call_path {
            CallPath::Raw => {
                self.raw.all_reduce(buffer, other);
                self.events.join(other, &self.stream);
                Ok(())
            }
            CallPath::Ours => self.issue(buffer, 1),
        }
    }

    /// The device's time for a step in milliseconds, the minimum of several rounds.
    fn time(&self, step: impl Fn() -> Result<()>) -> Result<f64> {
        let rounds = if self.mode == Mode::Quiet { 1 } else { 10 };
        let mut best = f64::INFINITY;
        for _ in 0..rounds {
            self.world.group().barrier()?;
            self.events.start(&self.stream);
            step()?;
            self.events.stop(&self.stream);
            self.stream.synchronize()?;
            best = best.min(self.events.milliseconds());
        }
        Ok(best)
    }
}

/// By which path a call reaches NCCL: directly, or through rcomm.
#[derive(Clone, Copy)]
enum CallPath {
    Raw,
    Ours,
}

fn best(costs: &[Cost]) -> Cost {
    let least = |number: fn(&Cost) -> f64| costs.iter().map(number).fold(f64::INFINITY, f64::min);
    Cost {
        device_us: least(|cost| cost.device_us),
        host_ns: least(|cost| cost.host_ns),
    }
}

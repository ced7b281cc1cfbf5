//! The work of each rank of a demonstration.

use super::cli::{Demo, Kind};
use super::dump_directory;
use anyhow::Result;
use rcomm::{Config, GroupOptions, ProcessGroup, ReduceOp, World};
use rustix::process::{Signal, getpid, kill_process};
use std::time::Duration;

/// How long an operation may take: a demonstration shows its fault until the user ends it.
const TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
/// How long loading a batch takes.
const LOAD: Duration = Duration::from_millis(30);
/// How long each computation of a step takes.
const COMPUTE: Duration = Duration::from_millis(30);
/// Additional time that the slow rank needs to load a batch.
const EXTRA: Duration = Duration::from_millis(300);
/// The number of values in a batch: large enough to be seen as bandwidth.
const VALUES: usize = 64 << 10;

/// Trains until the job is ended. After an error the process stays alive, so that its records can be read.
pub(super) fn run(demo: &Demo) -> Result<()> {
    let mut config = Config::from_environment()?;
    if std::env::var_os("RCOMM_TIMEOUT_MS").is_none() {
        config.timeout = TIMEOUT;
    }
    if let (None, Ok(job)) = (
        std::env::var_os("RCOMM_DUMP_DIR"),
        std::env::var("TORCHELASTIC_RUN_ID"),
    ) {
        config.dump_dir = dump_directory(&job);
    }
    let world = World::init(config)?;
    let trained = match demo.kind {
        Kind::Pipeline => train_pipeline(&world, demo),
        Kind::Healthy
        | Kind::Slow
        | Kind::Stuck
        | Kind::Kill
        | Kind::Freeze
        | Kind::Mismatch
        | Kind::Deadlock => train(&world, demo),
    };
    let Err(error) = trained;
    // The launcher puts the rank before each line.
    let _ = std::io::Write::write_all(
        &mut std::io::stderr(),
        format!("{error}\nthis rank keeps its records until ctrl-c\n").as_bytes(),
    );
    hang()
}

/// Makes the groups for tensor and data parallelism. Each has a part of the ranks if the ranks can be divided.
/// Otherwise, and in `deadlock` and `mismatch`, both groups have all ranks.
fn groups(world: &World, demo: &Demo) -> rcomm::Result<[ProcessGroup; 2]> {
    let (rank, size) = (world.rank(), world.size());
    let all_ranks: Vec<u32> = (0..size).collect();
    // In a group of two, either rank can be the wrong one; in a larger group, the majority shows which one it is.
    let over_all_ranks = matches!(demo.kind, Kind::Deadlock | Kind::Mismatch);
    let is_divided = size >= 4 && size.is_multiple_of(2) && !over_all_ranks;
    let (tp, dp) = match is_divided {
        true => {
            let row = rank / 2 * 2;
            let column = (rank % 2..size).step_by(2);
            (vec![row, row + 1], column.collect())
        }
        false => (all_ranks.clone(), all_ranks),
    };
    let tp = world.new_group(&tp, &GroupOptions::named("tp"))?;
    let dp = world.new_group(&dp, &GroupOptions::named("dp"))?;
    Ok([tp, dp])
}

/// Makes steps of data and tensor parallel training, without end.
fn train(world: &World, demo: &Demo) -> rcomm::Result<std::convert::Infallible> {
    let [tp, dp] = groups(world, demo)?;
    let is_culprit = world.rank() == demo.culprit();
    let mut batch = vec![world.rank() as f32; VALUES];
    let mut gradients = vec![1.0f32; VALUES];
    for step in 0.. {
        let fault = (is_culprit && step == demo.step_of_fault()).then_some(demo.kind);
        world.step(step);
        world.phase("load data");
        std::thread::sleep(LOAD);
        if is_culprit && demo.kind == Kind::Slow {
            std::thread::sleep(EXTRA);
        }
        match fault {
            Some(Kind::Stuck) => hang(),
            Some(Kind::Freeze) => signal_itself(Signal::STOP),
            _ => {}
        }

        world.phase("forward");
        std::thread::sleep(COMPUTE);
        let values = match fault {
            Some(Kind::Mismatch) => VALUES / 2,
            _ => VALUES,
        };
        if fault == Some(Kind::Deadlock) {
            dp.all_reduce(&mut gradients, ReduceOp::Avg)?;
        }
        if fault == Some(Kind::Kill) {
            // The process is killed while its operation is in flight: the other ranks have not issued it yet, or
            // wait in it.
            let work = tp.all_reduce_async(vec![0.0f32; VALUES], ReduceOp::Avg)?;
            signal_itself(Signal::KILL);
            work.wait()?;
        }
        tp.all_reduce(&mut batch[..values], ReduceOp::Avg)?;

        world.phase("backward");
        std::thread::sleep(COMPUTE);
        dp.all_reduce(&mut gradients, ReduceOp::Avg)?;
        world.phase("optimizer");
    }
    hang()
}

/// Makes steps of pipeline parallel training, without end: activations go from stage to stage, and a barrier ends the
/// step.
fn train_pipeline(world: &World, demo: &Demo) -> rcomm::Result<std::convert::Infallible> {
    let stages: Vec<u32> = (0..world.size()).collect();
    let pp = world.new_group(&stages, &GroupOptions::named("pp"))?;
    let (stage, last) = (pp.rank(), pp.size() - 1);
    let mut activations = vec![stage as f32; VALUES];
    for step in 0.. {
        world.step(step);
        world.phase("forward");
        if stage > 0 {
            pp.recv(&mut activations, stage - 1, 0)?;
        }
        std::thread::sleep(COMPUTE);
        let leaves_out = stage == demo.stage_at_fault() && step == demo.step_of_fault();
        if stage < last && !leaves_out {
            pp.send(&activations, stage + 1, 0)?;
        }
        world.phase("optimizer");
        pp.barrier()?;
    }
    hang()
}

/// Sends a signal to this process, which cannot fail.
fn signal_itself(signal: Signal) {
    let _ = kill_process(getpid(), signal);
}

/// Sleeps until the process is ended.
fn hang() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

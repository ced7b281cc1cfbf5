//! The program of each rank.

use crate::Fault;
use crate::job::CULPRIT;
use anyhow::Result;
use rcomm::{Config, GroupOptions, ReduceOp, World};
use std::time::Duration;

const STEPS: i64 = 10;
const STEP_OF_FAULT: i64 = 5;

/// Trains until all steps are done or an operation fails.
pub(crate) fn run(fault: Fault) -> Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let rank = world.rank();
    // The tensor-parallel pairs are ranks 0 and 1, and 2 and 3. The data-parallel pairs are ranks 0 and 2, and 1 and 3.
    let (tp_first, dp_first) = (rank / 2 * 2, rank % 2);
    let tp = world.new_group(&[tp_first, tp_first + 1], &GroupOptions::named("tp"))?;
    let dp = world.new_group(&[dp_first, dp_first + 2], &GroupOptions::named("dp"))?;

    let mut weights = vec![0.0f32; 4096];
    for step in 0..STEPS {
        world.step(step);
        world.phase("load data");
        let mut batch = load_batch(rank, step, fault);

        world.phase("forward");
        tp.all_reduce(&mut batch, ReduceOp::Sum)?;

        world.phase("backward");
        let mut gradients: Vec<f32> = batch.iter().map(|x| x * 0.5).collect();
        dp.all_reduce(&mut gradients, ReduceOp::Avg)?;

        world.phase("optimizer");
        for (weight, gradient) in weights.iter_mut().zip(&gradients) {
            *weight -= 0.01 * gradient;
        }
    }
    world.shutdown()?;
    Ok(())
}

/// Returns the batch of a step. On rank [`CULPRIT`], in step [`STEP_OF_FAULT`], it sleeps forever or kills the
/// process.
fn load_batch(rank: u32, step: i64, fault: Fault) -> Vec<f32> {
    if rank == CULPRIT && step == STEP_OF_FAULT {
        match fault {
            Fault::Hang | Fault::Hold => loop {
                std::thread::sleep(Duration::from_secs(1));
            },
            Fault::Kill => {
                let own_pid = rustix::process::getpid();
                // A process may always kill itself, and this call does not return.
                let _ = rustix::process::kill_process(own_pid, rustix::process::Signal::KILL);
            }
        }
    }
    vec![rank as f32 + step as f32; 4096]
}

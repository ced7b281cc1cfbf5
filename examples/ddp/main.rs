//! Trains a small network on generated data with candle, each rank on its own part of every batch, and compares the
//! loss curve with that of a single process.
//!
//! ```text
//! rcomm-run -n 4 target/release/ddp
//! ```
#![allow(clippy::print_stdout)]

mod model;
mod train;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use model::{Batch, Model};
use rcomm::{Config, ReduceOp, World};
use rcomm_candle::TensorGroup;
use train::{BATCH, RATE, Trainer};

const STEPS: usize = 400;

fn main() -> Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let group = world.group();
    let size = group.size() as usize;
    ensure!(
        BATCH.is_multiple_of(size),
        "a batch of {BATCH} is not divisible by {size} ranks"
    );

    let mut trainer = Trainer::new(group)?;
    let mut curve = (0..STEPS)
        .map(|step| trainer.step(step))
        .collect::<Result<Vec<f32>>>()?;
    group.all_reduce(&mut curve, ReduceOp::Avg)?;

    // Check that the weights of all ranks are equal, bit by bit.
    for parameter in &trainer.model.parameters {
        let weights: Vec<f32> = parameter.flatten_all()?.to_vec1()?;
        let gathered = group.all_gather_tensor(parameter.as_tensor())?;
        let gathered: Vec<f32> = gathered.flatten_all()?.to_vec1()?;
        ensure!(
            gathered == weights.repeat(size),
            "the weights of the ranks differ"
        );
    }
    if group.rank() == 0 {
        compare(&curve, &alone()?)?;
    }
    world.shutdown()?;
    Ok(())
}

/// Runs the same training, on whole batches, in one process; returns the loss of each step.
fn alone() -> Result<Vec<f32>> {
    let model = Model::new(0)?;
    let mut curve = Vec::new();
    for step in 0..STEPS {
        let (loss, store) = model.backward(&Batch::of_step(step, BATCH)?)?;
        let gradients = model.parameters.iter();
        let gradients = gradients.map(|parameter| store.get(parameter).cloned());
        let gradients: Option<Vec<Tensor>> = gradients.collect();
        let gradients = gradients.context("a parameter has no gradient")?;
        model.descend(&gradients, RATE)?;
        curve.push(loss);
    }
    Ok(curve)
}

/// Prints the loss curves of all ranks together and of one process alone. Fails if they differ by more than rounding
/// explains, or if the loss did not fall enough.
fn compare(together: &[f32], alone: &[f32]) -> Result<()> {
    println!("{:>6} {:>12} {:>12}", "step", "together", "alone");
    for step in (0..STEPS).step_by(STEPS / 10).chain([STEPS - 1]) {
        println!("{step:>6} {:>12.7} {:>12.7}", together[step], alone[step]);
    }
    let difference = |(a, b): (&f32, &f32)| (a - b).abs() / b.abs();
    let largest = together.iter().zip(alone).map(difference);
    let largest = largest.fold(0.0, f32::max);
    println!("the curves differ by at most {largest:.1e} of their values");
    ensure!(largest < 1e-3, "this is more than rounding explains");
    ensure!(
        together[STEPS - 1] < together[0] / 20.0,
        "the loss did not fall below a twentieth of its first value"
    );
    Ok(())
}

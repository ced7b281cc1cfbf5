//! Trains a small network on generated data with candle, each rank on its own part of every batch, and compares the
//! loss curve with that of a single process.
//!
//! ```text
//! rcomm-run -n 4 target/release/ddp
//! ```
#![allow(clippy::print_stdout)]

mod model;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use model::{Batch, Model, PARAMETERS};
use rcomm::data_parallel::{Parameter, Reducer, ReducerOptions};
use rcomm::{Buffer, Config, ReduceOp, World};
use rcomm_candle::{TensorGroup, read, tensor_of};

const STEPS: usize = 400;
const BATCH: usize = 240;
const RATE: f64 = 0.1;

fn main() -> Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let group = world.group();
    let (rank, size) = (group.rank() as usize, group.size() as usize);
    ensure!(
        BATCH.is_multiple_of(size),
        "a batch of {BATCH} is not divisible by {size} ranks"
    );

    // Each rank starts with different weights, and gets those of rank 0.
    let model = Model::new(rank as u64)?;
    for parameter in &model.parameters {
        group.broadcast_tensor(parameter.as_tensor(), 0)?;
    }
    let options = ReducerOptions::default();
    let mut reducer = Reducer::<f32>::new(group, parameters(), options)?;
    let mut curve = Vec::new();
    for step in 0..STEPS {
        let part = Batch::of_step(step, BATCH)?.part(rank, size)?;
        let (loss, gradients) = model.backward(&part)?;
        model.descend(&average(&mut reducer, &model, &gradients)?, RATE)?;
        curve.push(loss);
    }
    group.all_reduce(&mut curve, ReduceOp::Avg)?;

    // Check that the weights of all ranks are equal, bit by bit.
    for parameter in &model.parameters {
        let weights: Vec<f32> = parameter.flatten_all()?.to_vec1()?;
        let all = group.all_gather_tensor(parameter.as_tensor())?;
        let gathered: Vec<f32> = all.flatten_all()?.to_vec1()?;
        ensure!(
            gathered == weights.repeat(size),
            "the weights of the ranks differ"
        );
    }
    if rank == 0 {
        compare(&curve, &alone()?)?;
    }
    world.shutdown()?;
    Ok(())
}

/// The names and shapes of the parameters, which the reducer compares between the ranks.
fn parameters() -> Vec<Parameter> {
    let named = PARAMETERS.iter().map(|(name, shape)| {
        let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        Parameter::new(*name, &shape)
    });
    named.collect()
}

/// Averages the gradients over all ranks. The last parameter is the first to be ready, as in backpropagation.
fn average(
    reducer: &mut Reducer<f32>,
    model: &Model,
    gradients: &GradStore,
) -> Result<Vec<Tensor>> {
    for (at, parameter) in model.parameters.iter().enumerate().rev() {
        let gradient = gradients.get(parameter);
        let gradient = gradient.context("a parameter has no gradient")?;
        read(gradient, |buffer| {
            reducer.ready(at, buffer.as_slice::<f32>().unwrap_or_default())
        })?;
    }
    let averages = reducer.finish()?.into_iter().zip(PARAMETERS);
    let averages = averages.map(|(average, (_, shape))| {
        let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        let average = Buffer::from_vec(average.unwrap_or_default());
        Ok(tensor_of(average.with_shape(&shape)?)?)
    });
    averages.collect()
}

/// Runs the same training, on whole batches, in one process; returns the loss of each step.
fn alone() -> Result<Vec<f32>> {
    let model = Model::new(0)?;
    let mut curve = Vec::new();
    for step in 0..STEPS {
        let (loss, gradients) = model.backward(&Batch::of_step(step, BATCH)?)?;
        let gradients = model.parameters.iter().map(|it| gradients.get(it).cloned());
        let gradients: Option<Vec<Tensor>> = gradients.collect();
        let gradients = gradients.context("a parameter has no gradient")?;
        model.descend(&gradients, RATE)?;
        curve.push(loss);
    }
    Ok(curve)
}

fn compare(together: &[f32], alone: &[f32]) -> Result<()> {
    println!("{:>6} {:>12} {:>12}", "step", "together", "alone");
    for step in (0..STEPS).step_by(STEPS / 10).chain([STEPS - 1]) {
        println!("{step:>6} {:>12.7} {:>12.7}", together[step], alone[step]);
    }
    let difference = |(a, b): (&f32, &f32)| (a - b).abs() / b.abs();
    let largest = together.iter().zip(alone).map(difference);
    let largest = largest.fold(0.0, f32::max);
    println!("the curves differ by at most {largest:.1e} of their height");
    ensure!(largest < 1e-3, "this is more than rounding explains");
    ensure!(
        together[STEPS - 1] < together[0] / 20.0,
        "the loss did not fall"
    );
    Ok(())
}

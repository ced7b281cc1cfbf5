//! Trains a small network on generated data, each rank on its own part of every batch, and compares
//! the curve of the loss with that of one process which does it all.
//!
//! ```text
//! rcomm-run -n 4 target/release/examples/ddp
//! ```
#![allow(clippy::print_stdout)]

mod model;

use anyhow::{Result, ensure};
use model::{Noise, PARAMETERS, Sample};
use rcomm::data_parallel::{Parameter, Reducer, ReducerOptions};
use rcomm::{Config, ReduceOp, World};
use std::convert::Infallible;

const STEPS: usize = 400;
const BATCH: usize = 240;
const RATE: f32 = 0.1;

fn main() -> Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let group = world.group();
    let (rank, size) = (group.rank() as usize, group.size() as usize);
    ensure!(
        BATCH.is_multiple_of(size),
        "{size} ranks do not divide a batch of {BATCH}"
    );

    // The ten lines of data-parallel training. Each rank starts differently, and gets rank 0's weights.
    let parameters = PARAMETERS.map(|(name, shape)| Parameter::new(name, shape));
    let mut reducer = Reducer::new(group, parameters.to_vec(), ReducerOptions::default())?;
    let mut weights = model::initial(rank as u64);
    reducer.broadcast_parameters(&mut weights)?;
    let mut curve = Vec::new();
    for step in 0..STEPS {
        let own = &batch(step)[rank * BATCH / size..(rank + 1) * BATCH / size];
        curve.push(model::backward(&weights, own, |at, gradient| {
            reducer.ready(at, gradient)
        })?);
        for (weights, gradient) in weights.iter_mut().zip(reducer.finish()?) {
            descend(weights, &gradient.unwrap_or_default());
        }
    }
    reducer.check_consistency(&weights)?;
    group.all_reduce(&mut curve, ReduceOp::Avg)?;

    if rank == 0 {
        compare(&curve, &alone());
    }
    world.shutdown()?;
    Ok(())
}

/// The same training in one process.
fn alone() -> Vec<f32> {
    let mut weights = model::initial(0);
    let mut curve = Vec::new();
    for step in 0..STEPS {
        let mut gradients = vec![Vec::new(); PARAMETERS.len()];
        let loss = model::backward(&weights, &batch(step), |at, gradient| {
            gradients[at] = gradient.to_vec();
            Ok::<(), Infallible>(())
        });
        let Ok(loss) = loss;
        curve.push(loss);
        for (weights, gradient) in weights.iter_mut().zip(&gradients) {
            descend(weights, gradient);
        }
    }
    curve
}

fn descend(weights: &mut [f32], gradient: &[f32]) {
    for (weight, gradient) in weights.iter_mut().zip(gradient) {
        *weight -= RATE * gradient;
    }
}

/// Points of a surface that a straight line cannot follow.
fn batch(step: usize) -> Vec<Sample> {
    let mut noise = Noise(step as u64 + 1);
    let sample = |_| {
        let point = [noise.next(), noise.next()];
        let value = point[0] * point[1] + 0.5 * point[0];
        Sample { point, value }
    };
    (0..BATCH).map(sample).collect()
}

fn compare(together: &[f32], alone: &[f32]) {
    println!("{:>6} {:>12} {:>12}", "step", "together", "alone");
    for step in (0..STEPS).step_by(STEPS / 10).chain([STEPS - 1]) {
        println!("{step:>6} {:>12.7} {:>12.7}", together[step], alone[step]);
    }
    let apart = |(a, b): (&f32, &f32)| (a - b).abs() / b.abs();
    let furthest = together.iter().zip(alone).map(apart).fold(0.0, f32::max);
    println!("the curves differ by {furthest:.1e} of their height at most");
    assert!(furthest < 1e-3, "more than rounding");
    assert!(
        together[STEPS - 1] < together[0] / 20.0,
        "it has learnt nothing"
    );
}

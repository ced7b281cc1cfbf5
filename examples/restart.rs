//! A training run loses a rank, and goes on from its last checkpoint after the launcher has restarted all ranks.
//!
//! ```text
//! rcomm-run -n 3 --max-restarts 1 target/release/examples/restart /tmp/checkpoint
//! ```
//!
//! Rank 1 exits in the middle of the first attempt. In the second attempt, rank 0 reads the checkpoint that it wrote
//! after each step, and broadcasts it. The final weights equal, bit by bit, those of a run that lost no rank.
#![allow(clippy::print_stdout)]

use anyhow::{Context, Result, ensure};
use rcomm::data_parallel::{Parameter, Reducer, ReducerOptions};
use rcomm::{Config, World};
use std::path::{Path, PathBuf};

const STEPS: u32 = 12;
/// The step in which the first attempt loses a rank.
const LOST_AT: u32 = 7;
const WEIGHTS: usize = 8;

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).map(PathBuf::from);
    let path = path.context("usage: restart CHECKPOINT")?;
    let world = World::init(Config::from_environment()?)?;
    let (rank, size, attempt) = (world.rank(), world.size(), world.place().attempt);

    // Rank 0 reads the checkpoint and sends it to the others, which may be on other hosts.
    let mut checkpoint: (u32, Vec<f32>) = (0, vec![1.0; WEIGHTS]);
    if rank == 0 && attempt > 0 {
        checkpoint = read_checkpoint(&path)?;
    }
    world.group().broadcast_object(&mut checkpoint, 0)?;
    let (first, mut weights) = checkpoint;
    let parameters = vec![Parameter::new("weights", &[WEIGHTS as u64])];
    let mut reducer = Reducer::<f32>::new(world.group(), parameters, ReducerOptions::default())?;
    for step in first..STEPS {
        world.step(i64::from(step));
        if attempt == 0 && step == LOST_AT && rank == 1 {
            // The rank ends as if its host had failed. The others notice it, and the launcher starts all ranks again.
            std::process::exit(1);
        }
        gradient(&weights, step, rank, reducer.gradient_mut(0)?);
        reducer.mark_ready(0)?;
        reducer.finish_in_place()?;
        descend(&mut weights, reducer.average(0).unwrap_or_default());
        if rank == 0 {
            write_checkpoint(&path, step + 1, &weights)?;
        }
    }
    ensure!(
        weights == alone(size),
        "the weights are not those of a run that lost no rank"
    );
    if rank == 0 {
        println!("attempt {attempt} went from step {first} to step {STEPS}: the weights are right");
    }
    world.shutdown()?;
    Ok(())
}

/// Writes to `gradients` the gradient, at the rounded weights, of half the squared distance to a point that differs
/// between ranks and steps. All numbers are whole and small, so their sums are exact in any order.
fn gradient(weights: &[f32], step: u32, rank: u32, gradients: &mut [f32]) {
    for (index, (gradient, weight)) in gradients.iter_mut().zip(weights).enumerate() {
        let target = ((step + rank) as usize * 3 + index) % 7;
        *gradient = weight.round() - target as f32;
    }
}

/// Takes a step of gradient descent.
fn descend(weights: &mut [f32], gradient: &[f32]) {
    for (weight, gradient) in weights.iter_mut().zip(gradient) {
        *weight -= 0.25 * gradient;
    }
}

/// The final weights of the same training in one process.
fn alone(size: u32) -> Vec<f32> {
    let mut weights = vec![1.0; WEIGHTS];
    let (mut sum, mut rank_gradient) = (vec![0.0f32; WEIGHTS], vec![0.0f32; WEIGHTS]);
    for step in 0..STEPS {
        sum.fill(0.0);
        for rank in 0..size {
            gradient(&weights, step, rank, &mut rank_gradient);
            sum.iter_mut()
                .zip(&rank_gradient)
                .for_each(|(sum, gradient)| *sum += gradient);
        }
        let average: Vec<f32> = sum.iter().map(|sum| sum / size as f32).collect();
        descend(&mut weights, &average);
    }
    weights
}

/// Writes the number of steps in the first line, and the bits of the weights in the second.
fn write_checkpoint(path: &Path, steps: u32, weights: &[f32]) -> Result<()> {
    let bits = weights.iter().map(|weight| weight.to_bits().to_string());
    let bits: Vec<String> = bits.collect();
    // A rank that is killed while it writes leaves the file of the step before.
    let temporary = path.with_extension("new");
    std::fs::write(&temporary, format!("{steps}\n{}\n", bits.join(" ")))
        .and_then(|()| std::fs::rename(&temporary, path))
        .with_context(|| format!("cannot write the checkpoint {}", path.display()))
}

/// The number of steps and the weights of a checkpoint.
fn read_checkpoint(path: &Path) -> Result<(u32, Vec<f32>)> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the checkpoint {}", path.display()))?;
    let (steps, bits) = text
        .split_once('\n')
        .context("the checkpoint has no second line")?;
    let weights = bits
        .split_whitespace()
        .map(|word| Ok(f32::from_bits(word.parse()?)));
    Ok((steps.parse()?, weights.collect::<Result<_>>()?))
}

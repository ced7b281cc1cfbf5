//! The first stage of ZeRO (Rajbhandari et al., 2020). Each rank keeps the optimizer's state of its part of the weights
//! only; with three ranks, this is a third of the state.
//!
//! ```text
//! rcomm-run -n 3 target/release/examples/zero
//! ```
//!
//! In each step a reduce-scatter gives every rank the averaged gradients of its part, the rank updates that part by
//! Adam, and an all-gather gives all ranks the new weights.
#![allow(clippy::print_stdout)]

use anyhow::{Result, ensure};
use rcomm::{Config, ReduceOp, World};

const WEIGHTS: usize = 1 << 10;
const STEPS: usize = 60;
const RATE: f32 = 0.05;

/// The optimizer Adam (Kingma and Ba, 2015), with the state of some weights.
struct Adam {
    step: i32,
    /// The moving average of each gradient.
    mean: Vec<f32>,
    /// The moving average of each squared gradient.
    square: Vec<f32>,
}

impl Adam {
    fn new(weights: usize) -> Self {
        Self {
            step: 0,
            mean: vec![0.0; weights],
            square: vec![0.0; weights],
        }
    }

    fn update(&mut self, weights: &mut [f32], gradients: &[f32]) {
        const DECAY: f32 = 0.9;
        const SQUARE_DECAY: f32 = 0.999;
        self.step += 1;
        let (mean_scale, square_scale) = (
            1.0 - DECAY.powi(self.step),
            1.0 - SQUARE_DECAY.powi(self.step),
        );
        for (index, (weight, gradient)) in weights.iter_mut().zip(gradients).enumerate() {
            let (mean, square) = (&mut self.mean[index], &mut self.square[index]);
            *mean = DECAY * *mean + (1.0 - DECAY) * gradient;
            *square = SQUARE_DECAY * *square + (1.0 - SQUARE_DECAY) * gradient * gradient;
            *weight -= RATE * (*mean / mean_scale) / ((*square / square_scale).sqrt() + 1e-8);
        }
    }

    fn bytes(&self) -> usize {
        size_of_val(&self.mean[..]) + size_of_val(&self.square[..])
    }
}

fn main() -> Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let group = world.group();
    let (rank, size) = (group.rank() as usize, group.size() as usize);

    // All parts have the same length. The last part is padded with weights that nothing uses.
    let part = WEIGHTS.div_ceil(size);
    let mut weights = vec![0.0; part * size];
    let (mut gradients, mut part_gradients) = (vec![0.0; part * size], vec![0.0; part]);
    let mut optimizer = Adam::new(part);
    for step in 0..STEPS {
        gradient(&weights, step, rank, &mut gradients[..WEIGHTS]);
        group.reduce_scatter_single(&gradients, &mut part_gradients, ReduceOp::Avg)?;
        let mut part_weights = weights[rank * part..][..part].to_vec();
        optimizer.update(&mut part_weights, &part_gradients);
        group.all_gather_single(&part_weights, &mut weights)?;
    }

    let (expected, undivided_bytes) = alone(size);
    let differences = weights.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f32::max);
    ensure!(
        largest < 1e-4,
        "the weights differ by up to {largest} from those of one process"
    );
    let distances = weights[..WEIGHTS].iter().enumerate();
    let distance = distances
        .map(|(index, weight)| (weight - target(index)).abs())
        .fold(0.0, f32::max);
    ensure!(
        distance < 0.5,
        "a weight is {distance} from where it should be"
    );
    if rank == 0 {
        let bytes = optimizer.bytes();
        println!(
            "the weights are those of one process; optimizer state: {bytes} bytes of {undivided_bytes}"
        );
    }
    world.shutdown()?;
    Ok(())
}

/// The value that the weight of this index is trained towards.
fn target(index: usize) -> f32 {
    (index % 5) as f32 / 4.0
}

/// Writes to `gradients` the gradient of half the squared distance to the target, with noise.
fn gradient(weights: &[f32], step: usize, rank: usize, gradients: &mut [f32]) {
    for (index, (gradient, weight)) in gradients.iter_mut().zip(weights).enumerate() {
        let noise = ((index + step * 7 + rank * 3) % 11) as f32 / 11.0 - 0.45;
        *gradient = weight - target(index) + 0.1 * noise;
    }
}

/// The final weights of the same training in one process, and the size of its optimizer's state in bytes.
fn alone(size: usize) -> (Vec<f32>, usize) {
    let mut weights = vec![0.0; WEIGHTS];
    let (mut sum, mut rank_gradient) = (vec![0.0; WEIGHTS], vec![0.0; WEIGHTS]);
    let mut optimizer = Adam::new(WEIGHTS);
    for step in 0..STEPS {
        sum.fill(0.0);
        for rank in 0..size {
            gradient(&weights, step, rank, &mut rank_gradient);
            sum.iter_mut()
                .zip(&rank_gradient)
                .for_each(|(sum, gradient): (&mut f32, _)| *sum += gradient);
        }
        sum.iter_mut().for_each(|sum| *sum /= size as f32);
        optimizer.update(&mut weights, &sum);
    }
    (weights, optimizer.bytes())
}

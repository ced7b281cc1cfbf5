//! Pipeline parallelism. Each rank holds one layer of a network. Micro-batches are sent forward through the ranks, and
//! their gradients back. The result equals that of a single process, bit by bit.
//!
//! ```text
//! rcomm-run -n 4 target/release/examples/pipeline
//! ```
#![allow(clippy::print_stdout)]

mod layer;

use anyhow::{Result, ensure};
use layer::{Layer, WIDTH};
use rcomm::{Config, ProcessGroup, World};

const STEPS: usize = 60;
const MICRO_BATCHES: u32 = 6;
const RATE: f32 = 0.05;
/// The tag of the first micro-batch's activations. A micro-batch's number is added to it.
const FORWARD: u32 = 0;
/// The tag of the first micro-batch's gradients. A micro-batch's number is added to it.
const BACKWARD: u32 = 1000;

fn main() -> Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let group = world.group();
    let layers = group.size();
    ensure!(layers > 1, "a pipeline needs at least two ranks");
    let mut layer = Layer::new(group.rank());
    let mut loss = 0.0;
    for step in 0..STEPS {
        loss = train(group, &mut layer, step)?;
    }

    // The last rank has the loss; every rank compares its layer with that of a single process.
    let (expected, expected_loss) = alone(layers);
    ensure!(
        layer == expected[group.rank() as usize],
        "the weights of rank {} differ",
        group.rank()
    );
    if group.rank() == layers - 1 {
        ensure!(
            loss.to_bits() == expected_loss.to_bits(),
            "{loss} is not {expected_loss}"
        );
        println!("{layers} layers on {layers} ranks: loss {loss:.6}, as in one process");
    }
    world.shutdown()?;
    Ok(())
}

/// Runs one step: all micro-batches forward, then all backward. Sends overlap with the computation of the next
/// micro-batch. Returns the loss of the step on the last rank, 0 on the others.
fn train(group: &ProcessGroup, layer: &mut Layer, step: usize) -> Result<f32> {
    let (rank, last) = (group.rank(), group.size() - 1);
    let mut inputs = Vec::new();
    let mut outputs = Vec::new();
    let mut sends = Vec::new();
    for micro in 0..MICRO_BATCHES {
        let mut input = vec![0.0; WIDTH];
        if rank == 0 {
            input = sample(step, micro);
        } else {
            group.recv(&mut input, rank - 1, FORWARD + micro)?;
        }
        let output = layer.forward(&input);
        if rank != last {
            sends.push(group.send_async(output.clone(), rank + 1, FORWARD + micro)?);
        }
        inputs.push(input);
        outputs.push(output);
    }
    let mut loss = 0.0;
    for micro in 0..MICRO_BATCHES {
        let index = micro as usize;
        let mut gradient = vec![0.0; WIDTH];
        if rank == last {
            loss += layer::loss(&outputs[index], &sample(step, micro), &mut gradient);
        } else {
            group.recv(&mut gradient, rank + 1, BACKWARD + micro)?;
        }
        let input_gradient = layer.backward(&inputs[index], &outputs[index], &gradient);
        if rank != 0 {
            sends.push(group.send_async(input_gradient, rank - 1, BACKWARD + micro)?);
        }
    }
    for send in sends {
        send.wait()?;
    }
    layer.descend(RATE);
    Ok(loss)
}

/// Runs the same training in a single process; returns the layers and the loss of the last step.
fn alone(layers: u32) -> (Vec<Layer>, f32) {
    let mut model: Vec<Layer> = (0..layers).map(Layer::new).collect();
    let mut loss = 0.0;
    for step in 0..STEPS {
        loss = 0.0;
        for micro in 0..MICRO_BATCHES {
            let mut values = vec![sample(step, micro)];
            for layer in &model {
                values.push(layer.forward(&values[values.len() - 1]));
            }
            let mut gradient = vec![0.0; WIDTH];
            loss += layer::loss(&values[values.len() - 1], &values[0], &mut gradient);
            for (index, layer) in model.iter_mut().enumerate().rev() {
                gradient = layer.backward(&values[index], &values[index + 1], &gradient);
            }
        }
        model.iter_mut().for_each(|layer| layer.descend(RATE));
    }
    (model, loss)
}

/// Returns the input of a micro-batch. It is also the target: the network learns to return its input.
fn sample(step: usize, micro: u32) -> Vec<f32> {
    let start = (step * MICRO_BATCHES as usize + micro as usize) as f32;
    (0..WIDTH)
        .map(|at| 0.5 * (start * 1.7 + at as f32 * 0.9).sin())
        .collect()
}

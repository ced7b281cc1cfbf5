//! A training run loses a rank, goes on without it, and then takes in a new process in its place. The other processes
//! are not restarted.
//!
//! ```text
//! rcomm-run -n 4 --replace 1 target/release/examples/elastic
//! ```
//!
//! Rank 1 kills itself in step 7. The others shrink their world and train four more steps. Then they grow their world
//! by the process that `rcomm-run` has started meanwhile, and give that process their weights. The losses of all steps
//! and the final weights equal, bit by bit, those of one process that trains on the data of the same ranks in each
//! step.
#![allow(clippy::print_stdout)]

use anyhow::{Result, ensure};
use rcomm::{Config, ReduceOp, World};
use rustix::process::{Signal, getpid, kill_process};
use std::time::Duration;

const STEPS: u32 = 16;
/// The step in which rank 1 kills itself.
const LOST_AT: u32 = 7;
/// The step before which the remaining ranks take in the new process.
const GROWN_AT: u32 = 11;
const WEIGHTS: usize = 8;
/// How long a remaining rank waits for the others before it counts the absent ranks as lost.
const ABSENT_AFTER: Duration = Duration::from_secs(5);

/// The training's state, which a process needs to take part.
#[derive(Clone, Debug, PartialEq)]
struct State {
    weights: Vec<f32>,
    losses: Vec<f32>,
    /// The ranks that took part in each step.
    ranks: Vec<Vec<u32>>,
}

impl State {
    fn new() -> Self {
        Self {
            weights: vec![1.0; WEIGHTS],
            losses: Vec::new(),
            ranks: Vec::new(),
        }
    }

    /// The number of the next step.
    fn step(&self) -> u32 {
        self.losses.len() as u32
    }

    /// Trains one step of `rank`, in which `ranks` take part. `average` replaces the loss and the gradient of `rank` by
    /// their averages over `ranks`.
    fn train(
        &mut self,
        rank: u32,
        ranks: &[u32],
        average: impl Fn(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let mut numbers = loss_and_gradient(&self.weights, self.step(), rank);
        average(&mut numbers)?;
        let (loss, gradient) = numbers.split_at(1);
        for (weight, gradient) in self.weights.iter_mut().zip(gradient) {
            *weight -= 0.25 * gradient;
        }
        self.losses.push(loss[0]);
        self.ranks.push(ranks.to_vec());
        Ok(())
    }
}

/// The loss of one rank in one step, followed by half its gradient. The loss is the squared distance of the rounded
/// weights to a point that differs between ranks and steps. All numbers are whole and small, so their sums are exact in
/// any order.
fn loss_and_gradient(weights: &[f32], step: u32, rank: u32) -> Vec<f32> {
    let target = |index: usize| (((step + rank) as usize * 3 + index) % 7) as f32;
    let gradient: Vec<f32> = (0..)
        .zip(weights)
        .map(|(index, weight)| weight.round() - target(index))
        .collect();
    let loss = gradient.iter().map(|distance| distance * distance).sum();
    [&[loss], &gradient[..]].concat()
}

fn main() -> Result<()> {
    let config = Config::from_environment()?;
    let joins = config.joins;
    let mut world = World::init(config)?;
    let mut state = State::new();
    if joins {
        share(&world, &mut state)?;
    }
    while state.step() < STEPS {
        let (rank, step) = (world.rank(), state.step());
        world.step(i64::from(step));
        if rank == 1 && step == LOST_AT && !joins {
            kill_process(getpid(), Signal::KILL)?;
        }
        let group = world.group();
        if step >= GROWN_AT && group.size() < world.size() {
            let size = world.size();
            world.grow(&[], size)?;
            share(&world, &mut state)?;
            continue;
        }
        let trained = state.train(rank, group.ranks(), |numbers| {
            Ok(group.all_reduce(numbers, ReduceOp::Avg)?)
        });
        if trained.is_err() {
            let lost = group.find_absent(ABSENT_AFTER)?;
            world.shrink(&lost)?;
            share(&world, &mut state)?;
        }
    }
    ensure!(
        state == alone(&state.ranks)?,
        "losses and weights are not those of one process"
    );
    let (rank, attempt) = (world.rank(), world.place().attempt);
    let sizes: Vec<String> = (state.ranks.iter())
        .map(|ranks| ranks.len().to_string())
        .collect();
    let sizes = sizes.join(", ");
    println!("rank {rank}, attempt {attempt}: {sizes} ranks, the losses are right");
    world.shutdown()?;
    Ok(())
}

/// Gives all ranks the state of a rank with the most steps. A process that joins has made no step, and a step may have
/// ended on some ranks only.
fn share(world: &World, state: &mut State) -> Result<()> {
    let group = world.group();
    let steps = group.all_gather_object(&state.step())?;
    let most = (0..)
        .zip(&steps)
        .max_by_key(|&(rank, step)| (step, std::cmp::Reverse(rank)));
    let root = most.map_or(0, |(rank, _): (u32, _)| rank);
    let mut shared = (
        state.weights.clone(),
        state.losses.clone(),
        state.ranks.clone(),
    );
    group.broadcast_object(&mut shared, root)?;
    (state.weights, state.losses, state.ranks) = shared;
    Ok(())
}

/// The state after the same training in one process; `ranks` holds the ranks that took part in each step.
fn alone(ranks: &[Vec<u32>]) -> Result<State> {
    let mut state = State::new();
    for ranks in ranks {
        let (weights, step) = (state.weights.clone(), state.step());
        state.train(ranks[0], ranks, |numbers| {
            for &rank in &ranks[1..] {
                let rank_numbers = loss_and_gradient(&weights, step, rank);
                numbers
                    .iter_mut()
                    .zip(rank_numbers)
                    .for_each(|(sum, number)| *sum += number);
            }
            numbers
                .iter_mut()
                .for_each(|sum| *sum /= ranks.len() as f32);
            Ok(())
        })?;
    }
    Ok(state)
}

//! Trains, loses a rank on the way, goes on without it, and takes up a process in its place: no other process starts
//! again.
//!
//! ```text
//! rcomm-run -n 4 --replace 1 target/release/examples/elastic
//! ```
//!
//! Rank 1 kills itself in step 7. The others shrink their world, train four more steps, and then make it anew with the
//! process that `rcomm-run` has started meanwhile: it gets the weights from them. The losses of all steps and the
//! weights at the end are those of one process that trains on the data of the same ranks in each step, to the bit.
#![allow(clippy::print_stdout)]

use anyhow::{Result, ensure};
use rcomm::{Config, ReduceOp, World};
use rustix::process::{Signal, getpid, kill_process};
use std::time::Duration;

const STEPS: u32 = 16;
/// Where rank 1 is lost.
const LOST_AT: u32 = 7;
/// Where the ranks that are left take up a process in its place.
const GROWN_AT: u32 = 11;
const WEIGHTS: usize = 8;
/// The longest time that the ranks that are left take to notice that one was lost.
const NOTICED: Duration = Duration::from_secs(5);

/// The training's state: what a process must know to take part.
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

    fn step(&self) -> u32 {
        self.losses.len() as u32
    }

    /// Makes one step with these ranks. `average` is given the sum of the squared distances of a rank, and then the
    /// gradient; it replaces them by the averages over the ranks.
    fn train(
        &mut self,
        rank: u32,
        ranks: &[u32],
        average: impl Fn(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let mut sums = loss_and_gradient(&self.weights, self.step(), rank);
        average(&mut sums)?;
        let (loss, gradient) = sums.split_at(1);
        for (weight, gradient) in self.weights.iter_mut().zip(gradient) {
            *weight -= 0.25 * gradient;
        }
        self.losses.push(loss[0]);
        self.ranks.push(ranks.to_vec());
        Ok(())
    }
}

/// The loss of one rank in one step, and its gradient: of the distance to a point that differs between ranks and
/// steps. Small whole numbers, so that sums are exact in any order.
fn loss_and_gradient(weights: &[f32], step: u32, rank: u32) -> Vec<f32> {
    let target = |at: usize| (((step + rank) as usize * 3 + at) % 7) as f32;
    let gradient: Vec<f32> = (0..)
        .zip(weights)
        .map(|(at, weight)| weight.round() - target(at))
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
            let lost = group.find_absent(NOTICED)?;
            world.shrink(&lost)?;
            share(&world, &mut state)?;
        }
    }
    ensure!(
        state == alone(&state.ranks)?,
        "losses and weights are not those of one process"
    );
    let (rank, attempt) = (world.rank(), world.place().attempt);
    let sizes: Vec<usize> = state.ranks.iter().map(Vec::len).collect();
    println!("rank {rank}, attempt {attempt}: {sizes:?} ranks, the losses are right");
    world.shutdown()?;
    Ok(())
}

/// Gives all ranks the state of the one that has made the most steps: a process that joins has made none, and a step
/// may have ended on some ranks only.
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

/// The same training in one process.
fn alone(ranks: &[Vec<u32>]) -> Result<State> {
    let mut state = State::new();
    for ranks in ranks {
        let (weights, step) = (state.weights.clone(), state.step());
        state.train(ranks[0], ranks, |numbers| {
            for &rank in &ranks[1..] {
                let theirs = loss_and_gradient(&weights, step, rank);
                numbers
                    .iter_mut()
                    .zip(theirs)
                    .for_each(|(sum, it)| *sum += it);
            }
            numbers
                .iter_mut()
                .for_each(|sum| *sum /= ranks.len() as f32);
            Ok(())
        })?;
    }
    Ok(state)
}

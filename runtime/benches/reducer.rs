//! Measures a step of data-parallel training: 64 gradients of 1 MiB on each of two ranks, which are threads.
//!
//! | way | what it does |
//! |---|---|
//! | `all_reduce each` | computes all gradients, then averages one after the other: the plain loop |
//! | `ready, finish` | the reducer with gradients that lie elsewhere: copied in and out |
//! | `in place` | the reducer with gradients computed in the memory of their bucket |
//!
//! The backward pass of a layer either waits for a millisecond, as if an accelerator computed it, or computes on the
//! processor. The ways take turns in each round. The table has the times of rank 0, in ms. `exposed` is how long the
//! step waits for communication: the whole communication for `all_reduce each`, the wait in `finish` for the reducer.
//! Allocations (count, bytes) are those of the training thread in the step that had the fewest. `copies` is how often
//! all gradients are copied in a step, apart from the averaging.
//!
//! ```text
//! cargo bench -p rcomm --bench reducer [-- ROUNDS]
//! ```

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use rcomm::config::{EndpointChoice, RingDir};
use rcomm::data_parallel::{Parameter, Reducer, ReducerOptions};
use rcomm::{Config, HashStore, ReduceOp, Rendezvous, World};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANKS: u32 = 2;
const PARAMETERS: usize = 64;
const LEN: usize = 256 << 10;
/// Steps of one way in a round; the first is not counted.
const STEPS: usize = 4;

#[derive(Clone, Copy)]
enum Backward {
    /// A layer takes a millisecond on another device.
    Waits,
    /// A layer is computed by the training thread.
    Computes,
}

const BACKWARDS: [(Backward, &str); 2] =
    [(Backward::Waits, "waits"), (Backward::Computes, "computes")];
/// The ways, each with the number of `copies`.
const WAYS: [(&str, u32); 3] = [
    ("all_reduce each", 0),
    ("ready, finish", 2),
    ("in place", 0),
];

impl Backward {
    /// Computes the gradient of a layer.
    fn layer(self, gradient: &mut [f32]) {
        match self {
            Self::Waits => {
                std::thread::sleep(Duration::from_millis(1));
                gradient.fill(black_box(1.0));
            }
            Self::Computes => {
                for (index, value) in gradient.iter_mut().enumerate() {
                    *value = (black_box(index) as f32).sqrt();
                }
            }
        }
    }
}

/// The measurements of one way.
#[derive(Clone, Default)]
struct Measured {
    /// The time of each counted step.
    step: Vec<Duration>,
    /// How long each counted step waited for communication.
    exposed: Vec<Duration>,
    /// Count and bytes in the step with the fewest: in some steps queues grow.
    allocations: Option<(u64, u64)>,
}

impl Measured {
    fn add(&mut self, mut step: impl FnMut() -> Duration) {
        for step_index in 0..STEPS {
            let start = Instant::now();
            let mut exposed = Duration::ZERO;
            let allocated = allocation_counter::measure(|| exposed = step());
            if step_index > 0 {
                self.step.push(start.elapsed());
                self.exposed.push(exposed);
                let allocated = (allocated.count_total, allocated.bytes_total);
                let fewest = self.allocations.get_or_insert(allocated);
                *fewest = (*fewest).min(allocated);
            }
        }
    }
}

/// Sorts the times and returns the median, in ms.
fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

/// The measurements of this rank, by backward pass and way.
fn measure_rank(world: &World, rounds: usize) -> Vec<Measured> {
    let group = world.group();
    let parameters = || {
        let parameters =
            (0..PARAMETERS).map(|index| Parameter::new(index.to_string(), &[LEN as u64]));
        parameters.collect::<Vec<_>>()
    };
    let new_reducer =
        || Reducer::<f32>::new(group, parameters(), ReducerOptions::default()).unwrap();
    let (mut copied, mut in_place) = (new_reducer(), new_reducer());
    let mut gradients = vec![vec![0.0_f32; LEN]; PARAMETERS];
    let mut measured = vec![Measured::default(); BACKWARDS.len() * WAYS.len()];
    for _ in 0..rounds {
        for ((backward, _), measured) in BACKWARDS.iter().zip(measured.chunks_mut(WAYS.len())) {
            group.barrier().unwrap();
            measured[0].add(|| {
                for gradient in gradients.iter_mut().rev() {
                    backward.layer(gradient);
                }
                let start = Instant::now();
                for gradient in gradients.iter_mut().rev() {
                    group.all_reduce(gradient, ReduceOp::Avg).unwrap();
                }
                start.elapsed()
            });
            group.barrier().unwrap();
            measured[1].add(|| {
                for (index, gradient) in gradients.iter_mut().enumerate().rev() {
                    backward.layer(gradient);
                    copied.ready(index, gradient).unwrap();
                }
                black_box(copied.finish().unwrap());
                copied.statistics().exposed
            });
            group.barrier().unwrap();
            measured[2].add(|| {
                for index in (0..PARAMETERS).rev() {
                    backward.layer(in_place.gradient_mut(index).unwrap());
                    in_place.mark_ready(index).unwrap();
                }
                in_place.finish_in_place().unwrap();
                in_place.statistics().exposed
            });
        }
    }
    measured
}

fn main() {
    // Cargo passes `--bench`, which is not a number.
    let rounds = std::env::args().find_map(|argument| argument.parse().ok());
    let rounds = rounds.unwrap_or(10);
    let store = Arc::new(HashStore::new());
    let threads: Vec<_> = (0..RANKS)
        .map(|rank| {
            let store = store.clone();
            std::thread::spawn(move || {
                // Nothing listens at this address: the ranks meet in `store`. The job's name is made from the address.
                let config = Config {
                    rendezvous: Some(Rendezvous::explicit(rank, RANKS, "127.0.0.1", 1).unwrap()),
                    ring_dir: RingDir::Memory,
                    endpoint: EndpointChoice::Off,
                    ..Config::default()
                };
                let world = World::builder(config).store(store).init().unwrap();
                let measured = measure_rank(&world, rounds);
                world.shutdown().unwrap();
                measured
            })
        })
        .collect();
    let mut results = threads.into_iter().map(|thread| thread.join().unwrap());
    let mut measured = results.next().unwrap();
    results.for_each(drop);
    println!(
        "{RANKS} ranks, {PARAMETERS} gradients of 1 MiB, {rounds} rounds of {} steps, times of rank 0 in ms",
        STEPS - 1
    );
    println!(
        "{:<9} {:<16} {:>9} {:>9} {:>15} {:>12} {:>12} {:>7}",
        "backward",
        "way",
        "min",
        "median",
        "exposed median",
        "allocations",
        "alloc bytes",
        "copies"
    );
    let rows = BACKWARDS
        .iter()
        .flat_map(|(_, backward)| WAYS.map(|way| (backward, way)));
    for ((backward, (way, copies)), times) in rows.zip(&mut measured) {
        let (step, exposed) = (median(&mut times.step), median(&mut times.exposed));
        let min = times.step[0].as_secs_f64() * 1e3;
        let (count, bytes) = times.allocations.unwrap_or_default();
        println!(
            "{backward:<9} {way:<16} {min:>9.1} {step:>9.1} {exposed:>15.1} {count:>12} {bytes:>12} {copies:>7}"
        );
    }
}

//! Every rank contributes a vector and gets the sum of all vectors.
//!
//! ```text
//! rcomm-run -n 4 target/release/examples/all_reduce
//! ```
#![allow(clippy::print_stdout)]

use rcomm::{Config, ReduceOp, World};

fn main() -> rcomm::Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let group = world.group();

    let mut numbers = vec![world.rank() as f32 + 1.0; 4];
    group.all_reduce(&mut numbers, ReduceOp::Sum)?;

    let ranks = world.size() as f32;
    assert_eq!(numbers, vec![ranks * (ranks + 1.0) / 2.0; 4]);
    println!("rank {} of {}: {numbers:?}", world.rank(), world.size());
    world.shutdown()
}

//! A step of the reducer allocates no more memory than its operations alone: it has no copies of the gradients.
#![allow(clippy::unwrap_used)]

use allocation_counter::{AllocationInfo, measure};
use rcomm::config::{EndpointChoice, RingDir};
use rcomm::data_parallel::{BucketSizes, Parameter, Reducer, ReducerOptions, Wire};
use rcomm::{Config, HashStore, ReduceOp, Rendezvous, World};
use std::sync::Arc;

const PARAMETERS: usize = 8;
const LEN: usize = 50_000;

fn world() -> World {
    let config = Config {
        rendezvous: Some(Rendezvous::explicit(0, 1, "127.0.0.1", 1).unwrap()),
        ring_dir: RingDir::Memory,
        endpoint: EndpointChoice::Off,
        ..Config::default()
    };
    let store = Arc::new(HashStore::new());
    World::builder(config).store(store).init().unwrap()
}

/// The fewest allocations of this thread in one of several runs: queues grow in some of them.
fn fewest(mut run: impl FnMut()) -> AllocationInfo {
    let runs = (0..20).map(|_| measure(&mut run));
    runs.min_by_key(|allocations| (allocations.count_total, allocations.bytes_total))
        .unwrap()
}

#[test]
fn a_step_allocates_no_more_than_its_operations() {
    let world = world();
    let group = world.group();
    // Two parameters in each bucket.
    let buckets = BucketSizes {
        first: 2 * LEN * size_of::<f32>(),
        rest: 2 * LEN * size_of::<f32>(),
    };
    let mut memory: Vec<Vec<f32>> = vec![vec![0.0; 2 * LEN]; PARAMETERS / 2];
    let mut works = Vec::with_capacity(memory.len());
    let bare = fewest(|| {
        for bucket in &mut memory {
            let bucket = std::mem::take(bucket);
            works.push(group.all_reduce_async(bucket, ReduceOp::Avg).unwrap());
        }
        for (bucket, work) in memory.iter_mut().zip(works.drain(..)) {
            *bucket = work.wait().unwrap();
        }
    });
    assert!(
        bare.count_total > 0,
        "the counter must see that an operation allocates"
    );
    for wire in [Wire::Own, Wire::F16] {
        let names = (0..PARAMETERS).map(|index| Parameter::new(index.to_string(), &[LEN as u64]));
        let options = ReducerOptions {
            buckets,
            wire,
            ..ReducerOptions::default()
        };
        let mut reducer = Reducer::<f32>::new(group, names.collect(), options).unwrap();
        assert_eq!(reducer.buckets().len(), memory.len());
        let step = fewest(|| {
            for parameter in (0..PARAMETERS).rev() {
                reducer.gradient_mut(parameter).unwrap().fill(1.0);
                reducer.mark_ready(parameter).unwrap();
            }
            reducer.finish_in_place().unwrap();
        });
        assert_eq!(reducer.average(0).unwrap()[0], 1.0);
        println!("{wire:?}: {step:?}; its operations alone: {bare:?}");
        assert!(
            step.count_total <= bare.count_total,
            "{wire:?}: {step:?}, bare: {bare:?}"
        );
        assert!(
            step.bytes_total <= bare.bytes_total,
            "{wire:?}: {step:?}, bare: {bare:?}"
        );
    }
    world.shutdown().unwrap();
}

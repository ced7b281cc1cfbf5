//! A step of the reducer allocates nothing on the thread that calls it, neither for copies of the gradients nor for its
//! operations, once the watchdog has let go of the operations of earlier steps. This holds for up to 1,024 operations
//! in a round of the watchdog.
#![allow(clippy::unwrap_used)]

use allocation_counter::measure;
use rcomm::config::{EndpointChoice, RingDir};
use rcomm::data_parallel::{
    BucketSizes, Parameter, Reducer, ReducerOptions, UnevenInputs, UnusedParameters, Wire,
};
use rcomm::{Config, HashStore, ReduceOp, Rendezvous, World};
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// Runs steps until one allocates nothing on this thread. The operations of a step use the memory of earlier ones once
/// the watchdog, in its next round, has let go of these.
fn until_nothing_is_allocated(what: &str, mut step: impl FnMut()) {
    let began = Instant::now();
    loop {
        let allocations = measure(&mut step);
        if allocations.count_total == 0 {
            return;
        }
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{what}: {allocations:?}"
        );
    }
}

#[test]
fn a_step_allocates_nothing() {
    let world = world();
    let group = world.group();
    let mut memory = Some(vec![0.0f32; LEN]);
    let bare = measure(|| {
        let work = group.all_reduce_async(memory.take().unwrap(), ReduceOp::Avg);
        memory = Some(work.unwrap().wait().unwrap());
    });
    assert!(
        bare.count_total > 0,
        "the counter must see that an operation allocates"
    );
    // Two parameters in each bucket.
    let buckets = BucketSizes {
        first: 2 * LEN * size_of::<f32>(),
        rest: 2 * LEN * size_of::<f32>(),
    };
    for (wire, unused, uneven) in [
        (Wire::Own, UnusedParameters::Refuse, UnevenInputs::No),
        (Wire::F16, UnusedParameters::Refuse, UnevenInputs::No),
        (
            Wire::Own,
            UnusedParameters::Find,
            UnevenInputs::DivideByActive,
        ),
    ] {
        let names = (0..PARAMETERS).map(|index| Parameter::new(index.to_string(), &[LEN as u64]));
        let options = ReducerOptions {
            buckets,
            wire,
            unused,
            uneven,
            ..ReducerOptions::default()
        };
        let mut reducer = Reducer::<f32>::new(group, names.collect(), options).unwrap();
        assert_eq!(reducer.buckets().len(), PARAMETERS / 2);
        until_nothing_is_allocated(&format!("{wire:?}, {unused:?}, {uneven:?}"), || {
            for parameter in (0..PARAMETERS).rev() {
                reducer.gradient_mut(parameter).unwrap().fill(1.0);
                reducer.mark_ready(parameter).unwrap();
            }
            reducer.finish_in_place().unwrap();
        });
        assert_eq!(reducer.average(0).unwrap()[0], 1.0);
    }
    world.shutdown().unwrap();
}

//! What the reducer itself costs in a step of 64 MiB of gradients: the group has one rank, so that no data is exchanged.
//! `copied` gives each gradient as a slice and takes the averages as vectors; `in place` computes gradients in the memory
//! that is sent, and reads the averages there. Both write every gradient once more, as a backward pass would.

#![allow(clippy::unwrap_used, missing_docs)]

use criterion::{Criterion, criterion_group, criterion_main};
use rcomm::config::{EndpointChoice, RingDir};
use rcomm::data_parallel::{Parameter, Reducer, ReducerOptions};
use rcomm::{Config, Rendezvous, World};
use std::hint::black_box;

const PARAMETERS: usize = 64;
const LEN: usize = 256 << 10;

fn reducer(criterion: &mut Criterion) {
    let config = Config {
        rendezvous: Some(Rendezvous::explicit(0, 1, "127.0.0.1", 1).unwrap()),
        ring_dir: RingDir::Memory,
        endpoint: EndpointChoice::Off,
        ..Config::default()
    };
    let store = std::sync::Arc::new(rcomm::HashStore::new());
    let world = World::builder(config).store(store).init().unwrap();
    let names = || {
        let names = (0..PARAMETERS).map(|at| Parameter::new(at.to_string(), &[LEN as u64]));
        names.collect::<Vec<_>>()
    };
    let new = || Reducer::<f32>::new(world.group(), names(), ReducerOptions::default()).unwrap();
    let mut own = vec![0.0_f32; LEN];
    let mut group = criterion.benchmark_group("step of 64 MiB");
    group.sample_size(20);
    let mut copied = new();
    group.bench_function("copied", |bencher| {
        bencher.iter(|| {
            for parameter in (0..PARAMETERS).rev() {
                own.fill(black_box(1.0));
                copied.ready(parameter, &own).unwrap();
            }
            black_box(copied.finish().unwrap());
        });
    });
    let mut in_place = new();
    group.bench_function("in place", |bencher| {
        bencher.iter(|| {
            for parameter in (0..PARAMETERS).rev() {
                in_place
                    .gradient_mut(parameter)
                    .unwrap()
                    .fill(black_box(1.0));
                in_place.mark_ready(parameter).unwrap();
            }
            in_place.finish_in_place().unwrap();
            black_box(in_place.average(0));
        });
    });
    group.finish();
    world.shutdown().unwrap();
}

criterion_group!(benches, reducer);
criterion_main!(benches);

//! The fixed cost of an operation: checks, the issue lock, the record, the wait for its turn, and the report to the
//! watchdog. The group has one rank, so that no data is exchanged; the ring has the default size. Also the cost of one
//! reading of the clock of the records.

#![allow(clippy::unwrap_used, missing_docs)]

use criterion::{Criterion, criterion_group, criterion_main};
use rcomm::config::{EndpointChoice, RingDir};
use rcomm::{Config, ReduceOp, Rendezvous, World};
use std::hint::black_box;

fn dispatch(criterion: &mut Criterion) {
    let config = Config {
        rendezvous: Some(Rendezvous::explicit(0, 1, "127.0.0.1", 1).unwrap()),
        ring_dir: RingDir::Memory,
        endpoint: EndpointChoice::Off,
        ..Config::default()
    };
    let store = std::sync::Arc::new(rcomm::HashStore::new());
    let world = World::builder(config).store(store).init().unwrap();
    let group = world.group();
    let (mut first, mut second) = ([0.0_f32; 2], [0.0_f32; 2]);
    // The ring has been full before the first measurement.
    for _ in 0..2 * Config::default().ring_entries {
        group.barrier().unwrap();
    }
    criterion.bench_function("barrier", |bencher| bencher.iter(|| group.barrier()));
    criterion.bench_function("all_reduce of 8 bytes", |bencher| {
        bencher.iter(|| group.all_reduce(black_box(&mut first), ReduceOp::Sum));
    });
    criterion.bench_function("all_gather of 8 bytes", |bencher| {
        bencher.iter(|| group.all_gather_single(black_box(&first), black_box(&mut second)));
    });
    criterion.bench_function("reduce_scatter of 8 bytes", |bencher| {
        bencher.iter(|| {
            group.reduce_scatter_single(black_box(&second), black_box(&mut first), ReduceOp::Sum)
        });
    });
    criterion.bench_function("all_to_all of 8 bytes", |bencher| {
        bencher.iter(|| group.all_to_all_single(black_box(&first), black_box(&mut second)));
    });
    let recorder = world.recorder();
    criterion.bench_function("the clock of the records", |bencher| {
        bencher.iter(|| recorder.now());
    });
    world.shutdown().unwrap();
}

criterion_group!(benches, dispatch);
criterion_main!(benches);

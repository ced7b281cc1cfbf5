//! Time to read dumps: small ones of PyTorch's, and the file that `RCOMM_BENCH_DUMP` names.

#![allow(clippy::unwrap_used, missing_docs)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rcomm_recorder::publish::DumpReader;
use std::hint::black_box;
use std::path::Path;

fn read(criterion: &mut Criterion) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps");
    let mut group = criterion.benchmark_group("read");
    let mut files = vec![
        ("pickle", fixtures.join("nccl-slow-2x4/pickle/rank_0")),
        ("json", fixtures.join("batch-ring-w4/json/rank_0.json")),
    ];
    if let Some(path) = std::env::var_os("RCOMM_BENCH_DUMP") {
        files.push(("file", path.into()));
    }
    for (name, path) in files {
        let bytes = std::fs::read(path).unwrap();
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        let mut reader = DumpReader::new();
        group.bench_function(name, |bencher| {
            bencher.iter(|| black_box(reader.read(black_box(&bytes)).unwrap()));
        });
    }
    group.finish();
}

criterion_group!(benches, read);
criterion_main!(benches);

//! Cost of recording: begin and completed together, as a backend calls them, in a ring of the default size that has
//! wrapped; and the cost of its parts.

#![allow(clippy::unwrap_used, missing_docs)]

use criterion::{Criterion, criterion_group, criterion_main};
use rcomm_recorder::model::{DType, OpType, ProcessGroupInfo, ReduceOp};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, RecorderConfig, SignatureCache, SignatureKey,
    SignatureRef, Tensor,
};
use std::hint::black_box;
use std::panic::Location;
use std::time::Duration;

const KEY: SignatureKey<'static> = SignatureKey {
    backend: "cpu",
    op_name: "all_reduce",
    inputs: &[Tensor {
        dtype: DType::F32,
        shape: &[4_096, 1_024],
    }],
    outputs: &[Tensor {
        dtype: DType::F32,
        shape: &[4_096, 1_024],
    }],
};

#[track_caller]
fn all_reduce<'a>(group: GroupHandle, signature: SignatureRef<'a>, seq: u64) -> Operation<'a> {
    Operation {
        collective_seq_id: seq,
        op_id: seq,
        reduce_op: Some(ReduceOp::Sum),
        timeout: Duration::from_secs(600),
        call_site: Some(Location::caller().into()),
        ..Operation::new(group, OpType::AllReduce, signature)
    }
}

fn record(criterion: &mut Criterion) {
    let job = format!("bench-{}", std::process::id());
    let recorder = FlightRecorder::create(&RecorderConfig::new(job, 0, 8)).unwrap();
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: (0..8).collect(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(600));
    let id = SignatureRef::Id(recorder.intern(&KEY).unwrap());
    let mut seq = 0;
    let mut next = || {
        seq += 1;
        seq
    };
    for _ in 0..2 * recorder.entries() {
        let ticket = recorder.begin(&all_reduce(group, id, next()));
        recorder.completed(ticket);
    }

    criterion.bench_function("begin + completed", |bencher| {
        bencher.iter(|| {
            let ticket = recorder.begin(black_box(&all_reduce(group, id, next())));
            recorder.completed(black_box(ticket));
        });
    });
    let mut cache = SignatureCache::default();
    let op = OpType::AllReduce;
    if let SignatureRef::Id(id) = id {
        cache.keep(KEY.backend, op, &KEY, id);
    }
    criterion.bench_function(
        "begin + completed, as a ProcessGroup calls them",
        |bencher| {
            bencher.iter(|| {
                let sides = [black_box(KEY.inputs), black_box(KEY.outputs)];
                let [inputs, outputs] = sides.map(|side| side.iter().copied());
                let found = cache.find(KEY.backend, op, inputs, outputs).unwrap();
                let signature = SignatureRef::Id(found);
                let ticket = recorder.begin(black_box(&all_reduce(group, signature, next())));
                recorder.completed(black_box(ticket));
            });
        },
    );
    criterion.bench_function("begin + completed, signature looked up", |bencher| {
        bencher.iter(|| {
            let key = SignatureRef::Key(black_box(&KEY));
            let ticket = recorder.begin(black_box(&all_reduce(group, key, next())));
            recorder.completed(black_box(ticket));
        });
    });
    criterion.bench_function("begin + started + completed + retired", |bencher| {
        bencher.iter(|| {
            let ticket = recorder.begin(black_box(&all_reduce(group, id, next())));
            recorder.started(black_box(ticket));
            recorder.completed(black_box(ticket));
            recorder.retired(black_box(ticket));
        });
    });
    criterion.bench_function("begin + completed, times given", |bencher| {
        let now = recorder.now();
        bencher.iter(|| {
            let ticket = recorder.begin_at(black_box(&all_reduce(group, id, next())), now);
            recorder.completed_at(black_box(ticket), now, None);
        });
    });
    criterion.bench_function("clock", |bencher| bencher.iter(|| recorder.now()));
    criterion.bench_function("step", |bencher| {
        bencher.iter(|| recorder.step(black_box(7)))
    });
    criterion.bench_function("phase", |bencher| {
        bencher.iter(|| recorder.phase(black_box("load data")));
    });
    criterion.bench_function("snapshot of a full ring", |bencher| {
        bencher.iter(|| recorder.snapshot());
    });
    recorder.close().unwrap();
}

criterion_group!(benches, record);
criterion_main!(benches);

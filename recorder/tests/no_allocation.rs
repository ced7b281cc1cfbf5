//! In steady state, recording allocates nothing.

#![allow(clippy::unwrap_used)]

use rcomm_recorder::model::{
    DType, Failure, FailureKind, OpType, ProcessGroupInfo, ReduceOp, ReducerBucket, ReducerStep,
    ReducerTimes,
};
use rcomm_recorder::record::{
    FlightRecorder, Operation, Placement, RecorderConfig, SignatureCache, SignatureKey,
    SignatureRef, Tensor,
};
use std::panic::Location;
use std::time::Duration;

#[test]
fn recording_known_operations_allocates_nothing() {
    let mut config = RecorderConfig::new("job", 0, 1);
    config.placement = Placement::Memory;
    config.signatures = 1;
    let recorder = FlightRecorder::create(&config).unwrap();
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: [0].into(),
    };
    let group = recorder.add_group(&info, Duration::ZERO);
    let tensor = [Tensor {
        dtype: DType::F32,
        shape: &[8],
    }];
    let known = SignatureKey {
        backend: "cpu",
        op_name: "all_reduce",
        inputs: &tensor,
        outputs: &tensor,
    };
    let beyond = SignatureKey {
        op_name: "reduce",
        ..known
    };
    let mut cache = SignatureCache::default();
    let op = OpType::AllReduce;
    let first = allocation_counter::measure(|| {
        cache.keep("cpu", op, &known, recorder.intern(&known).unwrap());
    });
    assert!(
        first.count_total > 0,
        "interning allocates, so the counter does not work"
    );
    let failure = Failure::new(FailureKind::Timeout, &[1, 2, 3], 0, "waited for rank 1");
    let one_of_each = || {
        let side = || tensor.iter().copied();
        let kept = cache.find("cpu", op, side(), side()).unwrap();
        recorder.begin(&Operation::new(group, op, SignatureRef::Id(kept)));
        for key in [&known, &beyond] {
            for signature in [
                SignatureRef::Key(key),
                SignatureRef::Id(recorder.intern(&known).unwrap()),
            ] {
                let ticket = recorder.begin(&Operation {
                    reduce_op: Some(ReduceOp::Sum),
                    input_splits: &[1, 2, 3],
                    call_site: Some(Location::caller().into()),
                    ..Operation::new(group, OpType::AllReduce, signature)
                });
                recorder.started(ticket);
                recorder.completed(ticket);
                recorder.retired(ticket);
            }
        }
        recorder.phase("load data");
        recorder.step(3);
        recorder.heartbeat();
        recorder.note_failure(&failure);
        let buckets = (0..2 * ReducerStep::MAX_BUCKETS).map(|_| ReducerBucket::default());
        recorder.note_reducer_step(0, &ReducerTimes::default(), buckets);
        recorder.status(group)
    };
    // A thread that records for two worlds in turns finds its row in the tables anew each time.
    let other = FlightRecorder::create(&config).unwrap();
    let group_of_other = other.add_group(&info, Duration::ZERO);
    let known_to_other = other.intern(&known).unwrap();
    let one_for_the_other = || {
        let signature = SignatureRef::Id(known_to_other);
        other.begin(&Operation::new(group_of_other, op, signature))
    };
    one_of_each();
    one_for_the_other();
    let rest = allocation_counter::measure(|| {
        for _ in 0..2 * recorder.entries() {
            one_of_each();
            one_for_the_other();
        }
    });
    assert_eq!(rest.count_total, 0);
}

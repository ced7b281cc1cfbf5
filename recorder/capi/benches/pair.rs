//! Cost of a pair of begin and completed through the C functions, with a call site, in a ring that has wrapped.

#![allow(clippy::unwrap_used, missing_docs, unsafe_code)]

use criterion::{Criterion, criterion_group, criterion_main};
use rcomm_recorder::model::OpType;
use rcomm_recorder_capi::operation::{
    CallOperation, rcomm_recorder_begin, rcomm_recorder_completed,
};
use rcomm_recorder_capi::outcome::{RCOMM_RECORDER_NONE, RCOMM_RECORDER_OK};
use rcomm_recorder_capi::table::{
    CallTensor, Config, Group, rcomm_recorder_call_site, rcomm_recorder_close,
    rcomm_recorder_group, rcomm_recorder_open, rcomm_recorder_signature,
};
use std::ffi::CString;
use std::hint::black_box;
use std::ptr;

fn pair(criterion: &mut Criterion) {
    let job = CString::new(format!("bench-{}", std::process::id())).unwrap();
    let config = Config {
        directory: ptr::null(),
        job: job.as_ptr(),
        rank: 0,
        world_size: 1,
        attempt: 0,
        entries: 0,
    };
    let mut ring = ptr::null_mut();
    // SAFETY: the configuration and the pointer for the handle are valid during the call.
    let opened = unsafe { rcomm_recorder_open(&config, &mut ring) };
    assert_eq!(opened, RCOMM_RECORDER_OK);
    let ranks = [0];
    let group = Group {
        id: 0,
        name: c"0".as_ptr(),
        description: c"default_pg".as_ptr(),
        ranks: ranks.as_ptr(),
        size: 1,
        own_rank: 0,
        timeout_ms: 600_000,
    };
    let shape = [4_096, 1_024];
    let tensor = CallTensor {
        dtype: 0,
        dimensions: 2,
        shape: shape.as_ptr(),
    };
    // SAFETY: the handle is alive, and all pointed-to memory is valid during the calls.
    let (group, call_site, signature) = unsafe {
        (
            rcomm_recorder_group(ring, &group),
            rcomm_recorder_call_site(ring, c"train.py".as_ptr(), c"step".as_ptr(), 64),
            rcomm_recorder_signature(
                ring,
                c"gloo".as_ptr(),
                c"all_reduce".as_ptr(),
                &tensor,
                1,
                &tensor,
                1,
            ),
        )
    };
    let mut operation = CallOperation {
        group,
        call_site,
        signature,
        collective_seq_id: 0,
        p2p_seq_id: 0,
        op_id: 0,
        peer: RCOMM_RECORDER_NONE,
        root: RCOMM_RECORDER_NONE,
        timeout_ms: 600_000,
        input_splits: ptr::null(),
        input_split_count: 0,
        output_splits: ptr::null(),
        output_split_count: 0,
        op: OpType::AllReduce.code(),
        reduction: 0,
        is_p2p: 0,
        starts_at_once: 0,
    };
    let mut record_one = || {
        operation.collective_seq_id += 1;
        operation.op_id += 1;
        // SAFETY: the handle and the operation are valid.
        unsafe {
            let ticket = rcomm_recorder_begin(ring, black_box(&operation));
            rcomm_recorder_completed(ring, black_box(ticket));
        }
    };
    for _ in 0..2 * 16_384 {
        record_one();
    }
    criterion.bench_function("C: begin + completed", |bencher| {
        bencher.iter(&mut record_one)
    });
    // SAFETY: the handle is not used any more.
    unsafe { rcomm_recorder_close(ring) };
}

criterion_group!(benches, pair);
criterion_main!(benches);

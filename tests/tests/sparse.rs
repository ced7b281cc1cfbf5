//! The sums of sparse tensors over ranks are those of the dense tensors.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use rcomm::{ErrorKind, FakeFabric, OpType, ReduceOp, SparseTensor};
use rcomm_tests::world::{Carrier, on_threads};

const SHAPE: [u64; 3] = [4, 3, 2];

/// The tensor of `rank`, with two sparse dimensions, blocks of two values, and coordinates that may be listed twice.
fn tensor(rank: u32, seed: u64) -> SparseTensor<f64> {
    let mut state = seed ^ u64::from(rank).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = |limit: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % limit
    };
    let count = next(9) as usize;
    let rows: Vec<i64> = (0..count).map(|_| next(4) as i64).collect();
    let columns: Vec<i64> = (0..count).map(|_| next(3) as i64).collect();
    let values = (0..count * 2).map(|_| next(100) as f64).collect();
    SparseTensor::new(SHAPE.to_vec(), 2, [rows, columns].concat(), values).unwrap()
}

/// Adds the values of a sparse tensor to a dense one.
fn add_to(dense: &mut [f64], tensor: &SparseTensor<f64>) {
    let count = tensor.places();
    for at in 0..count {
        let (row, column) = (tensor.indices()[at], tensor.indices()[count + at]);
        let start = (row as usize * 3 + column as usize) * 2;
        for (sum, value) in dense[start..]
            .iter_mut()
            .zip(&tensor.values()[at * 2..at * 2 + 2])
        {
            *sum += value;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn the_sum_is_that_of_the_dense_tensors(size in 1u32..5, seed: u64) {
        for carrier in [Carrier::Cpu, Carrier::Fake(FakeFabric::new())] {
            on_threads(size, &carrier, |_| {}, |world| {
                let input = tensor(world.rank(), seed);
                let sum = world.group().all_reduce_sparse(&input, ReduceOp::Sum).unwrap();
                let mut expected = vec![0.0; 24];
                (0..size).for_each(|rank| add_to(&mut expected, &tensor(rank, seed)));
                let mut got = vec![0.0; 24];
                add_to(&mut got, &sum);
                assert_eq!(got, expected);
                // The sum is coalesced: each index tuple occurs once, in ascending order.
                let count = sum.places();
                let keys: Vec<_> = (0..count)
                    .map(|at| (sum.indices()[at], sum.indices()[count + at]))
                    .collect();
                assert!(keys.is_sorted_by(|a, b| a < b), "{keys:?}");
                world.shutdown().unwrap();
            });
        }
    }
}

#[test]
fn issued_sums_complete_in_order_with_blocking_ones() {
    for carrier in [Carrier::Cpu, Carrier::Fake(FakeFabric::new())] {
        on_threads(
            3,
            &carrier,
            |_| {},
            |world| {
                let (group, rank) = (world.group(), world.rank());
                let mut works = Vec::new();
                for round in 0..8 {
                    // Some ranks issue an operation that others run blocking, since only the order must be the same.
                    let input = tensor(rank, round);
                    let check = move |sum: SparseTensor<f64>| {
                        let mut dense = vec![0.0; 24];
                        (0..3).for_each(|rank| add_to(&mut dense, &tensor(rank, round)));
                        let mut got = vec![0.0; 24];
                        add_to(&mut got, &sum);
                        assert_eq!(got, dense);
                    };
                    if (u64::from(rank) + round).is_multiple_of(3) {
                        check(group.all_reduce_sparse(&input, ReduceOp::Sum).unwrap());
                    } else {
                        let work = group.all_reduce_sparse_async(input, ReduceOp::Sum).unwrap();
                        works.push((work, check));
                    }
                    let mut ranks = [rank];
                    if round % 2 == 0 {
                        group.all_reduce(&mut ranks, ReduceOp::Sum).unwrap();
                    } else {
                        let work = group.all_reduce_async(ranks.to_vec(), ReduceOp::Sum);
                        ranks.copy_from_slice(&work.unwrap().wait().unwrap());
                    }
                    assert_eq!(ranks, [3]);
                }
                for (work, check) in works {
                    check(work.wait().unwrap());
                }
                let dump = world.snapshot();
                let sums = dump.entries.iter();
                let sums = sums.filter(|entry| entry.op == OpType::AllReduceSparse);
                let seqs: Vec<u64> = sums.map(|entry| entry.collective_seq_id).collect();
                assert_eq!(seqs, [1, 3, 5, 7, 9, 11, 13, 15]);
                world.shutdown().unwrap();
            },
        );
    }
}

#[test]
fn a_sum_that_a_rank_never_issues_fails_and_names_the_rank() {
    let change = |config: &mut rcomm::Config| {
        config.dump_dir = std::env::temp_dir().join("rcomm-tests-sparse");
        // Rank 1 may answer the request for its status late, on a busy machine.
        config.status_wait = std::time::Duration::from_secs(60);
    };
    on_threads(2, &Carrier::Cpu, change, |world| {
        let store = world.store().clone();
        if world.rank() == 0 {
            let group = world.group().within(std::time::Duration::from_millis(200));
            let input = tensor(0, 1);
            let work = group.all_reduce_sparse_async(input, ReduceOp::Sum).unwrap();
            let error = work.wait().unwrap_err();
            assert_eq!(error.op(), Some(OpType::AllReduceSparse), "{error}");
            assert!(error.to_string().contains("not arrived: rank 1"), "{error}");
            // Operations after that are refused at once.
            assert!(group.barrier().is_err());
            store.set("test/done", b"1").unwrap();
        } else {
            let done = store.wait(&["test/done"], std::time::Duration::from_secs(90));
            done.unwrap();
        }
    });
}

#[test]
fn all_ranks_report_differing_shapes_and_refuse_other_reductions() {
    on_threads(
        2,
        &Carrier::Cpu,
        |config| {
            config.dump_dir = std::env::temp_dir().join("rcomm-tests-sparse");
            config.status_wait = std::time::Duration::from_millis(200);
        },
        |world| {
            let group = world.group();
            let shape = vec![2 + u64::from(world.rank())];
            let input = SparseTensor::new(shape, 1, vec![1], vec![1u32]).unwrap();
            let refused = group.all_reduce_sparse(&input, ReduceOp::Max).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Unsupported);
            assert_eq!(refused.op(), Some(OpType::AllReduceSparse));
            let error = group.all_reduce_sparse(&input, ReduceOp::Sum).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            assert!(
                error
                    .to_string()
                    .contains("rank 1 and rank 0 gave sparse tensors"),
                "{error}"
            );
        },
    );
}

//! Every collective, with sizes around the thresholds, compared with its definition.

use super::*;
use rcomm_core::Reduction;
use rcomm_core::arithmetic;
use rcomm_recorder::model::{DType, ReduceOp};

/// Sizes around the vector block, the inline limit, the segment and the chunk, and others.
const COUNTS: &[usize] = &[0, 1, 2, 7, 64, 257, 1021, 2048, 8191, 200_003];
pub(super) const SIZES: &[u32] = &[1, 2, 3, 8];

/// The input of `rank` at this index: small integers, so that sums are exact in any order.
fn value(rank: usize, index: usize) -> f32 {
    ((rank * 31 + index * 7) % 97) as f32 - 20.0
}

fn input(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|index| value(rank, index)).collect()
}

fn sum(size: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|index| (0..size).map(|rank| value(rank, index)).sum())
        .collect()
}

/// Runs `body` on every rank of worlds of all wirings and sizes.
pub(super) fn on_all(body: impl Fn(&Rig) + Sync) {
    for &wiring in WIRINGS {
        for &size in SIZES {
            world(size, wiring, &body);
        }
    }
}

/// Runs `body` as [`on_all`] does, and also over hosts with equal and with different numbers of ranks, with the
/// algorithm `nested` for all-to-all, gather and scatter at every size.
fn on_all_and_nested(body: impl Fn(&Rig) + Sync) {
    on_all(&body);
    for (size, ranks) in [(4, 2), (5, 3), (8, 3), (3, 1), (7, 2)] {
        world(size, Wiring::Nested(ranks), &body);
    }
}

#[test]
fn all_reduce_gives_every_rank_the_sum() {
    on_all(|rig| {
        for &count in COUNTS {
            let mut data = input(rig.rank, count);
            rig.run(Op::AllReduce {
                buffer: Buffer::from_mut(&mut data),
                op: ReduceOp::Sum.into(),
            })
            .unwrap();
            assert!(data == sum(rig.size, count), "{count} of {}", rig.size);
        }
    });
}

#[test]
fn averages_of_floats_have_the_same_bits_on_every_rank_and_wiring() {
    let mut all_results = Vec::new();
    for &wiring in WIRINGS {
        for count in [300, 100_003] {
            let results = world(5, wiring, |rig| {
                let mut data: Vec<f32> = (0..count)
                    .map(|index| (value(rig.rank, index) * 1.1).exp2())
                    .collect();
                rig.run(Op::AllReduce {
                    buffer: Buffer::from_mut(&mut data),
                    op: ReduceOp::Avg.into(),
                })
                .unwrap();
                data.iter()
                    .map(|element| element.to_bits())
                    .collect::<Vec<_>>()
            });
            for result in &results[1..] {
                assert!(*result == results[0]);
            }
            all_results.push((count, results[0].clone()));
        }
    }
    for (count, result) in &all_results {
        let same = all_results
            .iter()
            .filter(|(other_count, other)| other_count == count && other == result)
            .count();
        assert_eq!(same, WIRINGS.len());
    }
    let by_rank_order: Vec<u32> = (0..300)
        .map(|index| {
            let terms = (0..5).map(|rank| (value(rank, index) * 1.1).exp2());
            (terms.reduce(|a, b| a + b).unwrap() / 5.0).to_bits()
        })
        .collect();
    assert!(all_results[0].1 == by_rank_order);
}

#[test]
fn two_ranks_over_sockets_get_the_bits_of_the_reference() {
    for wiring in [Wiring::Tcp, Wiring::Streams(3)] {
        // Sizes around the limits of inline data, of a block, and of how far sending may be ahead of receiving.
        for count in [1, 1023, 1025, 65_535, 65_537, 70_001, 400_003] {
            let of_rank = |rank: usize| -> Vec<f32> {
                let special =
                    |index: usize| f32::from_bits((index * 2 + rank) as u32 ^ 0x7f80_0000);
                let is_special = |index: usize| index % 3 == rank;
                let finite = |index: usize| (value(rank, index) * 1.1).exp2();
                let element = |index: usize| match is_special(index) {
                    true => special(index),
                    false => finite(index),
                };
                (0..count).map(element).collect()
            };
            let results = world(2, wiring, |rig| {
                let mut data = of_rank(rig.rank);
                rig.run(Op::AllReduce {
                    buffer: Buffer::from_mut(&mut data),
                    op: ReduceOp::Sum.into(),
                })
                .unwrap();
                data.iter()
                    .map(|element| element.to_bits())
                    .collect::<Vec<_>>()
            });
            assert!(results[0] == results[1], "{count} over {wiring:?}");
            let (mut first, mut second) = (of_rank(0), of_rank(1));
            let inputs = [Buffer::from_mut(&mut first), Buffer::from_mut(&mut second)];
            let inputs = inputs.each_ref().map(|input| input.as_bytes().unwrap());
            let mut expected = vec![0; count * 4];
            arithmetic::combine(ReduceOp::Sum, DType::F32, &inputs, &mut expected, None);
            let bits: Vec<u8> = results[0]
                .iter()
                .flat_map(|bits| bits.to_ne_bytes())
                .collect();
            assert!(bits == expected, "{count} over {wiring:?}");
        }
    }
}

#[test]
fn every_type_and_reduction_gives_the_result_of_the_arithmetic() {
    let worlds = [
        (Wiring::Tcp, 2),
        (Wiring::Tcp, 3),
        (Wiring::Shm, 3),
        (Wiring::Hosts(2), 3),
    ];
    for (wiring, size) in worlds {
        world(size, wiring, |rig| {
            for &dtype in DType::ALL {
                for &op in ReduceOp::ALL {
                    if !Reduction::allows(op, dtype) {
                        continue;
                    }
                    let reduction = Reduction {
                        op,
                        ..Reduction::premul_sum(2.0)
                    };
                    for count in [3, 20_000] {
                        let mut data = Buffer::zeroed(dtype, count).unwrap();
                        let bytes = data.as_bytes_mut().unwrap();
                        let len = bytes.len() as u8;
                        bytes.iter_mut().enumerate().for_each(|(index, byte)| {
                            *byte = if dtype == DType::Bool {
                                index as u8 & 1
                            } else {
                                (index as u8).wrapping_mul(37) & 0x3f ^ len & 1
                            };
                        });
                        let copy = data.as_bytes().unwrap().to_vec();
                        let copies = vec![copy; rig.size];
                        rig.run(Op::AllReduce {
                            buffer: data.lend(),
                            op: reduction.clone(),
                        })
                        .unwrap();
                        let mut expected = vec![0; copies[0].len()];
                        let mut inputs = copies;
                        let mut by = op;
                        if op == ReduceOp::PremulSum {
                            for input in &mut inputs {
                                arithmetic::scale(dtype, input, 2.0);
                            }
                            by = ReduceOp::Sum;
                        }
                        let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
                        arithmetic::combine(by, dtype, &slices, &mut expected, None);
                        assert!(data.as_bytes().unwrap() == expected, "{op} of {dtype}");
                    }
                }
            }
        });
    }
}

#[test]
fn reduce_gives_the_root_the_sum_and_does_not_change_other_buffers() {
    on_all(|rig| {
        for (index, &count) in COUNTS.iter().enumerate() {
            let root = (index % rig.size) as u32;
            let mut data = input(rig.rank, count);
            rig.run(Op::Reduce {
                buffer: Buffer::from_mut(&mut data),
                op: ReduceOp::Sum.into(),
                root,
            })
            .unwrap();
            if rig.rank == root as usize {
                assert!(data == sum(rig.size, count));
            } else {
                assert!(data == input(rig.rank, count));
            }
        }
    });
}

#[test]
fn broadcast_gives_every_rank_the_roots_data() {
    on_all(|rig| {
        for (index, &count) in COUNTS.iter().enumerate() {
            let root = (index * 3 % rig.size) as u32;
            let mut data = input(rig.rank, count);
            rig.run(Op::Broadcast {
                buffer: Buffer::from_mut(&mut data),
                root,
            })
            .unwrap();
            assert!(data == input(root as usize, count), "{count}");
        }
    });
}

#[test]
fn all_gather_gives_every_rank_all_inputs() {
    on_all(|rig| {
        for &count in COUNTS {
            let own_input = input(rig.rank, count);
            let expected: Vec<f32> = (0..rig.size).flat_map(|rank| input(rank, count)).collect();
            let mut output = vec![0.0; count * rig.size];
            rig.run(Op::AllGatherSingle {
                input: Buffer::from_slice(&own_input),
                output: Buffer::from_mut(&mut output),
            })
            .unwrap();
            assert!(output == expected, "{count}");

            let mut parts = vec![vec![0.0f32; count]; rig.size];
            rig.run(Op::AllGather {
                input: Buffer::from_slice(&own_input),
                outputs: parts
                    .iter_mut()
                    .map(|part| Buffer::from_mut(part))
                    .collect(),
            })
            .unwrap();
            assert!(parts.concat() == expected, "{count}");
        }
    });
}

#[test]
fn reduce_scatter_gives_every_rank_its_part_of_the_sum() {
    on_all(|rig| {
        for &count in COUNTS {
            let own_input = input(rig.rank, count * rig.size);
            let total = sum(rig.size, count * rig.size);
            let expected = &total[rig.rank * count..(rig.rank + 1) * count];
            let mut output = vec![0.0f32; count];
            rig.run(Op::ReduceScatterSingle {
                input: Buffer::from_slice(&own_input),
                output: Buffer::from_mut(&mut output),
                op: ReduceOp::Sum.into(),
            })
            .unwrap();
            assert!(output == expected, "{count}");
            output.fill(0.0);
            let parts = own_input.chunks(count.max(1)).take(rig.size);
            let mut inputs: Vec<_> = parts.map(Buffer::from_slice).collect();
            inputs.resize_with(rig.size, || Buffer::from_slice::<f32>(&[]));
            rig.run(Op::ReduceScatter {
                inputs,
                output: Buffer::from_mut(&mut output),
                op: Reduction::premul_sum(2.0),
            })
            .unwrap();
            let doubled: Vec<f32> = expected.iter().map(|element| element * 2.0).collect();
            assert!(output == doubled, "{count}");
        }
    });
}

/// A size for each rank, one of them zero.
fn uneven(rank: usize, count: usize) -> usize {
    if rank == 1 { 0 } else { count / (rank + 1) }
}

#[test]
fn operations_with_uneven_parts_give_every_rank_its_parts() {
    on_all_and_nested(|rig| {
        for &count in COUNTS {
            let lens: Vec<usize> = (0..rig.size).map(|rank| uneven(rank, count)).collect();
            let own_input = input(rig.rank, lens[rig.rank]);
            let mut parts: Vec<Vec<f32>> = lens.iter().map(|&len| vec![0.0; len]).collect();
            rig.run(Op::AllGatherV {
                input: Buffer::from_slice(&own_input),
                outputs: parts
                    .iter_mut()
                    .map(|part| Buffer::from_mut(part))
                    .collect(),
            })
            .unwrap();
            for (rank, part) in parts.iter().enumerate() {
                assert!(*part == input(rank, lens[rank]));
            }

            let inputs: Vec<Vec<f32>> = lens.iter().map(|&len| input(rig.rank, len)).collect();
            let mut output = vec![0.0; lens[rig.rank]];
            rig.run(Op::ReduceScatterV {
                inputs: inputs
                    .iter()
                    .map(|input| Buffer::from_slice(input))
                    .collect(),
                output: Buffer::from_mut(&mut output),
                op: ReduceOp::Sum.into(),
            })
            .unwrap();
            assert!(output == sum(rig.size, lens[rig.rank]));

            let root = rig.size - 1;
            for part in &mut parts {
                part.fill(0.0);
            }
            let is_root = rig.rank == root;
            let outputs = parts.iter_mut().map(|part| Buffer::from_mut(part));
            rig.run(Op::GatherV {
                input: Buffer::from_slice(&own_input),
                outputs: outputs.filter(|_| is_root).collect(),
                root: root as u32,
            })
            .unwrap();
            for (rank, part) in parts.iter().enumerate().filter(|_| is_root) {
                assert!(*part == input(rank, lens[rank]));
            }

            let inputs: Vec<Vec<f32>> = (0..rig.size).map(|to| input(to + 5, lens[to])).collect();
            let inputs = inputs.iter().map(|input| Buffer::from_slice(input));
            let mut output = vec![0.0; lens[rig.rank]];
            rig.run(Op::ScatterV {
                inputs: inputs.filter(|_| is_root).collect(),
                output: Buffer::from_mut(&mut output),
                root: root as u32,
            })
            .unwrap();
            assert!(output == input(rig.rank + 5, lens[rig.rank]));
        }
    });
}

#[test]
fn gather_and_scatter_move_parts_to_and_from_the_root() {
    on_all_and_nested(|rig| {
        for &count in COUNTS {
            let root = rig.size / 2;
            let is_root = rig.rank == root;
            let own_input = input(rig.rank, count);
            let mut parts = vec![vec![0.0f32; count]; if is_root { rig.size } else { 0 }];
            rig.run(Op::Gather {
                input: Buffer::from_slice(&own_input),
                outputs: parts
                    .iter_mut()
                    .map(|part| Buffer::from_mut(part))
                    .collect(),
                root: root as u32,
            })
            .unwrap();
            for (rank, part) in parts.iter().enumerate() {
                assert!(*part == input(rank, count));
            }
            let mut output = vec![0.0f32; count];
            rig.run(Op::Scatter {
                inputs: parts.iter().map(|part| Buffer::from_slice(part)).collect(),
                output: Buffer::from_mut(&mut output),
                root: root as u32,
            })
            .unwrap();
            assert!(output == own_input);
        }
    });
}

#[test]
fn all_to_all_gives_every_rank_its_part_of_all_inputs() {
    on_all_and_nested(|rig| {
        for &count in COUNTS {
            let own_input: Vec<f32> = (0..rig.size)
                .flat_map(|to| input(rig.rank * 10 + to, count))
                .collect();
            let mut output = vec![0.0f32; own_input.len()];
            rig.run(Op::AllToAllSingle {
                input: Buffer::from_slice(&own_input),
                output: Buffer::from_mut(&mut output),
            })
            .unwrap();
            let expected: Vec<f32> = (0..rig.size)
                .flat_map(|from| input(from * 10 + rig.rank, count))
                .collect();
            assert!(output == expected, "{count}");

            // This rank and each other exchange a number of elements that depends on both ranks.
            let counts: Vec<usize> = (0..rig.size)
                .map(|peer| count * ((peer + rig.rank) % 3))
                .collect();
            let own_input: Vec<f32> = counts
                .iter()
                .enumerate()
                .flat_map(|(to, &len)| input(rig.rank * 10 + to, len))
                .collect();
            let mut output = vec![0.0f32; counts.iter().sum()];
            rig.run(Op::AllToAllVSingle {
                input: Buffer::from_slice(&own_input),
                output: Buffer::from_mut(&mut output),
                input_splits: counts.clone(),
                output_splits: counts.clone(),
            })
            .unwrap();
            let expected: Vec<f32> = counts
                .iter()
                .enumerate()
                .flat_map(|(from, &len)| input(from * 10 + rig.rank, len))
                .collect();
            assert!(output == expected, "{count}");

            let inputs: Vec<Vec<f32>> = (0..rig.size)
                .map(|to| input(rig.rank * 10 + to, counts[to]))
                .collect();
            let mut outputs: Vec<Vec<f32>> = counts.iter().map(|&len| vec![0.0; len]).collect();
            rig.run(Op::AllToAll {
                inputs: inputs
                    .iter()
                    .map(|input| Buffer::from_slice(input))
                    .collect(),
                outputs: outputs
                    .iter_mut()
                    .map(|output| Buffer::from_mut(output))
                    .collect(),
            })
            .unwrap();
            assert!(outputs.concat() == expected);
        }
    });
}

#[test]
fn coalesced_operations_run_each_of_their_operations() {
    on_all(|rig| {
        let (mut floats, mut integers) = (input(rig.rank, 70_001), vec![rig.rank as i64; 5]);
        rig.run(Op::AllReduceCoalesced {
            buffers: vec![
                Buffer::from_mut(&mut floats),
                Buffer::from_mut(&mut integers),
            ],
            op: ReduceOp::Sum.into(),
        })
        .unwrap();
        assert!(floats == sum(rig.size, 70_001));
        assert_eq!(integers, [(0..rig.size as i64).sum::<i64>(); 5]);

        let mut data = input(rig.rank, 3);
        rig.run(Op::Coalesced(vec![
            Op::Barrier,
            Op::Broadcast {
                buffer: Buffer::from_mut(&mut data),
                root: 0,
            },
        ]))
        .unwrap();
        assert_eq!(data, input(0, 3));

        let mut outputs = [(); 2].map(|()| vec![0.0f32; 3 * rig.size]);
        rig.run(Op::AllGatherCoalesced {
            inputs: vec![Buffer::from_slice(&data), Buffer::from_slice(&data)],
            outputs: outputs
                .iter_mut()
                .map(|output| Buffer::from_mut(output))
                .collect(),
        })
        .unwrap();
        assert_eq!(outputs[1], data.repeat(rig.size));
        let mut sums = [(); 2].map(|()| vec![0.0f32; 3]);
        rig.run(Op::ReduceScatterCoalesced {
            inputs: outputs
                .iter()
                .map(|output| Buffer::from_slice(output))
                .collect(),
            outputs: sums
                .iter_mut()
                .map(|output| Buffer::from_mut(output))
                .collect(),
            op: ReduceOp::Max.into(),
        })
        .unwrap();
        assert_eq!(sums, [data.clone(), data]);
    });
}

//! The reducer serves trainers: it holds gradients in place, orders buckets by the first step, and supports static
//! graphs, accumulation, uneven inputs, sparse gradients, gradients in 16 or 8 bits or by PowerSGD, smaller groups, and
//! statistics.

use super::{LENS, average, gradient, parameters, run, small_buckets};
use rcomm::data_parallel::{
    BucketSizes, Int8CompressHook, Parameter, PowerSgdHook, Reducer, ReducerOptions, UnevenInputs,
    UnusedParameters, Wire,
};
use rcomm::{ErrorKind, GroupOptions, OpType, ReduceOp, SparseTensor, World, bf16};
use std::time::Duration;

/// The number of recorded operations of this type.
pub(super) fn count(world: &World, op: OpType) -> usize {
    let entries = &world.snapshot().entries;
    entries.iter().filter(|entry| entry.op == op).count()
}

/// Takes a step in place, with the parameters in this order. Asserts that every gradient is zero at first.
pub(super) fn step(reducer: &mut Reducer, rank: u32, step: u32, order: &[usize]) {
    for &parameter in order {
        let into = reducer.gradient_mut(parameter).unwrap();
        assert!(into.iter().all(|&value| value == 0.0));
        into.copy_from_slice(&gradient(rank, parameter, step));
        reducer.mark_ready(parameter).unwrap();
    }
    reducer.finish_in_place().unwrap();
}

/// Asserts that the reducer has the averages of the gradients of `size` ranks in this step.
pub(super) fn assert_averages(reducer: &Reducer, size: u32, step: u32) {
    for parameter in 0..LENS.len() {
        let got = reducer.average(parameter).unwrap();
        assert_eq!(got, average(size, parameter, step));
    }
}

#[test]
fn gradients_stay_in_the_memory_of_their_bucket() {
    run(2, |world| {
        for wire in [Wire::Own, Wire::Bf16] {
            let options = ReducerOptions {
                wire,
                ..small_buckets()
            };
            let mut reducer = Reducer::new(world.group(), parameters(), options).unwrap();
            assert!(reducer.average(0).is_none());
            let mut places = Vec::new();
            for nth in 0..4 {
                step(&mut reducer, world.rank(), nth, &[3, 2, 1, 0]);
                assert_averages(&reducer, 2, nth);
                let place = |at| reducer.average(at).unwrap().as_ptr().addr();
                places.push((0..LENS.len()).map(place).collect::<Vec<_>>());
                let first = reducer.average_mut(0).unwrap();
                first.fill(7.0);
                assert_eq!(reducer.average(0).unwrap(), [7.0; 7]);
                let into = reducer.gradient_mut(0).unwrap().as_ptr().addr();
                assert_eq!(into, places[nth as usize][0]);
                // The step has begun: its gradients take the place of the averages.
                assert!(reducer.average(0).is_none());
            }
            assert!(places.windows(2).all(|pair| pair[0] == pair[1]));
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn buckets_are_formed_anew_in_the_order_of_the_first_step_of_rank_0() {
    run(3, |world| {
        let mut reducer = Reducer::new(world.group(), parameters(), small_buckets()).unwrap();
        assert_eq!(reducer.buckets(), [vec![3], vec![2], vec![1, 0]]);
        let order = if world.rank() == 0 {
            [0, 3, 1, 2]
        } else {
            [2, 1, 3, 0]
        };
        for nth in 0..3 {
            step(&mut reducer, world.rank(), nth, &order);
            assert_averages(&reducer, 3, nth);
            assert_eq!(reducer.buckets(), [vec![0], vec![3, 1, 2]]);
        }
        assert_eq!(count(&world, OpType::Broadcast), 1);

        let options = ReducerOptions {
            rebuild_buckets: false,
            ..small_buckets()
        };
        let mut fixed = Reducer::new(world.group(), parameters(), options).unwrap();
        step(&mut fixed, world.rank(), 0, &order);
        assert_eq!(fixed.buckets(), [vec![3], vec![2], vec![1, 0]]);
        world.shutdown().unwrap();
    });
}

#[test]
fn gradients_of_several_passes_add_up_and_only_the_last_pass_sends() {
    run(2, |world| {
        let mut reducer = Reducer::new(world.group(), parameters(), small_buckets()).unwrap();
        for _ in 0..2 {
            let before = count(&world, OpType::AllReduce);
            for nth in 0..2 {
                for parameter in 0..4 {
                    let values = gradient(world.rank(), parameter, nth);
                    reducer.accumulate(parameter, &values).unwrap();
                }
            }
            assert_eq!(count(&world, OpType::AllReduce), before);
            for parameter in 0..3 {
                let values = gradient(world.rank(), parameter, 2);
                reducer.ready(parameter, &values).unwrap();
            }
            // The last gradient is added in place, where the sum so far is.
            let values = gradient(world.rank(), 3, 2);
            let sum = reducer.gradient_mut(3).unwrap();
            sum.iter_mut()
                .zip(values)
                .for_each(|(sum, value)| *sum += value);
            reducer.finish_in_place().unwrap();
            for parameter in 0..4 {
                let passes = (0..3).map(|nth| average(2, parameter, nth));
                let sum = passes.reduce(|a, b| a.iter().zip(b).map(|(a, b)| a + b).collect());
                assert_eq!(reducer.average(parameter).unwrap(), sum.unwrap());
            }
        }
        let error = reducer.mark_ready(0).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("a cannot be ready: it has no gradient in this step"),
            "{error}"
        );
        world.shutdown().unwrap();
    });
}

#[test]
fn a_static_graph_is_searched_once_and_delays_no_bucket() {
    run(2, |world| {
        let options = ReducerOptions {
            unused: UnusedParameters::Find,
            static_graph: true,
            ..small_buckets()
        };
        let mut reducer = Reducer::new(world.group(), parameters(), options).unwrap();
        // Rank 0 uses a and b, rank 1 uses b and c; no rank uses d, which is in the first bucket.
        let first = world.rank() as usize;
        for nth in 0..3 {
            let before = count(&world, OpType::AllReduce);
            for parameter in [first + 1, first] {
                reducer
                    .ready(parameter, &gradient(0, parameter, 0))
                    .unwrap();
            }
            let sent = count(&world, OpType::AllReduce) - before;
            reducer.finish_in_place().unwrap();
            let all = count(&world, OpType::AllReduce) - before;
            let buckets = reducer.buckets().len();
            if nth == 0 {
                assert_eq!((sent, all), (0, 3 + 1));
            } else {
                assert_eq!((sent, all), (buckets, buckets));
            }
            let half = |parameter: usize| -> Vec<f32> {
                gradient(0, parameter, 0).iter().map(|x| x / 2.0).collect()
            };
            assert_eq!(reducer.average(0).unwrap(), half(0));
            assert_eq!(reducer.average(1).unwrap(), gradient(0, 1, 0));
            assert_eq!(reducer.average(2).unwrap(), half(2));
            assert!(reducer.average(3).is_none());
        }
        let error = reducer.ready(3, &gradient(0, 3, 0)).unwrap_err();
        assert!(
            error.to_string().contains("the graph is not static"),
            "{error}"
        );
        let error = reducer.finish_in_place().unwrap_err();
        assert!(
            error
                .to_string()
                .contains("which had one in the first step"),
            "{error}"
        );
        world.shutdown().unwrap();
    });
}

/// Takes `r + 1` steps on rank `r`, checks the averages of each step, and returns the reducer.
fn take_uneven_steps(world: &World, inputs: UnevenInputs) -> Reducer {
    let options = ReducerOptions {
        uneven: inputs,
        ..small_buckets()
    };
    let (rank, size) = (world.rank(), world.size());
    let mut reducer = Reducer::new(world.group(), parameters(), options).unwrap();
    for nth in 0..=rank {
        step(&mut reducer, rank, nth, &[3, 1, 2, 0]);
        let active = nth..size;
        let divisor = match inputs {
            UnevenInputs::DivideByActive => active.len() as f32,
            _ => size as f32,
        };
        for parameter in 0..4 {
            let got = reducer.average(parameter).unwrap();
            for (at, &got) in got.iter().enumerate() {
                let sum: f32 = active
                    .clone()
                    .map(|rank| gradient(rank, parameter, nth)[at])
                    .sum();
                let exact = sum / divisor;
                assert!(
                    (got - exact).abs() <= exact.abs() * 1e-6,
                    "{got} for {exact}"
                );
            }
        }
    }
    reducer
}

#[test]
fn ranks_without_input_take_part_until_all_have_joined() {
    run(3, |world| {
        for inputs in [UnevenInputs::DivideBySize, UnevenInputs::DivideByActive] {
            let mut reducer = take_uneven_steps(&world, inputs);
            let joined = reducer.join().unwrap();
            assert_eq!(joined.shadowed, u64::from(2 - world.rank()));
            assert_eq!(joined.last, 2);
            // A step without input averages the gradients of other ranks only, so this rank has no average of it.
            assert_eq!(reducer.average(0).is_some(), joined.shadowed == 0);
            let value = |len: &u64| vec![world.rank() as f32; *len as usize];
            let mut values: Vec<Vec<f32>> = LENS.iter().map(value).collect();
            reducer
                .broadcast_parameters_from(&mut values, joined.last)
                .unwrap();
            assert!(values.iter().flatten().all(|&value| value == 2.0));
            // The next epoch begins.
            step(&mut reducer, world.rank(), 1, &[0, 1, 2, 3]);
            assert_averages(&reducer, 3, 1);
            let joined = reducer.join().unwrap();
            assert_eq!(joined.shadowed, 0);
        }
        let mut even = Reducer::new(world.group(), parameters(), small_buckets()).unwrap();
        let error = even.join().unwrap_err();
        assert!(error.to_string().contains("`uneven`"), "{error}");
        world.shutdown().unwrap();
    });
}

#[test]
fn a_reducer_goes_on_in_the_group_of_the_remaining_ranks() {
    run(3, |world| {
        let rank = world.rank();
        let mut reducer = Reducer::new(world.group(), parameters(), small_buckets()).unwrap();
        step(&mut reducer, rank, 0, &[0, 1, 2, 3]);
        assert_averages(&reducer, 3, 0);
        if rank == 2 {
            return drop(world);
        }
        // This step fails, because rank 2 is gone.
        let mut lost_step = || -> rcomm::Result<()> {
            for parameter in 0..4 {
                reducer.ready(parameter, &gradient(rank, parameter, 1))?;
            }
            reducer.finish_in_place()
        };
        let error = lost_step().unwrap_err();
        assert!(!error.is_recoverable(), "{error}");
        let survivors = world
            .group()
            .shrink(&[2], &GroupOptions::named("rest"))
            .unwrap();
        reducer.regroup(&survivors).unwrap();
        for nth in 1..4 {
            step(&mut reducer, rank, nth, &[0, 1, 2, 3]);
            assert_averages(&reducer, 2, nth);
        }
        survivors.barrier().unwrap();
    });
}

#[test]
fn sparse_gradients_are_averaged_by_rows() {
    run(2, |world| {
        let model = vec![
            Parameter::new("dense", &[3]),
            Parameter::new("embedding", &[100, 2]),
            Parameter::new("last", &[2]),
        ];
        let options = || ReducerOptions {
            sparse: vec![1],
            unused: UnusedParameters::Find,
            ..ReducerOptions::default()
        };
        let mut reducer = Reducer::new(world.group(), model.clone(), options()).unwrap();
        assert_eq!(reducer.buckets(), [vec![2], vec![1], vec![0]]);
        let rank = world.rank();
        for nth in 0..3 {
            reducer.ready(2, &[rank as f32; 2]).unwrap();
            // Both ranks have row 7 and a row of their own. In the second step, rank 1 has no row.
            let is_used = nth != 1 || rank == 0;
            if is_used {
                let rows = vec![7, 10 + i64::from(rank)];
                let values = vec![1.0, 2.0, 4.0, 6.0];
                let rows = SparseTensor::new(vec![100, 2], 1, rows, values).unwrap();
                reducer.ready_sparse(1, rows).unwrap();
            }
            reducer.ready(0, &[1.0, 2.0, 3.0]).unwrap();
            reducer.finish_in_place().unwrap();
            assert_eq!(reducer.average(2).unwrap(), [0.5; 2]);
            assert!(reducer.average(1).is_none());
            let got = reducer.sparse_average(1).unwrap();
            if nth == 1 {
                assert_eq!(got.indices(), [7, 10]);
                assert_eq!(got.values(), [0.5, 1.0, 2.0, 3.0]);
            } else {
                assert_eq!(got.indices(), [7, 10, 11]);
                assert_eq!(got.values(), [1.0, 2.0, 2.0, 3.0, 2.0, 3.0]);
            }
        }
        let error = reducer.ready(1, &[0.0; 200]).unwrap_err();
        assert!(error.to_string().contains("use ready_sparse"), "{error}");
        let wrong = SparseTensor::new(vec![9, 2], 1, vec![], vec![]).unwrap();
        let error = reducer.ready_sparse(1, wrong).unwrap_err();
        assert!(error.to_string().contains("has shape [9, 2]"), "{error}");

        // The parameter is sparse on one rank only.
        let sparse = if rank == 1 { vec![1] } else { Vec::new() };
        let options = ReducerOptions {
            sparse,
            ..options()
        };
        let error = Reducer::<f32>::new(world.group(), model, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(
            error.to_string().contains("embedding is sparse on one of"),
            "{error}"
        );
    });
}

#[test]
fn gradients_sent_in_16_bits_are_rounded_as_by_the_hook_of_their_type() {
    run(2, |world| {
        for (wire, dtype) in [(Wire::F16, "Half"), (Wire::Bf16, "BFloat16")] {
            let options = ReducerOptions {
                wire,
                ..small_buckets()
            };
            let mut reducer = Reducer::new(world.group(), parameters(), options).unwrap();
            for nth in 0..2 {
                step(&mut reducer, world.rank(), nth, &[0, 1, 2, 3]);
                assert_averages(&reducer, 2, nth);
            }
            let signatures = &world.snapshot().signatures;
            let is_narrow = |input: &String| input == dtype;
            let mut signatures = signatures.iter();
            assert!(signatures.any(|signature| signature.input_dtypes.iter().any(is_narrow)));
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn power_sgd_sends_less_and_its_errors_even_out_over_many_steps() {
    run(2, |world| {
        let model = vec![
            Parameter::new("matrix", &[24, 20]),
            Parameter::new("bias", &[24]),
        ];
        let value_at = |at: usize| {
            let rank = world.rank() as usize;
            ((at * 37 + rank * 11) % 17) as f32 - 8.0
        };
        let gradients: [Vec<f32>; 2] = [
            (0..480).map(value_at).collect(),
            (0..24).map(value_at).collect(),
        ];
        let mean = |at: usize| -> f32 {
            let all = (0..2).map(|rank| ((at * 37 + rank * 11) % 17) as f32 - 8.0);
            all.sum::<f32>() / 2.0
        };
        let hook = PowerSgdHook::new(2, 1, &model).unwrap();
        assert_eq!(hook.compressed(), 1);
        let options = ReducerOptions {
            hook: Some(Box::new(hook)),
            buckets: BucketSizes {
                first: 64,
                rest: 64,
            },
            ..ReducerOptions::default()
        };
        let mut reducer = Reducer::new(world.group(), model, options).unwrap();
        let steps = 300;
        let mut sum = vec![0.0f32; 480];
        for nth in 0..steps {
            for parameter in [1, 0] {
                reducer.ready(parameter, &gradients[parameter]).unwrap();
            }
            reducer.finish_in_place().unwrap();
            for (at, &got) in reducer.average(1).unwrap().iter().enumerate() {
                assert_eq!(got, mean(at));
            }
            let got = reducer.average(0).unwrap();
            if nth == 0 {
                // The first step is not compressed.
                assert!(got.iter().enumerate().all(|(at, &got)| got == mean(at)));
            }
            sum.iter_mut().zip(got).for_each(|(sum, got)| *sum += got);
        }
        for (at, sum) in sum.iter().enumerate() {
            let (got, exact) = (sum / steps as f32, mean(at));
            assert!((got - exact).abs() < 0.5, "{got} for {exact}");
        }
        // After the first step, P of 24 by 2 and Q of 20 by 2 elements are sent instead of 480 elements.
        let dump = world.snapshot();
        let sizes = dump
            .signatures
            .iter()
            .flat_map(|it| it.input_sizes.concat());
        let sizes: Vec<u64> = sizes.collect();
        assert!(sizes.contains(&48) && sizes.contains(&40), "{sizes:?}");
        world.shutdown().unwrap();
    });
}

/// Element `at` of a rank's gradient. The elements become ten times as large every 300 positions.
fn element(rank: u32, at: usize) -> f32 {
    let size = 10.0f32.powi((at / 300) as i32);
    (((at * 37 + rank as usize * 11) % 17) as f32 - 8.3) * size
}

#[test]
fn sums_in_8_bits_are_the_same_on_all_ranks_and_off_by_less_than_their_bound() {
    const RANKS: u32 = 3;
    run(RANKS, |world| {
        let group = world.group();
        for len in [0, 1, 2, 5, 900, 1_537] {
            for op in [ReduceOp::Sum, ReduceOp::Avg] {
                let input = (0..len).map(|at| element(world.rank(), at));
                let input: Vec<f32> = input.collect();
                let mut got = input.clone();
                group.all_reduce_int8(&mut got, op).unwrap();
                let mut exact = input.clone();
                group.all_reduce(&mut exact, op).unwrap();
                // No element of a block is larger than the largest of all elements.
                let largest = input
                    .iter()
                    .fold(0.0f32, |most, it| most.max(it.abs()))
                    .max(1.0);
                let mut bound = vec![largest];
                group.all_reduce(&mut bound, ReduceOp::Max).unwrap();
                let bound = bound[0] / 127.0 * RANKS as f32;
                for (got, exact) in got.iter().zip(&exact) {
                    assert!((got - exact).abs() <= bound, "{got} for {exact}, {len}");
                }
                let bits: Vec<u32> = got.iter().map(|it| it.to_bits()).collect();
                let mut all = vec![0; len * RANKS as usize];
                group.all_gather_single(&bits, &mut all).unwrap();
                assert!(all.chunks(len.max(1)).all(|other| other == bits));
            }
        }
        let mut narrow = vec![bf16::from_f32(1.0); 300];
        if world.rank() == 1 {
            narrow[299] = bf16::NAN;
        }
        group.all_reduce_int8(&mut narrow, ReduceOp::Sum).unwrap();
        assert!(narrow[0].to_f32() > 2.9 && narrow[299].is_nan());
        let error = group.all_reduce_int8(&mut [1.0f32], ReduceOp::Max);
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        world.shutdown().unwrap();
    });
}

#[test]
fn errors_of_gradients_in_8_bits_even_out_over_many_steps() {
    const LEN: usize = 1_000;
    const STEPS: usize = 200;
    run(3, |world| {
        let model = vec![Parameter::new("weights", &[LEN as u64])];
        let options = ReducerOptions {
            hook: Some(Box::new(Int8CompressHook::default())),
            ..ReducerOptions::default()
        };
        let mut reducer = Reducer::new(world.group(), model, options).unwrap();
        let values: Vec<f32> = (0..LEN).map(|at| element(world.rank(), at)).collect();
        let mean = |at| (0..3).map(|rank| element(rank, at)).sum::<f32>() / 3.0;
        let mut sum = vec![0.0f64; LEN];
        for _ in 0..STEPS {
            reducer.ready(0, &values).unwrap();
            reducer.finish_in_place().unwrap();
            let got = reducer.average(0).unwrap();
            sum.iter_mut()
                .zip(got)
                .for_each(|(sum, &got)| *sum += f64::from(got));
        }
        for (at, sum) in sum.iter().enumerate() {
            let (got, exact) = (*sum / STEPS as f64, f64::from(mean(at)));
            // This bounds the error that a rank has not yet sent after the last step. A block may have elements of this
            // size and of the next one.
            let max_unsent = 8.7 * 10.0f64.powi((at / 300) as i32 + 1) / 127.0 * 2.0;
            assert!(
                (got - exact).abs() <= max_unsent / STEPS as f64,
                "{at}: {got} for {exact}"
            );
        }
        let dump = world.snapshot();
        let is_narrow = |types: &Vec<String>| types.iter().all(|dtype| dtype == "Byte");
        let sent = dump
            .entries
            .iter()
            .filter(|entry| entry.op == OpType::AllToAllSingle);
        let signatures = &dump.signatures;
        let mut sent = sent
            .map(|entry| &signatures[entry.signature as usize])
            .peekable();
        assert!(sent.peek().is_some());
        assert!(sent.all(|signature| is_narrow(&signature.input_dtypes)));
        world.shutdown().unwrap();
    });
}

#[test]
fn statistics_say_what_a_step_took_and_what_of_it_was_exposed() {
    run(2, |world| {
        let mut reducer = Reducer::new(world.group(), parameters(), small_buckets()).unwrap();
        assert_eq!(reducer.statistics().step, 0);
        for nth in 1..4 {
            reducer.begin_forward();
            step(&mut reducer, world.rank(), 0, &[3, 2, 1, 0]);
            let statistics = reducer.statistics();
            assert_eq!(statistics.step, nth);
            assert_eq!(statistics.bytes(), 4 * 25);
            let buckets = &statistics.buckets;
            let sizes = |at: usize| (buckets[at].parameters, buckets[at].bytes);
            assert_eq!([sizes(0), sizes(1), sizes(2)], [(1, 20), (1, 48), (2, 32)]);
            assert!(buckets.is_sorted_by_key(|bucket| bucket.sent));
            let sum: Duration = buckets.iter().map(|bucket| bucket.communication).sum();
            assert_eq!(statistics.communication, sum);
            assert!(sum > Duration::ZERO);
            let waited: Duration = buckets.iter().map(|bucket| bucket.exposed).sum();
            assert!(waited <= statistics.exposed);
            assert!(statistics.hidden() <= statistics.communication);
            let parts = statistics.forward + statistics.backward + statistics.exposed;
            assert_eq!(statistics.total(), parts);
            assert!(buckets.iter().all(|bucket| bucket.ready <= bucket.sent));
            // The rank's record has the same times.
            let steps = world.snapshot().reducer_steps;
            assert_eq!(steps.len() as u64, nth);
            let recorded = steps.last().unwrap();
            let times = recorded.times;
            assert_eq!((recorded.group, times.step, times.bytes), (0, nth, 4 * 25));
            let ns = |time: Duration| time.as_nanos() as u64;
            assert_eq!(times.exposed_ns, ns(statistics.exposed));
            assert_eq!(times.total_ns(), ns(statistics.total()));
            assert_eq!((times.bucket_count, times.sums.steps), (3, nth));
            let total: u64 = steps.iter().map(|step| step.times.communication_ns).sum();
            assert_eq!(times.sums.communication_ns, total);
            for (recorded, bucket) in recorded.buckets.iter().zip(buckets) {
                assert_eq!(recorded.bytes, bucket.bytes as u64);
                assert_eq!(recorded.ready_ns, ns(bucket.ready));
                assert_eq!(recorded.communication_ns, ns(bucket.communication));
            }
            assert_eq!(recorded.buckets.len(), buckets.len());
        }
        world.shutdown().unwrap();
    });
}

//! The reducer averages gradients in any order, handles unused parameters and hooks, and refuses models that differ.
#![allow(clippy::unwrap_used)]

mod buckets;
mod hooks;
mod mixed;
mod trainer;

use rcomm::data_parallel::{
    AllReduceHook, Averaging, Bf16CompressHook, Bucket, BucketSizes, CommHook, F16CompressHook,
    Gradient, Parameter, Reducer, ReducerOptions, UnusedParameters,
};
use rcomm::{Config, ErrorKind, OpType, ProcessGroup, ReduceOp, World, bf16, f16};
use rcomm_tests::world::{Carrier, on_threads};
use std::time::Duration;

/// Runs `body` on all ranks of a world of this size. Ranks that fail write their dumps outside the working directory,
/// and wait only briefly for the status of the others.
fn run(size: u32, body: impl Fn(World) + Sync) {
    let change = |config: &mut Config| {
        config.dump_dir = std::env::temp_dir().join("rcomm-tests-data-parallel");
        config.status_wait = Duration::from_millis(200);
    };
    on_threads(size, &Carrier::Cpu, change, body);
}

/// The lengths of the model's parameters.
const LENS: [u64; 4] = [7, 1, 12, 5];

/// The model: its parameters are a, b, c and d.
fn parameters() -> Vec<Parameter> {
    let named = LENS.iter().zip(["a", "b", "c", "d"]);
    named
        .map(|(&len, name)| Parameter::new(name, &[len]))
        .collect()
}

/// Options by which the first bucket has room for 5 elements of `f32`, and each other one for 12.
fn small_buckets() -> ReducerOptions {
    ReducerOptions {
        buckets: BucketSizes {
            first: 20,
            rest: 48,
        },
        ..ReducerOptions::default()
    }
}

/// The gradient of a parameter on a rank in a step.
fn gradient(rank: u32, parameter: usize, step: u32) -> Vec<f32> {
    let len = LENS[parameter] as u32;
    (0..len)
        .map(|at| (rank * 3 + at + step * parameter as u32) as f32)
        .collect()
}

/// The average of a parameter's gradients in a step over `size` ranks.
fn average(size: u32, parameter: usize, step: u32) -> Vec<f32> {
    let len = LENS[parameter] as usize;
    let mut sum = vec![0.0; len];
    for rank in 0..size {
        let gradient = gradient(rank, parameter, step);
        let pairs = sum.iter_mut().zip(gradient);
        pairs.for_each(|(sum, value)| *sum += value);
    }
    sum.iter().map(|sum| sum / size as f32).collect()
}

#[test]
fn gradients_are_averaged_in_whatever_order_they_are_ready() {
    run(3, |world| {
        let group = world.group();
        let mut reducer = Reducer::new(group, parameters(), small_buckets()).unwrap();
        assert_eq!(reducer.buckets(), [vec![3], vec![2], vec![1, 0]]);
        for step in 0..4 {
            // The order differs between ranks and between steps.
            for nth in 0..4 {
                let parameter = (nth + world.rank() as usize + step as usize) % 4;
                let gradient = gradient(world.rank(), parameter, step);
                reducer.ready(parameter, &gradient).unwrap();
            }
            let averages = reducer.finish().unwrap();
            for (parameter, got) in averages.into_iter().enumerate() {
                assert_eq!(got.unwrap(), average(3, parameter, step));
            }
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn a_full_bucket_is_reduced_before_the_last_gradient_is_ready() {
    run(2, |world| {
        let mut reducer = Reducer::new(world.group(), parameters(), small_buckets()).unwrap();
        let all_reduces = |world: &World| {
            let dump = world.snapshot();
            let entries = dump.entries.iter();
            entries
                .filter(|entry| entry.op == OpType::AllReduce)
                .count()
        };
        reducer.ready(2, &gradient(0, 2, 0)).unwrap();
        // The second bucket is full, but buckets are sent in order, and the first is not full yet.
        assert_eq!(all_reduces(&world), 0);
        reducer.ready(3, &gradient(0, 3, 0)).unwrap();
        assert_eq!(all_reduces(&world), 2);
        reducer.ready(0, &gradient(0, 0, 0)).unwrap();
        assert_eq!(all_reduces(&world), 2);
        reducer.ready(1, &gradient(0, 1, 0)).unwrap();
        assert_eq!(all_reduces(&world), 3);
        reducer.finish().unwrap();
        world.shutdown().unwrap();
    });
}

#[test]
fn unused_parameters_are_refused_by_name_or_found() {
    run(2, |world| {
        let group = world.group();
        let mut strict = Reducer::new(group, parameters(), ReducerOptions::default()).unwrap();
        strict.ready(0, &gradient(0, 0, 0)).unwrap();
        let error = strict.finish().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(
            error
                .to_string()
                .contains("no gradient was given for b, c, d:"),
            "{error}"
        );

        let options = ReducerOptions {
            unused: UnusedParameters::Find,
            ..small_buckets()
        };
        let mut lenient = Reducer::new(group, parameters(), options).unwrap();
        for _ in 0..2 {
            // Rank 0 uses a and b, rank 1 uses b and c; no rank uses d.
            let first = world.rank() as usize;
            lenient
                .ready(first + 1, &gradient(0, first + 1, 0))
                .unwrap();
            lenient.ready(first, &gradient(0, first, 0)).unwrap();
            let got = lenient.finish().unwrap();
            let half = |parameter| {
                let values = gradient(0, parameter, 0).into_iter();
                Some(values.map(|value| value / 2.0).collect::<Vec<_>>())
            };
            assert_eq!(got, [half(0), Some(gradient(0, 1, 0)), half(2), None]);
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn an_unknown_parameter_a_wrong_length_and_a_second_gradient_are_refused() {
    run(1, |world| {
        let group = world.group();
        let mut reducer = Reducer::new(group, parameters(), ReducerOptions::default()).unwrap();
        let mut refusal = |parameter: usize, len: usize| {
            let error = reducer.ready(parameter, &vec![0.0; len]).unwrap_err();
            assert!(error.is_recoverable());
            error.to_string()
        };
        assert!(refusal(4, 1).contains("there is no parameter 4 of 4"));
        assert!(refusal(0, 6).contains("the gradient of a has 6 elements, not 7"));
        reducer.ready(0, &[0.0; 7]).unwrap();
        let error = reducer.ready(0, &[0.0; 7]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("a already had its gradient in this step"),
            "{error}"
        );
    });
}

#[test]
fn models_that_differ_are_refused_with_rank_and_parameter() {
    run(3, |world| {
        let mut model = parameters();
        if world.rank() == 2 {
            model[1] = Parameter::new("b", &[3]);
        }
        let options = ReducerOptions::<f32>::default();
        let error = Reducer::new(world.group(), model, options).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Mismatch, Some(2)));
        let expected = "parameter 1 is b [3] on rank 2, b [1] on rank 0";
        assert!(error.to_string().contains(expected), "{error}");
    });
}

#[test]
fn differing_parameters_are_found_and_broadcast_sets_those_of_rank_0() {
    run(3, |world| {
        let group = world.group();
        let reducer = Reducer::new(group, parameters(), ReducerOptions::default()).unwrap();
        let value = |len: &u64| vec![world.rank() as f32; *len as usize];
        let mut values: Vec<Vec<f32>> = LENS.iter().map(value).collect();
        let error = reducer.check_consistency(&values).unwrap_err();
        let expected = "parameter a has other values on ranks 1, 2 than on rank 0";
        assert!(error.to_string().contains(expected), "{error}");
        reducer.broadcast_parameters(&mut values).unwrap();
        assert!(values.iter().flatten().all(|&value| value == 0.0));
        reducer.check_consistency(&values).unwrap();
        world.shutdown().unwrap();
    });
}

/// The averages of a step whose buckets go through this hook.
fn averages_through(world: &World, hook: impl CommHook + 'static) -> Vec<Vec<f32>> {
    let options = ReducerOptions {
        hook: Some(Box::new(hook)),
        ..small_buckets()
    };
    let mut reducer = Reducer::new(world.group(), parameters(), options).unwrap();
    for parameter in (0..4).rev() {
        let gradient = gradient(world.rank(), parameter, 1);
        reducer.ready(parameter, &gradient).unwrap();
    }
    let averages = reducer.finish().unwrap().into_iter();
    averages.map(Option::unwrap).collect()
}

#[test]
fn compression_sends_16_bit_gradients_and_rounds_them() {
    run(2, |world| {
        for (got, dtype) in [
            (averages_through(&world, F16CompressHook), "Half"),
            (averages_through(&world, Bf16CompressHook), "BFloat16"),
        ] {
            for (parameter, got) in got.iter().enumerate() {
                for (got, exact) in got.iter().zip(average(2, parameter, 1)) {
                    assert!(
                        (got - exact).abs() <= exact.abs() / 128.0,
                        "{dtype}: {got} for {exact}"
                    );
                }
            }
            let dump = world.snapshot();
            let is_narrow = |input: &String| input == dtype;
            assert!(
                dump.signatures
                    .iter()
                    .any(|signature| signature.input_dtypes.iter().any(is_narrow))
            );
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn gradients_of_every_floating_type_are_averaged_and_compressed() {
    fn check<T: Gradient + PartialEq>(world: &World) {
        let typed = |numbers: Vec<f32>| numbers.into_iter().map(T::from_f32).collect::<Vec<T>>();
        let hooks: [Box<dyn CommHook<T>>; 3] = [
            Box::new(AllReduceHook),
            Box::new(F16CompressHook),
            Box::new(Bf16CompressHook),
        ];
        for hook in hooks {
            let options = ReducerOptions {
                hook: Some(hook),
                ..ReducerOptions::default()
            };
            let mut reducer = Reducer::new(world.group(), parameters(), options).unwrap();
            let mut values: Vec<Vec<T>> = LENS
                .iter()
                .map(|&len| typed(vec![world.rank() as f32; len as usize]))
                .collect();
            assert!(reducer.check_consistency(&values).is_err());
            reducer.broadcast_parameters(&mut values).unwrap();
            reducer.check_consistency(&values).unwrap();
            for parameter in 0..4 {
                let elements = typed(gradient(world.rank(), parameter, 1));
                reducer.ready(parameter, &elements).unwrap();
            }
            for (parameter, got) in reducer.finish().unwrap().into_iter().enumerate() {
                // Small numbers and their halves are exact in every type.
                assert_eq!(
                    got.unwrap(),
                    typed(average(2, parameter, 1)),
                    "{}",
                    T::DTYPE
                );
            }
        }
    }
    run(2, |world| {
        check::<f32>(&world);
        check::<f64>(&world);
        check::<f16>(&world);
        check::<bf16>(&world);
        world.shutdown().unwrap();
    });
}

/// PowerSGD (Vogels et al., 2019) with matrices of rank 1. A bucket is a matrix M of `ROWS` rows and is sent as two
/// vectors, P = MQ and Q = MᵀP. The error is added to the next step's gradients.
#[derive(Default)]
struct LowRank {
    /// The vector Q and the error of the last step, by bucket.
    memory: Vec<(Vec<f32>, Vec<f32>)>,
}

const ROWS: usize = 4;

impl CommHook for LowRank {
    fn start(&mut self, group: &ProcessGroup, bucket: Bucket) -> rcomm::Result<Averaging> {
        let columns = bucket.gradients.len().div_ceil(ROWS);
        if self.memory.len() <= bucket.index {
            let start = (0..columns).map(|at| 1.0 + at as f32).collect();
            self.memory.push((start, vec![0.0; ROWS * columns]));
        }
        let (q, error) = &mut self.memory[bucket.index];
        let mut matrix = error.clone();
        for (element, gradient) in matrix.iter_mut().zip(&bucket.gradients) {
            *element += gradient;
        }
        let row = |matrix: &[f32], row: usize| matrix[row * columns..][..columns].to_vec();
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let mut p: Vec<f32> = (0..ROWS).map(|at| dot(&row(&matrix, at), q)).collect();
        group.all_reduce(&mut p, ReduceOp::Avg)?;
        let norm = dot(&p, &p).sqrt().max(1e-20);
        p.iter_mut().for_each(|p| *p /= norm);
        let column = |at: usize| {
            (0..ROWS)
                .map(|row| matrix[row * columns + at] * p[row])
                .sum()
        };
        *q = (0..columns).map(column).collect();
        group.all_reduce(q, ReduceOp::Avg)?;
        let sent: Vec<f32> = (0..ROWS * columns)
            .map(|at| p[at / columns] * q[at % columns])
            .collect();
        for ((error, full), sent) in error.iter_mut().zip(&matrix).zip(&sent) {
            *error = full - sent;
        }
        let len = bucket.gradients.len();
        Ok(Box::new(move || Ok(sent[..len].to_vec())))
    }
}

#[test]
fn a_custom_hook_may_compress_and_keep_state() {
    run(2, |world| {
        let options = ReducerOptions {
            hook: Some(Box::new(LowRank::default())),
            ..small_buckets()
        };
        let mut reducer = Reducer::new(world.group(), parameters(), options).unwrap();
        // Because each error is added to the next step, the sent gradients add up to nearly the given ones.
        let mut sent = [0.0; 12];
        let steps = 200;
        for _ in 0..steps {
            for parameter in 0..4 {
                let gradient = gradient(world.rank(), parameter, 0);
                reducer.ready(parameter, &gradient).unwrap();
            }
            let got = reducer.finish().unwrap().swap_remove(2).unwrap();
            sent.iter_mut().zip(got).for_each(|(sum, got)| *sum += got);
        }
        for (sent, exact) in sent.iter().zip(average(2, 2, 0)) {
            let mean = sent / steps as f32;
            assert!((mean - exact).abs() < 0.3, "{mean} for {exact}");
        }
        world.shutdown().unwrap();
    });
}

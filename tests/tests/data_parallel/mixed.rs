//! One reducer for parameters of several element types.

use super::run;
use rcomm::data_parallel::{
    AllReduceHook, BucketSizes, Gradient, MixedOptions, MixedReducer, Parameter, UnevenInputs,
    UnusedParameters, Wire,
};
use rcomm::{DType, ErrorKind, GroupOptions, SparseTensor, World, bf16};

const TYPES: [DType; 6] = [
    DType::F32,
    DType::Bf16,
    DType::F32,
    DType::F64,
    DType::Bf16,
    DType::F32,
];
const LENS: [u64; 6] = [7, 5, 12, 3, 1, 4];

fn parameters() -> Vec<(Parameter, DType)> {
    let numbered = LENS.iter().zip(TYPES).enumerate();
    let named =
        numbered.map(|(at, (&len, dtype))| (Parameter::new(format!("p{at}"), &[len]), dtype));
    named.collect()
}

/// A gradient's element: a small whole number, which all types represent exactly.
fn value(rank: u32, parameter: usize, at: usize, step: u32) -> f32 {
    (rank * 2 + at as u32 + step * parameter as u32) as f32
}

fn values<T: Gradient>(rank: u32, parameter: usize, step: u32) -> Vec<T> {
    let elements = 0..LENS[parameter] as usize;
    elements
        .map(|at| T::from_f32(value(rank, parameter, at, step)))
        .collect()
}

fn ready(reducer: &mut MixedReducer, rank: u32, parameter: usize, step: u32) {
    match TYPES[parameter] {
        DType::F32 => reducer.ready::<f32>(parameter, &values(rank, parameter, step)),
        DType::F64 => reducer.ready::<f64>(parameter, &values(rank, parameter, step)),
        _ => reducer.ready::<bf16>(parameter, &values(rank, parameter, step)),
    }
    .unwrap();
}

/// The average of a parameter as `f32`; `None` if no rank has used it.
fn average(reducer: &MixedReducer, parameter: usize) -> Option<Vec<f32>> {
    fn as_f32<T: Gradient>(reducer: &MixedReducer, parameter: usize) -> Option<Vec<f32>> {
        let average = reducer.average::<T>(parameter)?.iter();
        Some(average.map(|value| value.to_f32()).collect())
    }
    match TYPES[parameter] {
        DType::F32 => as_f32::<f32>(reducer, parameter),
        DType::F64 => as_f32::<f64>(reducer, parameter),
        _ => as_f32::<bf16>(reducer, parameter),
    }
}

/// The mean of a parameter's gradients over these ranks.
fn mean(ranks: &[u32], parameter: usize, step: u32) -> Vec<f32> {
    let mean = |at| {
        let sum: f32 = ranks
            .iter()
            .map(|&rank| value(rank, parameter, at, step))
            .sum();
        sum / ranks.len() as f32
    };
    (0..LENS[parameter] as usize).map(mean).collect()
}

fn options() -> MixedOptions {
    MixedOptions {
        buckets: BucketSizes { first: 8, rest: 40 },
        ..MixedOptions::default()
    }
}

#[test]
fn parameters_of_several_types_have_one_reducer() {
    run(2, |world| {
        let rank = world.rank();
        let mut reducer = MixedReducer::new(world.group(), parameters(), &options()).unwrap();
        let pair = world
            .new_group(&[0, 1], &GroupOptions::named("pair"))
            .unwrap();
        for nth in 0..6 {
            // The order of types differs between ranks and steps.
            for at in 0..6 {
                let parameter = (at + 3 * rank as usize + nth as usize) % 6;
                ready(&mut reducer, rank, parameter, nth);
            }
            reducer.finish_in_place().unwrap();
            for parameter in 0..6 {
                let expected = mean(&[0, 1], parameter, nth);
                assert_eq!(average(&reducer, parameter).unwrap(), expected, "{nth}");
            }
            let bytes = |reducer: &MixedReducer| {
                let f32s = reducer.reducer::<f32>().unwrap().statistics().bytes();
                f32s + reducer.reducer::<bf16>().unwrap().statistics().bytes()
            };
            assert_eq!(bytes(&reducer), 23 * 4 + 6 * 2);
            if nth == 2 {
                reducer.regroup(&pair).unwrap();
                assert!(average(&reducer, 0).is_none());
                let hooked = reducer.reducer_mut::<f64>().unwrap();
                hooked.set_hook(Some(Box::new(AllReduceHook))).unwrap();
            }
        }
        assert!(reducer.reducer::<rcomm::f16>().is_none());
        let error = reducer.gradient_mut::<f32>(1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("p1 has gradients of"), "{error}");
        let error = reducer.mark_ready(6).unwrap_err();
        assert!(
            error.to_string().contains("there is no parameter 6 of 6"),
            "{error}"
        );
        assert!(reducer.average::<f64>(0).is_none());
        world.shutdown().unwrap();
    });
}

#[test]
fn a_model_whose_types_differ_between_ranks_is_refused() {
    run(2, |world| {
        let mut model = parameters();
        if world.rank() == 1 {
            model[2].1 = DType::F16;
        }
        let error = MixedReducer::new(world.group(), model, &options()).unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Mismatch, Some(1)));
        assert!(
            error.to_string().contains("parameter 2 is p2 of "),
            "{error}"
        );
        let model = vec![(Parameter::new("whole", &[2]), DType::I32)];
        let error = MixedReducer::new(world.group(), model, &options()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    });
}

/// Takes a step in which this rank has gradients of some parameters only.
fn partial_step(reducer: &mut MixedReducer, world: &World, used: &[usize], step: u32) {
    for &parameter in used {
        ready(reducer, world.rank(), parameter, step);
    }
    reducer.finish_in_place().unwrap();
}

#[test]
fn unused_sparse_and_uneven_inputs_work_with_several_types() {
    run(2, |world| {
        let rank = world.rank();
        let uneven = MixedOptions {
            unused: UnusedParameters::Find,
            uneven: UnevenInputs::DivideByActive,
            wire: Wire::Bf16,
            ..options()
        };
        let mut reducer = MixedReducer::new(world.group(), parameters(), &uneven).unwrap();
        // Rank 0 uses p0 and p1, rank 1 uses p1 and p2, and takes two more steps.
        for nth in 0..=2 * rank {
            let used = [rank as usize + 1, rank as usize];
            partial_step(&mut reducer, &world, &used, nth);
            let active: &[u32] = if nth == 0 { &[0, 1] } else { &[1] };
            assert_eq!(average(&reducer, 1).unwrap(), mean(active, 1, nth), "{nth}");
            assert_eq!(average(&reducer, 0).is_some(), nth == 0);
            assert!(average(&reducer, 3).is_none());
        }
        let joined = reducer.join().unwrap();
        assert_eq!((joined.shadowed, joined.last), (u64::from(2 - 2 * rank), 1));

        let mut model = parameters();
        model[5].0.shape = vec![2, 2];
        let sparse = MixedOptions {
            sparse: vec![5],
            ..options()
        };
        let mut reducer = MixedReducer::new(world.group(), model, &sparse).unwrap();
        let rows = SparseTensor::new(vec![2, 2], 1, vec![i64::from(rank)], vec![2.0f32, 4.0]);
        reducer.ready_sparse(5, rows.unwrap()).unwrap();
        partial_step(&mut reducer, &world, &[4, 3, 2, 1, 0], 1);
        let rows = reducer.sparse_average::<f32>(5).unwrap();
        assert_eq!(
            (rows.indices(), rows.values()),
            (&[0, 1][..], &[1.0, 2.0, 1.0, 2.0][..])
        );
        let error = reducer.join().unwrap_err();
        assert!(error.to_string().contains("`uneven`"), "{error}");
        world.shutdown().unwrap();
    });
}

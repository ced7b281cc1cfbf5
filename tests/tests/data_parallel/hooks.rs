//! Hooks whose averages depend on earlier steps, and the averaging of models, are compared with their algorithm in one
//! process: batched PowerSGD and post-local SGD. After `regroup` hooks begin anew.

use super::{LENS, gradient, parameters, run, small_buckets};
use rcomm::data_parallel::{
    AveragingLevel, BatchedPowerSgdHook, BucketSizes, CommHook, ModelAverager, Parameter,
    PostLocalSgdHook, PowerSgdHook, Reducer, ReducerOptions,
};
use rcomm::{ErrorKind, GroupOptions, OpType, World};

/// Takes a step of a reducer with this rank's gradients, and returns the averages.
fn step(reducer: &mut Reducer, rank: u32, step: u32) -> Vec<Vec<f32>> {
    for parameter in (0..LENS.len()).rev() {
        let gradient = gradient(rank, parameter, step);
        reducer.ready(parameter, &gradient).unwrap();
    }
    let averages = reducer.finish().unwrap().into_iter();
    averages.map(Option::unwrap).collect()
}

/// A reducer of this rank's parameters with the hook and small buckets.
fn with_hook(world: &World, hook: impl CommHook + 'static) -> Reducer {
    let options = ReducerOptions {
        hook: Some(Box::new(hook)),
        ..small_buckets()
    };
    Reducer::new(world.group(), parameters(), options).unwrap()
}

/// The mean of the gradients of these ranks.
fn mean_over(ranks: &[u32], parameter: usize, step: u32) -> Vec<f32> {
    let mut sum = vec![0.0; LENS[parameter] as usize];
    for &rank in ranks {
        let gradient = gradient(rank, parameter, step);
        sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
    }
    sum.iter().map(|sum| sum / ranks.len() as f32).collect()
}

/// The algorithm of batched PowerSGD for all processes in one, with factors of the matrix rank `rank`.
struct Batched {
    side: usize,
    rank: usize,
    q: Vec<f64>,
    /// The error of each process.
    errors: Vec<Vec<f64>>,
}

impl Batched {
    fn new(bucket: usize, len: usize, rank: usize, processes: usize) -> Self {
        let side = (len as f64).sqrt().ceil() as usize;
        // SplitMix64, as the hook has it.
        let mut random = 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(bucket as u64 + 1);
        let mut next = || {
            random = random.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = random;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z >> 40) as f64 / f64::from(1u32 << 23) - 1.0
        };
        Self {
            side,
            rank,
            q: (0..side * rank).map(|_| next()).collect(),
            errors: vec![vec![0.0; side * side]; processes],
        }
    }

    /// The result of a step in which the processes have these gradients.
    fn step(&mut self, gradients: &[Vec<f32>]) -> Vec<f64> {
        let (side, rank, processes) = (self.side, self.rank, gradients.len() as f64);
        for (error, gradient) in self.errors.iter_mut().zip(gradients) {
            for (error, &gradient) in error.iter_mut().zip(gradient) {
                *error += f64::from(gradient);
            }
        }
        // The factors are averages of products with each process's matrix: products with the mean matrix.
        let mean = |at: usize| self.errors.iter().map(|error| error[at]).sum::<f64>() / processes;
        let matrix: Vec<f64> = (0..side * side).map(mean).collect();
        let mut p = vec![0.0; side * rank];
        for row in 0..side {
            for r in 0..rank {
                let products = (0..side).map(|k| matrix[row * side + k] * self.q[k * rank + r]);
                p[row * rank + r] = products.sum();
            }
        }
        for r in 0..rank {
            for before in 0..r {
                let dots = (0..side).map(|row| p[row * rank + r] * p[row * rank + before]);
                let dot: f64 = dots.sum();
                (0..side).for_each(|row| p[row * rank + r] -= dot * p[row * rank + before]);
            }
            let squares: f64 = (0..side).map(|row| p[row * rank + r].powi(2)).sum();
            let length = squares.sqrt() + 1e-8;
            (0..side).for_each(|row| p[row * rank + r] /= length);
        }
        for k in 0..side {
            for r in 0..rank {
                let products = (0..side).map(|row| matrix[row * side + k] * p[row * rank + r]);
                self.q[k * rank + r] = products.sum();
            }
        }
        let mut result = vec![0.0; side * side];
        for row in 0..side {
            for k in 0..side {
                let products = (0..rank).map(|r| p[row * rank + r] * self.q[k * rank + r]);
                result[row * side + k] = products.sum();
            }
        }
        for error in &mut self.errors {
            error
                .iter_mut()
                .zip(&result)
                .for_each(|(e, sent)| *e -= sent);
        }
        result
    }
}

#[test]
fn batched_power_sgd_gives_what_its_algorithm_gives_in_one_process() {
    const PROCESSES: u32 = 3;
    // One bucket of 24 * 20 + 7 elements: a square of side 23 that has 42 zeros. The other is too small for factors.
    const LENS: [usize; 3] = [480, 7, 5];
    fn value(process: u32, parameter: usize, at: usize, step: u32) -> f32 {
        let mixed = at * 37 + process as usize * 11 + parameter * 5 + step as usize * 3;
        (mixed % 17) as f32 / 8.0 - 1.0
    }
    run(PROCESSES, |world| {
        let gradient = |process: u32, parameter: usize, step: u32| -> Vec<f32> {
            let elements = 0..LENS[parameter];
            elements
                .map(|at| value(process, parameter, at, step))
                .collect()
        };
        let model = vec![
            Parameter::new("matrix", &[24, 20]),
            Parameter::new("vector", &[7]),
            Parameter::new("small", &[5]),
        ];
        for rank in [1, 2] {
            let options = ReducerOptions {
                hook: Some(Box::new(BatchedPowerSgdHook::new(rank, 1).unwrap())),
                buckets: BucketSizes {
                    first: 20,
                    rest: 1 << 20,
                },
                ..ReducerOptions::default()
            };
            let mut reducer = Reducer::new(world.group(), model.clone(), options).unwrap();
            assert_eq!(reducer.buckets(), [vec![2], vec![1, 0]]);
            let mut reference = Batched::new(1, 487, rank, PROCESSES as usize);
            for nth in 0..12 {
                for parameter in (0..3).rev() {
                    let own = gradient(world.rank(), parameter, nth);
                    reducer.ready(parameter, &own).unwrap();
                }
                reducer.finish_in_place().unwrap();
                let mean = |parameter: usize, at: usize| {
                    let all = (0..PROCESSES).map(|p| f64::from(value(p, parameter, at, nth)));
                    all.sum::<f64>() / f64::from(PROCESSES)
                };
                let expected: Vec<f64> = if nth == 0 {
                    let vector = (0..7).map(|at| mean(1, at));
                    vector.chain((0..480).map(|at| mean(0, at))).collect()
                } else {
                    let bucket = |p| [gradient(p, 1, nth), gradient(p, 0, nth)].concat();
                    let buckets: Vec<_> = (0..PROCESSES).map(bucket).collect();
                    reference.step(&buckets)
                };
                let got = [reducer.average(1).unwrap(), reducer.average(0).unwrap()].concat();
                for (at, (&got, expected)) in got.iter().zip(&expected).enumerate() {
                    let off = (f64::from(got) - expected).abs();
                    assert!(off < 1e-3, "step {nth}, {at}: {got} for {expected}");
                }
                for (at, &got) in reducer.average(2).unwrap().iter().enumerate() {
                    let off = (f64::from(got) - mean(2, at)).abs();
                    assert!(off < 1e-6, "step {nth}: {got}");
                }
            }
        }
        assert!(BatchedPowerSgdHook::new(0, 1).is_err());
        world.shutdown().unwrap();
    });
}

#[test]
fn batched_power_sgd_takes_a_bucket_without_elements() {
    run(2, |world| {
        let shapes: [&[&[u64]]; 2] = [&[&[0]], &[&[0], &[64]]];
        for shapes in shapes {
            let model = shapes.iter().map(|shape| Parameter::new("p", shape));
            let options = ReducerOptions {
                hook: Some(Box::new(BatchedPowerSgdHook::new(1, 0).unwrap())),
                ..small_buckets()
            };
            let mut reducer = Reducer::new(world.group(), model.collect(), options).unwrap();
            assert_eq!(reducer.buckets().last(), Some(&vec![0]));
            for _ in 0..2 {
                for (parameter, shape) in shapes.iter().enumerate().rev() {
                    let gradient = vec![1.0; shape[0] as usize];
                    reducer.ready(parameter, &gradient).unwrap();
                }
                reducer.finish_in_place().unwrap();
                assert_eq!(reducer.average(0).map(<[f32]>::len), Some(0));
            }
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn gradients_are_averaged_over_all_ranks_first_and_in_local_groups_later() {
    run(4, |world| {
        let rank = world.rank();
        let pair = rank / 2 * 2;
        let options = GroupOptions::named("pair");
        let given = world.group().new_subgroups(2, &options).unwrap();
        let hooks = [
            (PostLocalSgdHook::adjacent(2, 2), vec![pair, pair + 1]),
            (PostLocalSgdHook::new(&given, 2), vec![pair, pair + 1]),
            (PostLocalSgdHook::alone(2), vec![rank]),
        ];
        for (hook, local) in hooks {
            let mut reducer = with_hook(&world, hook);
            for nth in 0..5 {
                let count_over_all = |world: &World| {
                    let dump = world.snapshot();
                    let world_entries = dump.entries.iter().filter(|entry| entry.group == 0);
                    world_entries
                        .filter(|it| it.op == OpType::AllReduce)
                        .count()
                };
                let before = count_over_all(&world);
                let got = step(&mut reducer, rank, nth);
                let ranks = if nth < 2 {
                    vec![0, 1, 2, 3]
                } else {
                    local.clone()
                };
                for (parameter, got) in got.iter().enumerate() {
                    assert_eq!(got, &mean_over(&ranks, parameter, nth), "step {nth}");
                }
                let buckets = reducer.buckets().len();
                let expected = if nth < 2 { buckets } else { 0 };
                assert_eq!(count_over_all(&world) - before, expected, "step {nth}");
            }
        }
        let mut reducer = with_hook(&world, PostLocalSgdHook::adjacent(3, 100));
        let error = reducer.ready(3, &gradient(rank, 3, 0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let expected = "4 ranks do not divide into groups of 3";
        assert!(error.to_string().contains(expected), "{error}");
        // The step has failed, so the hook may be replaced before `regroup`, although the group still takes operations.
        reducer.set_hook(None).unwrap();
        // The hook has had the memory of the first bucket: nothing more can be sent in this step.
        let error = reducer.ready(2, &gradient(rank, 2, 0)).unwrap_err();
        assert!(error.to_string().contains("call regroup"), "{error}");
        reducer.regroup(world.group()).unwrap();
        for (parameter, got) in step(&mut reducer, rank, 0).iter().enumerate() {
            assert_eq!(got, &mean_over(&[0, 1, 2, 3], parameter, 0));
        }
        world.group().barrier().unwrap();
        world.shutdown().unwrap();
    });
}

/// The models of 4 ranks after each step, computed in one process: local SGD towards a target of each rank, with
/// averages over the ranks that `group` gives for a rank in a step. A rank for which it gives `None` keeps its model.
fn models_of_one_process(
    steps: u32,
    group: impl Fn(u32, u32) -> Option<Vec<u32>>,
) -> Vec<Vec<f32>> {
    let mut models = vec![0.0f32; 4];
    let mut history = Vec::new();
    for nth in 0..steps {
        for (rank, model) in models.iter_mut().enumerate() {
            *model -= 0.25 * (*model - rank as f32 * 8.0);
        }
        let averaged = (0..4).map(|rank| match group(rank, nth) {
            Some(ranks) => {
                let sum: f32 = ranks.iter().map(|&rank| models[rank as usize]).sum();
                sum / ranks.len() as f32
            }
            None => models[rank as usize],
        });
        models = averaged.collect();
        history.push(models.clone());
    }
    history
}

#[test]
fn models_are_averaged_in_the_steps_and_groups_of_one_process() {
    run(4, |world| {
        let group = world.group();
        let rank = world.rank();
        let all = || Some(vec![0, 1, 2, 3]);
        let levels = [
            AveragingLevel { period: 2, size: 2 },
            AveragingLevel { period: 6, size: 4 },
        ];
        let periodic = models_of_one_process(16, |_, nth| {
            (nth >= 3 && (nth - 3) % 4 == 0).then(all).flatten()
        });
        let hierarchical = models_of_one_process(16, |rank, nth| match nth {
            0..3 => None,
            _ if nth % 6 == 0 => all(),
            _ if nth % 2 == 0 => Some(vec![rank / 2 * 2, rank / 2 * 2 + 1]),
            _ => None,
        });
        for (mut averager, expected) in [
            (ModelAverager::periodic(group, 4, 3).unwrap(), periodic),
            (
                ModelAverager::hierarchical(group, &levels, 3).unwrap(),
                hierarchical,
            ),
        ] {
            let (mut a, mut b) = ([0.0f32], [0.0f32; 2]);
            for (nth, expected) in expected.iter().enumerate() {
                assert_eq!(averager.step(), nth as u64);
                let target = rank as f32 * 8.0;
                let parameters = a.iter_mut().chain(&mut b);
                parameters.for_each(|value| *value -= 0.25 * (*value - target));
                averager.average(&mut [&mut a[..], &mut b[..]]).unwrap();
                for value in a.iter().chain(&b) {
                    let expected = expected[rank as usize];
                    assert!(
                        (value - expected).abs() < 1e-4,
                        "{nth}: {value}, {expected}"
                    );
                }
            }
            // As if the model had been saved after three steps.
            averager.set_step(3);
            let is_due = averager.next_group().is_some();
            assert_eq!(is_due, expected[3][0] == expected[3][3]);
        }
        let level = |period, size| AveragingLevel { period, size };
        for levels in [
            vec![],
            vec![level(2, 2)],
            vec![level(0, 4)],
            vec![level(2, 3), level(4, 4)],
            vec![level(4, 2), level(2, 4)],
        ] {
            let refused = ModelAverager::hierarchical(group, &levels, 0);
            let kind = refused.map(|_| ()).unwrap_err().kind();
            assert_eq!(kind, ErrorKind::InvalidArgument, "{levels:?}");
        }
        assert!(ModelAverager::periodic(group, 0, 0).is_err());
        world.shutdown().unwrap();
    });
}

#[test]
fn hooks_that_count_steps_count_anew_in_another_group() {
    run(3, |world| {
        let rank = world.rank();
        let named = GroupOptions::named;
        let pair = (rank < 2).then(|| world.new_group(&[0, 1], &named("pair")).unwrap());
        let alone = world.group().new_subgroups(1, &named("alone")).unwrap();
        let model = vec![Parameter::new("matrix", &[8, 8])];
        let values = |rank: u32, nth: u32| -> Vec<f32> {
            let elements = 0..64;
            elements
                .map(|at| ((at * 37 + rank * 11 + nth) % 16) as f32)
                .collect()
        };
        let hooks: [Box<dyn CommHook>; 4] = [
            Box::new(PowerSgdHook::new(1, 2, &model).unwrap()),
            Box::new(BatchedPowerSgdHook::new(1, 2).unwrap()),
            Box::new(PostLocalSgdHook::adjacent(1, 2)),
            Box::new(PostLocalSgdHook::new(&alone, 2)),
        ];
        for (at, hook) in hooks.into_iter().enumerate() {
            let options = ReducerOptions {
                hook: Some(hook),
                ..ReducerOptions::default()
            };
            let mut reducer = Reducer::new(world.group(), model.clone(), options).unwrap();
            let is_average = |reducer: &mut Reducer, ranks: u32, nth: u32| {
                reducer.ready(0, &values(rank, nth)).unwrap();
                reducer.finish_in_place().unwrap();
                let got = reducer.average(0).unwrap().to_vec();
                let mean = (0..64).map(|at| {
                    let sum: f32 = (0..ranks).map(|rank| values(rank, nth)[at]).sum();
                    sum / ranks as f32
                });
                got.iter()
                    .zip(mean)
                    .all(|(got, mean)| (got - mean).abs() < 1e-3)
            };
            let plain: Vec<bool> = (0..4).map(|nth| is_average(&mut reducer, 3, nth)).collect();
            assert_eq!(plain, [true, true, false, false], "hook {at}");
            let Some(pair) = &pair else {
                continue;
            };
            if at == 3 {
                let error = reducer.regroup(pair).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                assert!(error.to_string().contains("Reducer::set_hook"), "{error}");
                let next = PostLocalSgdHook::alone(2);
                reducer.set_hook(Some(Box::new(next))).unwrap();
            }
            reducer.regroup(pair).unwrap();
            let plain: Vec<bool> = (0..4).map(|nth| is_average(&mut reducer, 2, nth)).collect();
            assert_eq!(plain, [true, true, false, false], "hook {at}");
            reducer.gradient_mut(0).unwrap();
            let error = reducer.set_hook(None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            reducer.mark_ready(0).unwrap();
            reducer.finish_in_place().unwrap();
            reducer.set_hook(None).unwrap();
            assert!(is_average(&mut reducer, 2, 9), "hook {at}");
        }
        world.shutdown().unwrap();
    });
}

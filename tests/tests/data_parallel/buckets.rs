//! Where the buckets of a reducer lie in memory, which are sent late, and that averages are passed on before all
//! buckets have arrived.

use super::trainer::{assert_averages, count, step};
use super::{LENS, gradient, parameters, run, small_buckets};
use rcomm::data_parallel::{
    AllReduceHook, BucketSizes, Delayed, Reducer, ReducerOptions, UnusedParameters,
};
use rcomm::{ErrorKind, GroupOptions, OpType};
use std::time::Duration;

/// The name of the file that is mapped at this address of the process; empty if there is none.
fn mapped_file(address: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let holds = |line: &&str| {
        let range = line
            .split_once(' ')
            .and_then(|(range, _)| range.split_once('-'));
        let range = range.map(|(from, to)| [from, to].map(|it| usize::from_str_radix(it, 16)));
        matches!(range, Some([Ok(from), Ok(to)]) if (from..to).contains(&address))
    };
    let line = maps.lines().find(holds).unwrap_or_default();
    line.split_whitespace()
        .nth(5)
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn buckets_that_are_sent_are_memory_that_other_ranks_map() {
    run(2, |world| {
        let files_after_step = |reducer: &mut Reducer| {
            step(reducer, world.rank(), 1, &[3, 2, 1, 0]);
            assert_averages(reducer, 2, 1);
            let addresses = (0..LENS.len()).map(|at| reducer.average(at).unwrap().as_ptr().addr());
            addresses.map(mapped_file).collect::<Vec<_>>()
        };
        let mut reducer = Reducer::new(world.group(), parameters(), small_buckets()).unwrap();
        let pair = world
            .new_group(&[0, 1], &GroupOptions::named("pair"))
            .unwrap();
        for nth in 0..4 {
            let files = files_after_step(&mut reducer);
            let are_mapped = files
                .iter()
                .all(|file| file.starts_with("/memfd:rcomm-region"));
            assert!(are_mapped, "{nth}: {files:?}");
            if nth == 1 {
                reducer.regroup(&pair).unwrap();
            }
        }
        // A hook is given vectors.
        let options = ReducerOptions {
            hook: Some(Box::new(AllReduceHook)),
            ..small_buckets()
        };
        let mut hooked = Reducer::new(world.group(), parameters(), options).unwrap();
        let files = files_after_step(&mut hooked);
        assert!(
            files.iter().all(|file| !file.contains("rcomm")),
            "{files:?}"
        );
        // A hook that is set later takes vectors, too.
        reducer.set_hook(Some(Box::new(AllReduceHook))).unwrap();
        files_after_step(&mut reducer);
        reducer.set_hook(None).unwrap();
        files_after_step(&mut reducer);
        world.shutdown().unwrap();
    });
}

#[test]
fn delayed_gradients_are_sent_in_one_bucket_behind_that_of_another() {
    run(2, |world| {
        let rank = world.rank();
        for (until, expected) in [
            (Some(3), [vec![3], vec![2, 0], vec![1]]),
            (None, [vec![3], vec![1], vec![2, 0]]),
        ] {
            let options = ReducerOptions {
                buckets: BucketSizes { first: 4, rest: 4 },
                delayed: Delayed {
                    parameters: vec![0, 2],
                    until,
                },
                ..ReducerOptions::default()
            };
            let mut reducer = Reducer::new(world.group(), parameters(), options).unwrap();
            assert_eq!(reducer.buckets(), expected);
            for nth in 0..3 {
                let before = count(&world, OpType::AllReduce);
                let mut sent = Vec::new();
                for parameter in [2, 0, 3, 1] {
                    let values = gradient(rank, parameter, nth);
                    reducer.ready(parameter, &values).unwrap();
                    sent.push(count(&world, OpType::AllReduce) - before);
                }
                let after_third = if until.is_some() { 2 } else { 1 };
                assert_eq!(sent, [0, 0, after_third, 3]);
                reducer.finish_in_place().unwrap();
                assert_averages(&reducer, 2, nth);
            }
        }
        let refusal = |delayed: Delayed, sparse: Vec<usize>| {
            let options = ReducerOptions {
                delayed,
                sparse,
                ..ReducerOptions::<f32>::default()
            };
            let error = Reducer::new(world.group(), parameters(), options).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            error.to_string()
        };
        let delayed = |parameter: usize, until| Delayed {
            parameters: vec![parameter],
            until,
        };
        assert!(refusal(delayed(4, None), vec![]).contains("parameter 4 cannot be delayed"));
        assert!(refusal(delayed(1, Some(1)), vec![]).contains("until itself"));
        assert!(refusal(delayed(1, Some(9)), vec![]).contains("parameter 9 cannot be"));
        assert!(refusal(delayed(1, None), vec![1]).contains("both sparse and delayed"));
        world.shutdown().unwrap();
    });
}

#[test]
fn averages_of_a_bucket_are_passed_on_while_later_buckets_are_under_way() {
    run(2, |world| {
        let rank = world.rank();
        let mut reducer = Reducer::new(world.group(), parameters(), small_buckets()).unwrap();
        let deadline = Duration::from_secs(60);
        for nth in 0..3 {
            let key = format!("test/passed {nth}");
            for parameter in [3, 2, 1, 0] {
                if (rank, parameter) == (1, 0) {
                    world.store().wait(&[&key], deadline).unwrap();
                }
                let values = gradient(rank, parameter, nth);
                reducer.ready(parameter, &values).unwrap();
            }
            let mut passed = Vec::new();
            let each = |parameter: usize, average: &mut [f32]| {
                if passed.is_empty() && rank == 0 {
                    // Rank 1 gives its last gradient only after this.
                    world.store().set(&key, b"1").unwrap();
                }
                passed.push(parameter);
                assert_eq!(average, super::average(2, parameter, nth));
                average.fill(7.0);
            };
            reducer.finish_each(each).unwrap();
            assert_eq!(passed, reducer.buckets().concat());
            assert_eq!(reducer.average(2).unwrap(), [7.0; 12]);
        }

        // Rank 0 uses a and b, rank 1 uses b and c; no rank uses d.
        let options = ReducerOptions {
            unused: UnusedParameters::Find,
            ..small_buckets()
        };
        let mut reducer = Reducer::new(world.group(), parameters(), options).unwrap();
        for parameter in [rank as usize + 1, rank as usize] {
            let values = gradient(rank, parameter, 1);
            reducer.ready(parameter, &values).unwrap();
        }
        let mut passed = Vec::new();
        reducer
            .finish_each(|parameter, _| passed.push(parameter))
            .unwrap();
        assert_eq!(passed, [2, 1, 0]);
        world.shutdown().unwrap();
    });
}

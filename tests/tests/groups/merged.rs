//! Groups of different jobs form a world of their own.

use super::failing;
use rcomm::{
    Config, ErrorKind, GroupOptions, HashStore, ProcessGroup, ReduceOp, Rendezvous, Store, World,
};
use rcomm_tests::world::{Carrier, builder, config};
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Runs two jobs with a store of their own each, `b` with three ranks and `a` with two, a thread for each rank. `body`
/// gets the world and a group of all its ranks in reverse order.
fn two_jobs(body: impl Fn(&World, &ProcessGroup) + Sync) {
    let jobs = [("b", 3), ("a", 2)];
    std::thread::scope(|scope| {
        for (job, size) in jobs {
            let store: Arc<dyn Store> = Arc::new(HashStore::new());
            for rank in 0..size {
                let (store, body) = (store.clone(), &body);
                scope.spawn(move || {
                    let mut config = config(rank, size);
                    failing(&mut config);
                    config.rendezvous = config.rendezvous.take().map(|place| Rendezvous {
                        job: job.to_owned(),
                        ..place
                    });
                    let world = builder(config, store, &Carrier::Cpu).init().unwrap();
                    let reverse: Vec<u32> = (0..size).rev().collect();
                    let group = world.new_group(&reverse, &GroupOptions::named("all"));
                    body(&world, &group.unwrap());
                    world.shutdown().unwrap();
                });
            }
        }
    });
}

#[test]
fn groups_of_different_jobs_form_a_world_of_their_own() {
    let meeting: Arc<dyn Store> = Arc::new(HashStore::new());
    two_jobs(|world, group| {
        group.set_timeout(Duration::from_secs(21));
        for _ in 0..2 {
            let merged = world.merge_remote(group, 5, "both", meeting.clone());
            let merged = merged.unwrap();
            // Job a comes first, and each group keeps its order.
            let expected = match world.place().job.as_str() {
                "a" => 1 - world.rank(),
                _ => 4 - world.rank(),
            };
            assert_eq!((merged.rank(), merged.size()), (expected, 5));
            assert_eq!(merged.place().job, "both");
            assert_eq!(merged.group().timeout(), Duration::from_secs(21));
            let mut sum = [merged.rank()];
            merged.group().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [10]);
            let record = merged.snapshot();
            assert_eq!(record.entries.len(), 1);
            // The old group stays usable, and its record remains that of its own job.
            group.barrier().unwrap();
            let (own, size) = (world.snapshot(), world.size());
            assert_eq!(own.identity.world_size, Some(size));
            merged.shutdown().unwrap();
        }
    });
}

#[test]
fn a_merge_that_cannot_be_is_refused_and_names_the_groups() {
    let meeting: Arc<dyn Store> = Arc::new(HashStore::new());
    let given_up = Barrier::new(5);
    two_jobs(|world, group| {
        let merge = |size, purpose: &str| {
            let merged = world.merge_remote(group, size, purpose, meeting.clone());
            merged.map(drop).unwrap_err()
        };
        let error = merge(5, "");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        // The purpose must not be the name of a job that is merged.
        let error = merge(5, "a");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = error.to_string();
        assert!(
            text.contains("\"a\" is the name of one that is merged"),
            "{text}"
        );
        if world.place().job == "b" {
            // Three ranks come, but the call states four.
            group.set_timeout(Duration::from_millis(200));
            let error = merge(4, "few");
            assert_eq!(error.kind(), ErrorKind::Timeout);
            let text = error.to_string();
            // Other members may look before rank 0 of the group has come.
            let expected = match group.rank() {
                0 => {
                    "of 4 ranks that are to be merged for \"few\", 3 have arrived: ranks 2, 1, 0 of job \"b\""
                }
                _ => "of 4 ranks that are to be merged for \"few\"",
            };
            assert!(text.contains(expected), "{text}");
            group.set_timeout(Duration::from_secs(20));
            let error = merge(2, "many");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let text = error.to_string();
            assert!(text.contains("have 3 members, not 2"), "{text}");
        }
        given_up.wait();
        if world.place().job == "a" {
            // A rank that comes late learns at once that the others have given up, and meets them in its next call.
            let error = merge(5, "few");
            assert_eq!(error.kind(), ErrorKind::Timeout);
            let text = error.to_string();
            assert!(text.contains("the merge was given up"), "{text}");
        }
        // The groups stay usable.
        group.barrier().unwrap();
        let merged = world.merge_remote(group, 5, "few", meeting.clone());
        merged.unwrap().shutdown().unwrap();
    });
}

#[test]
fn a_merged_world_may_have_other_options() {
    let meeting: Arc<dyn Store> = Arc::new(HashStore::new());
    two_jobs(|world, group| {
        let builder = World::builder(Config {
            timeout: Duration::from_secs(17),
            ..Config::clone(world.config())
        });
        let merged = world.merge_remote_with(group, 5, "both", meeting.clone(), builder);
        let merged = merged.unwrap();
        assert_eq!(merged.group().timeout(), Duration::from_secs(17));
        merged.group().barrier().unwrap();
        merged.shutdown().unwrap();
    });
}

/// Joins the world of the job with this name.
fn join(job: &str, rank: u32, size: u32, store: &Arc<dyn Store>) -> World {
    let mut config = config(rank, size);
    failing(&mut config);
    config.rendezvous = config.rendezvous.take().map(|place| Rendezvous {
        job: job.to_owned(),
        ..place
    });
    let builder = builder(config, store.clone(), &Carrier::Cpu);
    builder.init().unwrap()
}

#[test]
fn a_job_that_starts_anew_is_merged_with_one_that_stays() {
    let meeting: Arc<dyn Store> = Arc::new(HashStore::new());
    // Each job, with the number of merges in which each of its starts takes part.
    let jobs: [(&str, &[u32]); 2] = [("a", &[1, 1, 1]), ("b", &[2, 1])];
    let stores = jobs.map(|(_, starts)| {
        let new = |_: &u32| -> Arc<dyn Store> { Arc::new(HashStore::new()) };
        starts.iter().map(new).collect::<Vec<_>>()
    });
    std::thread::scope(|scope| {
        for ((job, starts), stores) in jobs.iter().zip(&stores) {
            for rank in 0..2 {
                let meeting = &meeting;
                scope.spawn(move || {
                    for (&merges, store) in starts.iter().zip(stores) {
                        let world = join(job, rank, 2, store);
                        for _ in 0..merges {
                            let group = world.group();
                            let merged = world.merge_remote(group, 4, "both", meeting.clone());
                            let merged = merged.unwrap();
                            let before = if *job == "a" { 0 } else { 2 };
                            assert_eq!(merged.rank(), before + rank);
                            let mut sum = [merged.rank()];
                            merged.group().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                            assert_eq!(sum, [6]);
                            merged.shutdown().unwrap();
                        }
                        world.shutdown().unwrap();
                    }
                });
            }
        }
    });
}

#[test]
fn a_group_beyond_the_stated_size_is_refused_and_is_merged_by_its_next_call() {
    let meeting: Arc<dyn Store> = Arc::new(HashStore::new());
    let [a, b, c] = ["a", "b", "c"].map(|job| {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        join(job, 0, 1, &store)
    });
    let merge = |world: &World| world.merge_remote(world.group(), 2, "pair", meeting.clone());
    let pair = |one: &World, other: &World| {
        std::thread::scope(|scope| {
            let first = scope.spawn(|| merge(one).unwrap().shutdown().unwrap());
            merge(other).unwrap().shutdown().unwrap();
            first.join().unwrap();
        });
    };
    // The first merge of c times out, and a, which comes late to it, gets the same error. The first call of b belongs
    // to the next merge.
    c.group().set_timeout(Duration::from_millis(200));
    for world in [&c, &a] {
        let error = merge(world).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    }
    c.group().set_timeout(Duration::from_secs(20));
    pair(&a, &b);
    // The second merge is complete without c.
    let error = merge(&c).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("complete without rank 0 of job \"c\""),
        "{text}"
    );
    pair(&c, &a);
    for world in [a, b, c] {
        world.shutdown().unwrap();
    }
}

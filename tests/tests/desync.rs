//! Ranks that do not do the same: every rank gets an error, none gets wrong data.
#![allow(clippy::unwrap_used)]

use rcomm::{Error, ErrorKind, FakeFabric, FakeFault, FakeFaultKind, ReduceOp, World};
use rcomm_tests::world::{Carrier, on_threads};
use std::time::Duration;

/// Runs `body` on two ranks of each backend and returns the errors, by rank.
fn errors(body: impl Fn(&World) -> rcomm::Result<()> + Sync) -> Vec<(&'static str, Vec<Error>)> {
    let carriers = [Carrier::Cpu, Carrier::Fake(FakeFabric::new())];
    let run = |carrier: &Carrier| {
        let short = |config: &mut rcomm::Config| {
            config.timeout = Duration::from_secs(3);
            config.dump_dir = std::env::temp_dir().join("rcomm-desync");
        };
        let errors = on_threads(2, carrier, short, |world| {
            body(&world).expect_err("ranks that disagree")
        });
        (carrier.name(), errors)
    };
    carriers.iter().map(run).collect()
}

fn assert_all(kind: ErrorKind, body: impl Fn(&World) -> rcomm::Result<()> + Sync) {
    for (backend, errors) in errors(body) {
        for (rank, error) in errors.iter().enumerate() {
            assert!(
                error.kind() == kind || error.kind() == ErrorKind::PeerLost,
                "{backend}, rank {rank}: {error}"
            );
            assert_eq!(error.seq(), Some(1), "{backend}, rank {rank}: {error}");
        }
        let told = errors.iter().any(|error| error.kind() == kind);
        assert!(told, "{backend}: {errors:?}");
    }
}

#[test]
fn sizes_that_differ_are_reported() {
    assert_all(ErrorKind::Mismatch, |world| {
        let mut numbers = vec![1.0f32; 8 + world.rank() as usize];
        let result = world.group().all_reduce(&mut numbers, ReduceOp::Sum);
        assert!(numbers.iter().all(|&x| x == 1.0), "{numbers:?}");
        result
    });
}

#[test]
fn types_that_differ_are_reported() {
    assert_all(ErrorKind::Mismatch, |world| match world.rank() {
        0 => world.group().all_reduce(&mut [1.0f32; 8], ReduceOp::Sum),
        _ => world.group().all_reduce(&mut [1i32; 8], ReduceOp::Sum),
    });
}

#[test]
fn operations_that_differ_are_reported() {
    assert_all(ErrorKind::Mismatch, |world| match world.rank() {
        0 => world.group().barrier(),
        _ => world.group().all_reduce(&mut [1i32; 8], ReduceOp::Sum),
    });
}

#[test]
fn roots_that_differ_are_reported() {
    assert_all(ErrorKind::Mismatch, |world| {
        world.group().broadcast(&mut [1u8; 8], world.rank())
    });
}

#[test]
fn a_rank_that_skips_leaves_the_others_waiting_until_they_are_told() {
    let fabric = FakeFabric::new();
    fabric.add_fault(FakeFault {
        rank: 1,
        group: "0".to_owned(),
        seq: 2,
        kind: FakeFaultKind::Skip,
    });
    let dumps = tempfile::tempdir().unwrap();
    let change = |config: &mut rcomm::Config| {
        config.timeout = Duration::from_secs(1);
        config.dump_dir = dumps.path().to_owned();
    };
    let results = on_threads(3, &Carrier::Fake(fabric), change, |world| {
        (0..3).try_for_each(|_| world.group().all_reduce(&mut [1.0f32], ReduceOp::Sum))
    });
    for (rank, result) in results.iter().enumerate() {
        let error = result.as_ref().expect_err("one rank skips");
        let expected = if rank == 1 { 3 } else { 2 };
        assert_eq!(error.seq(), Some(expected), "rank {rank}: {error}");
    }
}

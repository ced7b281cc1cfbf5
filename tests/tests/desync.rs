//! If ranks issue different operations, every rank gets an error and none gets wrong data.
#![allow(clippy::unwrap_used)]

use rcomm::config::TransportChoice;
use rcomm::{Error, ErrorKind, FakeFabric, FakeFault, FakeFaultKind, ReduceOp, World};
use rcomm_tests::world::{Carrier, on_threads};
use std::time::Duration;

const RANKS: u32 = 4;

/// Runs `body` on all ranks, over each transport and on the fake backend. Returns the errors of each run, by
/// rank; panics if a rank gets none.
fn errors(body: impl Fn(&World) -> rcomm::Result<()> + Sync) -> Vec<(&'static str, Vec<Error>)> {
    let fake = Carrier::Fake(FakeFabric::new());
    let carriers = [
        ("shared memory", Carrier::Cpu, TransportChoice::Shm),
        ("TCP", Carrier::Cpu, TransportChoice::Tcp),
        ("fake", fake, TransportChoice::Auto),
    ];
    let run = |(name, carrier, transport): (_, Carrier, _)| {
        let change = |config: &mut rcomm::Config| {
            config.transport = transport;
            config.status_wait = Duration::from_millis(500);
            config.dump_dir = std::env::temp_dir().join("rcomm-desync");
        };
        let errors = on_threads(RANKS, &carrier, change, |world| {
            let rank = world.rank();
            match body(&world) {
                Ok(()) => panic!("{name}: rank {rank} got no error"),
                Err(error) => error,
            }
        });
        (name, errors)
    };
    carriers.into_iter().map(run).collect()
}

/// Asserts that every rank's first operation fails because of the disagreement, and not by a time-out or a lost peer.
fn assert_all_disagree(body: impl Fn(&World) -> rcomm::Result<()> + Sync) {
    for (carrier, errors) in errors(body) {
        for (rank, error) in errors.iter().enumerate() {
            assert_eq!(
                error.kind(),
                ErrorKind::Mismatch,
                "{carrier}, rank {rank}: {error}"
            );
            assert_eq!(error.seq(), Some(1), "{carrier}, rank {rank}: {error}");
        }
    }
}

#[test]
fn sizes_that_differ_are_reported() {
    assert_all_disagree(|world| {
        let odd = usize::from(world.rank() == 2);
        let mut numbers = vec![1.0f32; 8 + odd];
        let result = world.group().all_reduce(&mut numbers, ReduceOp::Sum);
        assert!(numbers.iter().all(|&x| x == 1.0), "{numbers:?}");
        result
    });
}

#[test]
fn sizes_of_long_buffers_that_differ_are_reported() {
    assert_all_disagree(|world| {
        let rank = world.rank() as usize;
        let count = 300_000 - usize::from(rank == 1);
        let input = vec![rank as f64; count];
        let mut all = vec![7.0f64; RANKS as usize * count];
        let result = world.group().all_gather_single(&input, &mut all);
        // A rank's own input may already be in its part of the output; no data of another rank may be there.
        for (owner, part) in all.chunks(count).enumerate() {
            let fits = |&x: &f64| x == 7.0 || (owner == rank && x == rank as f64);
            assert!(
                part.iter().all(fits),
                "rank {rank} holds data of rank {owner}"
            );
        }
        result
    });
}

#[test]
fn types_that_differ_are_reported() {
    assert_all_disagree(|world| match world.rank() {
        0 => world.group().all_reduce(&mut [1.0f32; 8], ReduceOp::Sum),
        _ => world.group().all_reduce(&mut [1i32; 8], ReduceOp::Sum),
    });
}

#[test]
fn operations_that_differ_are_reported() {
    assert_all_disagree(|world| match world.rank() {
        0 => world.group().barrier(),
        _ => world.group().all_reduce(&mut [1i32; 8], ReduceOp::Sum),
    });
}

#[test]
fn roots_that_differ_are_reported() {
    assert_all_disagree(|world| world.group().broadcast(&mut [1u8; 8], world.rank() / 2));
}

#[test]
fn a_message_of_another_size_is_reported_at_both_ends() {
    let body = |world: &World| match world.rank() {
        // The message is so long that the sender waits for its receiver.
        0 => world.group().send(&vec![1.0f32; 1 << 20], 1, 0),
        1 => {
            let mut numbers = vec![7.0f32; 1 << 19];
            let result = world.group().recv(&mut numbers, 0, 0);
            assert!(numbers.iter().all(|&x| x == 7.0), "data was moved");
            result
        }
        _ => Err(Error::new(ErrorKind::Mismatch, "takes no part")),
    };
    for (carrier, errors) in errors(body) {
        for (rank, error) in errors.iter().enumerate() {
            assert_eq!(
                error.kind(),
                ErrorKind::Mismatch,
                "{carrier}, rank {rank}: {error}"
            );
        }
    }
}

#[test]
fn a_sender_that_has_completed_gets_the_size_mismatch_in_its_next_operation() {
    let wait = |world: &World, key| {
        let waited = world.store().wait(&[key], Duration::from_secs(60));
        waited.unwrap();
    };
    let body = |world: &World| match world.rank() {
        0 => {
            // The message is so short that it is sent before the receiver checks it.
            let sent = world.group().send(&[1.0f32; 8], 1, 0);
            wait(world, "test/refused");
            let result = sent.and_then(|()| world.group().barrier());
            world.store().set("test/done", b"1").unwrap();
            result
        }
        1 => {
            let mut numbers = [7.0f32; 4];
            let result = world.group().recv(&mut numbers, 0, 0);
            assert_eq!(numbers, [7.0; 4], "data was moved");
            world.store().set("test/refused", b"1").unwrap();
            wait(world, "test/done");
            result
        }
        _ => {
            // Ranks 2 and 3 leave, which ends rank 0's barrier with the mismatch that rank 1 has reported.
            wait(world, "test/refused");
            Err(Error::new(ErrorKind::Mismatch, "takes no part"))
        }
    };
    for (carrier, errors) in errors(body) {
        assert_eq!(
            errors[1].kind(),
            ErrorKind::Mismatch,
            "{carrier}: {}",
            errors[1]
        );
        let text = errors[0].to_string();
        assert!(text.contains("Float"), "{carrier}: {text}");
    }
}

#[test]
fn if_a_rank_skips_an_operation_every_rank_gets_an_error() {
    let fabric = FakeFabric::new();
    fabric
        .add_fault(FakeFault {
            rank: 1,
            group: "0".to_owned(),
            seq: 2,
            kind: FakeFaultKind::Skip,
        })
        .unwrap();
    let dumps = tempfile::tempdir().unwrap();
    let change = |config: &mut rcomm::Config| {
        config.timeout = Duration::from_secs(3);
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

//! Jobs with the debug checks: before each collective, the ranks compare what they issue and look for NaNs in its
//! input. Messages are not compared: the backend itself refuses one whose size does not fit.
#![allow(clippy::unwrap_used)]

use rcomm::config::{DebugLevel, NanCheck};
use rcomm::{Config, ErrorKind, FakeFabric, GroupOptions, ReduceOp, World};
use rcomm_tests::world::{Carrier, on_threads};
use std::time::Duration;

/// The backends on which the checks are tested.
fn carriers() -> [Carrier; 2] {
    [Carrier::Cpu, Carrier::Fake(FakeFabric::new())]
}

/// Switches both checks on. The ranks may fail: they write dumps outside the working directory, and wait only briefly
/// for the status of the others.
fn with_checks(config: &mut Config) {
    config.debug = DebugLevel::Detail;
    config.nan_check = NanCheck::On;
    config.dump_dir = std::env::temp_dir().join("rcomm-tests-checks");
    config.status_wait = Duration::from_millis(200);
}

/// Runs `body` on all ranks of a world of this size with the checks, once on each backend.
fn run(size: u32, body: impl Fn(World) + Sync) {
    for carrier in carriers() {
        on_threads(size, &carrier, with_checks, &body);
    }
}

/// Asserts that the error contains this text; each rank adds facts of its own.
fn assert_error(error: &rcomm::Error, expected: &str) {
    let message = error.to_string();
    assert!(message.contains(expected), "{message}");
}

#[test]
fn operations_succeed_if_all_ranks_agree() {
    run(3, |world| {
        let group = world.group();
        let rank = world.rank();
        // Blocking and asynchronous operations alternate, in the same order on all ranks.
        for round in 0..10 {
            let work = group.all_reduce_async(vec![rank; 5], ReduceOp::Sum);
            let mut highest = [rank + round];
            group.all_reduce(&mut highest, ReduceOp::Max).unwrap();
            assert_eq!(highest, [2 + round]);
            assert_eq!(work.unwrap().wait().unwrap(), [3; 5]);
        }
        let next = (rank + 1) % 3;
        let sent = group.send_async(vec![rank], next, 0).unwrap();
        let mut got = [9];
        group.recv(&mut got, (rank + 2) % 3, 0).unwrap();
        assert_eq!(got, [(rank + 2) % 3]);
        sent.wait().unwrap();
        world.shutdown().unwrap();
    });
}

#[test]
fn the_rank_with_another_size_is_named_on_all_ranks() {
    run(3, |world| {
        let len = if world.rank() == 1 { 4 } else { 3 };
        let error = world
            .group()
            .all_reduce(&mut vec![1f32; len], ReduceOp::Sum)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert_eq!(error.rank(), Some(1));
        assert_error(
            &error,
            "the ranks disagree: rank 1 issued #1 all_reduce(sum) of Float[4], \
             but ranks 0, 2 issued #1 all_reduce(sum) of Float[3]",
        );
    });
}

#[test]
fn the_rank_with_another_operation_is_named_on_all_ranks() {
    run(3, |world| {
        let group = world.group();
        let error = if world.rank() == 2 {
            let work = group.broadcast_async(vec![1u8; 3], 1).unwrap();
            work.wait().unwrap_err()
        } else {
            let work = group.all_reduce_async(vec![1u8; 3], ReduceOp::Max).unwrap();
            work.wait().unwrap_err()
        };
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        // Only the file is compared: the calls are on different lines of it.
        let file = file!();
        assert_error(
            &error,
            &format!("rank 2 issued #1 broadcast of Byte[3] with root 1 at {file}:"),
        );
        let usual = format!("but ranks 0, 1 issued #1 all_reduce(max) of Byte[3] at {file}:");
        assert_error(&error, &usual);
    });
}

#[test]
fn ranks_with_another_root_or_reduction_are_named() {
    run(2, |world| {
        let rank = world.rank();
        let error = world.group().broadcast(&mut [0u8], rank).unwrap_err();
        assert_error(&error, "rank 1 issued #1 broadcast of Byte[1] with root 1");
    });
    run(2, |world| {
        let op = [ReduceOp::Sum, ReduceOp::Min][world.rank() as usize];
        let error = world.group().all_reduce(&mut [0u8], op).unwrap_err();
        assert_error(&error, "rank 1 issued #1 all_reduce(min) of Byte[1]");
    });
}

#[test]
fn a_message_that_does_not_fit_is_an_error_at_both_ends() {
    // A short message is sent before its receiver can refuse it, a long one is not.
    for count in [10, 100_000] {
        let run = |body: fn(World, usize)| {
            on_threads(2, &Carrier::Cpu, with_checks, |world| body(world, count));
        };
        run(|world, count| {
            let group = world.group();
            if world.rank() == 1 {
                let mut short = vec![0i32; count - 1];
                let error = group.recv(&mut short, 0, 4).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Mismatch);
                assert_eq!(error.rank(), Some(0));
                assert_error(&error, &too_short_error(count));
                world.store().set("test/refused", b"1").unwrap();
                let done = world.store().wait(&["test/done"], Duration::from_secs(30));
                return done.unwrap();
            }
            let error = match group.send(&vec![1i32; count], 1, 4) {
                Err(error) => {
                    assert_eq!((error.kind(), count), (ErrorKind::Mismatch, 100_000));
                    assert_error(
                        &error,
                        "but the receive on rank 1 of the group expects 99999 elements of Int",
                    );
                    error
                }
                Ok(()) => {
                    assert_eq!(count, 10);
                    let refused = world
                        .store()
                        .wait(&["test/refused"], Duration::from_secs(30));
                    refused.unwrap();
                    // The sender gets the error in its next operation of any kind.
                    let error = group.barrier().unwrap_err();
                    assert_error(&error, &too_short_error(count));
                    error
                }
            };
            assert_eq!(error.rank(), Some(1), "{error}");
            world.store().set("test/done", b"1").unwrap();
        });
    }
}

/// The error of a receive that is one element too short for a message of `count` elements.
fn too_short_error(count: usize) -> String {
    let short = count - 1;
    format!(
        "the message with tag 4 from rank 0 of the group has {count} elements of Int, but its receive expects {short} \
         elements of Int"
    )
}

#[test]
fn a_nan_is_refused_on_all_ranks_with_its_rank_and_index() {
    run(2, |world| {
        let mut numbers = [1f32, 2.0, 3.0];
        let group = world.group();
        group.all_reduce(&mut numbers, ReduceOp::Sum).unwrap();
        if world.rank() == 1 {
            numbers[2] = f32::NAN;
        }
        let error = group.all_reduce(&mut numbers, ReduceOp::Sum).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotANumber);
        assert_eq!(error.rank(), Some(1));
        assert_error(
            &error,
            "rank 1 passed a NaN: element 2 of input 0 of #2 all_reduce(sum) of Float[3]",
        );
        // The refused operation wrote nothing.
        assert_eq!(numbers[..2], [2.0, 4.0]);
    });
}

#[test]
fn a_rank_that_does_not_arrive_is_named_before_the_operation_starts() {
    run(2, |world| {
        let group = world.group().within(Duration::from_millis(200));
        if world.rank() == 0 {
            let error = group.barrier().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert_error(&error, "waited for rank 1");
            assert_error(
                &error,
                "while the ranks compared what they were about to do",
            );
            world.store().set("test/done", b"1").unwrap();
        } else {
            let done = world.store().wait(&["test/done"], Duration::from_secs(30));
            done.unwrap();
        }
    });
}

#[test]
fn a_change_of_the_debug_level_applies_to_groups_made_later() {
    let off = |config: &mut Config| {
        with_checks(config);
        config.debug = DebugLevel::Off;
        config.nan_check = NanCheck::Off;
    };
    on_threads(2, &Carrier::Cpu, off, |world| {
        let rank = world.rank();
        let differ = |group: &rcomm::ProcessGroup| {
            let op = if rank == 0 {
                ReduceOp::Max
            } else {
                ReduceOp::Min
            };
            group.all_reduce(&mut [rank], op)
        };
        let make = || world.new_group(&[0, 1], &GroupOptions::default());
        assert_eq!(world.debug_level(), DebugLevel::Off);
        world.set_debug_level(DebugLevel::Detail);
        let compared = make().unwrap();
        world.set_debug_level(DebugLevel::Off);
        let plain = make().unwrap();
        plain.barrier().unwrap();
        let error = differ(&compared).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        plain.barrier().unwrap();
        // A member that makes the group with another level is refused.
        let (store, limit) = (world.store(), Duration::from_secs(30));
        if rank == 0 {
            let _alone = make().unwrap();
            store.set("test/made", b"1").unwrap();
            store.wait(&["test/refused"], limit).unwrap();
        } else {
            store.wait(&["test/made"], limit).unwrap();
            world.set_debug_level(DebugLevel::Detail);
            let error = make().unwrap_err();
            store.set("test/refused", b"1").unwrap();
            assert!(error.to_string().contains("cpu with checks"), "{error}");
        }
    });
}

//! Tests groups and work beyond the operations themselves: splitting, many groups, time-outs, abort, shrinking,
//! callbacks, objects.
#![allow(clippy::unwrap_used)]

mod blocks;
mod elsewhere;
mod ending;
mod keys;
mod lanes;
mod last_handle;
mod merged;
mod monitored_barrier;
mod rejected;
mod rows;
mod symmetric;
mod together;

use rcomm::config::TransportChoice;
use rcomm::{
    Buffer, Config, DeviceKind, ErrorKind, FakeFabric, FakeFault, FakeFaultKind, GroupOptions,
    ReduceOp, WorkStatus, World,
};
use rcomm_recorder::model::FailureKind;
use rcomm_tests::world::{Carrier, on_threads};
use std::sync::mpsc;
use std::time::Duration;

/// Configures groups that are meant to fail: their dumps must not land in the working directory, and a rank waits only
/// briefly for the status of the others.
fn failing(config: &mut Config) {
    config.dump_dir = std::env::temp_dir().join("rcomm-tests-groups");
    config.status_wait = Duration::from_millis(200);
}

/// Runs `body` on all ranks of a world of this size, in groups that may fail.
fn run(size: u32, body: impl Fn(World) + Sync) {
    on_threads(size, &Carrier::Cpu, failing, body);
}

#[test]
fn split_orders_ranks_by_key_and_excludes_ranks_without_a_color() {
    run(5, |world| {
        let rank = world.rank();
        let color = (rank != 4).then_some(rank % 2);
        let options = GroupOptions::named("half");
        let half = world.group().split(color, -i64::from(rank), &options);
        match half.unwrap() {
            None => assert_eq!(rank, 4),
            Some(half) => {
                assert_eq!(half.ranks(), [2 + rank % 2, rank % 2]);
                assert_eq!(half.global_rank(half.rank()), Some(rank));
                let mut sum = [rank];
                half.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [2 + 2 * (rank % 2)]);
                half.destroy().unwrap();
            }
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn a_time_out_of_one_call_aborts_its_group() {
    let change = |config: &mut Config| {
        failing(config);
        // Rank 1 may answer the request for its status late, on a busy machine.
        config.status_wait = Duration::from_secs(60);
    };
    on_threads(2, &Carrier::Cpu, change, |world| {
        if world.rank() == 0 {
            let group = world.group().within(Duration::from_millis(100));
            let error = group.barrier().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert!(error.to_string().contains("not arrived: rank 1"), "{error}");
            let later = world.group().barrier().unwrap_err();
            assert_eq!(later.kind(), ErrorKind::Aborted);
            assert!(later.to_string().contains("aborted before"), "{later}");
            world.store().set("test/done", b"1").unwrap();
        } else {
            // This rank stays until rank 0 has finished its checks.
            let done = world.store().wait(&["test/done"], Duration::from_secs(90));
            done.unwrap();
        }
    });
}

#[test]
fn a_time_out_over_tcp_names_the_absent_rank_before_the_neighbor_that_waits_for_it() {
    const ABSENT: u32 = 2;
    let change = |config: &mut Config| {
        failing(config);
        config.transport = TransportChoice::Tcp;
        config.status_wait = Duration::from_secs(60);
    };
    on_threads(4, &Carrier::Cpu, change, |world| {
        let (group, store, limit) = (world.group(), world.store(), Duration::from_secs(90));
        let (part, all) = (vec![1u8; 1 << 20], vec![0u8; 4 << 20]);
        match world.rank() {
            // In the second round of the exchange of headers, rank 3 waits for rank 1, which waits for the absent rank
            // in the first.
            3 => {
                store.wait(&["test/0", "test/1"], limit).unwrap();
                let group = group.within(Duration::from_millis(300));
                let work = group.all_gather_single_async(part, all).unwrap();
                let error = work.wait().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                assert_eq!(error.ranks(), [ABSENT], "{error}");
                let absent_first = ": rank 2 has not come: waited for rank 1 ";
                assert!(error.to_string().contains(absent_first), "{error}");
                store.set("test/done", b"1").unwrap();
            }
            ABSENT => store.wait(&["test/done"], limit).unwrap(),
            rank => {
                let group = group.within(limit);
                let work = group.all_gather_single_async(part, all).unwrap();
                store.set(&format!("test/{rank}"), b"1").unwrap();
                store.wait(&["test/done"], limit).unwrap();
                group.abort("the test has ended");
                assert!(work.wait().is_err());
            }
        }
    });
}

#[test]
fn an_abort_from_another_thread_ends_a_pending_operation() {
    run(2, |world| {
        if world.rank() == 0 {
            let group = world.group().clone();
            let work = group
                .all_reduce_async(vec![1.0f32; 8], ReduceOp::Sum)
                .unwrap();
            assert!(!work.is_completed());
            let aborted = std::thread::spawn(move || group.abort("enough"));
            let error = work.wait().unwrap_err();
            aborted.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            assert!(error.to_string().contains("enough"), "{error}");
            world.store().set("test/done", b"1").unwrap();
        } else {
            // A rank that leaves would end the work before the abort does.
            let done = world.store().wait(&["test/done"], Duration::from_secs(30));
            done.unwrap();
        }
    });
}

#[test]
fn the_other_ranks_learn_who_aborted_a_group_and_why() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let change = |config: &mut Config| {
            failing(config);
            config.transport = transport;
        };
        on_threads(2, &Carrier::Cpu, change, |world| {
            let group = world.group();
            group.barrier().unwrap();
            let (store, limit) = (world.store(), Duration::from_secs(30));
            if world.rank() == 0 {
                store.wait(&["test/issued"], limit).unwrap();
                group.abort("by hand");
                store.wait(&["test/learned"], limit).unwrap();
                return;
            }
            let work = group.all_reduce_async(vec![1u32; 8], ReduceOp::Sum);
            store.set("test/issued", b"1").unwrap();
            let error = work.unwrap().wait().unwrap_err();
            store.set("test/learned", b"1").unwrap();
            let expected = "rank 0 aborted the group: by hand";
            assert!(
                error.to_string().contains(expected),
                "{transport:?}: {error}"
            );
        });
    }
}

#[test]
fn work_reports_to_waiters_callbacks_and_futures() {
    run(2, |world| {
        let group = world.group();
        let work = group
            .all_reduce_async(vec![1u64; 4], ReduceOp::Sum)
            .unwrap();
        assert_eq!(work.seq(), 1);
        let (sender, receiver) = mpsc::channel();
        work.on_completion(move |result| sender.send(result.is_ok()).unwrap());
        assert!(receiver.recv_timeout(Duration::from_secs(30)).unwrap());
        assert_eq!(work.status(), WorkStatus::Completed);
        assert!(work.is_success() && work.error().is_none());
        assert_eq!(block_on(work).unwrap(), [2; 4]);
        world.shutdown().unwrap();
    });
}

#[test]
fn pending_receives_of_objects_block_no_collective_and_complete_by_shutdown() {
    run(2, |world| {
        let group = world.group();
        if world.rank() == 0 {
            let work = group.recv_object_async::<Vec<u32>>(1, 5).unwrap();
            // The pending receive blocks none of these, though the other rank sends only after all of
            // them.
            let broadcast = group.broadcast_object_async("unsent".to_owned(), 1);
            assert_eq!(broadcast.unwrap().wait().unwrap(), "all");
            group.barrier().unwrap();
            assert_eq!(block_on(work).unwrap(), [1, 2, 3]);
            let last = group.recv_object_async::<u32>(1, 5).unwrap();
            world.shutdown().unwrap();
            assert_eq!(last.wait().unwrap(), 9);
        } else {
            let broadcast = group.broadcast_object_async("all".to_owned(), 1);
            broadcast.unwrap().wait().unwrap();
            group.barrier().unwrap();
            group.send_object(&[1, 2, 3], 0, 5).unwrap();
            group.send_object(&9, 0, 5).unwrap();
            world.shutdown().unwrap();
        }
    });
}

#[test]
fn an_object_of_another_type_is_refused_by_its_receiver_and_the_group_stays_usable() {
    run(2, |world| {
        let group = world.group();
        if world.rank() == 0 {
            group.send_object(&"text", 1, 0).unwrap();
            let unwritable = std::collections::BTreeMap::from([((1, 2), 3)]);
            let error = group.send_object(&unwritable, 1, 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        } else {
            let error = group.recv_object_async::<u32>(0, 0).unwrap().wait();
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            assert!(error.is_recoverable(), "{error}");
            let error = group.recv_object::<u32>(0, 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.to_string().contains(
                "rank 0 of the group gave no value that can be sent: it could not serialize"
            ));
        }
        let mut object = world.rank().to_string();
        group.broadcast_object(&mut object, 0).unwrap();
        assert_eq!(object, "0");
        world.shutdown().unwrap();
    });
}

/// A value whose deserialization panics.
#[derive(serde::Serialize)]
struct Unreadable;

impl<'de> serde::Deserialize<'de> for Unreadable {
    fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        panic!("on purpose")
    }
}

#[test]
fn a_panic_of_the_program_on_a_groups_thread_fails_the_operation_and_names_no_other_rank() {
    run(2, |world| {
        let both = world.new_group(&[0, 1], &GroupOptions::default()).unwrap();
        let work = both.broadcast_object_async(Unreadable, 0).unwrap();
        let done = work.wait();
        if world.rank() == 1 {
            let error = done.map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
            assert!(error.to_string().contains("has panicked"), "{error}");
        }
        world.group().barrier().unwrap();
    });
}

#[test]
fn an_object_longer_than_the_limit_is_refused() {
    run(2, |world| {
        let group = world.group();
        let lengths = [1u64 << 40, u64::MAX - 1, (64 << 20) + 1];
        for len in lengths {
            if world.rank() == 0 {
                group.send(&[len], 1, 0).unwrap();
                continue;
            }
            let error = group.recv_object::<String>(0, 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let expected = format!("rank 0 of the group has {len} bytes, more than 67108864");
            assert!(error.to_string().contains(&expected), "{error}");
        }
        group.barrier().unwrap();
        world.shutdown().unwrap();
    });
}

#[test]
fn an_abort_ends_all_queued_receives_of_objects() {
    run(2, |world| {
        let group = world.group();
        if world.rank() == 1 {
            let done = world.store().wait(&["test/done"], Duration::from_secs(15));
            return done.unwrap();
        }
        let receive = || group.recv_object_async::<u32>(1, 0).unwrap();
        let works = [receive(), receive(), receive()];
        group.abort("enough");
        for work in works {
            let error = work.wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            assert!(error.to_string().contains("enough"), "{error}");
        }
        world.store().set("test/done", b"1").unwrap();
    });
}

/// Waits for a future on the calling thread.
fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    loop {
        match std::pin::Pin::new(&mut future).poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(30)),
        }
    }
}

#[test]
fn an_operation_that_nothing_waits_for_is_aborted_at_its_time_out() {
    let fabric = FakeFabric::new();
    fabric
        .add_fault(FakeFault {
            rank: 0,
            group: "0".to_owned(),
            seq: 1,
            kind: FakeFaultKind::Stall,
        })
        .unwrap();
    let change = |config: &mut Config| {
        failing(config);
        config.timeout = Duration::from_millis(200);
    };
    on_threads(2, &Carrier::Fake(fabric), change, |world| {
        drop(
            world
                .group()
                .all_reduce_async(vec![1u8], ReduceOp::Sum)
                .unwrap(),
        );
        let refusal = rcomm_tests::process::wait_until("the watchdog to abort", || {
            world.group().refusal().cloned()
        });
        assert!(!refusal.is_recoverable(), "{refusal}");
        assert_eq!(refusal.seq(), Some(1), "{refusal}");
    });
}

#[test]
fn extend_timeout_applies_until_the_next_operation_has_ended() {
    run(2, |world| {
        let group = world.group();
        group.set_timeout(Duration::from_secs(9));
        group.extend_timeout(Duration::from_secs(30));
        group.extend_timeout(Duration::from_secs(1));
        assert_eq!(group.timeout_extension(), Duration::from_secs(31));
        group.barrier().unwrap();
        assert_eq!(group.timeout_extension(), Duration::ZERO);
        group.within(Duration::from_secs(8)).barrier().unwrap();
        group.barrier().unwrap();
        let limits: Vec<u64> = world
            .snapshot()
            .entries
            .iter()
            .map(|entry| entry.timeout_ms)
            .collect();
        assert_eq!(limits, [40_000, 8_000, 9_000]);
        world.shutdown().unwrap();
    });
}

#[test]
fn the_status_of_a_group_has_its_time_out() {
    run(2, |world| {
        let options = GroupOptions {
            timeout: Some(Duration::from_secs(7)),
            ..GroupOptions::named("quick")
        };
        let quick = world.new_group(&[0, 1], &options).unwrap();
        let shown = || {
            let dump = world.snapshot();
            let groups = dump.groups.iter();
            let limits = groups.map(|group| group.status.map(|status| status.timeout_ms));
            limits.collect::<Vec<_>>()
        };
        let world_limit = world.group().timeout().as_millis() as u64;
        assert_eq!(quick.status().timeout_ms, 7_000);
        assert_eq!(shown(), [Some(world_limit), Some(7_000)]);
        quick.set_timeout(Duration::from_millis(1500));
        // A handle's own time-out is not the group's.
        quick.within(Duration::from_secs(3)).barrier().unwrap();
        assert_eq!(quick.status().timeout_ms, 1_500);
        let (read, _) = rcomm_recorder::publish::Dump::read(&world.snapshot().to_json()).unwrap();
        assert_eq!(read.groups[1].status.unwrap().timeout_ms, 1_500);
        world.shutdown().unwrap();
    });
}

#[test]
fn the_cpu_backend_registers_only_memory_that_the_group_allocated() {
    run(1, |world| {
        let backend = world.group().backend(DeviceKind::Cpu).unwrap();
        let error = backend
            .register(&Buffer::from_vec(vec![0u8]))
            .err()
            .unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let expected = "backend cpu registers what the group allocated";
        assert!(error.to_string().contains(expected), "{error}");
        let allocated = world.group().allocate::<u8>(1).unwrap();
        let registration = backend.register(&allocated).unwrap();
        backend.deregister(registration).unwrap();
        world.shutdown().unwrap();
    });
}

#[test]
fn sub_groups_are_made_as_listed_and_bad_lists_refused() {
    run(5, |world| {
        let group = world.group();
        let options = GroupOptions::named("listed");
        let refusal = |lists: &[Vec<u32>]| {
            let error = group.new_subgroups_by_enumeration(lists, &options);
            error.unwrap_err().to_string()
        };
        assert!(refusal(&[vec![0, 1], vec![1]]).contains("rank 1 is in the lists"));
        assert!(refusal(&[vec![0, 9]]).contains("rank 9 in list 0 of sub-groups is not a member"));
        assert!(refusal(&[vec![0], vec![]]).contains("list 1 of sub-groups is empty"));
        let lists = [vec![3, 0], vec![1, 4]];
        let part = group
            .new_subgroups_by_enumeration(&lists, &options)
            .unwrap();
        assert_eq!(part.is_none(), world.rank() == 2);
        if let Some(part) = part {
            assert_eq!(part.ranks(), lists[usize::from(part.ranks()[0] == 1)]);
            part.barrier().unwrap();
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn groups_may_be_made_in_another_order_on_each_rank() {
    run(3, |world| {
        let make = |ranks: &[u32], name: &str| {
            let group = world.new_group(ranks, &GroupOptions::named(name));
            group.unwrap()
        };
        // Many groups exist at once, created in this order on one rank and in reverse on the others.
        let mut names: Vec<String> = (0..40).map(|number| format!("group {number}")).collect();
        if world.rank() > 0 {
            names.reverse();
        }
        let groups: Vec<_> = names.iter().map(|name| make(&[0, 1, 2], name)).collect();
        let mut ordered: Vec<_> = groups.iter().collect();
        ordered.sort_by_key(|group| group.name().to_owned());
        for group in ordered {
            let mut sum = [world.rank() + group.name().len() as u32];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [3 + 3 * group.name().len() as u32]);
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn one_rank_may_make_hundreds_of_groups_before_the_others_begin() {
    const GROUPS: u32 = 400;
    run(2, |world| {
        let deadline = Duration::from_secs(120);
        if world.rank() == 1 {
            world.store().wait(&["test/all made"], deadline).unwrap();
        }
        let make = |at| {
            let options = GroupOptions::named(format!("group {at}"));
            world.new_group(&[0, 1], &options).unwrap()
        };
        let groups: Vec<_> = (0..GROUPS).map(make).collect();
        if world.rank() == 0 {
            world.store().set("test/all made", b"1").unwrap();
        }
        for group in &groups {
            let mut sum = [1_u32];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [2]);
        }
        world.shutdown().unwrap();
    });
}

#[test]
#[ignore = "takes a minute or two on a busy machine; .ci/long runs it"]
fn a_host_carries_4096_groups_at_once() {
    const GROUPS: u32 = 4096;
    let change = |config: &mut Config| {
        failing(config);
        config.timeout = Duration::from_secs(240);
    };
    on_threads(2, &Carrier::Cpu, change, |world| {
        let make = |at| {
            let options = GroupOptions::named(format!("group {at}"));
            world.new_group(&[0, 1], &options).unwrap()
        };
        let groups: Vec<_> = (0..GROUPS).map(make).collect();
        for group in &groups {
            let mut sum = [group.rank()];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [1]);
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn a_rank_that_lists_more_members_times_out_and_names_whom_it_waited_for() {
    let change = |config: &mut Config| {
        failing(config);
        config.init_timeout = Duration::from_secs(6);
    };
    on_threads(3, &Carrier::Cpu, change, |world| {
        let options = GroupOptions {
            timeout: Some(Duration::from_millis(300)),
            ..GroupOptions::named("pair")
        };
        if world.rank() < 2 {
            let pair = world.new_group(&[0, 1], &options).unwrap();
            pair.within(Duration::from_secs(20)).barrier().unwrap();
            let done = world.store().wait(&["test/done"], Duration::from_secs(60));
            return done.unwrap();
        }
        let made = world.new_group(&[0, 1, 2], &options);
        let error = made.and_then(|group| group.barrier()).unwrap_err();
        world.store().set("test/done", b"1").unwrap();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("group pair") && text.contains("rank 0"),
            "{text}"
        );
        let noted = world.snapshot().failures;
        let noted = noted.first().expect("the failure is recorded");
        assert_eq!((noted.kind, noted.seen_by), (FailureKind::Timeout, 2));
        assert!(noted.ranks.contains(&0), "{noted:?}");
        assert!(noted.text.starts_with("group pair: "), "{noted:?}");
    });
}

#[test]
fn new_subgroups_makes_groups_of_one_size_from_adjacent_ranks() {
    run(4, |world| {
        let options = GroupOptions::named("pair");
        let pair = world.group().new_subgroups(2, &options).unwrap();
        let first = world.rank() / 2 * 2;
        assert_eq!(pair.ranks(), [first, first + 1]);
        pair.barrier().unwrap();
        let error = world.group().new_subgroups(3, &options).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("4 ranks do not divide into groups of 3"),
            "{error}"
        );
        world.shutdown().unwrap();
    });
}

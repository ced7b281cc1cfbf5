//! Several groups of one world: they are found by name, form a mesh, are shared and merged, and are waited for, timed,
//! aborted and given time-outs at once. A group's hook is called for each operation, and ranks meet by the URL of an
//! init method.

use super::{failing, run};
use rcomm::{
    ErrorKind, GroupOptions, HookedOperation, OpType, OperationHook, ReduceOp, Timing, World,
};
use rcomm_analyzer::{Policy, Verdict, analyze};
use rcomm_tests::process::wait_until;
use rcomm_tests::world::{Carrier, on_threads};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[test]
fn a_mesh_has_a_group_along_each_dimension_described_by_its_coordinates() {
    run(8, |world| {
        let mesh = world
            .device_mesh(&[("pp", 2), ("dp", 2), ("tp", 2)])
            .unwrap();
        let rank = world.rank();
        let (pp, dp, tp) = (rank / 4, rank / 2 % 2, rank % 2);
        let place = |name| mesh.coordinate(name);
        assert_eq!(
            [place("pp"), place("dp"), place("tp")],
            [Some(pp), Some(dp), Some(tp)]
        );
        assert_eq!(mesh.rank_at(&[pp, dp, tp]), Some(rank));
        assert_eq!(mesh.rank_at(&[2, 0, 0]), None);
        assert_eq!(mesh.dimensions().last(), Some(("tp", 2)));
        let group = mesh.group("tp").unwrap();
        assert_eq!(group.desc(), format!("tp of pp {pp}, dp {dp}"));
        assert_eq!(group.ranks(), [rank - tp, rank - tp + 1]);
        let group = mesh.group("pp").unwrap();
        assert_eq!(group.desc(), format!("pp of dp {dp}, tp {tp}"));
        let mut sum = [rank];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [rank % 4 * 2 + 4]);
        let wide = world.mesh_group(&mesh, &["tp", "dp"]).unwrap();
        assert_eq!(wide.desc(), format!("dp+tp of pp {pp}"));
        assert_eq!(wide.size(), 4);
        wide.barrier().unwrap();
        // A reader of this rank's record sees the same description.
        let groups = &world.snapshot().groups;
        let desc = format!("tp of pp {pp}, dp {dp}");
        let has_desc = groups.iter().any(|group| group.info.desc == desc);
        assert!(has_desc, "{groups:?}");
        assert!(mesh.group("cp").is_none());
        for (dimensions, expected) in [
            (vec![("pp", 3), ("tp", 2)], "does not hold 8 ranks"),
            (vec![("a", 4), ("a", 2)], "need different names"),
            (vec![], "needs at least one dimension"),
        ] {
            let error = world.device_mesh(&dimensions).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains(expected), "{error}");
        }
        let error = world.mesh_group(&mesh, &["cp"]).unwrap_err();
        assert!(
            error.to_string().contains("has no dimension \"cp\""),
            "{error}"
        );
        world.shutdown().unwrap();
    });
}

#[test]
fn the_verdict_names_the_group_of_a_mesh_by_its_coordinates() {
    const CULPRIT: u32 = 6;
    let limit = Duration::from_secs(60);
    let dumps = on_threads(8, &Carrier::Cpu, failing, |world| {
        let mesh = world
            .device_mesh(&[("pp", 2), ("dp", 2), ("tp", 2)])
            .unwrap();
        let (tp, dp) = (mesh.group("tp").unwrap(), mesh.group("dp").unwrap());
        let sum =
            |group: &rcomm::ProcessGroup| group.all_reduce_async(vec![1.0f32; 8], ReduceOp::Sum);
        for group in [tp, dp] {
            sum(group).unwrap().wait().unwrap();
        }
        let last = (world.rank() != CULPRIT).then(|| sum(tp).unwrap());
        world.store().barrier("test/issued", 8, limit).unwrap();
        // The `tp` groups without the culprit complete their operations.
        if let Some(last) = last.as_ref().filter(|_| world.rank() / 2 != CULPRIT / 2) {
            last.join().unwrap();
        }
        world.store().barrier("test/pending", 8, limit).unwrap();
        let dump = world.snapshot();
        world.store().barrier("test/recorded", 8, limit).unwrap();
        match last {
            Some(last) => drop(last.wait().unwrap()),
            None => drop(sum(tp).unwrap().wait().unwrap()),
        }
        world.shutdown().unwrap();
        dump
    });
    let policy = Policy {
        overdue: Duration::ZERO,
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    assert_eq!(report.verdict, Verdict::Stuck, "{report:?}");
    let finding = &report.findings[0];
    assert_eq!(finding.culprit_ranks, [CULPRIT]);
    let expected = "rank 6 never issued all_reduce #2 on group tp of pp 1, dp 1";
    assert!(finding.sentence.contains(expected), "{}", finding.sentence);
}

#[test]
fn groups_that_do_not_know_each_other_are_merged() {
    run(4, |world| {
        let half = if world.rank() < 2 { [1, 0] } else { [2, 3] };
        let half = world.new_group(&half, &GroupOptions::default()).unwrap();
        let all = GroupOptions::named("all");
        for _ in 0..2 {
            let merged = world.merge(&half, 4, &all).unwrap();
            assert_eq!((merged.ranks(), merged.desc()), (&[1, 0, 2, 3][..], "all"));
            let mut sum = [world.rank()];
            merged.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [6]);
        }
        let error = world.merge(&half, 4, &GroupOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        if world.rank() < 2 {
            half.set_timeout(Duration::from_millis(200));
            let alone = GroupOptions::named("alone");
            let error = world.merge(&half, 4, &alone).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            let text = error.to_string();
            assert!(
                text.contains("of 4 ranks") && text.contains("2 have arrived"),
                "{text}"
            );
            // The half alone has more members than this call states.
            half.set_timeout(Duration::from_secs(20));
            let few = GroupOptions::named("few");
            let error = world.merge(&half, 1, &few).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(
                error.to_string().contains("have 2 members, not 1"),
                "{error}"
            );
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn durations_are_measured_from_when_timing_is_switched_on_until_it_is_off() {
    run(2, |world| {
        let group = world.group();
        let sum = || {
            let work = group.all_reduce_async(vec![1u32], ReduceOp::Sum).unwrap();
            work.join().unwrap();
            work.duration()
        };
        assert_eq!(sum(), None);
        world.set_timing(Timing::On).unwrap();
        let ran = sum().unwrap();
        assert!(ran > Duration::ZERO, "{ran:?}");
        group.barrier().unwrap();
        world.set_timing(Timing::Off).unwrap();
        assert_eq!(sum(), None);
        let dump = world.snapshot();
        let timed: Vec<bool> = dump
            .entries
            .iter()
            .map(|entry| entry.duration_ms.is_some())
            .collect();
        assert_eq!(timed, [false, true, true, false]);
        world.shutdown().unwrap();
    });
    let fabric = rcomm::FakeFabric::new();
    on_threads(1, &Carrier::Fake(fabric), failing, |world| {
        world.set_timing(Timing::Off).unwrap();
        let error = world.set_timing(Timing::On).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("the backend fake"), "{error}");
        world.shutdown().unwrap();
    });
}

#[test]
fn groups_are_found_by_name_and_shared_by_purpose() {
    run(2, |world| {
        let names = || -> Vec<String> {
            let groups = world.groups();
            groups.iter().map(|group| group.name().to_owned()).collect()
        };
        let data = GroupOptions::named("dp");
        let first = world.shared_group(&[0, 1], &data).unwrap();
        let second = world.shared_group(&[0, 1], &data).unwrap();
        assert_eq!((first.name(), second.name()), ("dp", "dp"));
        let other = world.shared_group(&[1, 0], &data).unwrap();
        assert_ne!(other.ranks(), first.ranks());
        let separate = world.new_group(&[0, 1], &data).unwrap();
        assert_eq!(separate.name(), "dp.2");
        assert_eq!(world.groups().len(), 4);
        let found = world.group_named("dp.2").unwrap();
        assert_eq!(found.ranks(), [0, 1]);
        drop((separate, found));
        assert_eq!(names().iter().filter(|name| *name == "dp.2").count(), 0);
        assert!(world.group_named("tp").is_none());
        // The world keeps a shared group: another part of the program may still ask for it.
        drop((first, second));
        let again = world.shared_group(&[0, 1], &data).unwrap();
        again.barrier().unwrap();
        assert_eq!(again.name(), "dp");
        again.destroy().unwrap();
        let new = world.shared_group(&[0, 1], &data).unwrap();
        assert_eq!(new.name(), "dp.3");
        new.barrier().unwrap();
        world.shutdown().unwrap();
    });
}

#[test]
fn time_outs_and_aborts_apply_to_all_groups_at_once() {
    run(2, |world| {
        let group = world
            .new_group(&[0, 1], &GroupOptions::named("dp"))
            .unwrap();
        let timeout = Duration::from_secs(11);
        world.set_timeouts(timeout);
        world.extend_timeouts(Duration::from_secs(5));
        for group in [&group, world.group()] {
            assert_eq!(group.timeout(), timeout);
            assert_eq!(group.timeout_extension(), Duration::from_secs(5));
            group.barrier().unwrap();
        }
        // Rank 0 aborts once both ranks have come to the last barrier.
        if world.rank() == 0 {
            world.abort_groups("the program ends");
        }
        for group in [&group, world.group()] {
            let error = wait_until("the abort", || group.barrier().err());
            assert!(error.to_string().contains("the program ends"), "{error}");
        }
    });
}

#[test]
fn a_rank_waits_for_all_pending_operations_of_all_groups() {
    run(2, |world| {
        let group = world
            .new_group(&[0, 1], &GroupOptions::named("dp"))
            .unwrap();
        world.wait_for_pending(Duration::ZERO).unwrap();
        if world.rank() == 0 {
            let receive = group.recv_async(vec![0u8; 3], 1, 0).unwrap();
            let sum = world
                .group()
                .all_reduce_async(vec![1.0f32], ReduceOp::Sum)
                .unwrap();
            let error = world
                .wait_for_pending(Duration::from_millis(20))
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            let text = error.to_string();
            assert!(
                text.contains("1 in 0") && text.contains("1 in dp"),
                "{text}"
            );
            let oldest = "the oldest is recv #1 on group dp, issued ";
            assert!(text.contains(oldest), "{text}");
            assert_eq!((group.pending(), world.group().pending()), (1, 1));
            world.store().set("test/go", b"").unwrap();
            world.wait_for_pending(Duration::from_secs(20)).unwrap();
            assert!(receive.is_success() && sum.is_success());
            assert_eq!(receive.wait().unwrap(), [1, 2, 3]);
        } else {
            world
                .store()
                .wait(&["test/go"], Duration::from_secs(20))
                .unwrap();
            group.send(&[1u8, 2, 3], 0, 0).unwrap();
            world
                .group()
                .all_reduce(&mut [1.0f32], ReduceOp::Sum)
                .unwrap();
        }
        world.shutdown().unwrap();
    });
}

/// Starts two ranks that meet at a URL, and checks a sum over both.
fn meet(url: &str) {
    std::thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let config = rcomm::Config {
                    rendezvous: None,
                    ..rcomm_tests::world::config(rank, 2)
                };
                let builder = World::builder(config).init_method(url, Some(rank), Some(2));
                let world = builder.unwrap().init().unwrap();
                let mut sum = [world.rank()];
                world.group().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!((sum, world.size()), ([1], 2));
                world.shutdown().unwrap();
            });
        }
    });
}

#[test]
fn ranks_meet_at_an_address_or_in_a_file() {
    meet(&format!(
        "tcp://127.0.0.1:{}",
        rcomm_tests::process::free_port()
    ));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meet");
    meet(&format!("file://{}", path.display()));
    wait_until("the last user to remove the file", || {
        (!path.exists()).then_some(())
    });
    let builder = || World::builder(rcomm::Config::default());
    let error = builder()
        .init_method("tcp://node0:1", None, Some(2))
        .err()
        .unwrap();
    assert!(error.to_string().contains("needs a rank"), "{error}");
}

/// Notes the beginnings and ends of operations as lines of text.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl OperationHook for Log {
    fn begun(&self, operation: &HookedOperation<'_>) {
        assert!(operation.record_id > 0 && operation.timeout > Duration::ZERO);
        self.note("begun", operation, None);
    }

    fn ended(&self, operation: &HookedOperation<'_>, error: Option<&rcomm::Error>) {
        self.note("ended", operation, error);
    }
}

impl Log {
    fn note(&self, event: &str, operation: &HookedOperation<'_>, error: Option<&rcomm::Error>) {
        let HookedOperation { group, op, seq, .. } = operation;
        let error = error.map_or(String::new(), |error| format!(": {:?}", error.kind()));
        self.0
            .lock()
            .unwrap()
            .push(format!("{event} {op} #{seq} of {group}{error}"));
    }

    fn has(&self, line: &str) -> bool {
        self.0.lock().unwrap().iter().any(|noted| noted == line)
    }
}

#[test]
fn a_hook_is_called_when_each_operation_begins_and_ends() {
    run(2, |world| {
        let group = world
            .new_group(&[0, 1], &GroupOptions::named("dp"))
            .unwrap();
        let log = Arc::new(Log::default());
        group.set_hook(log.clone()).unwrap();
        assert!(group.set_hook(log.clone()).is_err());
        group.barrier().unwrap();
        let sum = group.all_reduce_async(vec![1u32], ReduceOp::Sum).unwrap();
        sum.wait().unwrap();
        let objects = group.all_gather_object(&world.rank()).unwrap();
        assert_eq!(objects, [0, 1]);
        group.coalesce(|_| {}).unwrap();
        let (other, this_rank) = (1 - group.rank(), group.rank());
        let sent = group.send_async(vec![this_rank], other, 0).unwrap();
        group.recv(&mut [0u32], other, 0).unwrap();
        sent.wait().unwrap();
        let count = |event: &str| {
            let seen = log.0.lock().unwrap();
            seen.iter().filter(|line| line.starts_with(event)).count()
        };
        // A caller may see the end of its operation before the hook does.
        wait_until("all ends", || (count("ended") == 5).then_some(()));
        let seen = log.0.lock().unwrap().clone();
        assert_eq!(count("begun"), 5, "{seen:?}");
        assert_eq!(
            seen[..2],
            ["begun barrier #1 of dp", "ended barrier #1 of dp"]
        );
        for event in ["begun", "ended"] {
            assert!(log.has(&format!("{event} all_reduce #2 of dp")), "{seen:?}");
        }
        // The hook also gets the error with which an operation ends.
        let broken = group.recv_async(vec![0u32], other, 9).unwrap();
        let (store, limit) = (world.store(), Duration::from_secs(20));
        store.barrier("test/issued", 2, limit).unwrap();
        group.abort("by hand");
        assert!(broken.wait().is_err());
        let last = wait_until("the end", || {
            let seen = log.0.lock().unwrap();
            seen.iter().find(|line| line.contains("Aborted")).cloned()
        });
        assert!(
            last.starts_with(&format!("ended {} #3", OpType::Recv.name())),
            "{last}"
        );
    });
}

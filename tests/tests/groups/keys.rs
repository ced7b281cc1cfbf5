//! Groups, merges and agreements that are over leave no keys in the job's store, so that a job of many days does not
//! fill it.

use super::failing;
use rcomm::config::TransportChoice;
use rcomm::{Config, ErrorKind, GroupOptions, HashStore, MissingRanks, ReduceOp, Store, World};
use rcomm_tests::process::wait_until;
use rcomm_tests::world::{Carrier, on_threads};
use std::sync::Arc;
use std::time::Duration;

/// The number of groups. Shared memory holds agreements for fewer, so the ranks agree on the last groups in the store.
const MANY: usize = 700;
/// The number of groups that are made before keys are counted: the first ones bring the keys that the world needs.
const FIRST: usize = 10;

/// Makes groups, uses each and destroys it.
fn make_and_destroy(world: &World, count: usize) {
    let options = GroupOptions::named("many");
    for nth in 0..count {
        let made = match nth % 5 {
            0 => world.group().split(Some(0), 0, &options),
            _ => world.new_group(&[0, 1, 2], &options).map(Some),
        };
        let group = made.unwrap().unwrap();
        let mut sum = [1_u32];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [3]);
        group.monitored_barrier(MissingRanks::All).unwrap();
        group.destroy().unwrap();
    }
}

/// The keys of groups in the job's store.
fn keys(world: &World) -> Vec<String> {
    let mut keys = world.store().list_keys().unwrap();
    keys.retain(|key| key.contains("/group/"));
    keys
}

#[test]
fn groups_that_are_gone_leave_no_key_in_the_store() {
    for (transport, count) in [(TransportChoice::Tcp, 60), (TransportChoice::Shm, MANY)] {
        let change = |config: &mut Config| {
            failing(config);
            config.transport = transport;
        };
        on_threads(3, &Carrier::Cpu, change, |world| {
            make_and_destroy(&world, FIRST);
            world.group().barrier().unwrap();
            let before = keys(&world);
            world.group().barrier().unwrap();
            make_and_destroy(&world, count);
            world.group().barrier().unwrap();
            let after = keys(&world);
            let added: Vec<_> = after.iter().filter(|key| !before.contains(key)).collect();
            assert!(added.is_empty(), "{transport:?}: {added:?}");
            world.group().barrier().unwrap();
            world.shutdown().unwrap();
        });
    }
}

/// The keys of merges, but for those of the worlds that they made, and for one number of each purpose and caller.
fn merge_keys(keys: Vec<String>) -> Vec<String> {
    let is_of_round = |key: &String| {
        let end = key.rsplit('/').next().unwrap_or_default();
        key.contains("merge/") && ["list", "count", "whole", "read"].contains(&end)
    };
    let is_of_world = |key: &String| key.contains("/world/");
    let mut keys = keys;
    keys.retain(|key| is_of_round(key) && !is_of_world(key));
    keys
}

#[test]
fn merges_leave_no_keys_once_their_members_have_left_them() {
    let meeting: Arc<dyn Store> = Arc::new(HashStore::new());
    on_threads(4, &Carrier::Cpu, failing, |world| {
        let half = if world.rank() < 2 { [0, 1] } else { [2, 3] };
        let half = world.new_group(&half, &GroupOptions::default()).unwrap();
        let all = GroupOptions::named("all");
        // One half gives up the first merge of each kind, and the other half learns of it.
        let (brief, usual) = (Duration::from_millis(200), Duration::from_secs(20));
        for turn in [0, 2] {
            if world.rank() / 2 * 2 == turn {
                half.set_timeout(if turn == 0 { brief } else { usual });
                let error = world.merge(&half, 4, &all).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                let merged = world.merge_remote(&half, 4, "all", meeting.clone());
                let error = merged.map(drop).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                half.set_timeout(usual);
            }
            world.group().barrier().unwrap();
        }
        let left = merge_keys(world.store().list_keys().unwrap());
        assert!(!left.is_empty());
        world.group().barrier().unwrap();
        for _ in 0..2 {
            world.merge(&half, 4, &all).unwrap().destroy().unwrap();
            let merged = world.merge_remote(&half, 4, "all", meeting.clone());
            merged.unwrap().shutdown().unwrap();
        }
        world.group().barrier().unwrap();
        for store in [world.store(), &meeting] {
            let left = merge_keys(store.list_keys().unwrap());
            assert!(left.is_empty(), "{left:?}");
        }
        // A merge that others have completed is refused at once, though its keys are gone.
        if world.rank() == 0 {
            let alone = world.new_group(&[0], &GroupOptions::default()).unwrap();
            let error = world.merge(&alone, 4, &all).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            let text = error.to_string();
            assert!(
                text.contains("complete without this group, rank 0"),
                "{text}"
            );
            let left = merge_keys(world.store().list_keys().unwrap());
            assert!(left.is_empty(), "{left:?}");
        }
        world.group().barrier().unwrap();
        world.shutdown().unwrap();
    });
}

/// The keys of agreements of this kind, but for the one that remains of each group.
fn agreement_keys(world: &World, kind: &str) -> Vec<String> {
    let mut keys = world.store().list_keys().unwrap();
    keys.retain(|key| key.contains(&format!("/{kind}/")) && !key.ends_with("/over"));
    keys
}

#[test]
fn agreements_on_the_remaining_members_leave_no_keys_and_refuse_a_member_that_comes_later() {
    on_threads(3, &Carrier::Cpu, failing, |world| {
        let (rank, usual) = (world.rank(), Duration::from_secs(60));
        let meet = || world.group().barrier().unwrap();
        let none_left = |kind| {
            meet();
            let left = agreement_keys(&world, kind);
            assert!(left.is_empty(), "{left:?}");
            meet();
        };
        let three = world
            .new_group(&[0, 1, 2], &GroupOptions::default())
            .unwrap();
        // Rank 2 comes when the others have agreed without it.
        match rank {
            0 => assert_eq!(three.find_absent(usual).unwrap(), [2]),
            1 => {
                wait_until("rank 0 to wait", || {
                    let keys = agreement_keys(&world, "absent");
                    keys.iter()
                        .any(|key| key.ends_with("absent/1/0"))
                        .then_some(())
                });
                let soon = Duration::from_millis(100);
                assert_eq!(three.find_absent(soon).unwrap(), [2]);
            }
            _ => {}
        }
        none_left("absent");
        if rank == 2 {
            let error = three.find_absent(usual).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        }
        none_left("absent");
        assert!(three.find_absent(usual).unwrap().is_empty());
        none_left("absent");

        // Ranks 0 and 1 disagree at first.
        let options = GroupOptions::default();
        meet();
        if rank < 2 {
            let lists: [&[u32]; 2] = [&[2], &[]];
            let brief = three.within(Duration::from_millis(100));
            let failed = brief.shrink(lists[rank as usize], &options);
            let kind = failed.map(drop).unwrap_err().kind();
            assert!(
                [ErrorKind::Timeout, ErrorKind::Mismatch].contains(&kind),
                "{kind:?}"
            );
        }
        meet();
        assert!(!agreement_keys(&world, "shrink").is_empty());
        meet();
        if rank < 2 {
            let two = three.shrink(&[2], &options).unwrap();
            assert_eq!(two.ranks(), [0, 1]);
            two.barrier().unwrap();
        }
        none_left("shrink");
        if rank == 2 {
            for _ in 0..2 {
                let error = three.shrink(&[1], &options).map(drop).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                assert!(error.to_string().contains("called too late"), "{error}");
            }
        }
        none_left("shrink");
        world.shutdown().unwrap();
    });
}

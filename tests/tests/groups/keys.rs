//! Groups that are gone leave no keys in the job's store, so that a job of many days does not fill it.

use super::failing;
use rcomm::config::TransportChoice;
use rcomm::{Config, ErrorKind, GroupOptions, HashStore, MissingRanks, ReduceOp, Store, World};
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
    let of_worlds = |key: &String| key.contains("/world/");
    let mut keys = keys;
    keys.retain(|key| is_of_round(key) && !of_worlds(key));
    keys
}

#[test]
fn merges_leave_no_keys_once_their_members_have_left_them() {
    let meeting: Arc<dyn Store> = Arc::new(HashStore::new());
    on_threads(4, &Carrier::Cpu, failing, |world| {
        let half = if world.rank() < 2 { [0, 1] } else { [2, 3] };
        let half = world.new_group(&half, &GroupOptions::default()).unwrap();
        let all = GroupOptions::named("all");
        // One half gives the first merge of each kind up, and the other learns it.
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
            assert!(text.contains("complete without this group, [0]"), "{text}");
            let left = merge_keys(world.store().list_keys().unwrap());
            assert!(left.is_empty(), "{left:?}");
        }
        world.group().barrier().unwrap();
        world.shutdown().unwrap();
    });
}

//! Groups that are gone leave no keys in the job's store, so that a job of many days does not fill it.

use super::failing;
use rcomm::config::TransportChoice;
use rcomm::{Config, GroupOptions, MissingRanks, ReduceOp, World};
use rcomm_tests::world::{Carrier, on_threads};

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

//! Backends are warned of a failure that another rank has reported.

use super::failing;
use rcomm::backend::GroupContext;
use rcomm::config::DebugLevel;
use rcomm::{Config, ErrorKind, FakeFabric, GroupOptions, HashStore, World};
use rcomm_tests::hooked::{self, Hooks};
use rcomm_tests::process::wait_until;
use rcomm_tests::world;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The descriptions of the groups whose backends were warned, in the order of the warnings.
type Warned = Arc<Mutex<Vec<String>>>;

/// Notes the warnings that another rank has reported a failure.
struct Warnable {
    group: String,
    warned: Warned,
}

impl Hooks for Warnable {
    fn failed_elsewhere(&self) {
        self.warned.lock().unwrap().push(self.group.clone());
    }
}

/// Rank 0 waits in vain for rank 1 in one of two groups. Asserts that rank 1's backend of this group, and no other, is
/// warned.
fn fail_in_one_group(debug: DebugLevel) {
    let (store, fabric) = (Arc::new(HashStore::new()), FakeFabric::new());
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, fabric) = (store.clone(), fabric.clone());
            scope.spawn(move || {
                let mut config = Config {
                    backend: format!("cpu:{}", hooked::NAME),
                    debug,
                    ..world::config(rank, 2)
                };
                failing(&mut config);
                let warned = Warned::default();
                let for_factory = warned.clone();
                let world = World::builder(config)
                    .store(store)
                    .backend(move |world| {
                        let make = move |group: &GroupContext| Warnable {
                            group: group.info.desc.clone(),
                            warned: for_factory.clone(),
                        };
                        Ok(hooked::factory(fabric.factory(world.rank), make))
                    })
                    .init()
                    .unwrap();
                let make = |name| {
                    world
                        .new_group(&[0, 1], &GroupOptions::named(name))
                        .unwrap()
                };
                let (good, bad) = (make("good"), make("bad"));
                good.barrier().unwrap();
                if rank == 0 {
                    let error = bad.within(Duration::from_millis(500)).barrier();
                    assert_eq!(error.unwrap_err().kind(), ErrorKind::Timeout);
                } else {
                    wait_until("the warning", || {
                        (!warned.lock().unwrap().is_empty()).then_some(())
                    });
                }
                world.store().add("test/seen", 1).unwrap();
                let seen = || world.store().add("test/seen", 0).unwrap();
                wait_until("the other rank's part", || (seen() == 2).then_some(()));
                let warned = warned.lock().unwrap().clone();
                let expected: &[&str] = if rank == 0 { &[] } else { &["bad"] };
                assert_eq!(warned, expected, "rank {rank}");
            });
        }
    });
}

#[test]
fn backends_of_the_group_that_failed_on_another_rank_are_warned() {
    fail_in_one_group(DebugLevel::Off);
}

#[test]
fn a_backend_that_compares_what_ranks_issue_passes_the_warning_on() {
    fail_in_one_group(DebugLevel::Detail);
}

//! What backends learn of a failure that another rank has reported.

use super::failing;
use rcomm::backend::{AbortReason, Call, GroupContext, Observer};
use rcomm::config::DebugLevel;
use rcomm::{
    Backend, BackendFactory, Config, Deadline, DeviceKind, ErrorKind, FakeFabric, GroupOptions,
    HashStore, Op, Pending, Result, World,
};
use rcomm_tests::process::wait_until;
use rcomm_tests::world;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The descriptions of the groups whose backends were warned, in the order of the warnings.
type Warned = Arc<Mutex<Vec<String>>>;

/// A backend that notes the warnings that another rank has reported a failure, and passes all else on.
struct Warnable {
    inner: Arc<dyn Backend>,
    group: String,
    warned: Warned,
}

struct WarnableFactory {
    inner: Arc<dyn BackendFactory>,
    warned: Warned,
}

impl BackendFactory for WarnableFactory {
    fn name(&self) -> &'static str {
        "warnable"
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(Warnable {
            group: group.info.desc.clone(),
            inner: self.inner.connect(group, deadline)?,
            warned: self.warned.clone(),
        }))
    }
}

impl Backend for Warnable {
    fn name(&self) -> &'static str {
        "warnable"
    }

    fn issue(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>> {
        self.inner.issue(op, call, observer)
    }

    fn failed_elsewhere(&self) {
        self.warned.lock().unwrap().push(self.group.clone());
    }

    fn abort(&self, reason: &AbortReason) {
        self.inner.abort(reason);
    }

    fn shutdown(&self, deadline: Deadline) -> Result<()> {
        self.inner.shutdown(deadline)
    }
}

/// Rank 0 waits in vain for rank 1 in one of two groups.
fn fail_in_one_group(debug: DebugLevel) {
    let (store, fabric) = (Arc::new(HashStore::new()), FakeFabric::new());
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, fabric) = (store.clone(), fabric.clone());
            scope.spawn(move || {
                let mut config = Config {
                    backend: "cpu:warnable".to_owned(),
                    debug,
                    ..world::config(rank, 2)
                };
                failing(&mut config);
                let warned = Warned::default();
                let for_factory = warned.clone();
                let world = World::builder(config)
                    .store(store)
                    .backend(move |world| {
                        Ok(Arc::new(WarnableFactory {
                            inner: fabric.factory(world.rank),
                            warned: for_factory,
                        }))
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

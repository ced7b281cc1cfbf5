//! Worlds that end, or are made anew, while the program still works with their groups.

use super::{failing, run};
use rcomm::backend::GroupContext;
use rcomm::{
    Backend, BackendFactory, Config, Deadline, DeviceKind, ErrorKind, FakeFabric, GroupOptions,
    HashStore, OperationHook, Result, World,
};
use rcomm_tests::world::{Carrier, builder, config};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// A factory whose groups with the purpose `late` are not made before the test says so.
struct Slow {
    inner: Arc<dyn BackendFactory>,
    begun: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl BackendFactory for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn device(&self) -> DeviceKind {
        self.inner.device()
    }

    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        if group.info.desc == "late" {
            self.begun.send(()).unwrap();
            self.go_on.lock().unwrap().recv_timeout(LIMIT).unwrap();
        }
        self.inner.connect(group, deadline)
    }
}

#[test]
fn a_group_that_is_made_while_its_world_ends_is_refused() {
    let ((begun, has_begun), (go, go_on)) = (channel(), channel());
    let config = Config {
        backend: "slow".to_owned(),
        ..config(0, 1)
    };
    let fabric = FakeFabric::new();
    let store = Arc::new(HashStore::new());
    let world = World::builder(config)
        .store(store)
        .backend(move |world| -> Result<Arc<dyn BackendFactory>> {
            Ok(Arc::new(Slow {
                inner: fabric.factory(world.rank),
                begun,
                go_on: Mutex::new(go_on),
            }))
        })
        .init()
        .unwrap();
    let group = world.group().clone();
    let made = std::thread::spawn(move || {
        let late = group.new_subgroups(1, &GroupOptions::named("late"));
        let error = late.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        assert!(
            error.to_string().contains("no group can be made"),
            "{error}"
        );
    });
    has_begun.recv_timeout(LIMIT).unwrap();
    world.shutdown().unwrap();
    go.send(()).unwrap();
    made.join().unwrap();
}

/// A hook that asks for another shared group when its own group ends.
struct AsksAtTheEnd {
    world: Weak<World>,
    asked: Sender<ErrorKind>,
}

impl OperationHook for AsksAtTheEnd {}

impl Drop for AsksAtTheEnd {
    fn drop(&mut self) {
        let world = self.world.upgrade().unwrap();
        let refused = world.shared_group(&[7], &GroupOptions::named("none"));
        self.asked.send(refused.unwrap_err().kind()).unwrap();
    }
}

#[test]
fn a_shared_group_that_ends_may_ask_for_another() {
    let (done, is_done) = channel();
    let ask = move || {
        let (asked, answer) = channel();
        let store = Arc::new(HashStore::new());
        let mut config = config(0, 1);
        failing(&mut config);
        let world = builder(config, store, &Carrier::Cpu).init().unwrap();
        let world = Arc::new(world);
        let group = world.shared_group(&[0], &GroupOptions::named("a")).unwrap();
        let hook = AsksAtTheEnd {
            world: Arc::downgrade(&world),
            asked,
        };
        group.set_hook(Arc::new(hook)).unwrap();
        group.abort("it is not used any more");
        drop(group);
        // This finds that the group was aborted, and drops the last handle.
        world.shared_group(&[0], &GroupOptions::named("a")).unwrap();
        done.send(answer.recv_timeout(LIMIT).unwrap()).unwrap();
    };
    let asking = std::thread::spawn(ask);
    let kind = is_done.recv_timeout(2 * LIMIT).unwrap();
    assert_eq!(kind, ErrorKind::InvalidArgument);
    asking.join().unwrap();
}

#[test]
fn ranks_that_disagreed_on_a_new_world_make_the_next_one_together() {
    run(2, |world| {
        let mut world = world;
        let rank = world.rank();
        // The rank that comes first waits for the other, which wants another size and learns that at once.
        let brief = World::builder(Config {
            init_timeout: Duration::from_millis(500),
            ..world.config().clone()
        });
        let error = world.grow_with(&[], 2 + rank, brief).unwrap_err();
        let expected = [ErrorKind::Mismatch, ErrorKind::Rendezvous];
        assert!(expected.contains(&error.kind()), "{error}");
        world.group().barrier().unwrap();
        world.grow(&[], 2).unwrap();
        assert_eq!(world.place().attempt, 2);
        world.group().barrier().unwrap();
        world.shutdown().unwrap();
    });
}

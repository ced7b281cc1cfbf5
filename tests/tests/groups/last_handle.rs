//! The watchdog, a loop over all groups, or a handle of an operation may drop the last reference to a group whose
//! backend takes long to end; a callback of the watchdog may drop the world itself.

use super::failing;
use rcomm::backend::GroupContext;
use rcomm::{Config, FakeFabric, GroupOptions, HashStore, ReduceOp, Store, World};
use rcomm_tests::hooked::{self, Hooks};
use rcomm_tests::process::wait_until;
use rcomm_tests::world::{self, Carrier, on_threads};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

/// A time-out that is reached only if there is a fault.
const LONG: Duration = Duration::from_secs(60);

/// The name of the group whose backend takes long to be dropped.
const SLOW: &str = "slow";

/// Sends the name of the thread that drops a slow backend, and receives a message when that thread may go on.
type Ends = (Sender<String>, Receiver<()>);

/// Hooks of a backend. If they have channels, their drop sends the name of its thread, and waits until it may go on.
struct Slow(Option<Mutex<Ends>>);

impl Drop for Slow {
    fn drop(&mut self) {
        if let Some(ends) = &self.0 {
            let (ended, go_on) = &*ends.lock().unwrap();
            let thread = std::thread::current();
            let _ = ended.send(thread.name().unwrap_or_default().to_owned());
            let _ = go_on.recv_timeout(LONG);
        }
    }
}

impl Hooks for Slow {}

#[test]
fn a_group_that_the_watchdog_holds_last_does_not_hold_it_up() {
    let fabric = FakeFabric::new();
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let (ended, has_ended) = channel();
    let (go_on, may_go_on) = channel();
    let ends = Mutex::new(Some((ended, may_go_on)));
    let world = |rank| {
        let config = Config {
            backend: format!("cpu:{}", hooked::NAME),
            ..world::config(rank, 2)
        };
        let (inner, store) = (fabric.factory(rank), store.clone());
        let ends = (rank == 0).then(|| ends.lock().unwrap().take()).flatten();
        let builder = World::builder(config).store(store);
        let ends = Mutex::new(ends);
        let make = move |group: &GroupContext| {
            let is_slow = group.info.desc == SLOW;
            Slow(
                is_slow
                    .then(|| ends.lock().unwrap().take())
                    .flatten()
                    .map(Mutex::new),
            )
        };
        let factory = move |_: &_| Ok(hooked::factory(inner, make));
        builder.backend(factory).init().unwrap()
    };
    let issued = Barrier::new(2);
    let options = GroupOptions::named(SLOW);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let world = world(1);
            let group = world.new_group(&[0, 1], &options).unwrap();
            issued.wait();
            let work = group.all_reduce_async(vec![1u8], ReduceOp::Sum).unwrap();
            assert_eq!(work.wait().unwrap(), [2]);
            drop(group);
            world.shutdown().unwrap();
        });
        let world = world(0);
        let group = world.new_group(&[0, 1], &options).unwrap();
        // The operation ends only once this rank has dropped all that it holds.
        drop(group.all_reduce_async(vec![1u8], ReduceOp::Sum).unwrap());
        drop(group);
        issued.wait();
        let thread = has_ended.recv_timeout(LONG).unwrap();
        assert_eq!(thread, "rcomm/group-end");
        // The backend has not ended, and the watchdog goes on.
        let heartbeat = || {
            world
                .snapshot()
                .status
                .map_or(0, |status| status.heartbeat_ns)
        };
        let before = heartbeat();
        wait_until("another round", || (heartbeat() > before).then_some(()));
        go_on.send(()).unwrap();
        world.shutdown().unwrap();
    });
}

/// Hooks of a backend. If they have channels, an abort lets the test go on and waits for it, and the drop sends the
/// name of its thread.
struct Aborted(Option<Mutex<(Sender<()>, Ends)>>);

impl Hooks for Aborted {
    fn abort(&self) {
        if let Some(ends) = &self.0 {
            let (aborting, (_, go_on)) = &*ends.lock().unwrap();
            let _ = aborting.send(());
            let _ = go_on.recv_timeout(LONG);
        }
    }
}

impl Drop for Aborted {
    fn drop(&mut self) {
        if let Some(ends) = &self.0 {
            let (_, (ended, _)) = &*ends.lock().unwrap();
            let thread = std::thread::current();
            let _ = ended.send(thread.name().unwrap_or_default().to_owned());
        }
    }
}

#[test]
fn a_group_that_a_loop_over_all_groups_holds_last_ends_on_a_thread_of_its_own() {
    let (aborting, is_aborting) = channel();
    let (ended, has_ended) = channel();
    let (go_on, may_go_on) = channel();
    let ends = Mutex::new(Some(Mutex::new((aborting, (ended, may_go_on)))));
    let config = Config {
        backend: format!("cpu:{}", hooked::NAME),
        ..world::config(0, 1)
    };
    let make = move |group: &GroupContext| {
        let is_slow = group.info.desc == SLOW;
        Aborted(is_slow.then(|| ends.lock().unwrap().take()).flatten())
    };
    let inner = FakeFabric::new().factory(0);
    let factory = move |_: &_| Ok(hooked::factory(inner, make));
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let builder = World::builder(config).store(store);
    let world = builder.backend(factory).init().unwrap();
    let group = world.new_group(&[0], &GroupOptions::named(SLOW)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| world.abort_groups("as the test wants"));
        is_aborting.recv_timeout(LONG).unwrap();
        // The loop over the groups holds the last reference now.
        drop(group);
        go_on.send(()).unwrap();
        let thread = has_ended.recv_timeout(LONG).unwrap();
        assert_eq!(thread, "rcomm/group-end");
    });
}

#[test]
fn a_handle_of_an_operation_that_is_released_last_does_not_hold_up_its_thread() {
    let (ended, has_ended) = channel();
    let (go_on, may_go_on) = channel();
    let ends = Mutex::new(Some((ended, may_go_on)));
    let config = Config {
        backend: format!("cpu:{}", hooked::NAME),
        ..world::config(0, 1)
    };
    let make = move |group: &GroupContext| {
        let is_slow = group.info.desc == SLOW;
        let ends = is_slow.then(|| ends.lock().unwrap().take()).flatten();
        Slow(ends.map(Mutex::new))
    };
    let inner = FakeFabric::new().factory(0);
    let factory = move |_: &_| Ok(hooked::factory(inner, make));
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let builder = World::builder(config).store(store);
    let world = builder.backend(factory).init().unwrap();
    let group = world.new_group(&[0], &GroupOptions::named(SLOW)).unwrap();
    let work = group.all_reduce_async(vec![1u8], ReduceOp::Sum).unwrap();
    work.join().unwrap();
    drop(group);
    // The watchdog lets go of the operation in its next round.
    wait_until("the operation to be retired", || {
        let entries = world.snapshot().entries;
        entries
            .last()
            .is_some_and(|entry| entry.retired)
            .then_some(())
    });
    work.release();
    let thread = has_ended.recv_timeout(LONG).unwrap();
    assert_eq!(thread, "rcomm/group-end");
    go_on.send(()).unwrap();
    world.shutdown().unwrap();
}

#[test]
fn a_callback_of_the_watchdog_may_drop_the_world() {
    let carrier = Carrier::Fake(FakeFabric::new());
    let over = Barrier::new(2);
    on_threads(2, &carrier, failing, |world| {
        if world.rank() == 1 {
            over.wait();
            return;
        }
        let group = world.group().within(Duration::from_secs(2));
        // Rank 1 does not come, so the watchdog ends the operation.
        let work = group.all_reduce_async(vec![1u8], ReduceOp::Sum).unwrap();
        let (called, was_called) = channel();
        work.on_completion(move |outcome| {
            assert!(outcome.is_err());
            drop(world);
            let thread = std::thread::current();
            let _ = called.send(thread.name().unwrap_or_default().to_owned());
        });
        let thread = was_called.recv_timeout(LONG);
        over.wait();
        assert_eq!(thread.as_deref(), Ok("rcomm/watchdog"));
    });
}

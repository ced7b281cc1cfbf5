//! A group may have two backends, each in a lane of its own: one for each kind of memory.

use rcomm::backend::{Call, GroupContext};
use rcomm::{
    Backend, BackendFactory, Config, Deadline, DeviceKind, FakeFabric, Op, ReduceOp, Result, World,
};
use rcomm_recorder::model::EntryState;
use rcomm_tests::hooked::{self, Hooks};
use rcomm_tests::world;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

/// A factory for the memory of CUDA devices, whose backends another factory makes.
struct OnDevice(Arc<dyn BackendFactory>);

impl BackendFactory for OnDevice {
    fn name(&self) -> &'static str {
        "on_device"
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        self.0.connect(group, deadline)
    }
}

/// Announces that an operation runs, and holds it until it may go on.
struct Held(Mutex<(Sender<()>, Receiver<()>)>);

impl Hooks for Held {
    fn run(&self, _op: &Op<'_>, _call: &Call) {
        let (runs, go_on) = &*self.0.lock().unwrap();
        runs.send(()).unwrap();
        go_on.recv_timeout(LONG).unwrap();
    }
}

#[test]
fn a_collective_that_runs_is_recorded_as_started_whatever_has_ended_in_another_lane() {
    let config = Config {
        backend: format!("cuda:on_device,cpu:{}", hooked::NAME),
        ..world::config(0, 1)
    };
    let device: Arc<dyn BackendFactory> = Arc::new(OnDevice(FakeFabric::new().factory(0)));
    let (runs, has_begun) = channel();
    let (go_on, may_go_on) = channel();
    let held = Mutex::new(Some(Held(Mutex::new((runs, may_go_on)))));
    let make = move |_: &GroupContext| held.lock().unwrap().take().unwrap();
    let host = hooked::factory(FakeFabric::new().factory(0), make);
    let builder = World::builder(config).backend(move |_: &_| Ok(device));
    let world = builder.backend(move |_: &_| Ok(host)).init().unwrap();
    // An operation without memory goes to the first lane, that of the device.
    world.group().barrier().unwrap();
    std::thread::scope(|scope| {
        let world = &world;
        scope.spawn(move || {
            has_begun.recv_timeout(LONG).unwrap();
            let snapshot = world.snapshot();
            go_on.send(()).unwrap();
            let states = snapshot.entries.iter().map(|entry| entry.state);
            let states: Vec<EntryState> = states.collect();
            assert_eq!(states, [EntryState::Completed, EntryState::Started]);
        });
        let mut number = [3u8];
        world
            .group()
            .all_reduce(&mut number, ReduceOp::Sum)
            .unwrap();
        assert_eq!(number, [3]);
    });
    world.shutdown().unwrap();
}

//! Hints of a call or of a group reach the backend, and do not change the results.
#![allow(clippy::unwrap_used)]

use rcomm::backend::{Call, GroupContext};
use rcomm::{
    FakeFabric, GroupOptions, HashStore, Hints, Op, OpType, ReduceOp, Result, SparseTensor,
    WaitHint, World,
};
use rcomm_tests::hooked::{self, Hooks};
use rcomm_tests::world::{self, Carrier, on_threads};
use std::sync::{Arc, Mutex};

/// The operations and hints of all calls.
type Seen = Arc<Mutex<Vec<(OpType, Hints)>>>;

/// Records the hints of each call.
struct Listening(Seen);

impl Listening {
    fn note(&self, op: &Op<'_>, call: &Call) {
        let seen = (op.op_type(), call.hints.clone());
        self.0.lock().unwrap().push(seen);
    }
}

impl Hooks for Listening {
    fn issue(&self, op: &Op<'_>, call: &Call) -> Result<()> {
        self.note(op, call);
        Ok(())
    }

    fn run(&self, op: &Op<'_>, call: &Call) {
        self.note(op, call);
    }
}

#[test]
fn hints_of_a_handle_reach_the_backend_with_each_of_its_calls() {
    let config = rcomm::Config {
        backend: format!("cpu:{}", hooked::NAME),
        ..world::config(0, 1)
    };
    let seen = Seen::default();
    let (for_factory, fabric) = (seen.clone(), FakeFabric::new());
    let connected: Arc<Mutex<Vec<Hints>>> = Arc::default();
    let groups = connected.clone();
    let world = World::builder(config)
        .store(Arc::new(HashStore::new()))
        .backend(move |world| {
            let make = move |group: &GroupContext| {
                groups.lock().unwrap().push(group.hints.clone());
                Listening(for_factory.clone())
            };
            Ok(hooked::factory(fabric.factory(world.rank), make))
        })
        .init()
        .unwrap();
    let group = world.group();
    seen.lock().unwrap().clear();
    let hints = Hints::NONE
        .wait(WaitHint::Long)
        .own(&[("lane", "2"), ("trace", "on")]);
    let hinted = group.hinted(hints.clone());
    hinted.barrier().unwrap();
    let work = hinted.all_reduce_async(vec![1u8], ReduceOp::Sum).unwrap();
    work.wait().unwrap();
    let tensor = SparseTensor::new(vec![2], 1, vec![1], vec![1f32]).unwrap();
    hinted.all_reduce_sparse(&tensor, ReduceOp::Sum).unwrap();
    group.barrier().unwrap();
    let hinted_ops = [
        OpType::Barrier,
        OpType::AllReduce,
        OpType::AllGatherSingle,
        OpType::AllGatherV,
        OpType::AllGatherV,
    ];
    let mut expected: Vec<_> = hinted_ops.map(|op| (op, hints.clone())).into();
    expected.push((OpType::Barrier, Hints::NONE));
    assert_eq!(*seen.lock().unwrap(), expected);
    assert_eq!(hints.get("lane"), Some("2"));

    // A group's backend gets the group's hints when it connects, and with each call. Their values may be known at run
    // time only.
    let device = std::process::id().to_string();
    let group_hints = Hints::NONE.own(&[("device", &device)]);
    let options = GroupOptions {
        hints: group_hints.clone(),
        ..GroupOptions::named("hinted")
    };
    seen.lock().unwrap().clear();
    let made = world.new_group(&[0], &options).unwrap();
    assert_eq!(
        *connected.lock().unwrap(),
        [Hints::NONE, group_hints.clone()]
    );
    made.barrier().unwrap();
    made.hinted(Hints::NONE).barrier().unwrap();
    let named = world.group_named(made.name()).unwrap();
    named.barrier().unwrap();
    let calls = seen.lock().unwrap().clone();
    let hints: Vec<Hints> = calls.into_iter().map(|(_, hints)| hints).collect();
    assert_eq!(hints, [group_hints.clone(), Hints::NONE, group_hints]);
    world.shutdown().unwrap();
}

#[test]
fn ranks_may_give_different_hints() {
    on_threads(
        3,
        &Carrier::Cpu,
        |_| {},
        |world| {
            let waits = [WaitHint::Unknown, WaitHint::Short, WaitHint::Long];
            let wait = waits[world.rank() as usize];
            let group = world.group().hinted(Hints::NONE.wait(wait));
            for len in [1, 10_000, 300_000] {
                let mut data = vec![world.rank(); len];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|&sum| sum == 3));
                let work = group.all_reduce_async(data, ReduceOp::Max).unwrap();
                assert_eq!(work.wait().unwrap(), vec![3; len]);
            }
            let next = (world.rank() + 1) % 3;
            let sent = group.send_async(vec![world.rank()], next, 0).unwrap();
            let mut got = [9];
            group.recv(&mut got, (world.rank() + 2) % 3, 0).unwrap();
            assert_eq!(got, [(world.rank() + 2) % 3]);
            sent.wait().unwrap();
            world.shutdown().unwrap();
        },
    );
}

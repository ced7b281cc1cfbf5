//! A rank starts the thread that answers callers when it waits for one, or when the world lets it.

use super::{LONG, Wiring, world_context};
use crate::CpuFactory;
use crate::mesh::handshake::ChannelKind;
use crate::mesh::{ChannelRequest, Mesh, PeerState};
use crate::wait::{Stop, WaitMode, WaitPolicy};
use rcomm_core::Deadline;
use rcomm_core::backend::Later;
use rcomm_core::store::{HashStore, Store};
use std::sync::Arc;
use std::time::Duration;

/// Opens a rank of three, which starts its thread with `later`.
fn open(store: &Arc<dyn Store>, rank: u32, wiring: Wiring, later: &Later) -> CpuFactory {
    let mut context = world_context(store.clone(), rank, 3, wiring);
    context.later = later.clone();
    CpuFactory::open(&context).unwrap()
}

/// Opens a channel from the rank of `mesh` to `peer`, and waits for `time` at most; returns whether it was opened.
fn connect(mesh: &Mesh, peer: u32, time: Duration) -> bool {
    let stop = Stop::default();
    let deadline = Deadline::In(time).started();
    let mut policy = WaitPolicy::new(&stop, deadline, WaitMode::Sleep);
    let channel = ChannelRequest {
        group: 7,
        kind: ChannelKind::P2p,
        peer,
        streams: 1,
    };
    mesh.connect(channel, &mut policy).is_ok()
}

#[test]
fn callers_are_answered_once_the_rank_waits_for_one() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let later = Later::new();
    let lower = open(&store, 0, Wiring::Tcp, &later);
    let higher = open(&store, 1, Wiring::Tcp, &later);
    assert!(!lower.mesh.listens());
    std::thread::scope(|scope| {
        let called = scope.spawn(|| connect(&higher.mesh, 0, LONG));
        assert!(connect(&lower.mesh, 1, LONG));
        assert!(called.join().unwrap());
    });
    assert!(lower.mesh.listens() && !higher.mesh.listens());
}

#[test]
fn callers_are_answered_once_the_world_lets_the_thread_start() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let later = Later::new();
    // The first to come gives out the host's memory, so it needs its thread at once.
    let maker = open(&store, 0, Wiring::Shm, &later);
    assert!(maker.mesh.listens());
    let neighbor = open(&store, 1, Wiring::Shm, &later);
    assert!(!neighbor.mesh.listens());
    later.run();
    assert!(neighbor.mesh.listens());
    let stop = Stop::default();
    let deadline = Deadline::In(LONG).started();
    let mut policy = WaitPolicy::new(&stop, deadline, WaitMode::Sleep);
    let found = maker.mesh.find_gone(1, &mut policy);
    assert!(matches!(found, Ok(PeerState::Runs)), "{found:?}");
    neighbor.mesh.close();
    assert!(!neighbor.mesh.listens());
}

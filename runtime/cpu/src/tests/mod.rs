//! Tests of the backend. Ranks are threads with one store, each with its own mesh, so that they behave like processes.

mod collectives;
mod concurrent;
mod faults;
mod late_listener;
mod leaving;
mod messages;
mod order;
mod registered;
mod shortage;
mod waiting;

use crate::CpuFactory;
use rcomm_core::Buffer;
use rcomm_core::Deadline;
use rcomm_core::Hints;
use rcomm_core::Op;
use rcomm_core::Result;
use rcomm_core::Secret;
use rcomm_core::backend::{
    Backend, BackendFactory, Call, Done, GroupContext, Later, Observer, Pending, WorldContext,
};
use rcomm_core::config::{Config, TransportChoice};
use rcomm_core::store::{HashStore, PrefixStore, Store};
use rcomm_core::tuning::{Algorithm, Pattern, Topology, Tuning};
use rcomm_recorder::model::{ProcessGroupInfo, Rank};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A time-out that is reached only if there is a fault.
const LONG: Duration = Duration::from_secs(60);

/// How the ranks of a test's world are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wiring {
    /// All ranks use sockets.
    Tcp,
    /// All ranks use sockets, this many for each channel.
    Streams(usize),
    /// All ranks use shared memory.
    Shm,
    /// All ranks use shared memory. Collectives that can run directly in registered buffers do so at every size.
    Registered,
    /// Hosts have this many consecutive ranks each; the last may have fewer. Ranks share memory within a host, and use
    /// sockets between hosts.
    Hosts(u32),
    /// Like `Hosts`, with the algorithm `nested` for all-to-all, gather and scatter at every size.
    Nested(u32),
    /// Like `Hosts`, but with this many hosts; consecutive ranks are on different hosts.
    Dealt(u32),
}

/// The wirings over which operations are tested.
const WIRINGS: &[Wiring] = &[
    Wiring::Tcp,
    Wiring::Streams(3),
    Wiring::Shm,
    Wiring::Registered,
    Wiring::Hosts(2),
    Wiring::Hosts(3),
    Wiring::Dealt(2),
];

/// The context of a rank in a world with this wiring.
fn world_context(store: Arc<dyn Store>, rank: u32, size: u32, wiring: Wiring) -> WorldContext {
    let (transport, host) = match wiring {
        Wiring::Tcp | Wiring::Streams(_) => (TransportChoice::Tcp, None),
        Wiring::Shm | Wiring::Registered => (TransportChoice::Shm, None),
        Wiring::Hosts(ranks) | Wiring::Nested(ranks) => (TransportChoice::Shm, Some(rank / ranks)),
        Wiring::Dealt(hosts) => (TransportChoice::Shm, Some(rank % hosts)),
    };
    let mut tuning = Tuning::default();
    if let Wiring::Streams(count) = wiring {
        tuning.prepend(&format!("streams {count}")).unwrap();
    }
    if let Wiring::Nested(_) = wiring {
        for pattern in [Pattern::AllToAll, Pattern::Gather, Pattern::Scatter] {
            let line = format!("{pattern} hosts any any nested");
            tuning.prepend(&line).unwrap();
        }
    }
    if wiring == Wiring::Registered {
        for &pattern in Pattern::ALL {
            if Algorithm::of(pattern, Topology::Memory).contains(&Algorithm::Direct) {
                let line = format!("{pattern} memory any any direct");
                tuning.prepend(&line).unwrap();
            }
        }
    }
    let config = Config {
        transport,
        tuning,
        host_id: host.map(|host| host.to_string()),
        ..Config::default()
    };
    WorldContext {
        rank,
        world_size: size,
        local_rank: Some(rank),
        local_world_size: Some(size),
        job: "test".into(),
        attempt: 0,
        store,
        secret: Secret::from_text("test"),
        tls: None,
        config: Arc::new(config),
        recorder: None,
        deadline: Deadline::In(Duration::from_secs(60)).started(),
        later: Later::default(),
    }
}

/// The context of rank `rank` in a group of `ranks`.
fn group_context(
    store: &Arc<dyn Store>,
    name: &str,
    wire_id: u64,
    ranks: &[Rank],
    rank: Rank,
) -> GroupContext {
    let info = ProcessGroupInfo {
        id: 0,
        name: name.into(),
        desc: name.into(),
        ranks: ranks.into(),
    };
    let store = PrefixStore::new(format!("{name}/"), store.clone());
    GroupContext {
        group_rank: info
            .group_rank_of(rank)
            .expect("the rank is not a member of the group"),
        info,
        wire_id,
        store: Arc::new(store),
        hints: Hints::NONE,
    }
}

/// One rank of a test's world.
struct Rig {
    rank: usize,
    size: usize,
    wiring: Wiring,
    store: Arc<dyn Store>,
    factory: CpuFactory,
    backend: Arc<dyn Backend>,
    next_turn: AtomicU64,
}

struct NoObserver;
impl Observer for NoObserver {
    fn started(&self) {}
    fn ended(&self) {}
}

impl Rig {
    fn new(store: Arc<dyn Store>, rank: u32, size: u32, wiring: Wiring) -> Self {
        let context = world_context(store.clone(), rank, size, wiring);
        let factory = CpuFactory::open(&context).unwrap();
        let ranks: Vec<Rank> = (0..size).collect();
        let group = group_context(&store, "world", 1, &ranks, rank);
        let backend = factory.connect(group, LONG.into()).unwrap();
        Self {
            rank: rank as usize,
            size: size as usize,
            wiring,
            store,
            factory,
            backend,
            next_turn: AtomicU64::new(1),
        }
    }

    /// The parameters of the rank's next call, with a turn if it is a collective.
    fn call(&self, op: &Op<'_>, deadline: Duration) -> Call {
        let turn = if op.is_p2p() {
            0
        } else {
            self.next_turn.fetch_add(1, Ordering::Relaxed)
        };
        Call {
            seq: turn,
            turn,
            deadline: Deadline::In(deadline),
            hints: Hints::NONE,
        }
    }

    /// Runs the operation; with [`Wiring::Registered`] a collective runs on copies that the other ranks can map.
    fn run_for(&self, op: &mut Op<'_>, deadline: Duration) -> Result<Done> {
        op.validate(self.rank as u32, self.size as u32).unwrap();
        let call = self.call(op, deadline);
        if self.wiring != Wiring::Registered || op.is_p2p() {
            return self.backend.run(op, call, &NoObserver);
        }
        let mut copy = op
            .map_buffers(&|buffer| self.registered_copy(buffer))
            .unwrap();
        let done = self.backend.run(&mut copy, call, &NoObserver)?;
        op.copy_outputs_from(&copy).unwrap();
        Ok(done)
    }

    /// Returns a copy of the buffer in memory that the other ranks can map.
    fn registered_copy(&self, buffer: &Buffer<'_>) -> Result<Buffer<'static>> {
        let mut copy = self.backend.allocate(buffer.dtype(), buffer.len())?;
        copy.copy_from(buffer)?;
        copy.with_shape(buffer.shape())
    }

    fn run(&self, mut op: Op<'_>) -> Result<Done> {
        self.run_for(&mut op, LONG)
    }

    fn issue(&self, op: Op<'static>) -> Arc<dyn Pending> {
        let call = self.call(&op, LONG);
        self.backend.issue(op, call, Arc::new(NoObserver)).unwrap()
    }
}

/// Runs `body` on every rank of a world, and returns the result of each rank.
fn world<R: Send>(size: u32, wiring: Wiring, body: impl Fn(&Rig) -> R + Sync) -> Vec<R> {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let store = store.clone();
                let body = &body;
                scope.spawn(move || body(&Rig::new(store, rank, size, wiring)))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

//! [`CpuGroup`]: the parts of a group, and how it runs an operation.

use super::latecomer::Punctuality;
use super::sequencer::Sequencer;
use crate::algorithm::{ChannelEngine, HostsEngine, ShmEngine, ShmExchanges};
use crate::channels::neighbors::Neighbors;
use crate::channels::{Channels, Sockets};
use crate::collective::{Position, Step, for_each_step};
use crate::mesh::Mesh;
use crate::mesh::layout::Layout;
use crate::p2p::{P2p, Request};
use crate::transport::shm::CloseGuard;
use crate::wait::{Failure, Stop, WaitMode, WaitPolicy};
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::backend::{AbortReason, Call, Done};
use rcomm_core::store::Store;
use rcomm_core::tuning::Topology;
use rcomm_core::{ErrorKind, Result};
use rcomm_recorder::model::{GroupId, Rank, WaitingOperation};
use sha2::{Digest, Sha256};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The state that the threads of a group share.
pub(crate) struct CpuGroup {
    pub(crate) name: String,
    /// The group's number in this process.
    pub(crate) id: GroupId,
    /// The group's number in the whole job.
    pub(crate) wire_id: u64,
    /// This rank in the group.
    pub(crate) rank: usize,
    /// The members by their ranks in the world.
    pub(crate) ranks: Arc<[Rank]>,
    pub(crate) mesh: Arc<Mesh>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) wait_mode: WaitMode,
    pub(crate) stop: Stop,
    pub(crate) sequencer: Sequencer,
    /// Runs one collective at a time.
    pub(crate) engine: Mutex<CollectiveEngine>,
    /// Ends the waits of ranks that share memory with this one; `None` without an exchange area.
    pub(crate) close_guard: Option<Arc<CloseGuard>>,
    pub(crate) p2p: P2p,
    pub(crate) sockets: Sockets,
    /// Whether the members decide together how a collective ends: all share memory, and collectives use it, or there is
    /// only one member.
    pub(crate) ends_together: bool,
    pub(crate) punctuality: Punctuality,
    /// The thread that publishes this rank's reason for giving up, and then releases the peers.
    pub(crate) notice: Mutex<Option<JoinHandle<()>>>,
}

/// The implementation that runs the collectives of a group.
pub(crate) enum CollectiveEngine {
    /// All ranks of the group share memory.
    ShmExchange(ShmEngine),
    /// No ranks of the group share memory, or all do but the segment has no space for the group.
    Channels(Box<ChannelEngine>),
    /// The ranks of the group are on several hosts, at least one of which has several of them.
    Hosts(Box<HostsEngine>),
}

impl CollectiveEngine {
    #[inline]
    pub(crate) fn run(
        &mut self,
        step: Step<'_>,
        position: Position,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        match self {
            Self::ShmExchange(engine) => engine.run(step, position, policy),
            Self::Channels(engine) => engine.run(step, position, policy),
            Self::Hosts(engine) => engine.run(step, position, policy),
        }
    }
}

impl CpuGroup {
    /// Opens the parts of the group that use shared memory: the engine of its collectives, and the peers that
    /// its messages reach through memory. Sets `wait_mode` and `close_guard` if the group gets an exchange area on this
    /// host. `None` if no two ranks of the group are on one host, or if all are on this one and its segment has no
    /// space for the group.
    ///
    /// # Errors
    /// Those of the shared memory; of the group's store if the group is on several hosts.
    pub(crate) fn open_shared_memory(
        &mut self,
        id: u64,
        layout: Layout,
        channels: Channels,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Option<(CollectiveEngine, Neighbors)>, Failure> {
        if layout.hosts() > 1 && !layout.is_nested() {
            return Ok(None);
        }
        let here = layout.neighbors().to_vec();
        let ranks: Arc<[Rank]> = here.iter().map(|&rank| self.ranks[rank]).collect();
        let mut shm_exchange = |key| {
            let host = self.mesh.host();
            host.shm_exchange(key, layout.index_on_host(), &ranks, policy)
        };
        let mut phases = shm_exchange(id)?;
        let mut streams = match &phases {
            Some(_) if layout.is_nested() => shm_exchange(derived_id("streams", id, 0))?,
            _ => None,
        };
        let mut neighbors = Neighbors::default();
        let registry = self.mesh.registry();
        for shm_exchange in [&mut phases, &mut streams].into_iter().flatten() {
            registry.note_huge_pages(shm_exchange.huge_pages());
        }
        if let Some(shm_exchange) = &phases {
            self.wait_mode = shm_exchange.wait_mode();
            neighbors = Neighbors::new(shm_exchange.streams(), &here, self.ranks.len());
            let close_guard = shm_exchange.close_guard().map_err(Failure::Io)?;
            self.close_guard = Some(Arc::new(close_guard));
        }
        if layout.is_nested() {
            let channels = match &streams {
                Some(shm_exchange) => {
                    let streams = shm_exchange.streams();
                    channels.with_neighbors(Neighbors::new(streams, &here, self.ranks.len()))
                }
                None => channels,
            };
            let shm_exchanges = ShmExchanges { phases, streams };
            let tuning = self.mesh.tuning();
            let size = self.ranks.len();
            let engine = ChannelEngine::new(channels, tuning.plan(Topology::Sockets, size));
            let plan = tuning.plan(Topology::Hosts, size);
            let (store, limit) = (self.store.clone(), policy.time_left());
            let engine = HostsEngine::new(layout, shm_exchanges, engine, plan, store, limit)?;
            return Ok(Some((CollectiveEngine::Hosts(Box::new(engine)), neighbors)));
        }
        let plan = self.mesh.tuning().plan(Topology::Memory, ranks.len());
        let registry = self.mesh.registry().clone();
        let engine = |shm_exchange| {
            CollectiveEngine::ShmExchange(ShmEngine::new(
                shm_exchange,
                self.rank,
                ranks,
                &plan,
                registry,
            ))
        };
        Ok(phases.map(|shm_exchange| (engine(shm_exchange), neighbors)))
    }

    /// The policy with which this call's operation waits.
    pub(crate) fn policy(&self, call: &Call) -> WaitPolicy<'_> {
        let wait_mode = self.wait_mode.hinted(call.hints.wait);
        WaitPolicy::new(&self.stop, call.deadline, wait_mode).for_operation(self.waiting(call))
    }

    /// Returns the operation of this call, for the record of waits.
    pub(crate) fn waiting(&self, call: &Call) -> WaitingOperation {
        WaitingOperation {
            group: self.id,
            seq: call.seq,
            // Only collectives have a turn, their number in the group's order of issue, from 1.
            is_p2p: call.turn == 0,
        }
    }

    /// Makes all pending and later operations fail with this reason, and releases the peers. If the group is only
    /// closed after another group of the world has failed, the reason is that failure.
    pub(crate) fn give_up(&self, reason: &AbortReason) {
        // A program that ends because one of its groups has failed closes the other groups too: the peers in those
        // need the cause.
        let is_end = reason.error.kind() == ErrorKind::Closed;
        let earlier = self.mesh.first_failure().filter(|_| is_end);
        self.stop_for(earlier.unwrap_or_else(|| reason.error.clone()));
        self.finish_notice();
    }

    /// The policy with which a thread of the group polls for operations. It yields between polls, since the thread
    /// that calls the operations may need its processor.
    pub(crate) fn idle_policy(&self) -> WaitPolicy<'_> {
        WaitPolicy::new(&self.stop, Deadline::In(Duration::MAX), WaitMode::Helper)
    }

    /// Fails with the reason for which the group was stopped, if it was.
    pub(crate) fn refuse_if_stopped(&self) -> Result<()> {
        if !self.stop.is_raised() {
            return Ok(());
        }
        match self.stop.reason() {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }

    /// Runs a collective in its turn. Calls `started` as soon as the turn begins, with whether the caller had to wait
    /// for that.
    pub(crate) fn run_collective(
        &self,
        op: &mut Op<'_>,
        call: Call,
        started: impl FnOnce(bool),
    ) -> Result<Done> {
        self.refuse_if_stopped()?;
        let began = self.refuse_late_collective()?;
        let position = Position {
            rank: self.rank,
            size: self.ranks.len(),
            seq: call.seq,
        };
        let mut policy = self.policy(&call);
        let taken = self.sequencer.take(call.turn, &mut policy);
        let waited = taken.map_err(|interruption| self.fail(interruption.into()))?;
        started(waited);
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        let result = for_each_step(op, &position, &mut |step| {
            engine.run(step, position, &mut policy)
        });
        drop(engine);
        let result = result
            .map_err(|failure| self.fail(failure))
            .and_then(|()| self.end_collective(&call, began));
        let was_given_up = self.sequencer.pass();
        result?;
        // This rank's note says that this turn has not ended, unless its members have decided its end together.
        if was_given_up && !self.ends_together {
            self.refuse_if_stopped()?;
        }
        Ok(Done::default())
    }

    /// Runs sends and receives on this thread.
    pub(crate) fn run_p2p(&self, op: &mut Op<'_>, call: Call) -> Result<Done> {
        self.refuse_if_stopped()?;
        self.refuse_late_message(op)?;
        let began = self.begin_message();
        let mut policy = self.policy(&call);
        if let Op::Coalesced(_) = op {
            let mut requests = Vec::new();
            self.p2p.post(op, &mut requests);
            let outcome = self.p2p.run(op, &mut requests, &mut policy);
            return self.finish_p2p(&requests, began, outcome);
        }
        match self.p2p.run_one(op, &mut policy) {
            Ok(source) => {
                self.end_message(began);
                Ok(received_from(source))
            }
            Err(failure) => Err(self.fail(failure)),
        }
    }

    /// Ends the sends and receives of these requests. `began` is what [`begin_message`](Self::begin_message) returned.
    pub(crate) fn finish_p2p(
        &self,
        requests: &[Request],
        began: u64,
        outcome: Result<(), Failure>,
    ) -> Result<Done> {
        outcome.map_err(|failure| {
            self.p2p.withdraw(requests);
            self.fail(failure)
        })?;
        self.end_message(began);
        Ok(received_from(requests.iter().find_map(Request::source)))
    }
}

/// The result of an operation that received from `source`, a rank of the group; `None` if it received nothing.
fn received_from(source: Option<usize>) -> Done {
    // Ranks are `u32`.
    let source = source.map(|source| source as u32);
    Done {
        source,
        ..Done::default()
    }
}

/// The identifier of a part of a group: a hash, which differs from all others with high probability.
pub(crate) fn derived_id(part: &str, group: u64, number: u64) -> u64 {
    let digest: [u8; 32] = Sha256::new()
        .chain_update(part)
        .chain_update(group.to_le_bytes())
        .chain_update(number.to_le_bytes())
        .finalize()
        .into();
    let start = digest.first_chunk().copied().unwrap_or_default();
    u64::from_le_bytes(start)
}

//! [`CpuFactory`] and [`CpuBackend`]: the crate's public types.

mod executor;
mod failure_report;
mod group;
mod latecomer;
mod note;
mod sequencer;

use crate::algorithm::ChannelEngine;
use crate::channels::{Channels, Sockets};
use crate::mesh::handshake::ChannelKind;
use crate::mesh::{KeysToPublish, Mesh, address};
use crate::p2p::P2p;
use crate::wait::{Stop, WaitMode, WaitPolicy};
use crate::window::{CpuWindow, Members};
use executor::{Executor, ExecutorKind};
use group::{CollectiveEngine, CpuGroup, derived_id};
use latecomer::Punctuality;
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::backend::{
    AbortReason, Agreement, Backend, BackendFactory, BackendWindow, Call, Done, GroupContext,
    Observer, Pending, Registration, WorldContext,
};
use rcomm_core::store::{PrefixStore, StoreQuery};
use rcomm_core::tuning::Topology;
use rcomm_core::{Buffer, DeviceKind};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::{DType, Rank};
use sequencer::Sequencer;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Makes the CPU backends of a world's groups, which share one mesh of connections.
pub struct CpuFactory {
    pub(crate) mesh: Arc<Mesh>,
    /// The keys and values that are still to be published.
    to_publish: KeysToPublish,
}

impl CpuFactory {
    /// Opens this rank's ports, opens the memory that the ranks of this host share, and publishes the addresses in
    /// the store. Makes no connection to other hosts yet.
    ///
    /// A port is opened on one address of each interface that [`Config::socket_ifname`](rcomm_core::Config) names. If
    /// it names none, a port is opened on one address: the source address of this host's route to the configuration's
    /// rendezvous, or the host's first address beyond the loopback interface if other hosts could not reach that one;
    /// without a rendezvous, that of the loopback interface.
    ///
    /// # Errors
    /// `InvalidArgument` if a configured interface cannot be used or too many are configured (the error lists those of
    /// the host); `Rendezvous` if the store's name does not resolve or there is no route to it; `Io` if the interfaces
    /// cannot be listed, a port cannot be opened, or memory cannot be shared although the configuration requires it;
    /// `Store` if the store fails.
    pub fn open(world: &WorldContext) -> Result<Self> {
        let mut factory = Self::prepare(world)?;
        let to_publish = std::mem::take(&mut factory.to_publish);
        StoreQuery::within(&world.store, world.deadline.remaining(), move |store| {
            let entries: Vec<(&str, &[u8])> = to_publish
                .iter()
                .map(|(key, value)| (&**key, &**value))
                .collect();
            store.multi_set(&entries)
        })?;
        Ok(factory)
    }

    /// Works like [`open`](Self::open), but does not publish the addresses: the caller writes the
    /// [announcement](BackendFactory::announcement) to the store.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn prepare(world: &WorldContext) -> Result<Self> {
        let addresses = address::choose(&world.config)?;
        let (mesh, to_publish) = Mesh::open(world, &addresses)?;
        Ok(Self { mesh, to_publish })
    }

    /// Number of connections to this rank whose handshake was not completed: the caller was refused (it did not prove
    /// the job's secret, did not use the job's TLS, had another job, protocol or user, or took this rank for another),
    /// or the connection ended, expired or was closed to make room for others.
    pub fn refused(&self) -> u64 {
        self.mesh.refused()
    }
}

impl BackendFactory for CpuFactory {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        let stop = Stop::default();
        let backend = CpuBackend::new(self.mesh.clone(), group, &stop, deadline)?;
        Ok(Arc::new(backend))
    }

    fn announcement(&self) -> Vec<(String, Vec<u8>)> {
        self.to_publish.clone()
    }

    fn agree(
        &self,
        wire_id: u64,
        value: &[u8],
        ranks: &[Rank],
        group_rank: u32,
        deadline: Deadline,
    ) -> Result<Option<Agreement>> {
        let host = self.mesh.host();
        host.agree(wire_id, value, ranks, group_rank as usize, deadline)
    }

    fn is_lost(&self, rank: Rank, limit: Duration) -> bool {
        let stop = Stop::default();
        let deadline = Deadline::In(limit).started();
        let mut policy = WaitPolicy::new(&stop, deadline, WaitMode::Helper);
        rank != self.mesh.rank() && matches!(self.mesh.is_gone(rank, &mut policy), Ok(true))
    }
}

/// One group's operations on the CPU.
///
/// # Thread safety
/// As documented on [`Backend`].
pub struct CpuBackend {
    pub(crate) group: Arc<CpuGroup>,
    collectives: Executor,
    messages: Executor,
    context: GroupContext,
    windows: Mutex<Windows>,
}

/// The windows that were opened on a group.
#[derive(Default)]
struct Windows {
    /// Number of windows that were opened so far.
    opened: u64,
    /// The groups of windows whose opening may not have finished.
    opening: Vec<Weak<CpuGroup>>,
    /// The windows that were opened and may not have been dropped.
    open: Vec<Weak<CpuWindow>>,
}

impl CpuBackend {
    fn new(mesh: Arc<Mesh>, group: GroupContext, stop: &Stop, deadline: Deadline) -> Result<Self> {
        let context = group.clone();
        let ranks = group.info.ranks;
        mesh.forget_failure();
        let rank = group.group_rank as usize;
        let deadline = deadline.started();
        let layout = mesh.host().layout(&ranks, rank, deadline)?;
        // The other ranks may need this core to reach this point.
        let mut policy = WaitPolicy::new(stop, deadline, WaitMode::Oversubscribed);
        let sockets = Sockets::default();
        let id = group.wire_id;
        let plan = mesh.tuning().plan(Topology::Sockets, ranks.len());
        let channels = |sockets: &Sockets| {
            let kind = ChannelKind::Collective;
            Channels::new(mesh.clone(), id, kind, ranks.clone(), sockets.clone())
        };
        let mut group = CpuGroup {
            id: group.info.id,
            wire_id: id,
            name: group.info.name,
            rank,
            store: group.store,
            wait_mode: WaitMode::Oversubscribed,
            stop: Stop::default(),
            sequencer: Sequencer::new(),
            engine: Mutex::new(CollectiveEngine::Channels(Box::new(ChannelEngine::new(
                channels(&sockets),
                plan,
            )))),
            close_guard: None,
            p2p: P2p::new(mesh.clone(), id, ranks.clone(), sockets.clone()),
            mesh: mesh.clone(),
            ranks: ranks.clone(),
            sockets: sockets.clone(),
            ends_together: ranks.len() == 1,
            punctuality: Punctuality::default(),
            notice: Mutex::default(),
        };
        let shared = group.open_shared_memory(id, layout, channels(&sockets), &mut policy);
        if let Some((engine, neighbors)) = shared.map_err(|failure| group.explain(failure))? {
            group.ends_together = matches!(engine, CollectiveEngine::ShmExchange(_));
            group.engine = Mutex::new(engine);
            group.p2p = group.p2p.with_neighbors(neighbors);
        }
        if group.close_guard.is_none() {
            group.wait_mode = mesh.host().wait_mode(mesh.rank(), mesh.wait_mode());
        }
        Ok(Self {
            group: Arc::new(group),
            collectives: Executor::new(ExecutorKind::Collective),
            messages: Executor::new(ExecutorKind::P2p),
            context,
            windows: Mutex::default(),
        })
    }

    fn executor_of(&self, op: &Op<'_>) -> &Executor {
        if op.is_p2p() {
            &self.messages
        } else {
            &self.collectives
        }
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn runs_on_host(&self) -> bool {
        true
    }

    /// An operation ends at its deadline. Finding the reason and releasing the peers may take about two seconds
    /// more (`failure_report`); the rest is for a busy machine.
    fn ends_overdue_within(&self) -> Duration {
        Duration::from_secs(3)
    }

    fn issue(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>> {
        let executor = self.executor_of(&op);
        executor.issue(&self.group, op, call, observer, None)
    }

    fn issue_again(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
        former: Arc<dyn Pending>,
    ) -> Result<Arc<dyn Pending>> {
        let former = former.into_any();
        let former = former.and_then(|former| former.downcast().ok());
        let executor = self.executor_of(&op);
        executor.issue(&self.group, op, call, observer, former)
    }

    fn run(&self, op: &mut Op<'_>, call: Call, observer: &dyn Observer) -> Result<Done> {
        if op.is_p2p() {
            self.group.run_p2p(op, call)
        } else {
            self.group.run_collective(op, call, |waited| {
                if waited {
                    observer.started();
                }
            })
        }
    }

    fn abort(&self, reason: &AbortReason) {
        self.group.give_up(reason);
        let windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        for group in windows.opening.iter().filter_map(Weak::upgrade) {
            group.give_up(reason);
        }
        for window in windows.open.iter().filter_map(Weak::upgrade) {
            window.abort(reason);
        }
    }

    fn shutdown(&self, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        for executor in [&self.collectives, &self.messages] {
            if !executor.drain(deadline) {
                let message = format!(
                    "issued operations of group {} have not ended before the deadline",
                    self.context.info.name
                );
                return Err(Error::new(ErrorKind::Timeout, message));
            }
        }
        let closed = Error::new(ErrorKind::Closed, "the group was shut down");
        self.group.stop.raise(closed);
        self.collectives.close();
        self.messages.close();
        Ok(())
    }

    fn allocate(&self, dtype: DType, len: usize) -> Result<Buffer<'static>> {
        self.group.mesh.registry().allocate(dtype, len)
    }

    /// Memory that a group of this world allocated needs no registration, but may be registered. Other
    /// memory cannot be registered, since other processes cannot map it.
    fn register(&self, memory: &Buffer<'static>) -> Result<Registration> {
        let is_known = self.group.mesh.registry().has(memory);
        match memory.owner().filter(|_| is_known) {
            Some(owner) => Ok(Registration {
                id: memory.as_ptr().addr() as u64,
                owner: owner.clone(),
            }),
            None => Err(Error::new(
                ErrorKind::Unsupported,
                "backend cpu registers what the group allocated: no other memory can be mapped by \
                 other processes",
            )),
        }
    }

    fn deregister(&self, registration: Registration) -> Result<()> {
        // The registration only kept the memory alive.
        drop(registration);
        Ok(())
    }

    fn new_window(
        &self,
        memory: Buffer<'static>,
        deadline: Deadline,
    ) -> Result<Arc<dyn BackendWindow>> {
        self.group.refuse_if_stopped()?;
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.opened += 1;
        let number = windows.opened;
        drop(windows);
        let backend = self.for_window(number, deadline)?;
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.opening.retain(|group| group.strong_count() > 0);
        windows.opening.push(Arc::downgrade(&backend.group));
        drop(windows);
        // An abort before this point did not reach the window's group, so the stop is checked here.
        self.group.refuse_if_stopped()?;
        let name = &self.context.info.name;
        let group = backend.group.clone();
        let members = Members {
            messages: Box::new(backend),
            mesh: group.mesh.clone(),
            rank: group.rank,
            ranks: group.ranks.clone(),
            wait_mode: group.wait_mode,
        };
        let window = Arc::new(CpuWindow::open(members, name, memory, deadline)?);
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.open.retain(|window| window.strong_count() > 0);
        windows.open.push(Arc::downgrade(&window));
        Ok(window)
    }
}

impl CpuBackend {
    /// Makes a backend of the same members for the window with this number.
    fn for_window(&self, number: u64, deadline: Deadline) -> Result<Self> {
        let mut context = self.context.clone();
        context.wire_id = derived_id("window", context.wire_id, number);
        context.info.name = format!("{}/window{number}", context.info.name);
        context.store = Arc::new(PrefixStore::new(format!("window{number}"), context.store));
        let group = &self.group;
        let mesh = group.mesh.clone();
        Self::new(mesh, context, &group.stop, deadline)
    }
}

impl Drop for CpuBackend {
    fn drop(&mut self) {
        match self.group.mesh.first_failure() {
            Some(earlier) => self.group.stop_for(earlier),
            None => {
                let dropped = Error::new(ErrorKind::Closed, "the group was dropped");
                if self.group.stop.raise(dropped) {
                    self.group.release_peers();
                }
            }
        }
        self.group.finish_notice();
        self.collectives.close();
        self.messages.close();
    }
}

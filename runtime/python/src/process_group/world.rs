//! [`World`] for `torch.distributed`: how a process joins a job. [`StoreServer`]: the store that rank 0 serves if
//! PyTorch's own store is no TCPStore.

use super::callbacks::Callbacks;
use super::detached::{self, Detached, SharedGroup};
use super::errors::exception_for;
use super::fork::OfProcess;
use super::held_world::HeldWorld;
use super::issue::{Group, USED_AFTER_FORK, WorldState};
use crate::frames::CallSites;
use crate::tensors::Types;
use pyo3::prelude::*;
use rcomm::{
    Config, Error, ErrorKind, GroupOptions, HashStore, PrefixStore, Rendezvous, Store, TcpStore,
};
use rcomm_recorder::model::RankStatus;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A TCPStore that this process serves, for a job whose PyTorch store is a FileStore or a HashStore. Clients must prove
/// that they know the job's secret: see `docs/SECURITY.md`.
#[pyclass(module = "rcomm._native", frozen)]
pub(crate) struct StoreServer {
    /// The store, until the world that uses it takes it.
    store: OfProcess<Mutex<Option<TcpStore>>>,
    port: u16,
}

#[pymethods]
impl StoreServer {
    /// Listens on `host`, an address of this host or a name that resolves to one, at a port that the kernel chooses; on
    /// all addresses if `host` is a name other than "localhost" that resolves only to loopback addresses.
    #[new]
    fn new(py: Python<'_>, host: String, timeout: Duration) -> PyResult<Self> {
        let serve = || {
            let rendezvous = Rendezvous {
                master_port: 0,
                ..Rendezvous::explicit(0, 1, host, 1)?
            };
            let config = Config {
                rendezvous: Some(rendezvous),
                ..Config::from_environment()?
            };
            rcomm::World::connect_store(&config, timeout)
        };
        let store = py.detach(serve);
        let store = store.map_err(|error| exception_for(py, &error, Some(timeout)))?;
        let port = store.port();
        Ok(Self {
            store: OfProcess::new(Mutex::new(Some(store))),
            port,
        })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.port
    }
}

/// One process's place in a job, and its groups.
#[pyclass(module = "rcomm._native", frozen)]
pub(crate) struct World {
    world: OfProcess<Detached<HeldWorld>>,
    /// The group of all ranks, or of those that remain. Has a lock of its own, since that of `world` is held while a
    /// call waits for other ranks.
    group: OfProcess<Mutex<SharedGroup>>,
    is_open: AtomicBool,
    shared: Arc<WorldState>,
}

impl World {
    /// Called only in the process that made the world.
    fn main_group(&self) -> MutexGuard<'_, SharedGroup> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs an operation on the world without the interpreter's lock, since it may wait for other ranks. `timeout` is
    /// the time that the text of a time-out error names.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        operation: impl FnOnce(&HeldWorld) -> Option<Result<T, Error>> + Send,
    ) -> PyResult<T> {
        let closed = |message: &str| Err(Error::new(ErrorKind::Closed, message));
        let used = match self.world.is_own() {
            false => closed(USED_AFTER_FORK),
            true => py
                .detach(|| operation(&self.world))
                .unwrap_or_else(|| closed("the process group was destroyed")),
        };
        used.map_err(|error| exception_for(py, &error, timeout))
    }
}

/// The store with this prefix before all keys.
fn under(prefix: &str, store: TcpStore) -> Arc<dyn Store> {
    Arc::new(PrefixStore::new(prefix, Arc::new(store)))
}

#[pymethods]
impl World {
    /// Joins a job: waits until all of its ranks have arrived at the store at `host` and `port`, in which all keys
    /// begin with `prefix`. Without a host this rank is the job's only one. With a `server`, this process serves the
    /// store. `store_is_external` says that PyTorch, its launcher or the program serves the store, so that this world
    /// neither serves nor keeps it; `store_at_rank_0` says that the process of rank 0 is known to serve such a store.
    #[new]
    #[pyo3(signature = (rank, size, *, job, host=None, port=0, prefix="", server=None, store_is_external=false, store_at_rank_0=false, attempt=0, timeout, library_code=Vec::new()))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        rank: u32,
        size: u32,
        job: String,
        host: Option<String>,
        port: u16,
        prefix: &str,
        server: Option<&Bound<'_, StoreServer>>,
        store_is_external: bool,
        store_at_rank_0: bool,
        attempt: u32,
        timeout: Duration,
        library_code: Vec<String>,
    ) -> PyResult<Self> {
        let server = server.and_then(|server| {
            let mut held = server
                .get()
                .store
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            held.take()
        });
        let joined = py.detach(|| {
            let is_alone = host.is_none();
            let rendezvous = Rendezvous::explicit(
                rank,
                size,
                host.unwrap_or_else(|| "localhost".to_owned()),
                port.max(1),
            )?;
            let config = Config {
                timeout,
                init_timeout: timeout,
                rendezvous: Some(Rendezvous {
                    job,
                    attempt,
                    uses_agent_store: store_is_external,
                    ..rendezvous
                }),
                ..Config::from_environment()?
            };
            let store: Arc<dyn Store> = match server {
                _ if is_alone => Arc::new(HashStore::new()),
                Some(served) => under(prefix, served),
                None => under(prefix, rcomm::World::connect_store(&config, timeout)?),
            };
            let builder = rcomm::World::builder(config).store(store);
            match store_at_rank_0 {
                true => builder.store_at_rank_0().init(),
                false => builder.init(),
            }
        });
        let world = joined.map_err(|error| exception_for(py, &error, Some(timeout)))?;
        let recorder = world.recorder().clone();
        let shared = WorldState {
            no_call_site: recorder.intern_call_site(
                "<native>",
                "no Python code of the program was found on the thread's stack",
                0,
            ),
            sites: CallSites::new(library_code),
            types: Types::default(),
            callbacks: Arc::new(Callbacks::default()),
            recorder,
        };
        Ok(Self {
            group: OfProcess::new(Mutex::new(detached::shared(world.group().clone()))),
            world: OfProcess::new(Detached::new(HeldWorld::new(world))),
            is_open: AtomicBool::new(true),
            shared: Arc::new(shared),
        })
    }

    /// The group of all ranks, or of those that remain.
    fn group(&self, py: Python<'_>) -> PyResult<Group> {
        if !self.group.is_own() {
            let error = Error::new(ErrorKind::Closed, USED_AFTER_FORK);
            return Err(exception_for(py, &error, None));
        }
        Ok(Group::new(self.main_group().clone(), self.shared.clone()))
    }

    /// Continues without these ranks of the world, and returns the group of the others. All remaining ranks call this
    /// with the same list.
    fn shrink(&self, py: Python<'_>, excluding: Vec<u32>) -> PyResult<Group> {
        // In a forked child, `with` refuses, and the lock may be one that a thread of the parent held.
        let timeout = (self.group.is_own()).then(|| self.main_group().timeout());
        let group = self.with(py, timeout, |held| {
            held.change(|world| {
                world.shrink(&excluding)?;
                Ok(detached::shared(world.group().clone()))
            })
        })?;
        let old = std::mem::replace(&mut *self.main_group(), group.clone());
        // Dropped without holding the lock.
        drop(old);
        Ok(Group::new(group, self.shared.clone()))
    }

    /// A group of these ranks of the world. Exactly its members call this, all with the same list.
    fn new_group(
        &self,
        py: Python<'_>,
        ranks: Vec<u32>,
        name: String,
        timeout: Duration,
    ) -> PyResult<Group> {
        let options = GroupOptions {
            timeout: Some(timeout),
            ..GroupOptions::named(name)
        };
        let group = self.with(py, Some(timeout), |held| {
            held.read(|world| world.new_group(&ranks, &options))
        })?;
        Ok(Group::new(detached::shared(group), self.shared.clone()))
    }

    /// Waits for pending operations, for at most this long, and ends the world. Ranks that end later are no error. A
    /// rank whose `StoreServer` the others use then waits for them, for as long again at most (after a failure, for the
    /// time in which it waits for their status), and up to 10 s more until they have read that all have ended. Does
    /// nothing the second time, and nothing in a forked child.
    fn shutdown(&self, py: Python<'_>, within: Duration) -> PyResult<()> {
        if !self.world.is_own() {
            return Ok(());
        }
        self.is_open.store(false, Ordering::Relaxed);
        let ended = py.detach(|| {
            let world = self.world.take();
            world.map_or(Ok(()), |world| world.leave_within(within))
        });
        ended.map_err(|error| exception_for(py, &error, Some(within)))
    }

    /// Ends the world, since this exception has ended the program, without waiting for pending operations: these fail,
    /// and so do those of other ranks in the group of all ranks, with the exception as the reason. The ring stays. A
    /// rank whose `StoreServer` the others use keeps it for as long as it waits for their status.
    fn abandon(&self, py: Python<'_>, exception: &str) {
        if !self.world.is_own() || !self.is_open.swap(false, Ordering::Relaxed) {
            return;
        }
        py.detach(|| {
            // Another thread may be using the world, and waiting for other ranks.
            let group = self.main_group().clone();
            self.shared.recorder.note_exception(exception);
            group.abort(&format!("{}{exception}", RankStatus::RAISED));
            self.world.abandon();
        });
    }

    /// Whether the world was neither shut down nor abandoned, and was made by this process.
    fn is_open(&self) -> bool {
        self.world.is_own() && self.is_open.load(Ordering::Relaxed)
    }

    /// The ring's file; None if the ring is in this process's own memory.
    #[getter]
    fn path(&self) -> Option<PathBuf> {
        self.shared.recorder.storage().path().map(ToOwned::to_owned)
    }

    /// Names what the program does from now on; the empty text ends a phase.
    fn phase(&self, name: &str) {
        if self.world.is_own() {
            self.shared.recorder.phase(name);
        }
    }

    /// Sets the step that the program is in.
    fn step(&self, step: i64) {
        if self.world.is_own() {
            self.shared.recorder.step(step);
        }
    }

    /// Writes this rank's dump and returns the dump's path.
    fn dump(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, None, HeldWorld::dump)
    }
}

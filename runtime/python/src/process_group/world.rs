//! A process's place in a job of PyTorch's ranks.

use super::callbacks::Callbacks;
use super::errors::raise;
use super::fork::OfProcess;
use super::issue::{Group, WorldState};
use crate::frames::CallSites;
use crate::tensors::Types;
use pyo3::prelude::*;
use rcomm::{
    Config, Error, ErrorKind, GroupOptions, HashStore, PrefixStore, Rendezvous, Store, TcpStore,
};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A store for a job whose own one is not served over TCP, but is a file or a table in a process's memory. This
/// process serves it, on a port that the kernel chooses. A client must know the job's secret, as with any store that a
/// rank serves: `docs/SECURITY.md`.
#[pyclass(module = "rcomm._native", frozen)]
pub(crate) struct StoreServer(OfProcess<Mutex<Option<TcpStore>>>, u16);

#[pymethods]
impl StoreServer {
    /// Listens on the addresses of `host`, a name of this host, on a port that the kernel chooses.
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
        let store = store.map_err(|error| raise(py, &error, Some(timeout)))?;
        let port = store.port();
        Ok(Self(OfProcess::new(Mutex::new(Some(store))), port))
    }

    #[getter]
    fn port(&self) -> u16 {
        self.1
    }
}

/// One process's place in a job, and its groups.
#[pyclass(module = "rcomm._native", frozen)]
pub(crate) struct World {
    world: OfProcess<Mutex<Option<rcomm::World>>>,
    group: OfProcess<rcomm::ProcessGroup>,
    is_open: AtomicBool,
    shared: Arc<WorldState>,
}

impl World {
    fn lock(&self) -> MutexGuard<'_, Option<rcomm::World>> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses the world while the interpreter is released, since the call may wait for other ranks.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        use_it: impl FnOnce(&mut rcomm::World) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let gone = |message: &str| Error::new(ErrorKind::Closed, message);
        let used = match self.world.is_own() {
            false => Err(gone(
                "this process is a fork of the one that made the group",
            )),
            true => py.detach(|| {
                let mut world = self.lock();
                let world = world.as_mut();
                let world = world.ok_or_else(|| gone("the process group was destroyed"))?;
                use_it(world)
            }),
        };
        used.map_err(|error| raise(py, &error, None))
    }
}

fn under(prefix: &str, store: TcpStore) -> Arc<dyn Store> {
    Arc::new(PrefixStore::new(prefix, Arc::new(store)))
}

#[pymethods]
impl World {
    /// Joins a job: waits until all of its ranks have arrived at the store at `host` and `port`. All keys are under
    /// `prefix`. Without a host the job has this one rank. With a `server`, this process serves the store.
    /// `outlives` says that another process serves the store and ends later, so that no rank has to keep it for the
    /// others.
    #[new]
    #[pyo3(signature = (rank, size, *, job, host=None, port=0, prefix="", server=None, outlives=false, attempt=0, timeout, library_code=Vec::new()))]
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
        outlives: bool,
        attempt: u32,
        timeout: Duration,
        library_code: Vec<String>,
    ) -> PyResult<Self> {
        let server = server.and_then(|server| {
            let mut held = server
                .get()
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            held.take()
        });
        let made = py.detach(|| {
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
                    uses_agent_store: outlives,
                    ..rendezvous
                }),
                ..Config::from_environment()?
            };
            let store: Arc<dyn Store> = match server {
                _ if is_alone => Arc::new(HashStore::new()),
                Some(served) => under(prefix, served),
                None => under(prefix, rcomm::World::connect_store(&config, timeout)?),
            };
            rcomm::World::builder(config).store(store).init()
        });
        let world = made.map_err(|error| raise(py, &error, Some(timeout)))?;
        let recorder = world.recorder().clone();
        let shared = WorldState {
            in_torch: recorder.intern_call_site("<PyTorch>", "a thread of PyTorch's own", 0),
            sites: CallSites::new(library_code),
            types: Types::default(),
            callbacks: Arc::new(Callbacks::default()),
            recorder,
        };
        Ok(Self {
            group: OfProcess::new(world.group().clone()),
            world: OfProcess::new(Mutex::new(Some(world))),
            is_open: AtomicBool::new(true),
            shared: Arc::new(shared),
        })
    }

    /// The group of all ranks, or of those that remain.
    fn group(&self) -> Group {
        let world = self.world.is_own().then(|| self.lock());
        let now = world.as_ref().and_then(|world| world.as_ref());
        let group = now.map_or(&*self.group, rcomm::World::group);
        Group::new(group.clone(), self.shared.clone())
    }

    /// Continues without these ranks of the world, and returns the group of the others. All remaining ranks call this
    /// with the same list.
    fn shrink(&self, py: Python<'_>, excluding: Vec<u32>) -> PyResult<Group> {
        let group = self.with(py, |world| {
            world.shrink(&excluding)?;
            Ok(world.group().clone())
        })?;
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
        let group = self.with(py, |world| world.new_group(&ranks, &options))?;
        Ok(Group::new(group, self.shared.clone()))
    }

    /// Waits for what is pending, for this long at most, and ends the world. Ranks that end later are no error; the
    /// rank that serves the store waits as long for them. Does nothing the second time, and nothing in a forked
    /// child.
    fn shutdown(&self, py: Python<'_>, within: Duration) -> PyResult<()> {
        if !self.world.is_own() {
            return Ok(());
        }
        self.is_open.store(false, Ordering::Relaxed);
        let ended = py.detach(|| {
            let world = self.lock().take();
            world.map_or(Ok(()), |world| world.leave_within(within))
        });
        ended.map_err(|error| raise(py, &error, Some(within)))
    }

    /// Ends the world at once: what is pending fails, on the other ranks with this reason, and the ring stays.
    fn abandon(&self, py: Python<'_>, reason: &str) {
        if !self.world.is_own() {
            return;
        }
        self.is_open.store(false, Ordering::Relaxed);
        py.detach(|| {
            if let Some(world) = self.lock().take() {
                world.group().abort(reason);
            }
        });
    }

    /// Whether it was not shut down, and is this process's own.
    fn is_open(&self) -> bool {
        self.world.is_own() && self.is_open.load(Ordering::Relaxed)
    }

    /// The ring's file; None if it is in this process's own memory.
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

    /// Writes this rank's dump and returns where it is.
    fn dump(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |world| world.dump())
    }
}

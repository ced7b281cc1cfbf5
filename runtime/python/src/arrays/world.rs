//! A process's place in a job, for programs that call `rcomm.init()`.

use super::errors::{exception_for, used_after_fork};
use super::group::ArrayGroup;
use super::issue::{Shared, duration};
use crate::frames::CallSites;
use crate::process_group::callbacks::Callbacks;
use crate::process_group::detached::{self, Detached, SharedGroup};
use crate::process_group::fork::OfProcess;
use crate::process_group::held_world::HeldWorld;
use pyo3::prelude::*;
use rcomm::{Config, Error, ErrorKind, GroupOptions, HashStore, Rendezvous};
use rcomm_recorder::model::RankStatus;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One process's place in a job, and its groups.
#[pyclass(module = "rcomm._native", frozen, weakref)]
pub(crate) struct ArrayWorld {
    world: OfProcess<Detached<HeldWorld>>,
    /// Has a lock of its own, since that of `world` is held while a call waits for other ranks.
    current: OfProcess<Mutex<Current>>,
    is_open: AtomicBool,
    place: Rendezvous,
    /// The number of ranks with which the world was made, or recreated.
    size: AtomicU32,
    /// The files of the world as it was first made, which a forked child sees: a thread of the parent may have held the
    /// lock of `current`.
    first_path: Option<PathBuf>,
    first_dump_dir: PathBuf,
    library_code: Vec<String>,
}

/// What changes when the world shrinks or is recreated.
struct Current {
    group: SharedGroup,
    shared: Arc<Shared>,
}

impl Current {
    fn of(world: &rcomm::World, library_code: Vec<String>, callbacks: Arc<Callbacks>) -> Self {
        let recorder = world.recorder().clone();
        let ring = recorder.storage().path().map(ToOwned::to_owned);
        let shared = Shared {
            sites: CallSites::new(library_code),
            callbacks,
            records: ring.and_then(|ring| ring.parent().map(ToOwned::to_owned)),
            dump_dir: world.dump_dir().to_owned(),
            recorder,
        };
        Self {
            group: detached::shared(world.group().clone()),
            shared: Arc::new(shared),
        }
    }
}

fn ring_path(shared: &Shared) -> Option<PathBuf> {
    shared.recorder.storage().path().map(ToOwned::to_owned)
}

impl ArrayWorld {
    /// Called only in the process that made the world.
    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state that the groups share. Called only in the process that made the world.
    fn shared(&self) -> Arc<Shared> {
        self.current().shared.clone()
    }

    /// Runs an operation on the world without the interpreter's lock, since it may wait for other ranks.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        operation: impl FnOnce(&HeldWorld) -> Option<Result<T, Error>> + Send,
    ) -> PyResult<T> {
        if !self.world.is_own() {
            return Err(used_after_fork(py, "world"));
        }
        let closed = || Err(Error::new(ErrorKind::Closed, "the world was shut down"));
        let used = py.detach(|| operation(&self.world)).unwrap_or_else(closed);
        used.map_err(|error| self.shared().exception_for(py, &error))
    }
}

#[pymethods]
impl ArrayWorld {
    /// Joins a job: waits until all of its ranks have arrived.
    #[new]
    #[pyo3(signature = (*, rank=None, size=None, host=None, port=0, timeout=None, init_timeout=None, job=None, join=false, library_code=Vec::new()))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        rank: Option<u32>,
        size: Option<u32>,
        host: Option<String>,
        port: u16,
        timeout: Option<Duration>,
        init_timeout: Option<Duration>,
        job: Option<String>,
        join: bool,
        library_code: Vec<String>,
    ) -> PyResult<Self> {
        let made = py.detach(|| {
            let mut config = Config::from_environment()?;
            let is_alone = size == Some(1) && host.is_none();
            if let (Some(rank), Some(size)) = (rank, size) {
                let host = host.unwrap_or_else(|| "localhost".to_owned());
                config.rendezvous = Some(Rendezvous::explicit(rank, size, host, port.max(1))?);
            }
            if let Some(job) = job {
                let place = match config.rendezvous.take() {
                    Some(place) => place,
                    None => Rendezvous::from_environment(|name| std::env::var(name).ok())?,
                };
                config.rendezvous = Some(Rendezvous { job, ..place });
            }
            config.joins |= join;
            config.timeout = timeout.unwrap_or(config.timeout);
            config.init_timeout = init_timeout.unwrap_or(config.init_timeout);
            let mut builder = rcomm::World::builder(config);
            if is_alone {
                builder = builder.store(Arc::new(HashStore::new()));
            }
            builder.init()
        });
        let world = made.map_err(|error| exception_for(py, &error, None))?;
        let current = Current::of(&world, library_code.clone(), Arc::default());
        Ok(Self {
            first_path: ring_path(&current.shared),
            first_dump_dir: current.shared.dump_dir.clone(),
            current: OfProcess::new(Mutex::new(current)),
            place: world.place().clone(),
            size: AtomicU32::new(world.size()),
            world: OfProcess::new(Detached::new(HeldWorld::new(world))),
            is_open: AtomicBool::new(true),
            library_code,
        })
    }

    /// This process's rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.place.rank
    }

    /// The number of ranks with which the world was made, or recreated.
    #[getter]
    fn size(&self) -> u32 {
        self.size.load(Ordering::Relaxed)
    }

    /// The job's name.
    #[getter]
    fn job(&self) -> &str {
        &self.place.job
    }

    /// The group of all ranks that are left.
    #[getter]
    fn group(&self, py: Python<'_>) -> PyResult<ArrayGroup> {
        if !self.world.is_own() {
            return Err(used_after_fork(py, "world"));
        }
        let current = self.current();
        Ok(ArrayGroup::new(
            current.group.clone(),
            current.shared.clone(),
        ))
    }

    /// The ring's file; None if the ring is in this process's own memory. In a forked child, that of the world as it
    /// was first made.
    #[getter]
    fn path(&self) -> Option<PathBuf> {
        match self.world.is_own() {
            true => ring_path(&self.shared()),
            false => self.first_path.clone(),
        }
    }

    /// The folder of this run's dumps, which the first dump makes. In a forked child, as for `path`.
    #[getter]
    fn dump_dir(&self) -> PathBuf {
        match self.world.is_own() {
            true => self.shared().dump_dir.clone(),
            false => self.first_dump_dir.clone(),
        }
    }

    #[pyo3(signature = (ranks, *, name="", timeout=None))]
    fn new_group(
        &self,
        py: Python<'_>,
        ranks: Vec<u32>,
        name: &str,
        timeout: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<ArrayGroup> {
        let options = GroupOptions {
            timeout: timeout.map(duration).transpose()?,
            ..GroupOptions::named(name)
        };
        let group = self.with(py, |held| {
            held.read(|world| world.new_group(&ranks, &options))
        })?;
        Ok(ArrayGroup::new(detached::shared(group), self.shared()))
    }

    fn shrink(slf: &Bound<'_, Self>, without: Vec<u32>) -> PyResult<Py<Self>> {
        let (py, this) = (slf.py(), slf.get());
        let group = this.with(py, |held| {
            held.change(|world| {
                world.shrink(&without)?;
                Ok(detached::shared(world.group().clone()))
            })
        })?;
        let old = std::mem::replace(&mut this.current().group, group);
        // Dropped without holding the lock.
        drop(old);
        Ok(slf.clone().unbind())
    }

    fn grow(slf: &Bound<'_, Self>, lost: Vec<u32>, size: u32) -> PyResult<Py<Self>> {
        let (py, this) = (slf.py(), slf.get());
        let made = this.with(py, |held| {
            held.change(|world| {
                world.grow(&lost, size)?;
                let callbacks = this.shared().callbacks.clone();
                Ok(Current::of(world, this.library_code.clone(), callbacks))
            })
        })?;
        let old = std::mem::replace(&mut *this.current(), made);
        // As in `shrink`.
        drop(old);
        this.size.store(size, Ordering::Relaxed);
        Ok(slf.clone().unbind())
    }

    /// Names what the program does from now on; the empty text ends a phase.
    fn phase(&self, name: &str) {
        if self.world.is_own() {
            self.shared().recorder.phase(name);
        }
    }

    /// Sets the step that the program is in.
    fn step(&self, number: i64) {
        if self.world.is_own() {
            self.shared().recorder.step(number);
        }
    }

    /// Writes this rank's dump and returns the dump's path.
    fn dump(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, HeldWorld::dump)
    }

    /// Waits for pending operations, then for the other ranks, and ends the world. Does nothing the second time, and
    /// nothing in a forked child.
    #[pyo3(signature = (*, timeout=None))]
    fn shutdown(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let timeout = timeout.map(duration).transpose()?;
        if !self.world.is_own() {
            return Ok(());
        }
        self.is_open.store(false, Ordering::Relaxed);
        let ended = py.detach(|| match (self.world.take(), timeout) {
            (None, _) => Ok(()),
            (Some(world), Some(timeout)) => world.shutdown_within(timeout),
            (Some(world), None) => world.shutdown(),
        });
        ended.map_err(|error| self.shared().exception_for(py, &error))
    }

    /// Ends the world without waiting for pending operations: these fail, and so do those of other ranks in the group
    /// of all ranks, with this reason, which the ring keeps as the phase; or with an exception's text, if one has ended
    /// the program. The ring stays. A rank that serves the store does so for as long as it waits for the other ranks'
    /// status.
    #[pyo3(signature = (reason, *, is_exception=false))]
    fn abandon(&self, py: Python<'_>, reason: &str, is_exception: bool) {
        if !self.world.is_own() || !self.is_open.swap(false, Ordering::Relaxed) {
            return;
        }
        py.detach(|| {
            // The lock is not kept: other threads take it while they hold the interpreter's. Another thread may be
            // using the world, and waiting for other ranks.
            let group = self.current().group.clone();
            let recorder = &self.shared().recorder;
            if is_exception {
                recorder.note_exception(reason);
                group.abort(&format!("{}{reason}", RankStatus::RAISED));
            } else {
                recorder.phase(reason);
                group.abort(reason);
            }
            self.world.abandon();
        });
    }

    /// Whether the world was neither shut down nor abandoned, and was made by this process.
    #[getter]
    fn is_open(&self) -> bool {
        self.world.is_own() && self.is_open.load(Ordering::Relaxed)
    }

    fn __repr__(&self) -> String {
        format!(
            "<rcomm.World {} rank {} of {}>",
            self.place.job,
            self.place.rank,
            self.size()
        )
    }
}

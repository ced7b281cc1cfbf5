//! The recorder as a Python object.

use crate::exit;
use crate::frames::CallSites;
use crate::hooks::GroupHooks;
use crate::pending::Pending;
use crate::tensors::Types;
use crate::termination;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use rcomm_recorder::model::ProcessGroupInfo;
use rcomm_recorder::publish::{KeptJobs, remove_jobs_beside};
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use rcomm_recorder_capi::ForkGuarded;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// The ring, and the state that the hooks of all groups share.
pub(crate) struct RingState {
    pub(crate) ring: ForkGuarded,
    pub(crate) pending: Pending,
    pub(crate) sites: CallSites,
    pub(crate) types: Types,
    /// The number of operations under way whose end is visible only in a wait for them.
    pub(crate) deferred: AtomicUsize,
    /// What the hooks in C++ call before they record the first of these operations.
    pub(crate) first_deferred: CalledOnce,
    /// Whether the ring is closed if the process exits with code 0.
    pub(crate) closes: AtomicBool,
    /// The number of groups added so far.
    groups: AtomicU32,
}

/// A Python function that is called once.
#[derive(Default)]
pub(crate) struct CalledOnce {
    /// Whether there is a function, which is read without the lock.
    is_set: AtomicBool,
    callback: Mutex<Option<Py<PyAny>>>,
}

impl CalledOnce {
    fn set(&self, callback: Py<PyAny>) {
        let replaced = self.lock().replace(callback);
        self.is_set.store(true, Ordering::Release);
        // Dropped outside of the lock.
        drop(replaced);
    }

    /// Calls the function, unless that was done, with the interpreter's lock, which the caller need not hold. The
    /// function's error is dropped.
    pub(crate) fn call(&self) {
        if !self.is_set.swap(false, Ordering::Acquire) {
            return;
        }
        let callback = self.lock().take();
        Python::try_attach(|py| callback.map(|callback| callback.call0(py).map(drop)));
    }

    fn lock(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.callback.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A ring that this process writes.
#[pyclass(module = "rcomm._native", frozen)]
pub(crate) struct Ring(pub(crate) Arc<RingState>);

#[pymethods]
impl Ring {
    /// Makes the ring of a rank, with space for `entries` operations: in `directory` or, if that is "memory", in the
    /// process's own memory; without a directory, in a file below `/dev/shm` if that is possible. `library_code` are
    /// folders and files whose Python code is not the program's: calls are attributed to the innermost frame outside of
    /// them. Then removes the rings of dead jobs from the directory, except the newest (32 jobs, 1 GiB). A rank leaves
    /// that to a lower rank of the job that lives on this host. Raises OSError if the ring cannot be made.
    #[new]
    #[pyo3(signature = (job, rank, world_size, *, attempt=0, directory=None, entries=None, library_code=Vec::new()))]
    fn new(
        job: String,
        rank: u32,
        world_size: u32,
        attempt: u32,
        directory: Option<PathBuf>,
        entries: Option<u32>,
        library_code: Vec<String>,
    ) -> PyResult<Self> {
        let mut config = RecorderConfig::new(job, rank, world_size);
        config.attempt = attempt;
        if let Some(directory) = directory {
            config.placement = match directory.as_os_str() == "memory" {
                true => Placement::Memory,
                false => Placement::Dir(directory),
            };
        }
        if let Some(entries) = entries {
            config.entries = entries;
        }
        let made = FlightRecorder::create(&config);
        let made = made.map_err(|error| PyOSError::new_err(error.to_string()))?;
        remove_jobs_beside(made.storage(), &KeptJobs::default());
        let ring = ForkGuarded::new(made).map_err(|_| {
            PyOSError::new_err("recording needs Linux 4.14 or later (MADV_WIPEONFORK)")
        })?;
        let shared = Arc::new(RingState {
            ring,
            pending: Pending::default(),
            sites: CallSites::new(library_code),
            types: Types::default(),
            deferred: AtomicUsize::new(0),
            first_deferred: CalledOnce::default(),
            closes: AtomicBool::new(false),
            groups: AtomicU32::new(0),
        });
        beat(&shared);
        Ok(Self(shared))
    }

    /// The ring's file; None if the ring is in this process's own memory, or belongs to its parent process.
    #[getter]
    fn path(&self) -> Option<PathBuf> {
        let path = self.0.ring.get()?.storage().path()?;
        Some(path.to_owned())
    }

    /// Adds a group: `ranks` are its members' ranks in the world, in the order of their ranks in the group. Returns the
    /// group's hooks, which are to be registered with PyTorch.
    #[pyo3(signature = (name, description, ranks, *, backend, timeout_ms=0))]
    fn group(
        &self,
        name: String,
        description: String,
        ranks: Vec<u32>,
        backend: String,
        timeout_ms: u64,
    ) -> GroupHooks {
        let info = ProcessGroupInfo {
            id: self.0.groups.fetch_add(1, Ordering::Relaxed),
            name,
            desc: description,
            ranks: ranks.into(),
        };
        let timeout = Duration::from_millis(timeout_ms);
        let row = self.0.ring.get().map(|ring| ring.add_group(&info, timeout));
        GroupHooks::new(self.0.clone(), row, backend, timeout)
    }

    /// Polls the operations under way, and records those that ended.
    fn sweep(&self, py: Python<'_>) {
        self.0.pending.sweep(py, &self.0.ring, usize::MAX);
    }

    /// The number of operations under way whose end is visible only in a wait for them.
    fn deferred(&self) -> usize {
        self.0.deferred.load(Ordering::Relaxed)
    }

    /// Calls `callback` before the first operation that the hooks in C++ record and whose end is visible only in a wait
    /// for it. Replaces an earlier callback that was not called yet.
    fn on_first_deferred(&self, callback: Py<PyAny>) {
        self.0.first_deferred.set(callback);
    }

    /// How many operations are watched: those that were issued and not seen to end.
    fn under_way(&self) -> usize {
        self.0.pending.len()
    }

    /// Records that a wait for this Work returned, or raised.
    fn waited(&self, py: Python<'_>, work: &Bound<'_, PyAny>, has_returned: bool) {
        self.0.pending.waited(py, work, has_returned);
    }

    /// Names what the program does from now on; the empty text ends a phase.
    fn phase(&self, name: &str) {
        if let Some(ring) = self.0.ring.get() {
            ring.phase(name);
        }
    }

    /// Records that this exception ends the program.
    fn note_exception(&self, exception: &str) {
        if let Some(ring) = self.0.ring.get() {
            ring.note_exception(exception);
        }
    }

    /// Sets the step that the program is in.
    fn step(&self, step: i64) {
        if let Some(ring) = self.0.ring.get() {
            ring.step(step);
        }
    }

    /// Called when the process is about to exit: records the exit code as soon as it is known, which is after the last
    /// Python code has run. If `closes` is true, an exit with code 0 also closes the ring; the last of a host's ranks
    /// to close theirs removes the files of all. Later records do no harm. Raises OSError if the C library has no
    /// memory to register a function for the exit.
    fn exits(&self, closes: bool) -> PyResult<()> {
        self.0.closes.store(closes, Ordering::Relaxed);
        exit::watch(&self.0).map_err(|error| PyOSError::new_err(error.to_string()))
    }

    /// From now on, a SIGTERM that ends the process is recorded as exit code 143, as a shell reports it. Does nothing
    /// if another ring of the process does so, if the program handles or ignores the signal, or in the first process of
    /// a container, which the signal does not end.
    fn notes_termination(&self) {
        termination::watch(&self.0);
    }
}

/// The time between two heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Starts a thread that writes the heartbeat once a second until the ring is dropped. The thread never takes the
/// interpreter's lock, so the heartbeat stops only with the whole process. If the thread cannot be started, only the
/// heartbeat is missing in the ring.
fn beat(shared: &Arc<RingState>) {
    let ring: Weak<RingState> = Arc::downgrade(shared);
    let run = move || {
        while let Some(shared) = ring.upgrade() {
            if let Some(ring) = shared.ring.get() {
                ring.heartbeat();
            }
            // The last owner may be dropped while this thread sleeps.
            drop(shared);
            std::thread::sleep(HEARTBEAT);
        }
    };
    let thread = std::thread::Builder::new().name("rcomm-heartbeat".to_owned());
    drop(thread.spawn(run));
}

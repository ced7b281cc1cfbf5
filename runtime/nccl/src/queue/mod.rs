//! A queue: a communicator with its own stream, and the operations that are in progress on it. The module `enqueue`
//! puts operations on the stream, and `ending` ends a queue.
//!
//! An operation starts after the pending work of its buffers' streams, since the queue's stream waits for an event
//! after that work. Its end is an event of the queue's stream. So a call that issues an operation does not wait for the
//! device. Operations that are issued before all ranks have joined wait in the queue, and every later check of an
//! operation advances the joining. Buffers are released when the end event is complete. The buffers of an aborted
//! operation are kept until then, or leaked.

mod ending;
mod enqueue;
mod latest;
mod on_device;
pub(crate) mod pending;
pub(crate) mod registry;
mod separate_thread;

pub(crate) use enqueue::{IncompleteCall, RemainingWork, for_each_buffer};

use crate::comm::bootstrap::Bootstrap;
use crate::comm::init::{CommInit, InitStep, WarmUp};
use crate::comm::members::{BootstrapGroup, Scope};
use crate::comm::{Comm, CommStatus};
use crate::context::Shared;
use crate::context::options::Connecting;
use crate::cuda::event::Mark;
use crate::cuda::graph::{Graph, GraphNumbers, LiveGraphs};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::stream::CudaStream;
use crate::library::hash;
use ending::AbandonedOp;
use on_device::OnDevice;
use pending::{Start, Ticket};
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::{DType, OpType};
use registry::Registry;
use separate_thread::ConnectionKey;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

/// How long a dump waits for the queue's lock.
const FACTS_TIME: Duration = Duration::from_millis(20);

/// The stage of the queue's communicator.
enum Stage {
    /// The communicator is being made, which needs all its ranks.
    Joining(Box<Bootstrap>),
    /// The communicator exists.
    Ready,
    /// The queue is unusable, for this reason.
    Broken(Error),
}

/// The state that the queue's lock protects. The holder of the lock has exclusive use of the communicator.
pub(crate) struct QueueState {
    stage: Stage,
    /// The operations that wait for the ranks to join.
    waiting: VecDeque<Arc<Ticket>>,
    /// The keys of the calls for which the library has connected to peers.
    connected: HashSet<ConnectionKey>,
    /// The key that the latest operation needed: most operations need the same key as the one before.
    latest_connected: Option<ConnectionKey>,
    /// The names of the calls other than operations that have returned at least once.
    called: HashSet<&'static str>,
}

/// The result of enqueueing an operation.
pub(crate) enum Enqueued {
    /// The operation runs between this start and this event.
    Between(Start, Mark),
    /// The operation is part of the graph with this id.
    Captured(u64),
}

/// The operations that were captured into a graph.
#[derive(Default)]
struct Captured {
    count: u64,
    /// Sequence numbers of the first operation and of the last.
    ends: Option<(u64, u64)>,
}

/// An operation that a queue has put on its stream: the latest one there, or the latest one on registered memory.
#[derive(Clone)]
pub(crate) struct LatestOp {
    end: Mark,
    op: OpType,
    seq: u64,
    issued: Instant,
}

/// The parts of a queue that are made before its communicator.
pub(crate) struct QueueParts {
    stream: Arc<CudaStream>,
    /// Four bytes that barriers and the first broadcast use.
    barrier: DeviceBuffer,
}

impl QueueParts {
    /// Makes the stream and the memory of a new queue.
    ///
    /// # Errors
    /// `Backend` if the device has no more streams or memory.
    pub(crate) fn make(shared: &Shared) -> Result<Self> {
        let stream = CudaStream::new(&shared.device, shared.options.priority)?;
        let barrier = DeviceBuffer::zeroed(&stream, DType::U32, 1)?;
        Ok(Self { stream, barrier })
    }

    /// The stream and the buffer with which a new communicator connects its rings; `None` in a lazy group, which
    /// connects its rings at its first operation.
    pub(crate) fn warm_up(&self, shared: &Shared) -> Option<WarmUp> {
        (shared.options.connecting == Connecting::Eager).then(|| WarmUp {
            stream: self.stream.clone(),
            word: self.barrier.clone(),
        })
    }
}

/// A communicator, its stream, and the operations that go through them.
pub(crate) struct CommQueue {
    pub(crate) shared: Arc<Shared>,
    scope: Scope,
    /// Dropped before the objects that it uses, since freeing memory that a kernel uses waits for the kernel.
    comm: OnceLock<Arc<Comm>>,
    pub(crate) registry: Registry,
    stream: Arc<CudaStream>,
    /// Four bytes that barriers and the first broadcast use.
    barrier: DeviceBuffer,
    /// NCCL's number of the communicator, which is the same on all members.
    hash: OnceLock<u64>,
    /// The number of operations that were passed to the library, including refused ones.
    launched: AtomicU64,
    /// The operations captured into each of the latest graphs.
    graphs: Mutex<BTreeMap<u64, Captured>>,
    /// The graphs that still hold operations.
    live: Arc<LiveGraphs>,
    /// Whether the stream may be part of a capture: an operation made it part of one whose end was not seen yet.
    may_be_captured: AtomicBool,
    /// The latest operation on the stream.
    latest: Mutex<Option<LatestOp>>,
    state: Mutex<QueueState>,
    on_device: OnDevice,
    /// The memory of operations that were given up while the device may use it.
    abandoned: Mutex<Vec<AbandonedOp>>,
    /// Staging memory for lists whose parts the library requires to be contiguous.
    staging: Mutex<Option<DeviceBuffer>>,
    /// When an error of the communicator was first seen.
    error_since: OnceLock<Instant>,
}

impl CommQueue {
    /// How long [`lock_idle`](Self::lock_idle) waits until no work is in progress in the background.
    const IDLE_TIME: Duration = Duration::from_secs(30);

    /// Makes a queue and begins to join its communicator.
    ///
    /// # Errors
    /// Same as [`Bootstrap::begin`]; `Backend` if the device has no more streams or memory.
    pub(crate) fn begin(shared: &Arc<Shared>, members: BootstrapGroup) -> Result<Arc<Self>> {
        let scope = members.scope;
        let mut bootstrap = Bootstrap::begin(shared, members)?;
        match QueueParts::make(shared) {
            Ok(parts) => {
                if let Some(warm_up) = parts.warm_up(shared) {
                    bootstrap.warm_up(warm_up);
                }
                let stage = Stage::Joining(Box::new(bootstrap));
                Ok(Self::new(shared, scope, parts, stage))
            }
            // The other ranks must not wait for this rank.
            Err(error) => Err(bootstrap.give_up(error, Duration::ZERO)),
        }
    }

    /// Takes over an existing communicator for all members of a group.
    pub(crate) fn from_comm(
        shared: &Arc<Shared>,
        parts: QueueParts,
        comm: Comm,
        hash: u64,
    ) -> Arc<Self> {
        let queue = Self::new(shared, Scope::Group, parts, Stage::Ready);
        // Both values are set for the first time: no other thread has this queue yet.
        let _ = queue.hash.set(hash);
        let _ = queue.comm.set(Arc::new(comm));
        queue
    }

    fn new(
        shared: &Arc<Shared>,
        scope: Scope,
        QueueParts { stream, barrier }: QueueParts,
        stage: Stage,
    ) -> Arc<Self> {
        Arc::new(Self {
            shared: shared.clone(),
            scope,
            stream,
            barrier,
            comm: OnceLock::new(),
            registry: Registry::default(),
            hash: OnceLock::new(),
            launched: AtomicU64::new(0),
            graphs: Mutex::default(),
            live: Arc::default(),
            may_be_captured: AtomicBool::new(false),
            latest: Mutex::default(),
            state: Mutex::new(QueueState {
                stage,
                waiting: VecDeque::new(),
                connected: HashSet::new(),
                latest_connected: None,
                called: HashSet::new(),
            }),
            on_device: OnDevice::default(),
            abandoned: Mutex::default(),
            staging: Mutex::default(),
            error_since: OnceLock::new(),
        })
    }

    /// Waits until all ranks have joined. After an error, waits for `report_time` at most for the other ranks' reports.
    ///
    /// # Errors
    /// `Timeout`, `PeerLost` and `Rendezvous` name the ranks that did not arrive or do not fit together; the error of
    /// an abort or of the library.
    pub(crate) fn join(&self, deadline: Deadline, report_time: Duration) -> Result<()> {
        let deadline = deadline.started();
        let mut state = self.lock(deadline)?;
        loop {
            let error = match self.advance(&mut state) {
                Ok(true) => return Ok(()),
                Ok(false) if deadline.has_passed() => match &state.stage {
                    Stage::Joining(bootstrap) => bootstrap.timed_out(),
                    Stage::Ready | Stage::Broken(_) => return Ok(()),
                },
                Ok(false) => {
                    std::thread::sleep(Duration::from_micros(200));
                    continue;
                }
                Err(error) => error,
            };
            let stage = std::mem::replace(&mut state.stage, Stage::Broken(error.clone()));
            return Err(match stage {
                Stage::Joining(bootstrap) => bootstrap.give_up(error, report_time),
                Stage::Ready | Stage::Broken(_) => error,
            });
        }
    }

    /// The stream on which the operations of this queue run.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// NCCL's number of this communicator, once the communicator exists.
    pub(crate) fn hash(&self) -> Option<u64> {
        self.hash.get().copied()
    }

    /// Locks the queue, so that the holder has exclusive use of the communicator.
    ///
    /// # Errors
    /// `Timeout` if the queue is not free by the deadline: another thread may hold the lock in a call of the library
    /// or the driver that never returns.
    pub(crate) fn lock(&self, deadline: Deadline) -> Result<MutexGuard<'_, QueueState>> {
        let deadline = deadline.started();
        let mut pause = Duration::from_micros(5);
        loop {
            if let Some(state) = self.try_lock() {
                return Ok(state);
            }
            if deadline.has_passed() {
                let message =
                    "another thread's call on the communicator did not return before the deadline";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Locks the queue when no work, such as a launch, is in progress in the background. Registrations of memory need
    /// this, since the library keeps them in plain arrays that a launch reads (`ncclRegister`, register/register.cc).
    ///
    /// # Errors
    /// `Timeout` if work is still in progress after [`IDLE_TIME`](Self::IDLE_TIME); the error of an abort, of the
    /// library, or the reason why the queue is unusable: a call that was given up may still be in progress then.
    pub(crate) fn lock_idle(&self, comm: &Comm) -> Result<MutexGuard<'_, QueueState>> {
        let deadline = Deadline::In(Self::IDLE_TIME).started();
        let state = self.lock(deadline)?;
        if let Stage::Broken(error) = &state.stage {
            return Err(error.clone());
        }
        self.wait_until_connected(comm, deadline)?;
        Ok(state)
    }

    /// Locks the queue if no other thread holds the lock.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, QueueState>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the reason why work in progress cannot complete, if there is one: an abort, an error of the
    /// communicator that is older than [`Comm::GRACE`], or a failure of this queue. Never waits.
    pub(crate) fn async_error(&self) -> Option<Error> {
        if let Some(error) = self.shared.aborted.get() {
            return Some(error.clone());
        }
        if let Some(error) = self.comm.get().and_then(|comm| comm.async_error()) {
            let since = self.error_since.get_or_init(Instant::now);
            return (since.elapsed() >= Comm::GRACE).then_some(error);
        }
        match &self.state.try_lock().ok()?.stage {
            Stage::Broken(error) => Some(error.clone()),
            Stage::Joining(_) | Stage::Ready => None,
        }
    }

    /// Enqueues an operation on the device, or in the queue until all ranks have joined. The context must
    /// be current, and the graph is that of [`check_capture`](Self::check_capture).
    ///
    /// # Blocking
    /// Until `deadline` at the latest: for another thread's call on this queue and, the first time, for the peers to
    /// which the library connects.
    pub(crate) fn submit(
        self: &Arc<Self>,
        op: Op<'static>,
        (seq, deadline): (u64, Deadline),
        graph: Option<Graph>,
    ) -> Arc<Ticket> {
        let ticket = Ticket::new(self.clone(), op, seq, deadline);
        self.free_finished();
        self.release_ended();
        let mut state = match self.lock(deadline) {
            Ok(state) => state,
            Err(error) => {
                ticket.fail(error);
                return ticket;
            }
        };
        // A suspension sets its flag before it takes this lock.
        if let Err(error) = self.shared.check_awake() {
            ticket.fail(error);
            return ticket;
        }
        let is_ready = matches!(state.stage, Stage::Ready) && self.shared.aborted.get().is_none();
        if is_ready && state.waiting.is_empty() {
            self.launch(&mut state, &ticket, Some(graph));
        } else {
            state.waiting.push_back(ticket.clone());
            self.launch_waiting_ops(&mut state, Some((&ticket, graph)));
        }
        ticket
    }

    /// If an operation waits in the queue, advances the joining and the queue, unless another thread is doing so. Never
    /// waits for a peer to join, but may wait, as [`submit`](Self::submit), while the library connects to peers.
    pub(crate) fn try_progress(&self) {
        if let Some(mut state) = self.try_lock() {
            self.enter_and_launch_waiting(&mut state);
        }
    }

    /// Works as [`launch_waiting_ops`](Self::launch_waiting_ops), but enters the context itself.
    fn enter_and_launch_waiting(&self, state: &mut QueueState) {
        if state.waiting.is_empty() {
            return;
        }
        match self.shared.device.enter() {
            Ok(_entered) => self.launch_waiting_ops(state, None),
            Err(error) => {
                for ticket in state.waiting.drain(..) {
                    ticket.fail(error.clone());
                }
            }
        }
    }

    /// Launches the operations in the queue, if all ranks have joined. The context must be current; `checked` is the
    /// ticket for which the caller has looked up the graph.
    fn launch_waiting_ops(
        &self,
        state: &mut QueueState,
        checked: Option<(&Arc<Ticket>, Option<Graph>)>,
    ) {
        match self.advance(state) {
            Ok(false) => {}
            Ok(true) => {
                while let Some(ticket) = state.waiting.pop_front() {
                    let checked = checked.filter(|(checked, _)| Arc::ptr_eq(checked, &ticket));
                    let graph = checked.map(|(_, graph)| graph);
                    self.launch(state, &ticket, graph);
                }
            }
            Err(error) => {
                let stage = std::mem::replace(&mut state.stage, Stage::Broken(error.clone()));
                if let Stage::Joining(bootstrap) = stage {
                    // The operations fail at once instead of waiting for the reports of the other ranks.
                    bootstrap.give_up(error.clone(), Duration::ZERO);
                }
                for ticket in state.waiting.drain(..) {
                    ticket.fail(error.clone());
                }
            }
        }
    }

    /// Advances the joining by one step; returns whether all ranks have joined.
    fn advance(&self, state: &mut QueueState) -> Result<bool> {
        if let Some(error) = self.shared.aborted.get() {
            return Err(error.clone());
        }
        let has_joined = match &mut state.stage {
            Stage::Joining(bootstrap) => bootstrap.step(&self.shared)?,
            Stage::Ready => return Ok(true),
            Stage::Broken(error) => return Err(error.clone()),
        };
        if !has_joined {
            return Ok(false);
        }
        if let Stage::Joining(bootstrap) = std::mem::replace(&mut state.stage, Stage::Ready)
            && let Some((comm, ids)) = bootstrap.into_comm()
        {
            // The hash is set once, since there is one bootstrap.
            if let Some(first) = ids.first() {
                let computed = || hash::of_joined(self.shared.library.version(), first);
                let _ = self.hash.set(comm.stated_hash().unwrap_or_else(computed));
            }
            let _ = self.comm.set(Arc::new(comm));
        }
        Ok(true)
    }

    /// Returns the communicator, if it exists.
    pub(crate) fn comm(&self) -> Option<&Arc<Comm>> {
        self.comm.get()
    }

    /// Makes a communicator from this one, as a step of [`take_over`](Self::take_over); returns `None` on a rank that
    /// is in no part of a split.
    pub(crate) fn derive(
        &self,
        begin: impl FnOnce(&Arc<Comm>) -> Result<CommInit>,
        deadline: Deadline,
    ) -> Result<Option<Comm>> {
        let step = |init: &mut CommInit| match init.step()? {
            InitStep::Ready(made) => Ok(Some(made)),
            InitStep::NotYet => Ok(None),
        };
        self.take_over(begin, step, deadline)
    }

    /// Takes a step that all ranks of the communicator take together: calls `begin`, then `step` until it returns a
    /// value. No other call goes through the queue in the meantime.
    ///
    /// # Blocking
    /// Until the step is done, or an abort or the deadline ends it.
    ///
    /// # Errors
    /// `Timeout`; `Closed` if the communicator does not exist; the errors of an abort, of `begin` and of `step`. If
    /// `begin` has succeeded, the queue is unusable after an error.
    pub(crate) fn take_over<S, T>(
        &self,
        begin: impl FnOnce(&Arc<Comm>) -> Result<S>,
        mut step: impl FnMut(&mut S) -> Result<Option<T>>,
        deadline: Deadline,
    ) -> Result<T> {
        let deadline = deadline.started();
        // No launch can start while the lock is held.
        let mut state = self.lock(deadline)?;
        let was_aborted = self.shared.aborted.get().is_some();
        let Some(comm) = self.comm.get() else {
            let message = "the communicator does not exist yet";
            return Err(Error::new(ErrorKind::Closed, message));
        };
        let mut begun = {
            let _entered = self.shared.device.enter()?;
            begin(comm)?
        };
        let done = loop {
            if let Some(error) = self.shared.aborted.get().filter(|_| !was_aborted) {
                break Err(error.clone());
            }
            match step(&mut begun) {
                Ok(Some(done)) => break Ok(done),
                Ok(None) if deadline.has_passed() => {
                    let message = "the ranks did not all take part in time";
                    break Err(Error::new(ErrorKind::Timeout, message));
                }
                Ok(None) => std::thread::sleep(Duration::from_micros(200)),
                Err(error) => break Err(error),
            }
        };
        if let Err(error) = &done {
            state.stage = Stage::Broken(error.clone());
        }
        done
    }

    /// Returns the communicator's facts for a dump. Waits for at most [`FACTS_TIME`].
    pub(crate) fn facts(&self) -> Vec<(String, String)> {
        let mut facts: Vec<(String, String)> = Vec::new();
        let mut fact = |name: &str, value: String| facts.push((name.to_owned(), value));
        fact("stream", format!("{:#x}", self.stream.raw().addr()));
        if let Some(comm) = self.comm.get() {
            fact("rank", comm.rank().to_string());
            fact("n_ranks", comm.size().to_string());
            let state = match comm.status() {
                CommStatus::Ready => "ready".to_owned(),
                CommStatus::InProgress => "in progress".to_owned(),
                CommStatus::InUse => "inside a call".to_owned(),
                CommStatus::Gone => "ended".to_owned(),
                CommStatus::Failed(error) => error.to_string(),
            };
            fact("async_state", state);
        }
        // A thread that polls holds the lock for a moment. A thread that is inside a call of the library keeps it.
        let deadline = Instant::now() + FACTS_TIME;
        let mut state = self.state.try_lock();
        while state.is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(200));
            state = self.state.try_lock();
        }
        match state {
            Err(_) => fact("stage", "inside a call".to_owned()),
            Ok(state) => {
                let stage = match &state.stage {
                    Stage::Joining(_) => "joining".to_owned(),
                    Stage::Ready => "ready".to_owned(),
                    Stage::Broken(error) => format!("broken: {error}"),
                };
                fact("stage", stage);
                fact("queued", state.waiting.len().to_string());
            }
        }
        let launched = self.launched.load(Ordering::Relaxed);
        fact("launched", launched.to_string());
        let mut live = GraphNumbers::default();
        self.live.collect(&mut live);
        if !live.is_empty() {
            fact("live_graphs", live.to_string());
        }
        for (id, captured) in &*self.graphs() {
            let (first, last) = captured.ends.unwrap_or_default();
            let text = format!("{} operations, #{first} to #{last}", captured.count);
            fact(&format!("graph {id}"), text);
        }
        facts
    }
}

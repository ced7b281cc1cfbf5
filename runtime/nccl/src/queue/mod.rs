//! A communicator with a stream of its own, and the operations on their way through it. How they are put
//! on the stream is in `enqueue`, how a queue ends in `ending`.
//!
//! An operation starts after the pending work of its buffers' streams (an event that the queue's stream waits
//! for), and its end is an event of the queue's stream: nothing here waits for the device. What is issued
//! before all ranks have joined waits in a queue, and every later look at an operation advances the joining.
//! Buffers are released when the event has completed; those of an aborted operation are kept until then, or
//! leaked.

mod apart;
mod ending;
mod enqueue;
pub(crate) mod pending;
pub(crate) mod registry;

pub(crate) use enqueue::{Left, Unmade, visit};

use crate::comm::bootstrap::Bootstrap;
use crate::comm::init::{CommInit, InitStep, WarmUp};
use crate::comm::members::{BootstrapGroup, Scope};
use crate::comm::{Comm, CommStatus};
use crate::context::Shared;
use crate::context::options::Connecting;
use crate::cuda::event::Mark;
use crate::cuda::graph::{Graph, LiveGraphs};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::stream::CudaStream;
use crate::library::hash;
use apart::Shape;
use ending::Remains;
use pending::{Start, Ticket};
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::DType;
use registry::Registry;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

/// How far the queue's communicator is set up.
enum Stage {
    Joining(Box<Bootstrap>),
    Ready,
    Broken(Error),
}

/// Its holder has exclusive use of the communicator.
pub(crate) struct QueueState {
    stage: Stage,
    waiting: VecDeque<Arc<Ticket>>,
    /// What the library has connected to peers for.
    connected: HashSet<Shape>,
    /// The calls, other than operations, that have returned once.
    called: HashSet<&'static str>,
}

/// What became of an operation that was put on the stream.
pub(crate) enum Enqueued {
    /// It runs between these.
    Between(Start, Arc<Mark>),
    /// It is part of this graph.
    Captured(u64),
}

/// Operations of a graph.
#[derive(Default)]
struct Captured {
    count: u64,
    /// Sequence numbers, of the first and of the last.
    ends: Option<(u64, u64)>,
}

/// A communicator, its stream, and what goes through them.
pub(crate) struct CommQueue {
    pub(crate) shared: Arc<Shared>,
    scope: Scope,
    /// Dropped before what it uses: freeing memory that a kernel uses waits for the kernel.
    comm: OnceLock<Arc<Comm>>,
    pub(crate) registry: Registry,
    stream: Arc<CudaStream>,
    barrier: DeviceBuffer,
    /// NCCL's number of the communicator, the same on all members.
    hash: OnceLock<u64>,
    /// Operations put on the device.
    launched: AtomicU64,
    /// What went into each graph, of the latest.
    graphs: Mutex<BTreeMap<u64, Captured>>,
    /// Those that still hold operations.
    live: Arc<LiveGraphs>,
    /// The stream may be part of a capture: it was, and the capture has not been seen to end.
    may_be_captured: AtomicBool,
    /// The end of the latest operation on the stream.
    latest: Mutex<Option<Arc<Mark>>>,
    state: Mutex<QueueState>,
    remains: Mutex<Vec<Remains>>,
    /// For lists whose parts the library wants side by side.
    staging: Mutex<Option<DeviceBuffer>>,
    /// Since when the library reports an error of the communicator.
    troubled_since: OnceLock<Instant>,
}

impl CommQueue {
    /// How long what is on the device may go on after an error of the communicator.
    const GRACE: Duration = Duration::from_millis(500);
    /// How long memory waits to be registered while the library connects to peers.
    const SETTLED: Duration = Duration::from_secs(30);

    /// Begins to join.
    ///
    /// # Errors
    /// As [`Bootstrap::begin`]; `Backend` if the device has no more streams or memory.
    pub(crate) fn begin(shared: &Arc<Shared>, members: BootstrapGroup) -> Result<Arc<Self>> {
        let scope = members.scope;
        let mut bootstrap = Bootstrap::begin(shared, members)?;
        match Self::parts(shared) {
            Ok((stream, barrier)) => {
                // A lazy group also connects its rings at its first operation, so only an eager one warms up
                // here.
                if shared.options.connecting == Connecting::Eager {
                    bootstrap.warm_up(WarmUp {
                        stream: stream.clone(),
                        word: barrier.clone(),
                    });
                }
                let stage = Stage::Joining(Box::new(bootstrap));
                Ok(Self::new(shared, scope, (stream, barrier), stage))
            }
            // The others are not to wait for this rank.
            Err(error) => Err(bootstrap.give_up(error, Duration::ZERO)),
        }
    }

    /// Takes a communicator that is there already, for all members of a group.
    ///
    /// # Errors
    /// `Backend` if the device has no more streams or memory.
    pub(crate) fn over(shared: &Arc<Shared>, comm: Comm, hash: u64) -> Result<Arc<Self>> {
        let queue = Self::new(shared, Scope::Group, Self::parts(shared)?, Stage::Ready);
        // Cannot fail: no other thread has this queue yet.
        let _ = queue.hash.set(hash);
        let _ = queue.comm.set(Arc::new(comm));
        Ok(queue)
    }

    /// What a queue has of the device.
    fn parts(shared: &Shared) -> Result<(Arc<CudaStream>, DeviceBuffer)> {
        let stream = CudaStream::new(&shared.device, shared.options.priority)?;
        let barrier = DeviceBuffer::zeroed(&stream, DType::U32, 1)?;
        Ok((stream, barrier))
    }

    fn new(
        shared: &Arc<Shared>,
        scope: Scope,
        (stream, barrier): (Arc<CudaStream>, DeviceBuffer),
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
                called: HashSet::new(),
            }),
            remains: Mutex::default(),
            staging: Mutex::default(),
            troubled_since: OnceLock::new(),
        })
    }

    /// Waits until all ranks have joined.
    ///
    /// # Errors
    /// `Timeout`, `PeerLost` and `Rendezvous` name the ranks that did not come or do not fit.
    pub(crate) fn join(&self, deadline: Deadline, patience: Duration) -> Result<()> {
        let deadline = deadline.started();
        let mut state = self.lock(deadline)?;
        loop {
            let error = match self.advance(&mut state) {
                Ok(true) => return Ok(()),
                Ok(false) if deadline.has_passed() => Error::new(
                    ErrorKind::Timeout,
                    "the ranks did not all join the communicator in time",
                ),
                Ok(false) => {
                    std::thread::sleep(Duration::from_micros(200));
                    continue;
                }
                Err(error) => error,
            };
            let stage = std::mem::replace(&mut state.stage, Stage::Broken(error.clone()));
            return Err(match stage {
                Stage::Joining(bootstrap) => bootstrap.give_up(error, patience),
                Stage::Ready | Stage::Broken(_) => error,
            });
        }
    }

    /// The stream on which the operations of this queue run.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The hash that identifies this communicator, once it exists.
    pub(crate) fn hash(&self) -> Option<u64> {
        self.hash.get().copied()
    }

    /// Locks the queue: the holder has exclusive use of the communicator.
    ///
    /// # Errors
    /// `Timeout` if it is not free by the deadline: a call into the library or the driver may never return,
    /// and holds the lock until then.
    pub(crate) fn lock(&self, deadline: Deadline) -> Result<MutexGuard<'_, QueueState>> {
        let deadline = deadline.started();
        let mut pause = Duration::from_micros(5);
        loop {
            if let Some(state) = self.try_lock() {
                return Ok(state);
            }
            if deadline.has_passed() {
                let message =
                    "another thread is in a call on the communicator that does not return";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Locks the queue when nothing goes on in the background, such as a launch: registrations of memory are kept in
    /// plain arrays that a launch looks through (`ncclRegister`, register/register.cc).
    ///
    /// # Errors
    /// `Timeout` if it does not come to that; the library's own error.
    pub(crate) fn settled(&self, comm: &Comm) -> Result<MutexGuard<'_, QueueState>> {
        let deadline = Deadline::In(Self::SETTLED).started();
        let state = self.lock(deadline)?;
        self.settle(comm, deadline)?;
        Ok(state)
    }

    /// Locks the queue if no other thread has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, QueueState>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Why what is under way cannot complete, if so. Never waits.
    pub(crate) fn trouble(&self) -> Option<Error> {
        if let Some(error) = self.shared.aborted.get() {
            return Some(error.clone());
        }
        if let Some(error) = self.comm.get().and_then(|comm| comm.trouble()) {
            // A rank that leaves when its part is done does not harm data in flight.
            let since = self.troubled_since.get_or_init(Instant::now);
            return (since.elapsed() >= Self::GRACE).then_some(error);
        }
        match &self.state.try_lock().ok()?.stage {
            Stage::Broken(error) => Some(error.clone()),
            Stage::Joining(_) | Stage::Ready => None,
        }
    }

    /// Enqueues an operation on the device, or for when all ranks have joined. The context is current, and the
    /// graph is that of [`check_capture`](Self::check_capture).
    ///
    /// # Blocking
    /// Waits for peers only while the library connects to them: the first time, until `deadline`.
    pub(crate) fn submit(
        self: &Arc<Self>,
        op: Op<'static>,
        (seq, deadline): (u64, Deadline),
        graph: Option<Graph>,
    ) -> Arc<Ticket> {
        let ticket = Ticket::new(self.clone(), op, seq, deadline);
        self.sweep();
        let mut state = match self.lock(deadline) {
            Ok(state) => state,
            Err(error) => {
                ticket.fail(error);
                return ticket;
            }
        };
        state.waiting.push_back(ticket.clone());
        self.push_on(&mut state, Some((&ticket, graph)));
        ticket
    }

    /// Moves joining and the queue on, unless another thread does. Never waits for a peer to join.
    pub(crate) fn pump(&self) {
        if let Some(mut state) = self.try_lock() {
            self.push_waiting(&mut state);
        }
    }

    /// As [`push_on`](Self::push_on), in a context of its own.
    fn push_waiting(&self, state: &mut QueueState) {
        if state.waiting.is_empty() {
            return;
        }
        match self.shared.device.enter() {
            Ok(_entered) => self.push_on(state, None),
            Err(error) => {
                for ticket in state.waiting.drain(..) {
                    ticket.fail(error.clone());
                }
            }
        }
    }

    /// Launches what is in the queue, if all ranks have joined. The context is current; `own` is the ticket whose
    /// graph is known.
    fn push_on(&self, state: &mut QueueState, own: Option<(&Arc<Ticket>, Option<Graph>)>) {
        match self.advance(state) {
            Ok(false) => {}
            Ok(true) => {
                while let Some(ticket) = state.waiting.pop_front() {
                    let known = own.filter(|(own, _)| Arc::ptr_eq(own, &ticket));
                    let graph = known.map(|(_, graph)| graph);
                    self.launch(state, &ticket, graph);
                }
            }
            Err(error) => {
                let stage = std::mem::replace(&mut state.stage, Stage::Broken(error.clone()));
                if let Stage::Joining(bootstrap) = stage {
                    // The operation is already being waited for: do not spend time on finding the silent
                    // ranks.
                    bootstrap.give_up(error.clone(), Duration::ZERO);
                }
                for ticket in state.waiting.drain(..) {
                    ticket.fail(error.clone());
                }
            }
        }
    }

    /// Whether all ranks have joined, after a step towards it.
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
            // Set once: there is one bootstrap.
            if let Some(first) = ids.first() {
                let _ = self
                    .hash
                    .set(hash::of_joined(self.shared.library.version(), first));
            }
            let _ = self.comm.set(Arc::new(comm));
        }
        Ok(true)
    }

    /// The communicator, if it is there.
    pub(crate) fn comm(&self) -> Option<&Arc<Comm>> {
        self.comm.get()
    }

    /// Makes a communicator of this one, as [`take_over`](Self::take_over).
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

    /// Runs a step on the communicator that all its ranks take together. No other call goes through the queue
    /// until it returns.
    ///
    /// # Blocking
    /// Until it is done, an abort, or the deadline.
    ///
    /// # Errors
    /// `Timeout`, or the errors of `begin` and `step`. The queue is unusable after most of them.
    pub(crate) fn take_over<S, T>(
        &self,
        begin: impl FnOnce(&Arc<Comm>) -> Result<S>,
        mut step: impl FnMut(&mut S) -> Result<Option<T>>,
        deadline: Deadline,
    ) -> Result<T> {
        let deadline = deadline.started();
        // No launch can start while it is held.
        let mut state = self.lock(deadline)?;
        let was_aborted = self.shared.aborted.get().is_some();
        let Some(comm) = self.comm.get() else {
            let message = "the communicator is not there yet";
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

    /// The communicator's facts for a dump. Never waits.
    pub(crate) fn facts(&self) -> Vec<(String, String)> {
        let mut facts: Vec<(String, String)> = Vec::new();
        let mut fact = |name: &str, value: String| facts.push((name.to_owned(), value));
        fact("stream", format!("{:#x}", self.stream.raw().addr()));
        if let Some(comm) = self.comm.get() {
            fact("rank", comm.rank().to_string());
            fact("n_ranks", comm.size().to_string());
            let state = match comm.status() {
                CommStatus::Ready => "ready".to_owned(),
                CommStatus::AtWork => "in progress".to_owned(),
                CommStatus::InUse => "inside a call".to_owned(),
                CommStatus::Gone => "ended".to_owned(),
                CommStatus::Failed(error) => error.to_string(),
            };
            fact("async_state", state);
        }
        match self.state.try_lock() {
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
        for (id, captured) in &*self.graphs() {
            let (first, last) = captured.ends.unwrap_or_default();
            let text = format!("{} operations, #{first} to #{last}", captured.count);
            fact(&format!("graph {id}"), text);
        }
        facts
    }
}

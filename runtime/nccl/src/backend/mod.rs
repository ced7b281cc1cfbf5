//! [`NcclBackend`]: the operations of one group.

mod derive;
pub(crate) mod factory;
mod others;
mod suspension;
mod turns;

use crate::comm::members::{BootstrapGroup, Scope};
use crate::context::Shared;
use crate::context::doubt::Notes;
use crate::context::options::PairComms;
use crate::launch;
use crate::queue::pending::Ticket;
use crate::queue::{CommQueue, for_each_buffer};
use crate::window::{Signals, WindowGroup};
use others::AbortedGroup;
use rcomm_core::Buffer;
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::backend::{
    AbortReason, Backend, BackendWindow, Call, CommMemory, CommState, Done, GroupContext, Observer,
    Pending, Progress, Registration,
};
use rcomm_core::store::{PrefixStore, Store};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::{DType, OpType, Peer};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use turns::{TurnWait, Turns};

/// Runs the operations of one group on device memory.
///
/// Collectives and blocks of sends and receives go through one communicator, in order. A single send or receive goes
/// through a communicator of its two ranks, which is made when they first communicate, as in c10d. Unlike in c10d, each
/// direction has its own communicator, so that two ranks that both send first do not wait for each other, unless
/// [`NcclOptions::pairs`](crate::NcclOptions::pairs) asks for one communicator for both.
pub struct NcclBackend {
    this: Weak<Self>,
    pub(crate) group: GroupContext,
    pub(crate) shared: Arc<Shared>,
    /// The queue of the communicator of all members.
    pub(crate) main: Arc<CommQueue>,
    /// Queues for single messages, by sender and receiver as ranks of the group; by the lower and the higher of the two
    /// if one queue serves both directions.
    peers: Mutex<BTreeMap<[u32; 2], Arc<CommQueue>>>,
    turns: Turns,
    abort: Mutex<Option<RunningAbort>>,
    /// The reason of the abort, which is set once.
    reason: OnceLock<AbortReason>,
    /// The number of splits of this group that this rank has begun.
    pub(crate) splits: AtomicU64,
    /// The number of windows that this group has begun to make.
    pub(crate) windows: AtomicU64,
    pub(crate) signals: Arc<Signals>,
}

/// An abort on its own thread.
struct RunningAbort {
    thread: JoinHandle<()>,
    begun: Instant,
}

impl NcclBackend {
    /// The name by which configurations select this backend.
    pub const NAME: &'static str = "nccl";
    /// How long the library may take to abort; after that, the aborting thread is no longer waited for.
    const ABORT: Duration = Duration::from_secs(10);

    /// Makes the backend of a group whose communicator exists or is being created.
    pub(crate) fn new(group: GroupContext, shared: Arc<Shared>, main: Arc<CommQueue>) -> Arc<Self> {
        tracing::debug!(
            group = group.info.name,
            device = ?shared.device,
            stream = ?main.stream(),
            comm = main.hash().map(|hash| format!("{hash:016x}")),
            "group made"
        );
        if group.size() > 1 {
            // The notes are set for the first time, since each backend has shared state of its own.
            let _ = shared.notes.set(Notes::of(&group));
        }
        let backend = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            signals: Arc::new(Signals::of(&group)),
            group,
            main,
            peers: Mutex::default(),
            turns: Turns::default(),
            abort: Mutex::new(None),
            reason: OnceLock::new(),
            splits: AtomicU64::new(0),
            windows: AtomicU64::new(0),
            shared,
        });
        others::enter(&backend);
        backend
    }

    fn peers(&self) -> MutexGuard<'_, BTreeMap<[u32; 2], Arc<CommQueue>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queues(&self) -> Vec<Arc<CommQueue>> {
        let peers = self.peers();
        let queues = std::iter::once(&self.main).chain(peers.values());
        queues.cloned().collect()
    }

    /// The queues that nothing else uses, for a caller that drops this value.
    fn queues_of_its_own(&self) -> Vec<Arc<CommQueue>> {
        // The backend has one reference, the list another.
        let is_own = |queue: &Arc<CommQueue>| Arc::strong_count(queue) == 2;
        self.queues().into_iter().filter(is_own).collect()
    }

    /// Waits until a started abort has finished; returns `false` if it has not finished by the deadline.
    pub(crate) fn wait_for_abort(&self, deadline: Deadline) -> bool {
        let deadline = deadline.started();
        let mut abort = self.abort.lock().unwrap_or_else(PoisonError::into_inner);
        while abort
            .as_ref()
            .is_some_and(|abort| !abort.thread.is_finished())
        {
            if deadline.has_passed() {
                // The thread is inside a call of the library that nothing can end.
                tracing::error!("a call of NCCL that ends communicators has not returned in time");
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some(abort) = abort.take()
            && abort.thread.join().is_err()
        {
            tracing::error!("the thread that aborts communicators panicked");
        }
        true
    }

    /// How much of [`ABORT`](Self::ABORT) is left. The time counts from the beginning of the abort, so that groups that
    /// are aborted together and dropped one after the other wait no longer than one of them.
    fn time_of_abort(&self) -> Duration {
        let abort = self.abort.lock().unwrap_or_else(PoisonError::into_inner);
        let elapsed = abort.as_ref().map(|abort| abort.begun.elapsed());
        Self::ABORT.saturating_sub(elapsed.unwrap_or_default())
    }

    /// Refuses an operation that this backend cannot run.
    fn check(&self, op: &Op<'_>) -> Result<()> {
        launch::check(&self.shared, op)?;
        let mut result = Ok(());
        for_each_buffer(op, &mut |buffer| {
            if result.is_ok() {
                result = self.shared.check_place(buffer);
            }
        });
        result.map_err(|error| error.during(op.op_type()))
    }

    /// Returns the queue that an operation goes through, and makes it for the first message of a pair of ranks.
    fn queue_of(&self, op: &Op<'_>) -> Result<Arc<CommQueue>> {
        let this_rank = self.group.group_rank;
        let Peer::Rank(peer) = op.peer() else {
            return Ok(self.main.clone());
        };
        let pairs = self.shared.options.pairs;
        let pair = match (pairs, op.op_type()) {
            (PairComms::PerPair, _) => [this_rank.min(peer), this_rank.max(peer)],
            (PairComms::PerDirection, OpType::Send) => [this_rank, peer],
            (PairComms::PerDirection, _) => [peer, this_rank],
        };
        let mut peers = self.peers();
        if let Some(queue) = peers.get(&pair) {
            return Ok(queue.clone());
        }
        let [from, to] = pair;
        // Ranks with different options have different keys, so that they do not meet.
        let prefix = match pairs {
            PairComms::PerDirection => format!("pair/{from}-{to}"),
            PairComms::PerPair => format!("both/{from}-{to}"),
        };
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(prefix, self.group.store.clone()));
        let ranks = &self.group.info.ranks;
        let members = BootstrapGroup {
            scope: Scope::Pair,
            store,
            ranks: pair.map(|rank| ranks[rank as usize]).to_vec(),
            own_index: u32::from(this_rank == to),
            name: format!("{}/{from}-{to}", self.group.info.name),
        };
        let queue = CommQueue::begin(&self.shared, members)?;
        peers.insert(pair, queue.clone());
        Ok(queue)
    }

    /// Submits an operation to its queue when its turn comes. Also returns whether the operation had to wait for its
    /// turn.
    fn submit(
        &self,
        op: Op<'static>,
        call: Call,
        wait: HostWait,
    ) -> Result<(Arc<Ticket>, TurnWait)> {
        let turn = self.turns.take(call.turn, call.deadline);
        if let Some(error) = self.shared.aborted.get() {
            return Err(error.clone());
        }
        let turn = turn?;
        self.shared
            .check_awake()
            .map_err(|error| error.during(op.op_type()))?;
        self.check(&op)?;
        let queue = self.queue_of(&op)?;
        let _entered = self.shared.device.enter()?;
        let graph = queue.check_capture(&op);
        let graph = graph.map_err(|error| error.during(op.op_type()))?;
        if let (Some(graph), HostWait::Yes) = (graph, wait) {
            let message = format!(
                "its buffers' stream is being captured into graph {}: nothing runs during a capture, so it cannot be \
                 waited for: issue it (`..._async`) and call `wait_stream`",
                graph.id
            );
            let error = Error::new(ErrorKind::InvalidArgument, message);
            return Err(error.during(op.op_type()));
        }
        let ticket = queue.submit(op, (call.seq, call.deadline), graph);
        Ok((ticket, turn.wait))
    }
}

/// Returns the same operation over buffers that keep their memory alive.
///
/// # Errors
/// `InvalidArgument` for a buffer without an owner.
fn hold(op: &Op<'_>) -> Result<Op<'static>> {
    op.map_buffers(&|buffer| {
        buffer.share_owner().ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("{buffer:?} is not device memory that an owner keeps alive"),
            )
        })
    })
}

/// Whether the call that issues an operation waits for its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HostWait {
    /// The call waits, which is refused during a capture.
    Yes,
    /// The call returns at once.
    No,
}

impl Backend for NcclBackend {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn issue(&self, op: Op<'static>, call: Call, _: Arc<dyn Observer>) -> Result<Arc<dyn Pending>> {
        let deadline = call.deadline.started();
        let (ticket, _) = self.submit(op, Call { deadline, ..call }, HostWait::No)?;
        Ok(ticket)
    }

    fn run(&self, op: &mut Op<'_>, call: Call, observer: &dyn Observer) -> Result<Done> {
        let deadline = call.deadline.started();
        let held = match hold(op) {
            Ok(held) => held,
            Err(error) => {
                self.turns.pass(call.turn);
                return Err(error.during(op.op_type()));
            }
        };
        let (ticket, wait) = self.submit(held, Call { deadline, ..call }, HostWait::Yes)?;
        if wait == TurnWait::Waited {
            observer.started();
        }
        match ticket.wait(deadline) {
            Progress::Completed(done) => Ok(done),
            Progress::Failed(error) => Err(error),
            Progress::Queued => Err(Error::new(
                ErrorKind::Timeout,
                "the device did not begin the operation before the deadline",
            )),
            Progress::Started => Err(Error::new(
                ErrorKind::Timeout,
                "the device did not finish the operation before the deadline",
            )),
        }
    }

    /// If the error handling cleans up, ends the communicators on a separate thread, since the library waits for
    /// kernels that may never end. Otherwise leaves the communicators as they are.
    fn abort(&self, reason: &AbortReason) {
        if self.shared.aborted.set(reason.error.clone()).is_err() {
            return;
        }
        // The reason is set for the first time, as the error above.
        let _ = self.reason.set(reason.clone());
        self.turns.close();
        let queues = self.queues();
        let handling = self.shared.options.error_handling;
        if !handling.cleans_up() {
            CommQueue::abandon_all(&queues);
            return;
        }
        // Invariant 10 of docs/ARCHITECTURE.md: `wait_for_abort` joins the thread, unless the call never returns.
        let thread = std::thread::Builder::new().name("rcomm/nccl-abort".to_owned());
        let aborted = AbortedGroup::new(self, reason);
        let shared = self.shared.clone();
        let spawned = thread.spawn(move || {
            let notes = shared.notes.get();
            // The note is written before the kernels stop, since their stop may end the kernels of other ranks as if
            // they were done.
            if let (Some(notes), Some(error)) = (notes, shared.aborted.get())
                && CommQueue::may_run(&shared, &queues)
            {
                notes.give_up(error);
            }
            let mut others = aborted.others();
            CommQueue::end_all(&queues, &mut || others.stop_those_that_hang());
            if let Some(notes) = notes {
                notes.leave();
            }
        });
        match spawned {
            Ok(thread) => {
                let begun = Instant::now();
                let running = Some(RunningAbort { thread, begun });
                *self.abort.lock().unwrap_or_else(PoisonError::into_inner) = running;
            }
            Err(error) => tracing::error!(
                %error,
                "cannot start a thread to abort communicators: they stay until the process ends"
            ),
        }
        if handling.ends_process() {
            // The process is about to end, so the library gets the time to stop its kernels.
            self.wait_for_abort(Deadline::In(Self::ABORT));
        }
    }

    fn failed_elsewhere(&self) {
        if let Some(notes) = self.shared.notes.get() {
            notes.note_report();
        }
    }

    fn ends_process(&self) -> bool {
        self.shared.options.error_handling.ends_process()
    }

    fn split(&self, group: &GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        match self.derive_by_split(Some(group), deadline)? {
            Some(backend) => Ok(backend),
            None => Err(Error::new(
                ErrorKind::Backend,
                "ncclCommSplit returned no communicator for a member of the new group",
            )),
        }
    }

    fn decline_split(&self, deadline: Deadline) -> Result<()> {
        match self.derive_by_split(None, deadline) {
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
            declined => declined.map(|_| ()),
        }
    }

    fn shrink(&self, group: &GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        self.derive_by_shrink(group, deadline)
    }

    fn register(&self, memory: &Buffer<'static>) -> Result<Registration> {
        self.shared.check_place(memory)?;
        self.main.register(memory)
    }

    fn deregister(&self, registration: Registration) -> Result<()> {
        self.main.deregister(registration)
    }

    /// `ncclMemFree` unmaps the memory when the last buffer over it is dropped. Unlike the driver, which frees other
    /// memory, `ncclMemFree` does not wait for kernels and copies that the program itself has enqueued.
    fn allocate(&self, dtype: DType, len: usize) -> Result<Buffer<'static>> {
        self.shared
            .allocate(self.main.stream(), dtype, len)?
            .buffer()
    }

    fn new_window(
        &self,
        memory: Buffer<'static>,
        deadline: Deadline,
    ) -> Result<Arc<dyn BackendWindow>> {
        let group = WindowGroup {
            group: &self.group,
            shared: &self.shared,
            main: &self.main,
            signals: &self.signals,
            windows: &self.windows,
        };
        group.open(memory, deadline)
    }

    fn can_be_timed(&self) -> bool {
        true
    }

    fn set_timing(&self, is_on: bool) {
        self.shared.set_timing(is_on);
    }

    fn suspend(&self, deadline: Deadline) -> Result<()> {
        self.suspend_all(deadline)
    }

    fn resume(&self, deadline: Deadline) -> Result<()> {
        self.resume_all(deadline)
    }

    fn comm_memory(&self) -> Result<CommMemory> {
        self.memory_of_all()
    }

    fn split_count(&self) -> u64 {
        self.splits.load(Ordering::Relaxed)
    }

    fn estimate(&self, op: &Op<'_>, deadline: Deadline) -> Result<Duration> {
        if let Some(error) = self.shared.aborted.get() {
            return Err(error.clone());
        }
        self.check(op)?;
        self.main.estimate(hold(op)?, deadline)
    }

    fn communicator(&self) -> Option<u64> {
        self.main.hash()
    }

    fn comm_state(&self) -> Vec<CommState> {
        let group = &self.group.info.name;
        let main = std::iter::once((group.clone(), self.main.clone()));
        let splits = self.split_count();
        let peers = self.peers();
        let peers = peers
            .iter()
            .map(|([from, to], queue)| (format!("{group}/{from}-{to}"), queue.clone()));
        let state = |(name, queue): (String, Arc<CommQueue>)| {
            let mut facts = vec![
                ("group".to_owned(), name.clone()),
                ("device".to_owned(), format!("{:?}", self.shared.device)),
                ("device_uuid".to_owned(), self.shared.device.uuid()),
                (
                    "nccl_version".to_owned(),
                    self.shared.library.version().to_string(),
                ),
            ];
            // c10d's `comm_split_count`.
            facts.push(("split_count".to_owned(), splits.to_string()));
            facts.extend(queue.facts());
            if let Some(graphs) = self.shared.graphs_in_the_way.get() {
                facts.push(("graphs_in_the_way".to_owned(), graphs.clone()));
            }
            let leaked = self.shared.leaked.load(Ordering::Relaxed);
            if leaked > 0 {
                facts.push(("buffers_lost".to_owned(), leaked.to_string()));
            }
            let id = queue.hash().map_or(name, |hash| format!("{hash:#018x}"));
            CommState { id, facts }
        };
        let mut states: Vec<CommState> = main.chain(peers).map(state).collect();
        if let Some(report) = self.shared.ras.report() {
            states.push(CommState {
                id: "ras".to_owned(),
                facts: vec![("report".to_owned(), report)],
            });
        }
        states
    }

    fn find_nan(&self, memory: &Buffer<'_>) -> Result<Option<u64>> {
        if memory.device() != self.shared.device.place() {
            return Ok(None);
        }
        self.shared.find_nan(memory)
    }

    fn shutdown(&self, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        let queues = self.queues();
        queues.iter().try_for_each(|queue| queue.drain(deadline))?;
        CommQueue::close_all(&queues, deadline)
    }
}

impl Drop for NcclBackend {
    fn drop(&mut self) {
        if !self.wait_for_abort(Deadline::In(self.time_of_abort())) {
            return;
        }
        match self.reason.get() {
            Some(reason) if self.shared.options.error_handling.cleans_up() => {
                let mut others = AbortedGroup::new(self, reason).others();
                CommQueue::free_all(&self.queues(), &mut || others.stop_those_that_hang());
            }
            Some(_) => {}
            // Operations that have not ended keep their queue.
            None => CommQueue::free_all(&self.queues_of_its_own(), &mut || false),
        }
    }
}

//! A communicator with a stream of its own, and the operations on their way through it.
//!
//! An operation starts after what its buffers' streams have in hand (an event that the lane's stream
//! waits for), and its end is an event of the lane's stream: nothing here waits for the device. What is
//! issued before all ranks have joined waits in a queue, and whoever looks at an operation next moves
//! the joining on. Buffers are given up when the event has come; those of an operation that was aborted
//! are kept aside until then, or for ever.

use super::Shared;
use super::birth::{Birth, Step};
use super::comm::{Comm, Look};
use super::device::{CudaStream, Mark};
use super::launch::{Launched, Target};
use super::memory::{DeviceBuffer, stream_of};
use super::pending::Ticket;
use super::rally::{Meeting, Rally, Scope};
use super::registry::Registry;
use super::sys::UniqueId;
use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::op::Op;
use rcomm_recorder::model::DType;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How far a lane has come.
enum Stage {
    Joining(Box<Rally>),
    Ready,
    Broken(Error),
}

struct Door {
    stage: Stage,
    queue: VecDeque<Arc<Ticket>>,
}

/// What became of an operation that was put on the stream.
pub(super) enum Enqueued {
    /// It runs between these marks.
    Between([Mark; 2]),
    /// It is part of a graph.
    Captured,
}

/// How a communicator ends before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// What is pending is stopped; another can be made of what is left, where the library can do that.
    Stopped,
    /// Nothing is stopped: the library keeps it as it is.
    Forsaken,
}

/// Buffers of an operation that was aborted, until the device is through with them.
struct Remains {
    op: Op<'static>,
    end: Mark,
}

/// A communicator, its stream, and what goes through them.
pub(super) struct Lane {
    pub(super) shared: Arc<Shared>,
    scope: Scope,
    stream: Arc<CudaStream>,
    barrier: DeviceBuffer,
    comm: OnceLock<Arc<Comm>>,
    /// After the communicator, which must go first.
    pub(super) registry: Registry,
    /// What tells this communicator from all others, the same on all members.
    hash: OnceLock<u64>,
    /// Operations put on the device.
    launched: AtomicU64,
    /// How many operations went into each graph.
    graphs: Mutex<BTreeMap<u64, u64>>,
    door: Mutex<Door>,
    remains: Mutex<Vec<Remains>>,
    /// Since when the library reports an error of the communicator.
    troubled_since: OnceLock<Instant>,
}

impl Lane {
    /// How long what is on the device may go on after an error of the communicator.
    const GRACE: Duration = Duration::from_millis(500);
    /// How long the device may take to let go of what was stopped.
    const CLEAN_UP: Duration = Duration::from_secs(5);

    /// Begins to join.
    ///
    /// # Errors
    /// As [`Rally::begin`]; `Backend` if the device has no more streams or memory.
    pub(super) fn begin(shared: &Arc<Shared>, meeting: Meeting) -> Result<Arc<Self>> {
        let scope = meeting.scope;
        let rally = Rally::begin(shared, meeting)?;
        match Self::parts(shared) {
            Ok(parts) => Ok(Self::new(
                shared,
                scope,
                parts,
                Stage::Joining(Box::new(rally)),
            )),
            // The others are not to wait for this rank.
            Err(error) => Err(rally.give_up(error, Duration::ZERO)),
        }
    }

    /// Takes a communicator that is there already, for all members of a group.
    ///
    /// # Errors
    /// `Backend` if the device has no more streams or memory.
    pub(super) fn over(shared: &Arc<Shared>, comm: Comm, hash: u64) -> Result<Arc<Self>> {
        let lane = Self::new(shared, Scope::Group, Self::parts(shared)?, Stage::Ready);
        // Nobody else has it yet.
        let _ = lane.hash.set(hash);
        let _ = lane.comm.set(Arc::new(comm));
        Ok(lane)
    }

    /// What a lane has of the device.
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
            door: Mutex::new(Door {
                stage,
                queue: VecDeque::new(),
            }),
            remains: Mutex::default(),
            troubled_since: OnceLock::new(),
        })
    }

    /// Waits until all ranks have joined.
    ///
    /// # Errors
    /// `Timeout`, `PeerLost` and `Rendezvous` name the ranks that did not come or do not fit.
    pub(super) fn join(&self, deadline: Deadline, patience: Duration) -> Result<()> {
        let deadline = deadline.started();
        let mut door = self.lock();
        loop {
            let error = match self.advance(&mut door) {
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
            let stage = std::mem::replace(&mut door.stage, Stage::Broken(error.clone()));
            return Err(match stage {
                Stage::Joining(rally) => rally.give_up(error, patience),
                Stage::Ready | Stage::Broken(_) => error,
            });
        }
    }

    /// The stream on which the operations of this lane run.
    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// What tells this communicator from all others, once it is there.
    pub(super) fn hash(&self) -> Option<u64> {
        self.hash.get().copied()
    }

    fn lock(&self) -> MutexGuard<'_, Door> {
        self.door.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why nothing more can come of what is under way, if so. Never waits.
    pub(super) fn trouble(&self) -> Option<Error> {
        if let Some(error) = self.shared.aborted.get() {
            return Some(error.clone());
        }
        if let Some(error) = self.comm.get().and_then(|comm| comm.trouble()) {
            // A rank that leaves when its part is done does no harm to what is on its way.
            let since = self.troubled_since.get_or_init(Instant::now);
            return (since.elapsed() >= Self::GRACE).then_some(error);
        }
        match &self.door.try_lock().ok()?.stage {
            Stage::Broken(error) => Some(error.clone()),
            Stage::Joining(_) | Stage::Ready => None,
        }
    }

    /// Enqueues an operation on the device, or for when all ranks have joined.
    ///
    /// # Blocking
    /// Waits for peers only while the library connects to them: the first time, until `deadline`.
    pub(super) fn submit(self: &Arc<Self>, op: Op<'static>, deadline: Deadline) -> Arc<Ticket> {
        let ticket = Ticket::new(self.clone(), op, deadline);
        let mut door = self.lock();
        self.sweep();
        door.queue.push_back(ticket.clone());
        self.push_on(&mut door);
        ticket
    }

    /// Moves joining and the queue on, unless somebody else is at it. Never waits for a peer to join.
    pub(super) fn pump(&self) {
        match self.door.try_lock() {
            Ok(mut door) => self.push_on(&mut door),
            Err(std::sync::TryLockError::Poisoned(door)) => self.push_on(&mut door.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => {}
        }
    }

    fn push_on(&self, door: &mut Door) {
        if door.queue.is_empty() {
            return;
        }
        match self.advance(door) {
            Ok(false) => {}
            Ok(true) => {
                while let Some(ticket) = door.queue.pop_front() {
                    ticket.launch(|op, deadline| self.enqueue(op, deadline));
                }
            }
            Err(error) => {
                let stage = std::mem::replace(&mut door.stage, Stage::Broken(error.clone()));
                if let Stage::Joining(rally) = stage {
                    // It is too late to ask who is silent: somebody waits for this operation.
                    rally.give_up(error.clone(), Duration::ZERO);
                }
                for ticket in door.queue.drain(..) {
                    ticket.fail(error.clone());
                }
            }
        }
    }

    /// Whether all ranks have joined, after a step towards it.
    fn advance(&self, door: &mut Door) -> Result<bool> {
        if let Some(error) = self.shared.aborted.get() {
            return Err(error.clone());
        }
        let has_joined = match &mut door.stage {
            Stage::Joining(rally) => rally.step(&self.shared)?,
            Stage::Ready => return Ok(true),
            Stage::Broken(error) => return Err(error.clone()),
        };
        if !has_joined {
            return Ok(false);
        }
        if let Stage::Joining(rally) = std::mem::replace(&mut door.stage, Stage::Ready)
            && let Some((comm, ids)) = rally.into_comm()
        {
            // Set once: there is one rally.
            let _ = self.hash.set(hash_of(&ids));
            let _ = self.comm.set(Arc::new(comm));
        }
        Ok(true)
    }

    /// Puts one operation on the stream, between two marks.
    ///
    /// `Err` with a mark: something may be on the device before it.
    fn enqueue(
        &self,
        op: &Op<'static>,
        deadline: Deadline,
    ) -> Result<Enqueued, (Error, Option<Mark>)> {
        let early = |error| (error, None);
        let Some(comm) = self.comm.get() else {
            let message = "the communicator is not there yet";
            return Err(early(Error::new(ErrorKind::Closed, message)));
        };
        let shared = &self.shared;
        let _entered = shared.device.enter().map_err(early)?;
        let graph = self.graph_of(op).map_err(early)?;
        self.follow_streams(op).map_err(early)?;
        // Marks made in a capture are part of the graph: nobody may ask for them.
        let start = match graph {
            Some(_) => None,
            None => Some(shared.marks.mark(&self.stream).map_err(early)?),
        };
        let launched = comm.with(|library, raw| {
            let target = Target {
                library,
                comm: raw,
                scope: self.scope,
                stream: self.stream.raw(),
                rank: comm.rank(),
                size: comm.size(),
                barrier: std::ptr::with_exposed_provenance_mut(self.barrier.address() as usize),
            };
            // SAFETY: the communicator is live and locked while it is lent, the stream is our own. The
            // group has validated the operation and `check_place` the place of its buffers; the ticket
            // keeps it until the mark below is reached. What is captured is used by the graph alone, and
            // whoever launches that vouches for its memory.
            unsafe { target.launch(op) }
        });
        let settled = match launched {
            Ok(Ok(Launched::Done)) => Ok(()),
            Ok(Ok(Launched::InProgress)) => self.settle(comm, deadline),
            Ok(Err(error)) | Err(error) => Err(error),
        };
        self.launched.fetch_add(1, Ordering::Relaxed);
        let Some(start) = start else {
            settled.map_err(early)?;
            *self.graphs().entry(graph.unwrap_or_default()).or_default() += 1;
            return Ok(Enqueued::Captured);
        };
        let end = shared.marks.mark(&self.stream);
        match (settled, end) {
            (Ok(()), Ok(end)) => Ok(Enqueued::Between([start, end])),
            (Err(error), end) => Err((error, end.ok())),
            (Ok(()), Err(error)) => Err((error, None)),
        }
    }

    fn graphs(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.graphs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The graph that an operation is captured into: that of the streams of its buffers, all of them.
    ///
    /// # Errors
    /// `InvalidArgument` if they are not all of one mind.
    fn graph_of(&self, op: &Op<'_>) -> Result<Option<u64>> {
        let mut graph = None;
        let mut result = Ok(());
        let default = &self.shared.default_stream;
        visit(op, &mut |buffer| {
            if result.is_err() {
                return;
            }
            match stream_of(buffer).unwrap_or(default).graph() {
                Err(error) => result = Err(error),
                Ok(theirs) if graph.is_none_or(|graph| graph == theirs) => graph = Some(theirs),
                Ok(_) => {
                    result = Err(Error::new(
                        ErrorKind::InvalidArgument,
                        "the streams of its buffers are not all captured into the same graph",
                    ));
                }
            }
        });
        result?;
        let graph = graph.flatten();
        match self.stream.graph()? {
            Some(own) if graph != Some(own) => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "the stream of the group is being captured into graph {own}, and those of the \
                     buffers are not: issue it when that capture has ended"
                ),
            )),
            _ => Ok(graph),
        }
    }

    /// As [`graph_of`](Self::graph_of), before the operation is issued.
    ///
    /// # Errors
    /// `InvalidArgument` if the communicator is not there yet: none can be made during a capture.
    pub(super) fn check_capture(&self, op: &Op<'_>) -> Result<Option<u64>> {
        let graph = {
            let _entered = self.shared.device.enter()?;
            self.graph_of(op)?
        };
        if graph.is_some() && self.comm.get().is_none() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "the communicator is not there yet, and cannot be made while a graph is captured: \
                 issue the operation once before",
            ));
        }
        Ok(graph)
    }

    /// Holds up `stream` until what is on this lane's now is done.
    pub(super) fn lead(&self, stream: &CudaStream) -> Result<()> {
        let _entered = self.shared.device.enter()?;
        let mark = self.shared.joints.mark(&self.stream)?;
        stream.wait_for(&mark)
    }

    /// Has the lane's stream wait for what the buffers' streams have in hand.
    fn follow_streams(&self, op: &Op<'_>) -> Result<()> {
        let mut seen: Vec<&Arc<CudaStream>> = Vec::with_capacity(1);
        let default = &self.shared.default_stream;
        let mut result = Ok(());
        visit(op, &mut |buffer| {
            let stream = stream_of(buffer).unwrap_or(default);
            if result.is_err() || seen.iter().any(|it| it.raw() == stream.raw()) {
                return;
            }
            seen.push(stream);
            result = self.follow(stream);
        });
        result
    }

    fn follow(&self, stream: &CudaStream) -> Result<()> {
        let mark = self.shared.joints.mark(stream)?;
        self.stream.wait_for(&mark)
    }

    /// Waits until the library has connected to whom it had to.
    fn settle(&self, comm: &Comm, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        let mut pause = Duration::from_micros(20);
        while !comm.is_ready()? {
            if let Some(error) = self.shared.aborted.get() {
                return Err(error.clone());
            }
            if deadline.has_passed() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "NCCL did not connect to the other ranks before the deadline",
                ));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Keeps the buffers of an operation that nobody waits for until the device is through with them.
    pub(super) fn keep(&self, op: Op<'static>, end: Mark) {
        self.remains().push(Remains { op, end });
    }

    fn remains(&self) -> MutexGuard<'_, Vec<Remains>> {
        self.remains.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees what the device is through with; says whether anything is left.
    fn sweep(&self) -> bool {
        let mut remains = self.remains();
        if remains.is_empty() {
            return true;
        }
        match self.shared.device.enter() {
            // What cannot be asked about stays.
            Ok(_entered) => remains.retain(|it| !matches!(it.end.is_done(), Ok(true))),
            Err(error) => tracing::warn!(%error, "buffers of aborted operations stay"),
        }
        remains.is_empty()
    }

    /// Ends the communicator on this rank, and waits a little for the device to let go of buffers.
    ///
    /// # Blocking
    /// Until the library has stopped its kernels, which it may never.
    pub(super) fn end(&self, ending: Ending) {
        if let Some(comm) = self.comm.get()
            && let Err(error) = self.end_comm(comm, ending)
        {
            tracing::warn!(%error, "a communicator could not be ended");
        }
        let mut door = self.lock();
        if let Some(error) = self.shared.aborted.get() {
            for ticket in door.queue.drain(..) {
                ticket.fail(error.clone());
            }
            // One that has not joined yet is aborted as it is dropped.
            door.stage = Stage::Broken(error.clone());
        }
        drop(door);
        if ending == Ending::Forsaken {
            return;
        }
        let deadline = Deadline::In(Self::CLEAN_UP).started();
        while !self.sweep() && !deadline.has_passed() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn end_comm(&self, comm: &Comm, ending: Ending) -> Result<()> {
        if ending == Ending::Forsaken {
            return Ok(());
        }
        let _entered = self.shared.device.enter()?;
        let can_shrink = self.shared.library.table().comm_shrink.is_some();
        if self.scope == Scope::Group && can_shrink {
            match self.revoke(comm) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Unsupported => {}
                Err(error) => {
                    tracing::warn!(%error, "a communicator could not be revoked: it is aborted");
                }
            }
        }
        comm.abort()
    }

    fn revoke(&self, comm: &Comm) -> Result<()> {
        comm.revoke()?;
        let deadline = Deadline::In(Self::CLEAN_UP).started();
        while !comm.is_ready()? {
            if deadline.has_passed() {
                let message = "the library did not stop what was pending";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The communicator, if it is there.
    pub(super) fn comm(&self) -> Option<&Arc<Comm>> {
        self.comm.get()
    }

    /// Makes a communicator of this one. Nothing else goes through the lane meanwhile.
    ///
    /// # Blocking
    /// Until it is there, or the deadline.
    ///
    /// # Errors
    /// `Timeout`, or what `begin` and the library say. The lane is of no use any more after most.
    pub(super) fn derive(
        &self,
        begin: impl FnOnce(&Arc<Comm>) -> Result<Birth>,
        deadline: Deadline,
    ) -> Result<Option<Comm>> {
        let deadline = deadline.started();
        // Nobody launches as long as it is locked.
        let mut door = self.lock();
        let Some(comm) = self.comm.get() else {
            let message = "the communicator is not there yet";
            return Err(Error::new(ErrorKind::Closed, message));
        };
        let mut birth = {
            let _entered = self.shared.device.enter()?;
            begin(comm)?
        };
        let made = loop {
            match birth.step() {
                Ok(Step::Ready(made)) => break Ok(made),
                Ok(Step::NotYet) if deadline.has_passed() => {
                    let message = "the ranks did not all take part in time";
                    break Err(Error::new(ErrorKind::Timeout, message));
                }
                Ok(Step::NotYet) => std::thread::sleep(Duration::from_micros(200)),
                Err(error) => break Err(error),
            }
        };
        if let Err(error) = &made {
            door.stage = Stage::Broken(error.clone());
        }
        made
    }

    /// What a dump says of it. Never waits.
    pub(super) fn facts(&self) -> Vec<(String, String)> {
        let mut facts: Vec<(String, String)> = Vec::new();
        let mut fact = |name: &str, value: String| facts.push((name.to_owned(), value));
        fact("stream", format!("{:#x}", self.stream.raw().addr()));
        if let Some(comm) = self.comm.get() {
            fact("rank", comm.rank().to_string());
            fact("n_ranks", comm.size().to_string());
            let state = match comm.look() {
                Look::Ready => "ready".to_owned(),
                Look::AtWork => "in progress".to_owned(),
                Look::InUse => "inside a call".to_owned(),
                Look::Gone => "ended".to_owned(),
                Look::Failed(error) => error.to_string(),
            };
            fact("async_state", state);
        }
        match self.door.try_lock() {
            Err(_) => fact("stage", "inside a call".to_owned()),
            Ok(door) => {
                let stage = match &door.stage {
                    Stage::Joining(_) => "joining".to_owned(),
                    Stage::Ready => "ready".to_owned(),
                    Stage::Broken(error) => format!("broken: {error}"),
                };
                fact("stage", stage);
                fact("queued", door.queue.len().to_string());
            }
        }
        let launched = self.launched.load(Ordering::Relaxed);
        fact("launched", launched.to_string());
        for (id, count) in &*self.graphs() {
            fact(&format!("graph {id}"), format!("{count} operations"));
        }
        facts
    }

    /// Waits until everything submitted has ended.
    ///
    /// # Errors
    /// `Timeout` if something is still under way then; what has failed is the error of its operation.
    pub(super) fn drain(&self, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        let late = || {
            Error::new(
                ErrorKind::Timeout,
                "operations are still under way on the device",
            )
        };
        let mut pause = Duration::from_micros(20);
        let mut wait = || {
            if deadline.has_passed() {
                return Err(late());
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
            Ok(())
        };
        while !self.lock().queue.is_empty() {
            self.pump();
            wait()?;
        }
        let end = {
            let _entered = self.shared.device.enter()?;
            self.shared.joints.mark(&self.stream)?
        };
        loop {
            let _entered = self.shared.device.enter()?;
            if end.is_done()? {
                return Ok(());
            }
            if let Some(error) = self.trouble() {
                return Err(error);
            }
            wait()?;
        }
    }

    /// Begins to close the communicator, after [`drain`](Self::drain).
    pub(super) fn finalize(&self) {
        if let Some(comm) = self.comm.get() {
            let closing = self
                .shared
                .device
                .enter()
                .and_then(|_entered| comm.finalize());
            self.note_close(closing);
        }
    }

    /// Closes the communicator after [`finalize`](Self::finalize).
    ///
    /// # Errors
    /// `Timeout` if the other ranks do not close theirs.
    pub(super) fn destroy(&self, deadline: Deadline) -> Result<()> {
        let Some(comm) = self.comm.get() else {
            return Ok(());
        };
        match self.settle(comm, deadline) {
            Err(error) if error.kind() == ErrorKind::Timeout => return Err(error),
            settled => self.note_close(settled),
        }
        let closed = self
            .shared
            .device
            .enter()
            .and_then(|_entered| comm.destroy());
        self.note_close(closed);
        Ok(())
    }

    /// Everything has ended: that another rank has gone first, perhaps without a word, harms nobody.
    fn note_close(&self, closed: Result<()>) {
        if let Err(error) = closed {
            tracing::debug!(%error, "a communicator was not closed by all ranks together");
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let (Some(comm), true) = (self.comm.get(), self.shared.is_forsaken()) {
            comm.forsake();
            self.registry.leak();
        }
        if self.sweep() {
            return;
        }
        for remains in self.remains().drain(..) {
            self.shared.leak(remains.op);
        }
    }
}

/// Calls `look` with every buffer of an operation; a lone one twice.
pub(super) fn visit<'o, 'b>(op: &'o Op<'b>, look: &mut impl FnMut(&'o Buffer<'b>)) {
    if let Op::Coalesced(ops) = op {
        for op in ops {
            visit(op, look);
        }
    }
    op.inputs().iter().chain(op.outputs()).for_each(look);
}

fn hash_of(ids: &[UniqueId]) -> u64 {
    first_word(ids.iter().map(|id| &id.internal[..]))
}

/// What tells the `nth` communicator that was made of another, with this rank of the parent as its first.
pub(super) fn hash_of_child(parent: u64, nth: u64, first: u32) -> u64 {
    let words = [parent, nth, u64::from(first)].map(u64::to_le_bytes);
    first_word(words.iter().map(|word| &word[..]))
}

fn first_word<'a>(parts: impl Iterator<Item = &'a [u8]>) -> u64 {
    let mut hash = Sha256::new();
    parts.for_each(|part| hash.update(part));
    let digest: [u8; 32] = hash.finalize().into();
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    u64::from_le_bytes(first)
}

impl Shared {
    /// Gives up memory that a device may still write to: better lost than corrupted.
    pub(super) fn leak(&self, op: Op<'static>) {
        let op_type = op.op_type();
        std::mem::forget(op);
        let leaked = self.leaked.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::warn!(
            op = %op_type,
            leaked,
            "the device did not let go of the buffers of an aborted operation: they are never freed"
        );
    }
}

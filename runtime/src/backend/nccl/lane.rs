//! A communicator with a stream of its own, and the operations on their way through it.
//!
//! An operation starts after what its buffers' streams have in hand (an event that the lane's stream
//! waits for), and its end is an event of the lane's stream: nothing here waits for the device. What is
//! issued before all ranks have joined waits in a queue, and whoever looks at an operation next moves
//! the joining on. Buffers are given up when the event has come; those of an operation that was aborted
//! are kept aside until then, or for ever.

use super::Shared;
use super::comm::Comm;
use super::device::{CudaStream, Mark};
use super::launch::{Launched, Target};
use super::memory::{DeviceBuffer, stream_of};
use super::pending::Ticket;
use super::rally::{Meeting, Rally, Scope};
use super::sys::UniqueId;
use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::op::Op;
use rcomm_recorder::model::DType;
use sha2::{Digest, Sha256};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
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
    comm: OnceLock<Comm>,
    /// What tells this communicator from all others, the same on all members.
    hash: OnceLock<u64>,
    door: Mutex<Door>,
    remains: Mutex<Vec<Remains>>,
    /// Since when the library reports an error of the communicator.
    troubled_since: OnceLock<Instant>,
}

impl Lane {
    /// How long what is on the device may go on after an error of the communicator.
    const GRACE: Duration = Duration::from_millis(500);

    /// Begins to join.
    ///
    /// # Errors
    /// As [`Rally::begin`]; `Backend` if the device has no more streams or memory.
    pub(super) fn begin(shared: &Arc<Shared>, meeting: Meeting) -> Result<Arc<Self>> {
        let stream = CudaStream::new(&shared.device, shared.options.priority)?;
        let barrier = DeviceBuffer::zeroed(&stream, DType::U32, 1)?;
        let scope = meeting.scope;
        let rally = Rally::begin(shared, meeting)?;
        Ok(Arc::new(Self {
            shared: shared.clone(),
            scope,
            stream,
            barrier,
            comm: OnceLock::new(),
            hash: OnceLock::new(),
            door: Mutex::new(Door {
                stage: Stage::Joining(Box::new(rally)),
                queue: VecDeque::new(),
            }),
            remains: Mutex::default(),
            troubled_since: OnceLock::new(),
        }))
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
        if let Some(error) = self.comm.get().and_then(Comm::trouble) {
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
            let _ = self.comm.set(comm);
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
    ) -> Result<[Mark; 2], (Error, Option<Mark>)> {
        let early = |error| (error, None);
        let Some(comm) = self.comm.get() else {
            let message = "the communicator is not there yet";
            return Err(early(Error::new(ErrorKind::Closed, message)));
        };
        let shared = &self.shared;
        let _entered = shared.device.enter().map_err(early)?;
        self.follow_streams(op).map_err(early)?;
        let start = shared.marks.mark(&self.stream).map_err(early)?;
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
            // keeps it until the mark below is reached.
            unsafe { target.launch(op) }
        });
        let settled = match launched {
            Ok(Ok(Launched::Done)) => Ok(()),
            Ok(Ok(Launched::InProgress)) => self.settle(comm, deadline),
            Ok(Err(error)) | Err(error) => Err(error),
        };
        let end = shared.marks.mark(&self.stream);
        match (settled, end) {
            (Ok(()), Ok(end)) => Ok([start, end]),
            (Err(error), end) => Err((error, end.ok())),
            (Ok(()), Err(error)) => Err((error, None)),
        }
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
    pub(super) fn abort(&self) {
        if let Some(comm) = self.comm.get()
            && let Err(error) = self.shared.device.enter().and_then(|_entered| comm.abort())
        {
            tracing::warn!(%error, "a communicator could not be aborted");
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
        let deadline = Deadline::In(Duration::from_secs(5)).started();
        while !self.sweep() && !deadline.has_passed() {
            std::thread::sleep(Duration::from_millis(5));
        }
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
    let mut hash = Sha256::new();
    for id in ids {
        hash.update(id.internal);
    }
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

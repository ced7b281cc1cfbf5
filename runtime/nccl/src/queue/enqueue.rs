//! Enqueues operations on a queue's stream, after the pending work of their buffers' streams, and marks the end of each
//! with an event. If those streams are being captured, the operations become part of the graph instead.

use super::pending::{Marks, OpCall, Start};
use super::registry::LastUse;
use super::{Captured, CommQueue, Enqueued, LatestOp, QueueState, Stage};
use crate::comm::{Comm, CommStatus};
use crate::context::options::Timing;
use crate::cuda::event::Mark;
use crate::cuda::graph::Graph;
use crate::cuda::memory::{DeviceBuffer, stream_of};
use crate::cuda::stream::CudaStream;
use crate::launch::{Call, LaunchTarget, Launched, staging_bytes};
use crate::library::NcclLibrary;
use crate::library::config::Blocking;
use crate::library::sys::{NcclComm, NcclResult, RawStream, result};
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::{Buffer, Device};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::{DType, OpType};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A call that failed.
pub(crate) struct IncompleteCall {
    pub(crate) error: Error,
    pub(crate) left: RemainingWork,
}

/// The work that an incomplete call may have left on the device.
pub(crate) enum RemainingWork {
    /// There is no work: the call failed before it enqueued any.
    Nothing,
    /// There is no work once this event is complete.
    Until(Mark),
    /// There may be work, and it is unknown when the device will finish it.
    Unknown,
}

impl IncompleteCall {
    fn untouched(error: Error) -> Self {
        let left = RemainingWork::Nothing;
        Self { error, left }
    }

    fn unknown(error: Error) -> Self {
        let left = RemainingWork::Unknown;
        Self { error, left }
    }
}

impl From<IncompleteCall> for Error {
    fn from(incomplete: IncompleteCall) -> Self {
        incomplete.error
    }
}

impl CommQueue {
    /// Enqueues one operation on the stream, or into the graph into which its buffers' streams are
    /// captured. The context must be current. `graph` is the result of [`check_capture`](Self::check_capture), if the
    /// caller has it.
    ///
    /// After an error the caller must keep the buffers for as long as the error says that there may be work.
    pub(super) fn enqueue(
        &self,
        op: &Op<'static>,
        call: &OpCall,
        graph: Option<Option<Graph>>,
    ) -> Result<Enqueued, IncompleteCall> {
        let early = IncompleteCall::untouched;
        let Some(comm) = self.comm.get() else {
            let message = "the communicator does not exist yet";
            return Err(early(Error::new(ErrorKind::Closed, message)));
        };
        let shared = &self.shared;
        let graph = graph.map_or_else(|| self.graph_of(op), Ok).map_err(early)?;
        let staging = self.staging_for(op, graph).map_err(early)?;
        if let Some(graph) = graph {
            self.keep_for(graph, op, &staging).map_err(early)?;
            self.may_be_captured.store(true, Ordering::Release);
        }
        let sync_events = self.wait_for_buffer_streams(op, graph).map_err(early)?;
        let (marks, timing) = shared.marks();
        // Events recorded in a capture are part of the graph, and cannot be queried.
        let start = match (graph, timing) {
            (Some(_), _) => None,
            (None, Timing::On) => {
                let mark = marks.mark(&self.stream).map_err(early)?;
                Some(Start::Marked(mark))
            }
            // The operation starts when the work before it is done, and events already mark the end of that work.
            (None, Timing::Off) => {
                let former = self.latest().as_ref().map(|latest| latest.end().clone());
                Some(Start::Follows(former, sync_events))
            }
        };
        let launched = comm.with(|library, raw| {
            let target = LaunchTarget {
                staging: staging.as_ref().map_or(null_mut(), address_of),
                tag: shared.options.tags.then_some(call.seq),
                ..self.target(comm, library, raw)
            };
            // SAFETY: the communicator is live and locked while it is lent, and the queue owns the stream. The
            // group has validated the operation, and `check_place` the device of its buffers. The ticket keeps
            // the operation until the event below is complete, and the queue keeps the staging memory. If the
            // operation is captured, the graph and everything made from it keep both.
            unsafe { target.launch(op) }
        });
        // Whether the event below marks the end of all work of the call.
        let mut is_marked = true;
        let finished = match launched {
            // If the library is still launching at an error, it enqueues work after any event.
            Ok(Ok(launched)) => self
                .complete_launch(comm, launched, call.deadline)
                .inspect_err(|_| is_marked = false),
            Ok(Err(error)) => {
                // Calls of the group before the one that failed may still be in progress (`Group` ends the group
                // when it is dropped).
                is_marked = !matches!(comm.status(), CommStatus::InProgress | CommStatus::InUse);
                Err(error)
            }
            Err(error) => Err(error),
        };
        self.launched.fetch_add(1, Ordering::Relaxed);
        let (Some(start), None) = (start, graph) else {
            finished.map_err(IncompleteCall::unknown)?;
            return Ok(Enqueued::Captured(graph.map_or(0, |graph| graph.id)));
        };
        let end = marks.mark(&self.stream);
        self.registry.note_use(op, || match &end {
            Ok(end) if is_marked => LastUse::Op(LatestOp::new(op, call, end.clone())),
            _ => LastUse::Unknown(op.op_type(), call.seq),
        });
        match (finished, end) {
            (Ok(()), Ok(end)) => {
                *self.latest() = Some(LatestOp::new(op, call, end.clone()));
                Ok(Enqueued::Between(start, end))
            }
            (Err(error), Ok(end)) if is_marked => Err(IncompleteCall {
                error,
                left: RemainingWork::Until(end),
            }),
            (Err(error), _) | (Ok(()), Err(error)) => Err(IncompleteCall::unknown(error)),
        }
    }

    /// The target of this queue's calls, without staging memory and without a number for profiler plug-ins.
    pub(super) fn target<'a>(
        &'a self,
        comm: &Comm,
        library: &'a NcclLibrary,
        raw: NcclComm,
    ) -> LaunchTarget<'a> {
        LaunchTarget {
            library,
            comm: raw,
            scope: self.scope,
            stream: &self.stream,
            rank: comm.rank(),
            size: comm.size(),
            barrier: address_of(&self.barrier),
            staging: null_mut(),
            tag: None,
            algorithms: self.shared.algorithms,
        }
    }

    /// Runs `before`, which may enqueue work, then makes a call with which the library enqueues a put, a signal or a
    /// wait for signals. Returns an event that marks the end of that work.
    ///
    /// # Blocking
    /// While the library connects to peers, until `deadline`.
    ///
    /// # Errors
    /// `InvalidArgument` while the group is suspended; `Closed` if there is no communicator yet; `Unsupported` while
    /// the queue's stream is being captured; `Timeout` after the deadline; the reason why the queue is unusable; the
    /// errors of an abort, of `before` and of the library. The queue is unusable afterwards if the library may still be
    /// working on the call, or if the end of the work could not be marked.
    pub(crate) fn call_on_stream(
        &self,
        mut state: MutexGuard<'_, QueueState>,
        name: &'static str,
        deadline: Deadline,
        before: impl FnOnce() -> Result<()>,
        call: impl FnOnce(NcclComm, RawStream) -> NcclResult + Send + 'static,
    ) -> Result<Mark, IncompleteCall> {
        let awake = self.shared.check_awake();
        awake.map_err(IncompleteCall::untouched)?;
        // Operations that were issued earlier are launched first.
        self.enter_and_launch_waiting(&mut state);
        if let Stage::Broken(error) = &state.stage {
            return Err(IncompleteCall::untouched(error.clone()));
        }
        let Some(comm) = self.comm.get() else {
            let message = "the communicator does not exist yet";
            return Err(IncompleteCall::untouched(Error::new(
                ErrorKind::Closed,
                message,
            )));
        };
        let entered = self.shared.device.enter();
        let _entered = entered.map_err(IncompleteCall::untouched)?;
        if self
            .stream
            .graph()
            .map_err(IncompleteCall::untouched)?
            .is_some()
        {
            let message = format!(
                "the stream of the group is being captured: {name} is not supported during a capture"
            );
            let error = Error::new(ErrorKind::Unsupported, message);
            return Err(IncompleteCall::untouched(error));
        }
        let mut given_up = None;
        let called = before().and_then(|()| {
            if self.shared.options.comm.blocking == Blocking::No || state.called.contains(name) {
                return comm.with(|library, raw| {
                    let status = call(raw, self.stream.raw());
                    check_call(library, raw, name, status)
                })?;
            }
            let stream = self.stream.clone();
            let work = move |library: &NcclLibrary, raw| {
                let status = call(raw, stream.raw());
                check_call(library, raw, name, status)
            };
            let mut thread_call = comm.call_on_thread(&self.shared.device, work)?;
            match self.wait_for_thread(&mut thread_call, deadline) {
                Ok(called) => {
                    state.called.insert(name);
                    called
                }
                // The call may still be in progress, and then enqueues work after any event.
                Err(error) => {
                    given_up = Some(error.clone());
                    Err(error)
                }
            }
        });
        if let Some(error) = given_up {
            state.stage = Stage::Broken(error.clone());
            return Err(IncompleteCall {
                error,
                left: RemainingWork::Unknown,
            });
        }
        if let Ok(Call::InProgress) = called
            && let Err(error) = self.wait_until_connected(comm, deadline)
        {
            // The library may still be launching, and then enqueues work after any event.
            state.stage = Stage::Broken(error.clone());
            return Err(IncompleteCall {
                error,
                left: RemainingWork::Unknown,
            });
        }
        let mark = self.shared.sync_events.mark(&self.stream);
        if let Err(error) = &mark {
            // Without an event it is unknown when the buffers may be reused.
            state.stage = Stage::Broken(error.clone());
        }
        match (called, mark) {
            (Ok(_), Ok(mark)) => Ok(mark),
            (Err(error), Ok(mark)) => Err(IncompleteCall {
                error,
                left: RemainingWork::Until(mark),
            }),
            (Err(error), Err(_)) | (Ok(_), Err(error)) => Err(IncompleteCall {
                error,
                left: RemainingWork::Unknown,
            }),
        }
    }

    /// Fails after an abort, and if the queue is unusable: the library may then still enqueue work.
    ///
    /// # Errors
    /// The error of the abort, or the reason why the queue is unusable; `Timeout` as [`lock`](Self::lock).
    pub(crate) fn check_usable(&self, deadline: Deadline) -> Result<()> {
        if let Some(error) = self.shared.aborted.get() {
            return Err(error.clone());
        }
        match &self.lock(deadline)?.stage {
            Stage::Broken(error) => Err(error.clone()),
            Stage::Joining(_) | Stage::Ready => Ok(()),
        }
    }

    /// Waits until the library has launched all calls, and enqueues the copies that follow them.
    fn complete_launch(&self, comm: &Comm, launched: Launched, deadline: Deadline) -> Result<()> {
        if launched.call == Call::InProgress {
            self.wait_until_connected(comm, deadline)?;
        }
        launched.copies.into_iter().try_for_each(|copy| {
            // SAFETY: the copy reads the staging memory and writes a buffer of the operation, of the length that
            // was staged for it. Both are kept until the event is complete, as for the call.
            unsafe { copy.enqueue(&self.stream) }
        })
    }

    /// Returns the memory that an operation needs besides its buffers; `None` if it needs none. The memory is used only
    /// on the queue's stream, so that one operation after the other may use it. An operation in a graph gets separate
    /// memory.
    fn staging_for(&self, op: &Op<'_>, graph: Option<Graph>) -> Result<Option<DeviceBuffer>> {
        let bytes = staging_bytes(&self.shared.library, op);
        if bytes == 0 {
            return Ok(None);
        }
        // All bytes of this memory are written before they are read.
        let make = |bytes| DeviceBuffer::uninitialized(&self.stream, DType::U8, bytes);
        if graph.is_some() {
            return make(bytes).map(Some);
        }
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(staging) = staging.as_ref().filter(|it| it.len() >= bytes) {
            return Ok(Some(staging.clone()));
        }
        let made = make(bytes.next_power_of_two())?;
        if let Some(former) = staging.replace(made.clone()) {
            // Freeing the former memory now could wait for work in progress.
            let end = self.shared.sync_events.mark(&self.stream)?;
            self.keep_until(OpType::Gather, Box::new(former), end);
        }
        Ok(Some(made))
    }

    /// Makes a graph keep the memory that an operation uses.
    fn keep_for(&self, graph: Graph, op: &Op<'_>, staging: &Option<DeviceBuffer>) -> Result<()> {
        let hold = |buffer: &Buffer<'_>| {
            buffer.share_owner().ok_or_else(|| {
                let message = format!("{buffer:?}: nothing keeps the memory alive for the graph");
                Error::new(ErrorKind::InvalidArgument, message)
            })
        };
        let held = op.map_buffers(&hold)?;
        let memory = (held, self.barrier.clone(), staging.clone());
        graph.keep(&self.shared.device, Box::new(memory), &self.live)
    }

    /// Notes, for dumps, that an operation was captured into a graph.
    pub(crate) fn note_captured(&self, graph: u64, seq: u64) {
        /// How many of the latest graphs are noted, since a program may capture any number of graphs.
        const MAX_GRAPHS: usize = 64;
        let mut graphs = self.graphs();
        let captured = graphs.entry(graph).or_default();
        captured.count += 1;
        captured.ends = Some((captured.ends.map_or(seq, |(first, _)| first), seq));
        if graphs.len() > MAX_GRAPHS {
            graphs.pop_first();
        }
    }

    pub(super) fn graphs(&self) -> MutexGuard<'_, BTreeMap<u64, Captured>> {
        self.graphs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the graph into which the streams of all buffers of an operation are captured, if they are. The
    /// context must be current.
    ///
    /// # Errors
    /// `InvalidArgument` if the streams are not all captured into the same graph.
    fn graph_of(&self, op: &Op<'_>) -> Result<Option<Graph>> {
        let mut streams = Streams::of(op, &self.shared.default_stream).into_iter();
        let graph = match streams.next() {
            Some(first) => first.graph()?,
            None => None,
        };
        for stream in streams {
            if !is_same(graph, stream.graph()?) {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    "the streams of its buffers are not all captured into the same graph",
                ));
            }
        }
        // The queue's own stream becomes part of a capture only by an operation of this queue.
        if !self.may_be_captured.load(Ordering::Acquire) {
            return Ok(graph);
        }
        match self.stream.graph()? {
            None => {
                self.may_be_captured.store(false, Ordering::Release);
                Ok(graph)
            }
            Some(group_graph) if !is_same(graph, Some(group_graph)) => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "the stream of the group is being captured into graph {}, and those of the \
                     buffers are not: issue it when that capture has ended",
                    group_graph.id
                ),
            )),
            Some(_) => Ok(graph),
        }
    }

    /// Works as [`graph_of`](Self::graph_of), and checks that the operation can be captured. The context must be
    /// current.
    ///
    /// # Errors
    /// `InvalidArgument` if the communicator does not exist yet: none can be made during a capture.
    pub(crate) fn check_capture(&self, op: &Op<'_>) -> Result<Option<Graph>> {
        let graph = self.graph_of(op)?;
        if graph.is_some() && self.comm.get().is_none() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "the communicator does not exist yet, and cannot be made while a graph is captured: \
                 issue the operation once before",
            ));
        }
        Ok(graph)
    }

    /// Makes `stream` wait for the work that is now pending on this queue's stream.
    pub(crate) fn make_stream_wait(&self, stream: &CudaStream) -> Result<()> {
        let _entered = self.shared.device.enter()?;
        let mark = self.shared.sync_events.mark(&self.stream)?;
        stream.wait_for(&mark)
    }

    /// Makes the queue's stream wait for the pending work of the buffers' streams; returns the events for
    /// which it waits. `graph` is the graph into which these streams are captured.
    fn wait_for_buffer_streams(&self, op: &Op<'_>, graph: Option<Graph>) -> Result<Marks> {
        let mut marks = Marks::default();
        for stream in Streams::of(op, &self.shared.default_stream).into_iter() {
            // The operation runs after the pending work of the queue's own stream in any case. The wait is what makes
            // that stream part of a capture.
            let is_ordered =
                stream.raw() == self.stream.raw() || graph.is_none() && stream.is_known_idle();
            if !is_ordered {
                marks.push(self.wait_for_stream(stream)?);
            }
        }
        Ok(marks)
    }

    /// Makes the queue's stream wait for the pending work of this stream; returns the event that marks its end.
    pub(crate) fn wait_for_stream(&self, stream: &CudaStream) -> Result<Mark> {
        let mark = self.shared.sync_events.mark(stream)?;
        self.stream.wait_for(&mark)?;
        Ok(mark)
    }

    /// Waits until the library has finished the latest call on the communicator, for which it may have to connect to
    /// peers.
    pub(super) fn wait_until_connected(&self, comm: &Comm, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        let start_time = Instant::now();
        let mut pauses = Pauses::default();
        loop {
            let is_ready = comm.is_ready()?;
            // This is checked after readiness: an aborted communicator also becomes ready, but its work is
            // not done.
            if let Some(error) = self.shared.aborted.get() {
                return Err(error.clone());
            }
            if is_ready {
                return Ok(());
            }
            if deadline.has_passed() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "NCCL did not finish the call, which may have to connect to other ranks, before the deadline",
                ));
            }
            match pauses.next(start_time.elapsed()) {
                None => std::thread::yield_now(),
                Some(pause) => std::thread::sleep(pause),
            }
        }
    }
}

/// The pauses between the polls of a call that the library completes on a thread of its own.
struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(Duration::from_micros(20))
    }
}

impl Pauses {
    /// How long to poll without a pause: the library's thread normally ends within this time, and a sleep would take
    /// longer.
    const SPIN: Duration = Duration::from_micros(200);
    const LONGEST: Duration = Duration::from_millis(1);

    /// Returns the next pause, `elapsed` after the first poll; `None` while the polls follow each other without a
    /// pause.
    fn next(&mut self, elapsed: Duration) -> Option<Duration> {
        if elapsed < Self::SPIN {
            return None;
        }
        let pause = self.0;
        self.0 = (pause * 2).min(Self::LONGEST);
        Some(pause)
    }
}

/// Returns whether a call is done or still in progress.
///
/// # Errors
/// Those of [`NcclLibrary::check_on`].
pub(super) fn check_call(
    library: &NcclLibrary,
    raw: NcclComm,
    name: &str,
    status: NcclResult,
) -> Result<Call> {
    if status == result::IN_PROGRESS {
        return Ok(Call::InProgress);
    }
    // SAFETY: the callers got the communicator from `with`, which lends it live and locked.
    unsafe { library.check_on(raw, name, status) }.map(|()| Call::Done)
}

fn is_same(one: Option<Graph>, other: Option<Graph>) -> bool {
    one.map(|graph| graph.id) == other.map(|graph| graph.id)
}

/// The streams of an operation's buffers, without duplicates.
#[derive(Default)]
struct Streams<'o> {
    first: Option<&'o Arc<CudaStream>>,
    /// The list is nearly always empty, and then allocates nothing.
    others: Vec<&'o Arc<CudaStream>>,
}

impl<'o> Streams<'o> {
    /// Collects the streams of `op`; `default` is the stream of buffers that name no stream.
    fn of(op: &'o Op<'_>, default: &'o Arc<CudaStream>) -> Self {
        let mut streams = Self::default();
        for_each_buffer(op, &mut |buffer| {
            let stream = stream_of(buffer).unwrap_or(default);
            match streams.first {
                None => streams.first = Some(stream),
                Some(first) if first.raw() == stream.raw() => {}
                Some(_) if streams.others.iter().any(|it| it.raw() == stream.raw()) => {}
                Some(_) => streams.others.push(stream),
            }
        });
        streams
    }

    fn into_iter(self) -> impl Iterator<Item = &'o Arc<CudaStream>> {
        self.first.into_iter().chain(self.others)
    }
}

/// The address of the memory, for calls of the library.
fn address_of(memory: &DeviceBuffer) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(memory.address() as usize)
}

/// Calls `look` with every buffer of an operation. A factor in the host's memory is left out, since its value is passed
/// on.
pub(crate) fn for_each_buffer<'o, 'b>(op: &'o Op<'b>, look: &mut impl FnMut(&'o Buffer<'b>)) {
    if let Op::Coalesced(ops) = op {
        for op in ops {
            for_each_buffer(op, look);
        }
    }
    let (inputs, outputs) = (op.inputs(), op.outputs());
    inputs.iter().for_each(&mut *look);
    // The buffers of an operation in place are both.
    if !std::ptr::eq(inputs, outputs) {
        outputs.iter().for_each(&mut *look);
    }
    let scale = op.reduction().and_then(|it| it.scale.as_deref());
    if let Some(scale) = scale.filter(|it| it.device() != Device::Cpu) {
        look(scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_polled_for_200_microseconds_before_the_first_sleep() {
        let mut pauses = Pauses::default();
        for elapsed in 0..200 {
            assert_eq!(pauses.next(Duration::from_micros(elapsed)), None);
        }
        let later = Duration::from_micros(200);
        let pauses = std::array::from_fn(|_| pauses.next(later).map(|it| it.as_micros()));
        assert_eq!(pauses, [20, 40, 80, 160, 320, 640, 1000, 1000].map(Some));
    }
}

//! Putting operations on a lane's stream: after what their buffers' streams have in hand, between two
//! marks, or into the graph that those streams are captured into.

use super::{Captured, Door, Enqueued, Lane, Stage};
use crate::comm::{Comm, Look};
use crate::event::Mark;
use crate::graph::Graph;
use crate::launch::{Call, Launched, Target, staging_bytes};
use crate::memory::{DeviceBuffer, stream_of};
use crate::stream::CudaStream;
use crate::sys::{CudaStream as RawStream, NcclComm, NcclResult, result};
use rcomm_core::Buffer;
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::{DType, OpType};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

/// A call that was not made whole.
pub(crate) struct Unmade {
    pub(crate) error: Error,
    pub(crate) left: Left,
}

/// What a call that was not made whole has left on the device.
pub(crate) enum Left {
    /// Nothing: it did not come so far.
    Nothing,
    /// Nothing after this mark.
    Until(Arc<Mark>),
    /// Perhaps something, and nothing will tell when it is gone.
    Unknown,
}

impl Unmade {
    fn untouched(error: Error) -> Self {
        let left = Left::Nothing;
        Self { error, left }
    }
}

impl From<Unmade> for Error {
    fn from(unmade: Unmade) -> Self {
        unmade.error
    }
}

impl Lane {
    /// Puts one operation on the stream, between two marks.
    ///
    /// `Err` with a mark: something may be on the device before it. Without one: nobody knows until when.
    pub(super) fn enqueue(
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
        let staging = self.staging_for(op, graph).map_err(early)?;
        if let Some(graph) = graph {
            self.keep_for(graph, op, &staging).map_err(early)?;
        }
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
                stream: &self.stream,
                rank: comm.rank(),
                size: comm.size(),
                barrier: place_of(&self.barrier),
                staging: staging.as_ref().map_or(null_mut(), place_of),
            };
            // SAFETY: the communicator is live and locked while it is lent, the stream is our own. The
            // group has validated the operation and `check_place` the place of its buffers; the ticket
            // keeps it until the mark below is reached, and the lane what it stages. What is captured is
            // kept by the graph, for itself and all that is made of it.
            unsafe { target.launch(op) }
        });
        let mut is_marked = true;
        let settled = match launched {
            // While the library is still at it, what it enqueues comes after any mark.
            Ok(Ok(launched)) => self
                .finish(comm, launched, deadline)
                .inspect_err(|_| is_marked = false),
            Ok(Err(error)) => {
                // What went before it in its group may still be on its way (`Group`, as it is dropped).
                is_marked = !matches!(comm.look(), Look::AtWork | Look::InUse);
                Err(error)
            }
            Err(error) => Err(error),
        };
        self.launched.fetch_add(1, Ordering::Relaxed);
        let (Some(start), None) = (start, graph) else {
            settled.map_err(early)?;
            return Ok(Enqueued::Captured(graph.map_or(0, |graph| graph.id)));
        };
        let end = shared.marks.mark(&self.stream);
        match (settled, end) {
            (Ok(()), Ok(end)) => Ok(Enqueued::Between([start, end])),
            (Err(error), end) => Err((error, end.ok().filter(|_| is_marked))),
            (Ok(()), Err(error)) => Err((error, None)),
        }
    }

    /// Has the library enqueue something other than an operation, after what `before` enqueues, and marks
    /// its end.
    ///
    /// # Blocking
    /// While the library connects to peers, until `deadline`.
    ///
    /// # Errors
    /// `Unsupported` while the lane's stream is captured; what `before` and the library say. The lane is of no
    /// use any more where the library may still be at it.
    pub(crate) fn call_on_stream(
        &self,
        mut door: MutexGuard<'_, Door>,
        name: &str,
        deadline: Deadline,
        before: impl FnOnce() -> Result<()>,
        call: impl FnOnce(NcclComm, RawStream) -> NcclResult,
    ) -> Result<Arc<Mark>, Unmade> {
        // What was issued before comes first.
        self.push_on(&mut door);
        if let Stage::Broken(error) = &door.stage {
            return Err(Unmade::untouched(error.clone()));
        }
        let Some(comm) = self.comm.get() else {
            let message = "the communicator is not there yet";
            return Err(Unmade::untouched(Error::new(ErrorKind::Closed, message)));
        };
        let entered = self.shared.device.enter();
        let _entered = entered.map_err(Unmade::untouched)?;
        if self.stream.graph().map_err(Unmade::untouched)?.is_some() {
            let message =
                format!("the stream of the group is being captured: {name} is not offered there");
            let error = Error::new(ErrorKind::Unsupported, message);
            return Err(Unmade::untouched(error));
        }
        let called = before().and_then(|()| {
            comm.with(|library, raw| {
                let status = call(raw, self.stream.raw());
                if status == result::IN_PROGRESS {
                    return Ok(Call::InProgress);
                }
                // SAFETY: the communicator is live.
                unsafe { library.check_on(raw, name, status) }.map(|()| Call::Done)
            })?
        });
        if let Ok(Call::InProgress) = called
            && let Err(error) = self.settle(comm, deadline)
        {
            // What the library enqueues comes after any mark.
            door.stage = Stage::Broken(error.clone());
            return Err(Unmade {
                error,
                left: Left::Unknown,
            });
        }
        let mark = self.shared.joints.mark(&self.stream).map(Arc::new);
        if let Err(error) = &mark {
            // Nothing tells when what is used now may be used again.
            door.stage = Stage::Broken(error.clone());
        }
        match (called, mark) {
            (Ok(_), Ok(mark)) => Ok(mark),
            (Err(error), Ok(mark)) => Err(Unmade {
                error,
                left: Left::Until(mark),
            }),
            (Err(error), Err(_)) | (Ok(_), Err(error)) => Err(Unmade {
                error,
                left: Left::Unknown,
            }),
        }
    }

    /// Refuses to go on where nobody knows what the library may still enqueue.
    ///
    /// # Errors
    /// Why the lane is of no use any more; `Timeout` as [`enter`](Self::enter).
    pub(crate) fn check_whole(&self, deadline: Deadline) -> Result<()> {
        if let Some(error) = self.shared.aborted.get() {
            return Err(error.clone());
        }
        match &self.enter(deadline)?.stage {
            Stage::Broken(error) => Err(error.clone()),
            Stage::Joining(_) | Stage::Ready => Ok(()),
        }
    }

    /// What comes after the library's call.
    fn finish(&self, comm: &Comm, launched: Launched, deadline: Deadline) -> Result<()> {
        if launched.call == Call::InProgress {
            self.settle(comm, deadline)?;
        }
        launched.copies.into_iter().try_for_each(|copy| {
            // SAFETY: from the staging memory to buffers of the operation, which are kept as for the call.
            unsafe { copy.enqueue(&self.stream) }
        })
    }

    /// The memory besides its buffers that an operation needs. It is used on the lane's stream alone, so
    /// that one operation after the other may; one in a graph has its own.
    fn staging_for(&self, op: &Op<'_>, graph: Option<Graph>) -> Result<Option<DeviceBuffer>> {
        let bytes = staging_bytes(&self.shared.library, op);
        if bytes == 0 {
            return Ok(None);
        }
        // All that is read there was written there first.
        let make = |bytes| DeviceBuffer::unset(&self.stream, DType::U8, bytes);
        if graph.is_some() {
            return make(bytes).map(Some);
        }
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(staging) = staging.as_ref().filter(|it| it.len() >= bytes) {
            return Ok(Some(staging.clone()));
        }
        let made = make(bytes.next_power_of_two())?;
        if let Some(former) = staging.replace(made.clone()) {
            // To free it would wait for what is under way.
            let end = self.shared.joints.mark(&self.stream)?;
            self.keep(OpType::Gather, Box::new(former), end);
        }
        Ok(Some(made))
    }

    /// Has a graph keep what an operation uses.
    fn keep_for(&self, graph: Graph, op: &Op<'_>, staging: &Option<DeviceBuffer>) -> Result<()> {
        let hold = |buffer: &Buffer<'_>| {
            buffer.hold_on().ok_or_else(|| {
                let message = format!("{buffer:?}: no owner keeps it for the graph");
                Error::new(ErrorKind::InvalidArgument, message)
            })
        };
        let held = op.map_buffers(&hold)?;
        let memory = (held, self.barrier.clone(), staging.clone());
        graph.keep(&self.shared.device, Box::new(memory))
    }

    /// Notes which operation went into a graph.
    pub(crate) fn note_captured(&self, graph: u64, seq: u64) {
        const MOST: usize = 64;
        let mut graphs = self.graphs();
        let captured = graphs.entry(graph).or_default();
        captured.count += 1;
        captured.ends = Some((captured.ends.map_or(seq, |(first, _)| first), seq));
        if graphs.len() > MOST {
            graphs.pop_first();
        }
    }

    pub(super) fn graphs(&self) -> MutexGuard<'_, BTreeMap<u64, Captured>> {
        self.graphs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The graph that an operation is captured into: that of the streams of its buffers, all of them.
    ///
    /// # Errors
    /// `InvalidArgument` if they are not all of one mind.
    fn graph_of(&self, op: &Op<'_>) -> Result<Option<Graph>> {
        let mut graph: Option<Option<Graph>> = None;
        let mut result = Ok(());
        let default = &self.shared.default_stream;
        visit(op, &mut |buffer| {
            if result.is_err() {
                return;
            }
            match stream_of(buffer).unwrap_or(default).graph() {
                Err(error) => result = Err(error),
                Ok(theirs) if graph.is_none_or(|graph| is_same(graph, theirs)) => {
                    graph = Some(theirs);
                }
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
            Some(own) if !is_same(graph, Some(own)) => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "the stream of the group is being captured into graph {}, and those of the \
                     buffers are not: issue it when that capture has ended",
                    own.id
                ),
            )),
            _ => Ok(graph),
        }
    }

    /// As [`graph_of`](Self::graph_of), before the operation is issued.
    ///
    /// # Errors
    /// `InvalidArgument` if the communicator is not there yet: none can be made during a capture.
    pub(crate) fn check_capture(&self, op: &Op<'_>) -> Result<Option<Graph>> {
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
    pub(crate) fn lead(&self, stream: &CudaStream) -> Result<()> {
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

    pub(crate) fn follow(&self, stream: &CudaStream) -> Result<()> {
        let mark = self.shared.joints.mark(stream)?;
        self.stream.wait_for(&mark)
    }

    /// Waits until the library has connected to whom it had to.
    pub(super) fn settle(&self, comm: &Comm, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        let mut pause = Duration::from_micros(20);
        loop {
            let is_ready = comm.is_ready()?;
            // After the question: an abort makes it ready as well, without what it was to do.
            if let Some(error) = self.shared.aborted.get() {
                return Err(error.clone());
            }
            if is_ready {
                return Ok(());
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
    }
}

fn is_same(one: Option<Graph>, other: Option<Graph>) -> bool {
    one.map(|graph| graph.id) == other.map(|graph| graph.id)
}

fn place_of(memory: &DeviceBuffer) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(memory.address() as usize)
}

/// Calls `look` with every buffer of an operation; a lone one twice.
pub(crate) fn visit<'o, 'b>(op: &'o Op<'b>, look: &mut impl FnMut(&'o Buffer<'b>)) {
    if let Op::Coalesced(ops) = op {
        for op in ops {
            visit(op, look);
        }
    }
    op.inputs().iter().chain(op.outputs()).for_each(look);
}

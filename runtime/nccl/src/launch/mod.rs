//! Launches each operation as calls of the library.
//!
//! Lists and parts of uneven lengths are groups of broadcasts, reductions, or sends and receives, as in c10d. NCCL
//! launches the calls of a group together. Messages without elements are left out on both sides.
//!
//! NCCL's own gather and scatter (2.28) require that the root's parts are contiguous. Only the root has the
//! parts' addresses, and the call must be the same on all ranks. So if the parts are not contiguous, the
//! root stages them in memory of the queue.

#![deny(clippy::wildcard_enum_match_arm)]

mod calls;
mod parts;

pub(crate) use parts::staging_bytes;

use crate::comm::members::Scope;
use crate::context::Shared;
use crate::cuda::device::CudaDevice;
use crate::cuda::stream::CudaStream;
use crate::library::NcclLibrary;
use crate::library::datatype::reduction_of;
use crate::library::sys::NcclComm;
use calls::Calls;
use parts::{BytesCopy, Part};
use rcomm_core::{Buffer, Error, ErrorKind, Result};
use rcomm_core::{Op, Reduction};
use rcomm_recorder::model::{DType, Layout, Parts, Pattern, Peer, ReduceOp};
use std::ffi::{CStr, c_void};
use std::time::Duration;

/// Refuses an operation that this release of NCCL or the device does not support.
///
/// # Errors
/// `Unsupported` names what is not supported.
pub(crate) fn check(shared: &Shared, op: &Op<'_>) -> Result<()> {
    check_device(&shared.device, op)?;
    check_library(&shared.library, op)
}

/// Refuses types that NCCL does not reduce on this device. If the library refused them, a communicator that does not
/// block would keep the error (`ncclEnqueueCheck`, enqueue.cc).
fn check_device(device: &CudaDevice, op: &Op<'_>) -> Result<()> {
    if let Op::Coalesced(ops) = op {
        return ops.iter().try_for_each(|op| check_device(device, op));
    }
    let is_float8 = |buffer: &Buffer<'_>| matches!(buffer.dtype(), DType::F8E4M3 | DType::F8E5M2);
    let reduces = op.reduction().is_some() && op.inputs().iter().any(is_float8);
    if !reduces || device.has_float8() {
        return Ok(());
    }
    let message = format!(
        "NCCL reduces 8-bit floats on devices of compute capability 9.0 or later, and {device:?} is older"
    );
    Err(Error::new(ErrorKind::Unsupported, message).during(op.op_type()))
}

/// Refuses types, reductions, tags and peers that the library does not support.
fn check_library(library: &NcclLibrary, op: &Op<'_>) -> Result<()> {
    if let Some(reduction) = op.reduction() {
        for buffer in op.inputs() {
            reduction_of(library, reduction, buffer.dtype())?;
        }
    }
    let refuse =
        |message: &str| Err(Error::new(ErrorKind::Unsupported, message).during(op.op_type()));
    if let Op::Coalesced(ops) = op {
        return ops.iter().try_for_each(|op| check_library(library, op));
    }
    if op.tag().is_some_and(|tag| tag != 0) {
        return refuse("NCCL has no tags: messages between two ranks arrive in order of issue");
    }
    if op.peer() == Peer::Any {
        return refuse("NCCL receives from a named rank only");
    }
    Ok(())
}

/// The library, communicator, stream and memory that calls use.
#[derive(Clone, Copy)]
pub(crate) struct LaunchTarget<'a> {
    pub(crate) library: &'a NcclLibrary,
    pub(crate) comm: NcclComm,
    pub(crate) scope: Scope,
    pub(crate) stream: &'a CudaStream,
    /// This rank's number in the communicator.
    pub(crate) rank: u32,
    /// The number of ranks of the communicator.
    pub(crate) size: u32,
    /// Four bytes of device memory for the reduction of a barrier.
    pub(crate) barrier: *mut c_void,
    /// Device memory of at least [`staging_bytes`] bytes; null if the operation needs none.
    pub(crate) staging: *mut c_void,
    /// The operation's number for profiler plug-ins, if it is to be passed on.
    pub(crate) tag: Option<u64>,
    /// The algorithms that the library may use, if they are limited.
    pub(crate) algorithms: Option<&'static CStr>,
}

/// Whether all work of an operation's calls is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// All work is enqueued.
    Done,
    /// The library is still launching, on a thread of its own, and may have to connect to peers for that. The
    /// communicator's asynchronous error will show the result.
    InProgress,
}

/// The result of a launch.
pub(crate) struct Launched {
    pub(crate) call: Call,
    /// Copies to be made on the stream once the work of the calls is enqueued.
    pub(crate) copies: Vec<BytesCopy>,
}

impl<'a> LaunchTarget<'a> {
    /// Enqueues an operation.
    ///
    /// # Safety
    /// The communicator and the stream are live, and no other thread calls the communicator during the
    /// call. The operation is valid for this rank and size ([`Op::validate`]), all its buffers are on the
    /// stream's device, and they stay until the stream is done with them.
    ///
    /// # Errors
    /// `Unsupported` as [`check`]; those of [`NcclLibrary::check_on`], after which a part of the operation's calls may
    /// have been enqueued.
    pub(crate) unsafe fn launch(self, op: &Op<'_>) -> Result<Launched> {
        // SAFETY: the caller keeps communicator and stream live, has the communicator to itself during this
        // call, which drops `calls`, and passes a valid operation whose buffers stay. The queue that fills a
        // `LaunchTarget` keeps the barrier's four bytes and the staging memory as long.
        let calls = unsafe { Calls::new(self) };
        if needs_group(op) {
            let group = self.library.group()?;
            calls.make(op)?;
            calls.note("ncclGroupEnd", group.end())?;
        } else {
            calls.make(op)?;
        }
        Ok(calls.into_launched())
    }

    /// Returns how long the library expects a collective to take. The collective is not launched, but the library may
    /// connect to peers for it.
    ///
    /// A simulated end leaves the operations of a group in the communicator's plan, and frees what was made for them
    /// (`groupLaunch`, group.cc:722 of NCCL 2.30.7). The next group of calls forgets the collectives
    /// (`ncclGroupCommJoin`, group.h:123), but not the messages: they stay in the queues of the peers, to which the
    /// library counts as connected (`p2pTaskAppend`, enqueue.cc:2646 and 2669). So only one collective is estimated
    /// at a time. For several, the library would return the time of the last one alone (`topoGetAlgoInfo`,
    /// enqueue.cc:2067).
    ///
    /// # Safety
    /// Same as [`launch`](Self::launch); the stream is not being captured, and the communicator blocks
    /// (`groupLaunchNonBlocking`, group.cc:762, launches the operation).
    ///
    /// # Errors
    /// `Unsupported` if the operation is not one collective, or the library has no function or no estimate; `Backend`
    /// with the library's message.
    pub(crate) unsafe fn estimate(self, op: &Op<'_>) -> Result<Duration> {
        let Some(end) = self.library.table().group_simulate_end else {
            return Err(self
                .library
                .lacks("an estimate of times", "ncclGroupSimulateEnd"));
        };
        let refuse = |message: &str| Err(Error::new(ErrorKind::Unsupported, message));
        if !is_one_collective(op) {
            return refuse(
                "NCCL estimates the time of one collective on single buffers: messages, and lists that are made of \
                 several calls, would stay in its plans",
            );
        }
        let is_empty = |buffers: &[Buffer<'_>]| buffers.iter().all(|buffer| buffer.is_empty());
        let has_buffers = op.any_buffer().is_some();
        if self.size == 1 || has_buffers && is_empty(op.inputs()) && is_empty(op.outputs()) {
            // No kernel would run. For one rank, a copy would run at once (`ncclLaunchOneRank`, enqueue.cc).
            return Ok(Duration::ZERO);
        }
        // SAFETY: as in `launch`; a stream on which nothing is enqueued does not use the memory.
        let calls = unsafe { Calls::new(self) };
        let group = self.library.group()?;
        let made = calls.make(op);
        // The group ends in this way after an error too, because its calls must not be launched.
        let (status, microseconds) = group.simulate(end);
        made?;
        calls.note("ncclGroupSimulateEnd", status)?;
        let seconds = f64::from(microseconds) / 1e6;
        match Duration::try_from_secs_f64(seconds) {
            Ok(time) => Ok(time),
            Err(_) => {
                refuse("NCCL has no estimate of this operation's time, as for buffers in windows")
            }
        }
    }
}

/// Returns the buffers of a list, each with its rank.
fn parts(list: &[Buffer<'_>]) -> impl Iterator<Item = (Part, u32)> {
    list.iter().map(Part::of).zip(0..)
}

/// Whether the operation may need several calls, which then form a group.
fn needs_group(op: &Op<'_>) -> bool {
    // A reduction with a factor is created before the call and destroyed after it, and neither may overlap a launch.
    let has_factor = |reduction: &Reduction| reduction.op == ReduceOp::PremulSum;
    if op.reduction().is_some_and(has_factor) {
        return true;
    }
    let is_message = matches!(op.op_type().pattern(), Pattern::Send | Pattern::Recv);
    !is_message && !is_one_collective(op)
}

/// Whether the operation is one call of a collective, apart from the calls that make and destroy its reduction.
fn is_one_collective(op: &Op<'_>) -> bool {
    let kind = op.op_type();
    match kind.pattern() {
        Pattern::AllReduce
        | Pattern::Reduce
        | Pattern::Broadcast
        | Pattern::Barrier
        | Pattern::AllGather
        | Pattern::ReduceScatter => match kind.layout() {
            Layout::Absent | Layout::InPlace | Layout::Single => true,
            Layout::List | Layout::Several | Layout::Sparse => false,
        },
        // All-to-all, gather and scatter are sends and receives, also inside the library's functions for them.
        Pattern::Send | Pattern::Recv | Pattern::AllToAll | Pattern::Gather | Pattern::Scatter => {
            false
        }
        Pattern::Block | Pattern::Agreement | Pattern::OneSided | Pattern::Unknown => false,
    }
}

impl Calls<'_> {
    /// Returns the rank in the communicator of a peer, which is given by its rank in the group.
    fn peer(&self, group_rank: u32) -> u32 {
        match self.target.scope {
            Scope::Group => group_rank,
            Scope::Pair => 1 - self.target.rank,
        }
    }

    /// Makes the calls of an operation, which was validated and so has as many buffers as its kind requires.
    fn make(&self, op: &Op<'_>) -> Result<()> {
        if let Op::Coalesced(ops) = op {
            return ops.iter().try_for_each(|op| self.make(op));
        }
        let this_rank = self.target.rank;
        let kind = op.op_type();
        let is_list = kind.layout() == Layout::List;
        let (inputs, outputs) = (op.inputs(), op.outputs());
        let root = op.root().unwrap_or(0);
        let sum = Reduction::from(ReduceOp::Sum);
        let reduction = op.reduction().unwrap_or(&sum);
        match kind.pattern() {
            Pattern::AllReduce => outputs
                .iter()
                .try_for_each(|buffer| self.all_reduce(buffer, reduction)),
            Pattern::Reduce => {
                let part = Part::of(&outputs[0]);
                self.reduce(part, part, reduction, root)
            }
            Pattern::Broadcast => {
                let part = Part::of(&outputs[0]);
                self.broadcast(part, part, root)
            }
            Pattern::Barrier => self.barrier(),
            Pattern::AllGather if is_list => {
                let mut outputs = parts(outputs);
                outputs.try_for_each(|(output, root)| {
                    let is_own = root == this_rank;
                    let input = if is_own { Part::of(&inputs[0]) } else { output };
                    self.broadcast(input, output, root)
                })
            }
            Pattern::AllGather => {
                let mut pairs = inputs.iter().zip(outputs);
                pairs.try_for_each(|(input, output)| self.all_gather(input, output))
            }
            Pattern::ReduceScatter if is_list => {
                let mut inputs = parts(inputs);
                inputs.try_for_each(|(input, root)| {
                    let is_own = root == this_rank;
                    let output = if is_own { Part::of(&outputs[0]) } else { input };
                    self.reduce(input, output, reduction, root)
                })
            }
            Pattern::ReduceScatter => {
                let mut pairs = inputs.iter().zip(outputs);
                pairs.try_for_each(|(input, output)| self.reduce_scatter(input, output, reduction))
            }
            Pattern::AllToAll if is_list => self.exchange(parts(inputs), parts(outputs)),
            Pattern::AllToAll => match op.splits() {
                None => self.all_to_all(&inputs[0], &outputs[0]),
                Some((sent, received)) => {
                    let inputs = Part::of(&inputs[0]).cut(sent.iter().copied());
                    let outputs = Part::of(&outputs[0]).cut(received.iter().copied());
                    self.exchange(inputs.zip(0..), outputs.zip(0..))
                }
            },
            // On ranks other than the root, the list is empty.
            Pattern::Gather => match kind.parts() {
                Parts::Equal => self.gather(&inputs[0], outputs, root),
                Parts::PerRank | Parts::PerPair => {
                    let input = (Part::of(&inputs[0]), root);
                    self.exchange([input].into_iter(), parts(outputs))
                }
            },
            Pattern::Scatter => match kind.parts() {
                Parts::Equal => self.scatter(inputs, &outputs[0], root),
                Parts::PerRank | Parts::PerPair => {
                    let output = (Part::of(&outputs[0]), root);
                    self.exchange(parts(inputs), [output].into_iter())
                }
            },
            Pattern::Send | Pattern::Recv => match op.peer() {
                Peer::Rank(peer) => {
                    let peer = self.peer(peer);
                    let mut sent = inputs.iter().map(Part::of);
                    sent.try_for_each(|part| self.send(part, peer))?;
                    let mut received = outputs.iter().map(Part::of);
                    received.try_for_each(|part| self.recv(part, peer))
                }
                Peer::Any | Peer::None => check_library(self.target.library, op),
            },
            Pattern::Block | Pattern::Agreement | Pattern::OneSided | Pattern::Unknown => {
                let message = "NCCL has no call for this operation";
                let error = Error::new(ErrorKind::Unsupported, message);
                Err(error.during(kind))
            }
        }
    }
}

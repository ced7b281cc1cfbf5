//! Operations as NCCL calls: which of our operations is which of the library's.
//!
//! Lists and parts of uneven lengths are groups of broadcasts, reductions, or sends and receives, as in
//! c10d: NCCL runs a group as one kernel. Parts without elements are left out on both sides.
//!
//! NCCL's own gather and scatter (2.28) want the root's parts side by side. Only the root knows whether its
//! are, and the call must be the same on all ranks: so the root goes through memory of the lane's where
//! they are not.

mod calls;
mod parts;

pub(super) use parts::staging_bytes;

use super::Shared;
use super::datatype::reduction_of;
use super::device::CudaDevice;
use super::library::NcclLibrary;
use super::rally::Scope;
use super::stream::CudaStream;
use super::sys::NcclComm;
use calls::Calls;
use parts::{Move, Part};
use rcomm_core::{Buffer, Error, ErrorKind, Result};
use rcomm_core::{Op, Reduction};
use rcomm_recorder::model::{DType, ReduceOp};
use std::ffi::c_void;

/// Refuses what NCCL, or this library, does not do. Nothing is sent.
///
/// # Errors
/// `Unsupported` names it.
pub(super) fn check(shared: &Shared, op: &Op<'_>) -> Result<()> {
    check_device(&shared.device, op)?;
    check_library(&shared.library, op)
}

/// The library's refusal would be the communicator's error for good (`ncclEnqueueCheck`, enqueue.cc).
fn check_device(device: &CudaDevice, op: &Op<'_>) -> Result<()> {
    if let Op::Coalesced(ops) = op {
        return ops.iter().try_for_each(|op| check_device(device, op));
    }
    let is_float8 = |it: &Buffer<'_>| matches!(it.dtype(), DType::F8E4M3 | DType::F8E5M2);
    let reduces = op.reduction().is_some() && op.inputs().iter().any(is_float8);
    if !reduces || device.has_float8() {
        return Ok(());
    }
    let message = format!(
        "NCCL reduces 8-bit floats on devices of compute capability 9.0 or later, and {device:?} is older"
    );
    Err(Error::new(ErrorKind::Unsupported, message).during(op.op_type()))
}

fn check_library(library: &NcclLibrary, op: &Op<'_>) -> Result<()> {
    if let Some(reduction) = op.reduction() {
        for buffer in op.inputs() {
            reduction_of(library, reduction, buffer.dtype())?;
        }
    }
    let refuse = |why: &str| Err(Error::new(ErrorKind::Unsupported, why).during(op.op_type()));
    match op {
        Op::Send { tag, .. } | Op::Recv { tag, .. } if *tag != 0 => {
            refuse("NCCL has no tags: messages between two ranks arrive in order of issue")
        }
        Op::Recv { peer: None, .. } => refuse("NCCL receives from a named rank only"),
        Op::Coalesced(ops) => ops.iter().try_for_each(|op| check_library(library, op)),
        _ => Ok(()),
    }
}

/// Where calls go.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) library: &'a NcclLibrary,
    pub(super) comm: NcclComm,
    pub(super) scope: Scope,
    pub(super) stream: &'a CudaStream,
    /// This rank, and the size, in the communicator.
    pub(super) rank: u32,
    pub(super) size: u32,
    /// Four bytes of the device's that a barrier may reduce.
    pub(super) barrier: *mut c_void,
    /// As many bytes of the device's as [`staging_bytes`] says.
    pub(super) staging: *mut c_void,
}

/// Whether everything is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// It is.
    Done,
    /// The library is still at it (it connects to peers): its asynchronous error will tell.
    InProgress,
}

/// What a launch has come to.
pub(super) struct Launched {
    pub(super) call: Call,
    /// What is to be copied on the stream once everything is enqueued.
    pub(super) copies: Vec<Move>,
}

impl<'a> Target<'a> {
    /// Enqueues an operation.
    ///
    /// # Safety
    /// The communicator and the stream are live, and nobody else calls the communicator meanwhile.
    /// The operation is valid for this rank and size ([`Op::validate`]), all its buffers are on the
    /// stream's device, and they stay until the stream is done with them.
    ///
    /// # Errors
    /// `Unsupported` as [`check`]; `Backend` with the library's words: part of a group may then have
    /// been enqueued.
    pub(super) unsafe fn launch(self, op: &Op<'_>) -> Result<Launched> {
        // SAFETY: as this function's.
        let calls = unsafe { Calls::over(self) };
        if needs_group(op) {
            let group = self.library.group()?;
            calls.make(op)?;
            calls.note("ncclGroupEnd", group.end())?;
        } else {
            calls.make(op)?;
        }
        Ok(calls.finish())
    }
}

/// Whether it is more than one call.
fn needs_group(op: &Op<'_>) -> bool {
    // A reduction with a factor is made before the call and undone after it, and neither may happen beside a launch.
    let has_factor = |it: Reduction| it.op == ReduceOp::PremulSum;
    op.reduction().is_some_and(has_factor)
        || !matches!(
            op,
            Op::AllReduce { .. }
                | Op::Reduce { .. }
                | Op::Broadcast { .. }
                | Op::Barrier
                | Op::AllGatherSingle { .. }
                | Op::ReduceScatterSingle { .. }
                | Op::Send { .. }
                | Op::Recv { .. }
        )
}

impl Calls<'_> {
    /// A rank of the group as a rank of the communicator.
    fn peer(&self, group_rank: u32) -> u32 {
        match self.target.scope {
            Scope::Group => group_rank,
            Scope::Pair => 1 - self.target.rank,
        }
    }

    fn make(&self, op: &Op<'_>) -> Result<()> {
        let own = self.target.rank;
        let ranks = 0..self.target.size;
        match op {
            Op::AllReduce { buffer, op } => self.all_reduce(buffer, *op),
            Op::AllReduceCoalesced { buffers, op } => buffers
                .iter()
                .try_for_each(|buffer| self.all_reduce(buffer, *op)),
            Op::Reduce { buffer, op, root } => {
                let part = Part::of(buffer);
                self.reduce(part, part, *op, *root)
            }
            Op::Broadcast { buffer, root } => {
                let part = Part::of(buffer);
                self.broadcast(part, part, *root)
            }
            Op::Barrier => self.barrier(),
            Op::AllGatherSingle { input, output } => self.all_gather(input, output),
            Op::AllGatherCoalesced { inputs, outputs } => inputs
                .iter()
                .zip(outputs)
                .try_for_each(|(input, output)| self.all_gather(input, output)),
            Op::AllGather { input, outputs } | Op::AllGatherV { input, outputs } => {
                let mut outputs = ranks.zip(outputs);
                outputs.try_for_each(|(root, output)| {
                    let output = Part::of(output);
                    let input = if root == own { Part::of(input) } else { output };
                    self.broadcast(input, output, root)
                })
            }
            Op::ReduceScatterSingle { input, output, op } => {
                self.reduce_scatter(input, output, *op)
            }
            Op::ReduceScatterCoalesced {
                inputs,
                outputs,
                op,
            } => inputs
                .iter()
                .zip(outputs)
                .try_for_each(|(input, output)| self.reduce_scatter(input, output, *op)),
            Op::ReduceScatter { inputs, output, op }
            | Op::ReduceScatterV { inputs, output, op } => {
                let mut inputs = ranks.zip(inputs);
                inputs.try_for_each(|(root, input)| {
                    let input = Part::of(input);
                    let output = if root == own { Part::of(output) } else { input };
                    self.reduce(input, output, *op, root)
                })
            }
            Op::AllToAllSingle { input, output } => self.all_to_all(input, output),
            Op::AllToAll { inputs, outputs } => self.exchange(
                inputs.iter().map(Part::of).zip(ranks.clone()),
                outputs.iter().map(Part::of).zip(ranks),
            ),
            Op::AllToAllVSingle {
                input,
                output,
                input_splits,
                output_splits,
            } => {
                let inputs = Part::of(input).cut(input_splits.iter().copied());
                let outputs = Part::of(output).cut(output_splits.iter().copied());
                self.exchange(inputs.zip(ranks.clone()), outputs.zip(ranks))
            }
            Op::Gather {
                input,
                outputs,
                root,
            } => self.gather(input, outputs, *root),
            Op::GatherV {
                input,
                outputs,
                root,
            } => {
                // Elsewhere than on the root there are no outputs.
                let outputs = outputs.iter().map(Part::of).zip(ranks);
                self.exchange([(Part::of(input), *root)].into_iter(), outputs)
            }
            Op::Scatter {
                inputs,
                output,
                root,
            } => self.scatter(inputs, output, *root),
            Op::ScatterV {
                inputs,
                output,
                root,
            } => {
                let inputs = inputs.iter().map(Part::of).zip(ranks);
                self.exchange(inputs, [(Part::of(output), *root)].into_iter())
            }
            Op::Send { buffer, peer, .. } => self.send(Part::of(buffer), self.peer(*peer)),
            Op::Recv {
                buffer,
                peer: Some(peer),
                ..
            } => self.recv(Part::of(buffer), self.peer(*peer)),
            Op::Recv { peer: None, .. } => check_library(self.target.library, op),
            Op::Coalesced(ops) => ops.iter().try_for_each(|op| self.make(op)),
        }
    }
}

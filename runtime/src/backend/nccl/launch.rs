//! Operations as NCCL calls: which of our operations is which of the library's.
//!
//! Lists and parts of uneven lengths are groups of broadcasts, reductions, or sends and receives, as in
//! c10d: NCCL runs a group as one kernel. Parts without elements are left out on both sides.
//!
//! NCCL's own gather and scatter (2.28) want the root's parts side by side. Only the root knows whether its
//! are, and the call must be the same on all ranks: so the root goes through memory of the lane's where
//! they are not.

mod parts;

pub(super) use parts::staging_bytes;

use super::datatype::{NcclReduction, Units, reduction_of};
use super::device::CudaStream;
use super::library::NcclLibrary;
use super::rally::Scope;
use super::sys::{self, NcclComm, NcclRedOp, NcclResult, result};
use crate::buffer::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::op::{Op, Reduction};
use parts::{Move, Part, STAGING_ALIGN, whole};
use rcomm_recorder::model::DType;
use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};

/// Refuses what NCCL, or this library, does not do. Nothing is sent.
///
/// # Errors
/// `Unsupported` names it.
pub(super) fn check(library: &NcclLibrary, op: &Op<'_>) -> Result<()> {
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
        Op::Coalesced(ops) => ops.iter().try_for_each(|op| check(library, op)),
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
        let calls = Calls {
            target: self,
            is_pending: Cell::new(false),
            staged: Cell::new(0),
            copies: RefCell::default(),
        };
        if needs_group(op) {
            let group = self.library.group()?;
            calls.make(op)?;
            calls.note("ncclGroupEnd", group.end())?;
        } else {
            calls.make(op)?;
        }
        let call = match calls.is_pending.get() {
            true => Call::InProgress,
            false => Call::Done,
        };
        let copies = calls.copies.into_inner();
        Ok(Launched { call, copies })
    }
}

/// Whether it is more than one call.
fn needs_group(op: &Op<'_>) -> bool {
    !matches!(
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

/// One operation's calls. Made by [`Target::launch`] alone, whose contract is the reason for every call
/// below: the communicator, the stream and the memory of the operation are live, and a part lies within
/// a buffer of the operation.
struct Calls<'a> {
    target: Target<'a>,
    is_pending: Cell<bool>,
    /// Bytes of the staging memory in use.
    staged: Cell<usize>,
    copies: RefCell<Vec<Move>>,
}

impl Calls<'_> {
    fn note(&self, call: &str, status: NcclResult) -> Result<()> {
        if status == result::IN_PROGRESS {
            self.is_pending.set(true);
            return Ok(());
        }
        // SAFETY: the communicator is live, by the contract of `launch`.
        unsafe { self.target.library.check_on(self.target.comm, call, status) }
    }

    /// A rank of the group as a rank of the communicator.
    fn peer(&self, group_rank: u32) -> u32 {
        match self.target.scope {
            Scope::Group => group_rank,
            Scope::Pair => 1 - self.target.rank,
        }
    }

    fn parts(&self, whole: &Buffer<'_>) -> impl Iterator<Item = Part> {
        let size = self.target.size as usize;
        let each = whole.len() / size;
        Part::of(whole).cut(std::iter::repeat_n(each, size))
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
            Op::Recv { peer: None, .. } => check(self.target.library, op),
            Op::Coalesced(ops) => ops.iter().try_for_each(|op| self.make(op)),
        }
    }

    /// Calls `then` with the library's reduction, made for this one operation where it has a factor.
    fn with_reduction(
        &self,
        reduction: Reduction,
        dtype: DType,
        then: impl FnOnce(Units, NcclRedOp) -> Result<()>,
    ) -> Result<()> {
        let (library, comm) = (self.target.library, self.target.comm);
        let (units, nccl) = reduction_of(library, reduction, dtype)?;
        let mut scalar = match nccl {
            NcclReduction::Named(op) => return then(units, op),
            NcclReduction::PremulSum { scalar } => scalar,
        };
        let mut op: NcclRedOp = 0;
        // SAFETY: the communicator is live; the scalar is of the given type, and read before the call
        // returns (`ncclScalarHostImmediate`); writes one int.
        let status = unsafe {
            (library.table().red_op_create_pre_mul_sum)(
                &mut op,
                scalar.as_mut_ptr().cast(),
                units.data_type,
                sys::SCALAR_HOST_IMMEDIATE,
                comm,
            )
        };
        // Nothing can be called with what is not there yet.
        // SAFETY: the communicator is live.
        unsafe { library.check_on(comm, "ncclRedOpCreatePreMulSum", status)? };
        let called = then(units, op);
        // SAFETY: made above; it may go as soon as the last call that names it has returned.
        let status = unsafe { (library.table().red_op_destroy)(op, comm) };
        called.and(self.note("ncclRedOpDestroy", status))
    }

    fn all_reduce(&self, buffer: &Buffer<'_>, reduction: Reduction) -> Result<()> {
        let part = Part::of(buffer);
        let it = self.target;
        let call = |units: Units, op| {
            // SAFETY: communicator, stream and buffer are live, by the contract; in place is allowed.
            let status = unsafe {
                (it.library.table().all_reduce)(
                    part.at,
                    part.at,
                    part.len * units.each,
                    units.data_type,
                    op,
                    it.comm,
                    it.stream.raw(),
                )
            };
            self.note("ncclAllReduce", status)
        };
        self.with_reduction(reduction, part.dtype, call)
    }

    /// The output is written on the root only.
    fn reduce(&self, input: Part, output: Part, reduction: Reduction, root: u32) -> Result<()> {
        let it = self.target;
        let root = to_c(root)?;
        let call = |units: Units, op| {
            // SAFETY: communicator, stream and memory are live, by the contract.
            let status = unsafe {
                (it.library.table().reduce)(
                    input.at,
                    output.at,
                    input.len * units.each,
                    units.data_type,
                    op,
                    root,
                    it.comm,
                    it.stream.raw(),
                )
            };
            self.note("ncclReduce", status)
        };
        self.with_reduction(reduction, input.dtype, call)
    }

    /// The input is read on the root only.
    fn broadcast(&self, input: Part, output: Part, root: u32) -> Result<()> {
        let it = self.target;
        let units = Units::to_move(output.dtype);
        let root = to_c(root)?;
        // SAFETY: communicator, stream and memory are live, by the contract.
        let status = unsafe {
            (it.library.table().broadcast)(
                input.at,
                output.at,
                output.len * units.each,
                units.data_type,
                root,
                it.comm,
                it.stream.raw(),
            )
        };
        self.note("ncclBroadcast", status)
    }

    /// A reduction of one number, as c10d's barrier.
    fn barrier(&self) -> Result<()> {
        let it = self.target;
        // SAFETY: communicator, stream and the four bytes are live, by the contract.
        let status = unsafe {
            (it.library.table().all_reduce)(
                it.barrier,
                it.barrier,
                1,
                sys::data_type::UINT32,
                sys::red_op::MAX,
                it.comm,
                it.stream.raw(),
            )
        };
        self.note("ncclAllReduce", status)
    }

    fn all_gather(&self, input: &Buffer<'_>, output: &Buffer<'_>) -> Result<()> {
        let it = self.target;
        let (input, output) = (Part::of(input), Part::of(output));
        let units = Units::to_move(input.dtype);
        // SAFETY: communicator, stream and buffers are live, by the contract; the output holds one
        // part for each rank.
        let status = unsafe {
            (it.library.table().all_gather)(
                input.at,
                output.at,
                input.len * units.each,
                units.data_type,
                it.comm,
                it.stream.raw(),
            )
        };
        self.note("ncclAllGather", status)
    }

    fn reduce_scatter(
        &self,
        input: &Buffer<'_>,
        output: &Buffer<'_>,
        reduction: Reduction,
    ) -> Result<()> {
        let it = self.target;
        let (input, output) = (Part::of(input), Part::of(output));
        let call = |units: Units, op| {
            // SAFETY: communicator, stream and buffers are live, by the contract; the input holds one
            // part for each rank.
            let status = unsafe {
                (it.library.table().reduce_scatter)(
                    input.at,
                    output.at,
                    output.len * units.each,
                    units.data_type,
                    op,
                    it.comm,
                    it.stream.raw(),
                )
            };
            self.note("ncclReduceScatter", status)
        };
        self.with_reduction(reduction, output.dtype, call)
    }

    fn all_to_all(&self, input: &Buffer<'_>, output: &Buffer<'_>) -> Result<()> {
        let it = self.target;
        let Some(all_to_all) = it.library.table().all_to_all else {
            let ranks = 0..it.size;
            let inputs = self.parts(input).zip(ranks.clone());
            return self.exchange(inputs, self.parts(output).zip(ranks));
        };
        let units = Units::to_move(input.dtype());
        let count = input.len() / it.size as usize * units.each;
        let (input, output) = (Part::of(input), Part::of(output));
        // SAFETY: communicator, stream and buffers are live, by the contract; both hold one part for
        // each rank.
        let status = unsafe {
            all_to_all(
                input.at,
                output.at,
                count,
                units.data_type,
                it.comm,
                it.stream.raw(),
            )
        };
        self.note("ncclAlltoAll", status)
    }

    fn gather(&self, input: &Buffer<'_>, outputs: &[Buffer<'_>], root: u32) -> Result<()> {
        let it = self.target;
        let ranks = 0..it.size;
        let own = Part::of(input);
        let outputs_at = outputs.iter().map(Part::of);
        let Some(gather) = it.library.table().gather else {
            return self.exchange([(own, root)].into_iter(), outputs_at.zip(ranks));
        };
        let at = match whole(outputs) {
            Some(at) => at,
            // On another rank than the root the library looks at no output.
            None if outputs.is_empty() => own.at,
            None => {
                let (at, moves) = self.stage(outputs);
                let back = moves.map(|it| Move {
                    to: it.from,
                    from: it.to,
                    ..it
                });
                self.copies.borrow_mut().extend(back);
                at
            }
        };
        let units = Units::to_move(own.dtype);
        let root = to_c(root)?;
        // SAFETY: communicator, stream and memory are live, by the contract; on the root there is one part
        // for each rank at `at`.
        let status = unsafe {
            gather(
                own.at,
                at,
                own.len * units.each,
                units.data_type,
                root,
                it.comm,
                it.stream.raw(),
            )
        };
        self.note("ncclGather", status)
    }

    fn scatter(&self, inputs: &[Buffer<'_>], output: &Buffer<'_>, root: u32) -> Result<()> {
        let it = self.target;
        let ranks = 0..it.size;
        let own = Part::of(output);
        let inputs_at = inputs.iter().map(Part::of);
        let Some(scatter) = it.library.table().scatter else {
            return self.exchange(inputs_at.zip(ranks), [(own, root)].into_iter());
        };
        let at = match whole(inputs) {
            Some(at) => at,
            // On another rank than the root the library looks at no input.
            None if inputs.is_empty() => own.at,
            None => {
                let (at, mut moves) = self.stage(inputs);
                // SAFETY: the parts are live, by the contract, and the staging memory has room for them.
                moves.try_for_each(|it| unsafe { it.enqueue(self.target.stream) })?;
                at
            }
        };
        let units = Units::to_move(own.dtype);
        let root = to_c(root)?;
        // SAFETY: communicator, stream and memory are live, by the contract; on the root there is one part
        // for each rank at `at`.
        let status = unsafe {
            scatter(
                at,
                own.at,
                own.len * units.each,
                units.data_type,
                root,
                it.comm,
                it.stream.raw(),
            )
        };
        self.note("ncclScatter", status)
    }

    /// Room for a list side by side, and what brings its parts there.
    fn stage(&self, list: &[Buffer<'_>]) -> (*mut c_void, impl Iterator<Item = Move>) {
        let start = self.staged.get();
        let at = self.target.staging.wrapping_byte_add(start);
        let mut end = 0;
        let moves: Vec<Move> = list
            .iter()
            .map(|part| {
                let bytes = part.size_bytes();
                let to = at.wrapping_byte_add(end);
                end += bytes;
                let from = Part::of(part).at;
                Move { to, from, bytes }
            })
            .collect();
        self.staged.set(start + end.next_multiple_of(STAGING_ALIGN));
        (at, moves.into_iter())
    }

    /// Sends and receives parts, also to and from this rank itself.
    fn exchange(
        &self,
        mut inputs: impl Iterator<Item = (Part, u32)>,
        mut outputs: impl Iterator<Item = (Part, u32)>,
    ) -> Result<()> {
        inputs.try_for_each(|(part, peer)| self.send(part, peer))?;
        outputs.try_for_each(|(part, peer)| self.recv(part, peer))
    }

    fn send(&self, part: Part, peer: u32) -> Result<()> {
        if part.len == 0 {
            return Ok(());
        }
        let it = self.target;
        let units = Units::to_move(part.dtype);
        let peer = to_c(peer)?;
        // SAFETY: communicator, stream and memory are live, by the contract.
        let status = unsafe {
            (it.library.table().send)(
                part.at,
                part.len * units.each,
                units.data_type,
                peer,
                it.comm,
                it.stream.raw(),
            )
        };
        self.note("ncclSend", status)
    }

    fn recv(&self, part: Part, peer: u32) -> Result<()> {
        if part.len == 0 {
            return Ok(());
        }
        let it = self.target;
        let units = Units::to_move(part.dtype);
        let peer = to_c(peer)?;
        // SAFETY: communicator, stream and memory are live, by the contract.
        let status = unsafe {
            (it.library.table().recv)(
                part.at,
                part.len * units.each,
                units.data_type,
                peer,
                it.comm,
                it.stream.raw(),
            )
        };
        self.note("ncclRecv", status)
    }
}

fn to_c(rank: u32) -> Result<c_int> {
    c_int::try_from(rank).map_err(|_| {
        Error::new(
            ErrorKind::InvalidArgument,
            format!("rank {rank} does not fit NCCL's int"),
        )
    })
}

//! The library's calls, with one function for each. A list of buffers is staged contiguously where a call takes one
//! address, and a reduction with a factor is made for one operation.

use super::parts::{BytesCopy, Part, STAGING_ALIGN, contiguous_start};
use super::{Call, LaunchTarget, Launched};
use crate::library::datatype::{NcclReduction, Scalar, Units, reduction_of};
use crate::library::sys::{self, CollConfig, NcclRedOp, NcclResult, result};
use rcomm_core::Buffer;
use rcomm_core::Reduction;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::DType;
use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};

/// The calls of one operation. All calls below are sound by the contract of [`new`](Self::new).
pub(super) struct Calls<'a> {
    pub(super) target: LaunchTarget<'a>,
    /// Whether the library is still launching a call.
    is_pending: Cell<bool>,
    /// The number of bytes of the staging memory that are in use.
    staged: Cell<usize>,
    /// The copies from the staging memory, to be made after the calls.
    copies: RefCell<Vec<BytesCopy>>,
    /// The configuration of each collective, if the operation has a tag or the algorithms are limited.
    config: Option<CollConfig>,
}

/// Makes a collective call, with the configuration if there is one and the library takes one (from 2.32 on).
macro_rules! collective {
    ($calls:expr, $plain:expr, $with_config:ident, ($($argument:expr),* $(,)?)) => {
        match ($calls.target.library.table().$with_config, &$calls.config) {
            (Some(call), Some(config)) => call($($argument,)* config),
            _ => $plain($($argument),*),
        }
    };
}

impl<'a> Calls<'a> {
    /// Prepares the calls of one operation.
    ///
    /// # Safety
    /// Until the value is dropped, the communicator and the stream of the target are live, and no other thread
    /// calls the communicator. Parts, and buffers that are cut into them, are those of one operation that is
    /// valid for the target's rank and size; they, the barrier's four bytes and the staging memory are on
    /// the stream's device, and stay until the stream is done with them.
    pub(super) unsafe fn new(target: LaunchTarget<'a>) -> Self {
        Self {
            target,
            is_pending: Cell::new(false),
            staged: Cell::new(0),
            copies: RefCell::default(),
            config: (target.tag.is_some() || target.algorithms.is_some())
                .then(|| CollConfig::new(target.tag.unwrap_or(0), target.algorithms)),
        }
    }

    /// Returns whether the library is still launching, and the copies that are to follow.
    pub(super) fn into_launched(self) -> Launched {
        let call = match self.is_pending.get() {
            true => Call::InProgress,
            false => Call::Done,
        };
        let copies = self.copies.into_inner();
        Launched { call, copies }
    }
}

impl Calls<'_> {
    /// Checks the result of a call, and notes whether the library is still launching.
    pub(super) fn note(&self, call: &str, status: NcclResult) -> Result<()> {
        if status == result::IN_PROGRESS {
            self.is_pending.set(true);
            return Ok(());
        }
        // SAFETY: `new` requires that the communicator is live, and that no other thread calls it, until `self` is
        // dropped.
        unsafe { self.target.library.check_on(self.target.comm, call, status) }
    }

    /// Cuts a buffer into equal parts, one for each rank.
    fn parts(&self, buffer: &Buffer<'_>) -> impl Iterator<Item = Part> {
        let size = self.target.size as usize;
        let len = buffer.len() / size;
        Part::of(buffer).cut(std::iter::repeat_n(len, size))
    }

    /// Returns the parts of all ranks: the buffers of a list, or equal parts of a single buffer.
    fn parts_of_all(&self, side: &[Buffer<'_>]) -> Vec<Part> {
        match side {
            [buffer] => self.parts(buffer).collect(),
            list => list.iter().map(Part::of).collect(),
        }
    }

    /// Calls `then` with the library's reduction. A reduction with a factor is created for this operation alone.
    fn with_reduction(
        &self,
        reduction: &Reduction,
        dtype: DType,
        then: impl FnOnce(Units, NcclRedOp) -> Result<()>,
    ) -> Result<()> {
        let (library, comm) = (self.target.library, self.target.comm);
        let (units, nccl) = reduction_of(library, reduction, dtype)?;
        let mut scalar = match nccl {
            // The mean over one rank is its sum. NCCL would scale it by one, which it refuses to do with 8-bit floats
            // (`ncclLaunchOneRank`, device/onerank.cu:44 of 2.30.7, whose cases for them are compiled for no host).
            NcclReduction::Named(sys::red_op::AVG) if self.target.size == 1 => {
                return then(units, sys::red_op::SUM);
            }
            NcclReduction::Named(op) => return then(units, op),
            NcclReduction::PremulSum(scalar) => scalar,
        };
        let (scalar, residence) = match &mut scalar {
            Scalar::Value(bytes) => (bytes.as_mut_ptr().cast(), sys::SCALAR_HOST_IMMEDIATE),
            Scalar::OnDevice(at) => (*at, sys::SCALAR_DEVICE),
        };
        let mut op: NcclRedOp = 0;
        // SAFETY: the communicator is live (`new`). The scalar is of the given type. On the host, it is read before the
        // call returns (`ncclScalarHostImmediate`). On the device, it is read when the stream runs the operation, which
        // holds the reduction, and so the memory, for as long as its buffers (`new`). The call writes one int through a
        // reference.
        let status = unsafe {
            (library.table().red_op_create_pre_mul_sum)(
                &mut op,
                scalar,
                units.data_type,
                residence,
                comm,
            )
        };
        // `ncclInProgress` is an error here: a reduction that is not complete yet cannot be used.
        // SAFETY: the communicator is live (`new`).
        unsafe { library.check_on(comm, "ncclRedOpCreatePreMulSum", status)? };
        let called = then(units, op);
        // SAFETY: the call above made `op` for this communicator, which is live (`new`). `op` may be destroyed as
        // soon as the last call that uses it has returned.
        let status = unsafe { (library.table().red_op_destroy)(op, comm) };
        called.and(self.note("ncclRedOpDestroy", status))
    }

    pub(super) fn all_reduce(&self, buffer: &Buffer<'_>, reduction: &Reduction) -> Result<()> {
        let part = Part::of(buffer);
        let target = self.target;
        let call = |units: Units, op| {
            // SAFETY: communicator and stream are live, and the buffer, `part.len` elements at `part.at`, stays
            // until the stream is done with it (`new`). NCCL allows the same buffer for input and output.
            let status = unsafe {
                collective!(
                    self,
                    target.library.table().all_reduce,
                    all_reduce_config,
                    (
                        part.at,
                        part.at,
                        part.len * units.each,
                        units.data_type,
                        op,
                        target.comm,
                        target.stream.raw(),
                    )
                )
            };
            self.note("ncclAllReduce", status)
        };
        self.with_reduction(reduction, part.dtype, call)
    }

    /// Makes a call of `ncclReduce`, which writes only the root's output.
    pub(super) fn reduce(
        &self,
        input: Part,
        output: Part,
        reduction: &Reduction,
        root: u32,
    ) -> Result<()> {
        let target = self.target;
        let root = to_c(root)?;
        let call = |units: Units, op| {
            // SAFETY: communicator and stream are live, and both parts, of equal length, stay until the
            // stream is done with them (`new`). On ranks other than the root the output is not written.
            let status = unsafe {
                collective!(
                    self,
                    target.library.table().reduce,
                    reduce_config,
                    (
                        input.at,
                        output.at,
                        input.len * units.each,
                        units.data_type,
                        op,
                        root,
                        target.comm,
                        target.stream.raw(),
                    )
                )
            };
            self.note("ncclReduce", status)
        };
        self.with_reduction(reduction, input.dtype, call)
    }

    /// Makes a call of `ncclBroadcast`, which reads only the root's input.
    pub(super) fn broadcast(&self, input: Part, output: Part, root: u32) -> Result<()> {
        let target = self.target;
        let units = Units::to_move(output.dtype);
        let root = to_c(root)?;
        // SAFETY: communicator and stream are live, and both parts, of equal length, stay until the stream
        // is done with them (`new`). On ranks other than the root the input is not read.
        let status = unsafe {
            collective!(
                self,
                target.library.table().broadcast,
                broadcast_config,
                (
                    input.at,
                    output.at,
                    output.len * units.each,
                    units.data_type,
                    root,
                    target.comm,
                    target.stream.raw(),
                )
            )
        };
        self.note("ncclBroadcast", status)
    }

    /// Runs a reduction of one number, as c10d's barrier does.
    pub(super) fn barrier(&self) -> Result<()> {
        let target = self.target;
        // SAFETY: communicator and stream are live, and the barrier's four bytes, one `uint32`, stay until
        // the stream is done with them (`new`).
        let status = unsafe {
            collective!(
                self,
                target.library.table().all_reduce,
                all_reduce_config,
                (
                    target.barrier,
                    target.barrier,
                    1,
                    sys::data_type::UINT32,
                    sys::red_op::MAX,
                    target.comm,
                    target.stream.raw(),
                )
            )
        };
        self.note("ncclAllReduce", status)
    }

    pub(super) fn all_gather(&self, input: &Buffer<'_>, output: &Buffer<'_>) -> Result<()> {
        let target = self.target;
        let (input, output) = (Part::of(input), Part::of(output));
        let units = Units::to_move(input.dtype);
        // SAFETY: communicator and stream are live, and both buffers stay until the stream is done with
        // them (`new`). The operation is valid, so the output holds as much as the input for each rank.
        let status = unsafe {
            collective!(
                self,
                target.library.table().all_gather,
                all_gather_config,
                (
                    input.at,
                    output.at,
                    input.len * units.each,
                    units.data_type,
                    target.comm,
                    target.stream.raw(),
                )
            )
        };
        self.note("ncclAllGather", status)
    }

    pub(super) fn reduce_scatter(
        &self,
        input: &Buffer<'_>,
        output: &Buffer<'_>,
        reduction: &Reduction,
    ) -> Result<()> {
        let target = self.target;
        let (input, output) = (Part::of(input), Part::of(output));
        let call = |units: Units, op| {
            // SAFETY: communicator and stream are live, and both buffers stay until the stream is done with
            // them (`new`). The operation is valid, so the input holds as much as the output for each
            // rank.
            let status = unsafe {
                collective!(
                    self,
                    target.library.table().reduce_scatter,
                    reduce_scatter_config,
                    (
                        input.at,
                        output.at,
                        output.len * units.each,
                        units.data_type,
                        op,
                        target.comm,
                        target.stream.raw(),
                    )
                )
            };
            self.note("ncclReduceScatter", status)
        };
        self.with_reduction(reduction, output.dtype, call)
    }

    /// Makes a call of `ncclAlltoAll`, or sends and receives if the library has no such function.
    pub(super) fn all_to_all(&self, input: &Buffer<'_>, output: &Buffer<'_>) -> Result<()> {
        let target = self.target;
        let Some(all_to_all) = target.library.table().all_to_all else {
            let ranks = 0..target.size;
            let inputs = self.parts(input).zip(ranks.clone());
            return self.exchange(inputs, self.parts(output).zip(ranks));
        };
        let units = Units::to_move(input.dtype());
        let count = input.len() / target.size as usize * units.each;
        let (input, output) = (Part::of(input), Part::of(output));
        // SAFETY: communicator and stream are live, and both buffers stay until the stream is done with
        // them (`new`). Both hold `count` units for each rank.
        let status = unsafe {
            collective!(
                self,
                all_to_all,
                all_to_all_config,
                (
                    input.at,
                    output.at,
                    count,
                    units.data_type,
                    target.comm,
                    target.stream.raw(),
                )
            )
        };
        self.note("ncclAlltoAll", status)
    }

    /// Makes a call of `ncclGather`, or sends and receives if the library has no such function. Outputs that are not
    /// contiguous are staged.
    pub(super) fn gather(
        &self,
        input: &Buffer<'_>,
        outputs: &[Buffer<'_>],
        root: u32,
    ) -> Result<()> {
        let target = self.target;
        let ranks = 0..target.size;
        let this_part = Part::of(input);
        let Some(gather) = target.library.table().gather else {
            let outputs = self.parts_of_all(outputs).into_iter().zip(ranks);
            return self.exchange([(this_part, root)].into_iter(), outputs);
        };
        let at = match contiguous_start(outputs) {
            Some(at) => at,
            // On ranks other than the root the library ignores the output's address.
            None if outputs.is_empty() => this_part.at,
            None => {
                let (at, copies) = self.stage(outputs);
                let back = copies.map(|copy| BytesCopy {
                    to: copy.from,
                    from: copy.to,
                    ..copy
                });
                self.copies.borrow_mut().extend(back);
                at
            }
        };
        let units = Units::to_move(this_part.dtype);
        let root = to_c(root)?;
        // SAFETY: communicator, stream, buffers and staging memory stay until the stream is done with them
        // (`new`). On the root, `at` is memory for as much as the input for each rank: its contiguous outputs, or
        // staging memory. On other ranks it is not written.
        let status = unsafe {
            collective!(
                self,
                gather,
                gather_config,
                (
                    this_part.at,
                    at,
                    this_part.len * units.each,
                    units.data_type,
                    root,
                    target.comm,
                    target.stream.raw(),
                )
            )
        };
        self.note("ncclGather", status)
    }

    /// Makes a call of `ncclScatter`, or sends and receives if the library has no such function. Inputs that are not
    /// contiguous are staged.
    pub(super) fn scatter(
        &self,
        inputs: &[Buffer<'_>],
        output: &Buffer<'_>,
        root: u32,
    ) -> Result<()> {
        let target = self.target;
        let ranks = 0..target.size;
        let this_part = Part::of(output);
        let Some(scatter) = target.library.table().scatter else {
            let inputs = self.parts_of_all(inputs).into_iter().zip(ranks);
            return self.exchange(inputs, [(this_part, root)].into_iter());
        };
        let at = match contiguous_start(inputs) {
            Some(at) => at,
            // On ranks other than the root the library ignores the input's address.
            None if inputs.is_empty() => this_part.at,
            None => {
                let (at, mut copies) = self.stage(inputs);
                // SAFETY: the parts are the operation's buffers, and the staging memory is large enough for all of
                // them (`staging_bytes`). Both stay until the stream is done with them (`new`).
                copies.try_for_each(|copy| unsafe { copy.enqueue(self.target.stream) })?;
                at
            }
        };
        let units = Units::to_move(this_part.dtype);
        let root = to_c(root)?;
        // SAFETY: communicator, stream, buffers and staging memory stay until the stream is done with them
        // (`new`). On the root, `at` holds as much as the output for each rank: its contiguous inputs, or staging
        // memory. On other ranks it is not read.
        let status = unsafe {
            collective!(
                self,
                scatter,
                scatter_config,
                (
                    at,
                    this_part.at,
                    this_part.len * units.each,
                    units.data_type,
                    root,
                    target.comm,
                    target.stream.raw(),
                )
            )
        };
        self.note("ncclScatter", status)
    }

    /// Reserves contiguous staging memory for a list. Returns its address, and the copies of the list's parts to it.
    fn stage(&self, list: &[Buffer<'_>]) -> (*mut c_void, impl Iterator<Item = BytesCopy>) {
        let start = self.staged.get();
        let at = self.target.staging.wrapping_byte_add(start);
        let mut end = 0;
        let copies: Vec<BytesCopy> = list
            .iter()
            .map(|part| {
                let bytes = part.size_bytes();
                let to = at.wrapping_byte_add(end);
                end += bytes;
                let from = Part::of(part).at;
                BytesCopy { to, from, bytes }
            })
            .collect();
        self.staged.set(start + end.next_multiple_of(STAGING_ALIGN));
        (at, copies.into_iter())
    }

    /// Sends each input to its rank and receives each output from its rank, which may be this rank itself.
    pub(super) fn exchange(
        &self,
        mut inputs: impl Iterator<Item = (Part, u32)>,
        mut outputs: impl Iterator<Item = (Part, u32)>,
    ) -> Result<()> {
        inputs.try_for_each(|(part, peer)| self.send(part, peer))?;
        outputs.try_for_each(|(part, peer)| self.recv(part, peer))
    }

    /// Sends a part to a rank of the communicator; nothing for an empty part.
    pub(super) fn send(&self, part: Part, peer: u32) -> Result<()> {
        if part.len == 0 {
            return Ok(());
        }
        let target = self.target;
        let units = Units::to_move(part.dtype);
        let peer = to_c(peer)?;
        // SAFETY: communicator and stream are live, and the part's `len` elements stay until the stream is
        // done with them (`new`).
        let status = unsafe {
            (target.library.table().send)(
                part.at,
                part.len * units.each,
                units.data_type,
                peer,
                target.comm,
                target.stream.raw(),
            )
        };
        self.note("ncclSend", status)
    }

    /// Receives a part from a rank of the communicator; nothing for an empty part.
    pub(super) fn recv(&self, part: Part, peer: u32) -> Result<()> {
        if part.len == 0 {
            return Ok(());
        }
        let target = self.target;
        let units = Units::to_move(part.dtype);
        let peer = to_c(peer)?;
        // SAFETY: communicator and stream are live, and the part's `len` elements stay until the stream is
        // done with them (`new`).
        let status = unsafe {
            (target.library.table().recv)(
                part.at,
                part.len * units.each,
                units.data_type,
                peer,
                target.comm,
                target.stream.raw(),
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

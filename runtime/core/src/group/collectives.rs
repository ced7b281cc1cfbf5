//! The typed collectives of a group.
//!
//! Each collective has two forms: `all_reduce(&mut [T], ..)` works on the caller's memory and returns when the
//! result is there; `all_reduce_async(Vec<T>, ..)` takes the memory and returns a [`Work`] at once, whose `wait`
//! returns the memory. Where a collective has inputs and outputs, the asynchronous form takes and returns both.
//! This module copies no elements. [`Op`] defines what each collective does.
//!
//! In-place forms are those with one buffer. Where there is an input and an output, Rust's borrow
//! checker ensures that they do not overlap.

use crate::backend::Done;
use crate::group::process_group::ProcessGroup;
use crate::group::spare::SpareOps;
use crate::group::work::Work;
use crate::op::buffer::Buffer;
use crate::op::element::Element;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::{Op, Reduction};
use std::panic::Location;

/// Vectors, one for each rank or for each of several tensors.
pub type Vecs<T> = Vec<Vec<T>>;

pub(crate) fn vec_of<T: Element>(buffer: Buffer<'static>) -> Result<Vec<T>> {
    buffer.into_vec().map_err(|buffer| {
        Error::new(
            ErrorKind::Backend,
            format!("the backend returned {buffer:?} instead of the submitted buffer"),
        )
    })
}

fn vecs_of<T: Element>(buffers: Vec<Buffer<'static>>) -> Result<Vecs<T>> {
    buffers.into_iter().map(vec_of).collect()
}

fn owned<T: Element>(vecs: Vecs<T>) -> Vec<Buffer<'static>> {
    vecs.into_iter().map(Buffer::from_vec).collect()
}

fn readable<'a, T: Element>(slices: &'a [&'a [T]]) -> Vec<Buffer<'a>> {
    slices
        .iter()
        .map(|slice| Buffer::from_slice(slice))
        .collect()
}

fn writable<'a, T: Element>(slices: &'a mut [&mut [T]]) -> Vec<Buffer<'a>> {
    let slices = slices.iter_mut();
    slices.map(|slice| Buffer::from_mut(slice)).collect()
}

pub(crate) fn wrong_op_error(op: Op<'static>) -> Error {
    Error::new(
        ErrorKind::Backend,
        format!("the backend returned another operation: {}", op.op_type()),
    )
}

/// Defines the two forms of a collective on a single buffer.
macro_rules! on_one_buffer {
    ($(#[$doc:meta])* $name:ident, $name_async:ident, $variant:ident { $($field:ident: $type:ty),* }) => {
        $(#[$doc])*
        #[track_caller]
        pub fn $name<T: Element>(&self, buffer: &mut [T], $($field: $type),*) -> Result<()> {
            let buffer = Buffer::from_mut(buffer);
            self.run(Op::$variant { buffer, $($field: $field.into()),* })?;
            Ok(())
        }

        #[doc = concat!("Like [`", stringify!($name), "`](Self::", stringify!($name), "), but returns at once; the vector comes back with the [`Work`].")]
        #[track_caller]
        pub fn $name_async<T: Element>(&self, buffer: Vec<T>, $($field: $type),*) -> Result<Work<Vec<T>>> {
            let buffer = Buffer::from_vec(buffer);
            self.submit(Op::$variant { buffer, $($field: $field.into()),* }, |op, _| {
                let Op::$variant { buffer, .. } = op else {
                    return Err(wrong_op_error(op));
                };
                vec_of(buffer)
            })
        }
    };
}

/// Defines the two forms of a collective with inputs and outputs. A list is `&[&[T]]` or
/// `&mut [&mut [T]]` when lent, `Vec<Vec<T>>` when owned.
macro_rules! in_out {
    (@lend in one $x:ident) => { Buffer::from_slice($x) };
    (@lend in list $x:ident) => { readable($x) };
    (@lend out one $x:ident) => { Buffer::from_mut($x) };
    (@lend out list $x:ident) => { writable($x) };
    (@own one $x:ident) => { Buffer::from_vec($x) };
    (@own list $x:ident) => { owned($x) };
    (@back one $x:ident) => { vec_of($x) };
    (@back list $x:ident) => { vecs_of($x) };
    (@lent in one $t:ident) => { &[$t] };
    (@lent in list $t:ident) => { &[&[$t]] };
    (@lent out one $t:ident) => { &mut [$t] };
    (@lent out list $t:ident) => { &mut [&mut [$t]] };
    (@owned one $t:ident) => { Vec<$t> };
    (@owned list $t:ident) => { Vecs<$t> };
    (
        $(#[$doc:meta])*
        $name:ident, $name_async:ident,
        $variant:ident { $input:ident: $in_shape:ident, $output:ident: $out_shape:ident $(, $field:ident: $type:ty)* }
    ) => {
        $(#[$doc])*
        #[track_caller]
        pub fn $name<T: Element>(
            &self,
            $input: in_out!(@lent in $in_shape T),
            $output: in_out!(@lent out $out_shape T),
            $($field: $type),*
        ) -> Result<()> {
            let $input = in_out!(@lend in $in_shape $input);
            let $output = in_out!(@lend out $out_shape $output);
            self.run(Op::$variant { $input, $output, $($field: $field.into()),* })?;
            Ok(())
        }

        #[doc = concat!("Like [`", stringify!($name), "`](Self::", stringify!($name), "), but returns at once; the vectors come back with the [`Work`].")]
        #[track_caller]
        pub fn $name_async<T: Element>(
            &self,
            $input: in_out!(@owned $in_shape T),
            $output: in_out!(@owned $out_shape T),
            $($field: $type),*
        ) -> Result<Work<(in_out!(@owned $in_shape T), in_out!(@owned $out_shape T))>> {
            let $input = in_out!(@own $in_shape $input);
            let $output = in_out!(@own $out_shape $output);
            self.submit(Op::$variant { $input, $output, $($field: $field.into()),* }, |op, _| {
                let Op::$variant { $input, $output, .. } = op else {
                    return Err(wrong_op_error(op));
                };
                Ok((in_out!(@back $in_shape $input)?, in_out!(@back $out_shape $output)?))
            })
        }
    };
}

impl ProcessGroup {
    on_one_buffer! {
        /// Every rank's `buffer` ends as the reduction of all ranks' buffers.
        all_reduce, all_reduce_async, AllReduce { op: impl Into<Reduction> }
    }

    /// Works like [`all_reduce_async`](Self::all_reduce_async), in the memory of an operation that has ended, if one is
    /// free. [`Work::wait_keeping`] makes it free. `result` makes the result from the reduced buffer; if it captures
    /// nothing, nothing is allocated for it.
    #[track_caller]
    pub(crate) fn all_reduce_again<R: 'static>(
        &self,
        buffer: Buffer<'static>,
        op: impl Into<Reduction>,
        spare: &mut SpareOps,
        result: impl FnOnce(Buffer<'static>) -> Result<R> + Send + 'static,
    ) -> Result<Work<R>> {
        let op = op.into();
        let unpack = move |op: Op<'static>, _: Done| match op {
            Op::AllReduce { buffer, .. } => result(buffer),
            op => Err(wrong_op_error(op)),
        };
        self.submit_again(Op::AllReduce { buffer, op }, spare, unpack)
    }

    on_one_buffer! {
        /// The root's `buffer` ends as the reduction of all ranks' buffers; the others' stay as they are.
        reduce, reduce_async, Reduce { op: impl Into<Reduction>, root: u32 }
    }

    on_one_buffer! {
        /// Every rank's `buffer` ends as the root's.
        broadcast, broadcast_async, Broadcast { root: u32 }
    }

    /// Reduces each of several buffers over all ranks, in place, as one operation.
    #[track_caller]
    pub fn all_reduce_coalesced<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        op: impl Into<Reduction>,
    ) -> Result<()> {
        let buffers = writable(buffers);
        self.run(Op::AllReduceCoalesced {
            buffers,
            op: op.into(),
        })?;
        Ok(())
    }

    /// Like [`all_reduce_coalesced`](Self::all_reduce_coalesced), but returns at once; the vectors come back with the
    /// [`Work`].
    #[track_caller]
    pub fn all_reduce_coalesced_async<T: Element>(
        &self,
        buffers: Vecs<T>,
        op: impl Into<Reduction>,
    ) -> Result<Work<Vecs<T>>> {
        let op = Op::AllReduceCoalesced {
            buffers: owned(buffers),
            op: op.into(),
        };
        self.submit(op, |op, _| {
            let Op::AllReduceCoalesced { buffers, .. } = op else {
                return Err(wrong_op_error(op));
            };
            vecs_of(buffers)
        })
    }

    /// Returns when every rank has called it.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.run(Op::Barrier)?;
        Ok(())
    }

    /// Like [`barrier`](Self::barrier), but returns at once.
    #[track_caller]
    pub fn barrier_async(&self) -> Result<Work<()>> {
        self.submit(Op::Barrier, |_, _| Ok(()))
    }

    in_out! {
        /// `outputs[r]` ends as rank r's `input`.
        all_gather, all_gather_async, AllGather { input: one, outputs: list }
    }

    in_out! {
        /// `output` ends as the inputs of all ranks, one after the other.
        all_gather_single, all_gather_single_async,
        AllGatherSingle { input: one, output: one }
    }

    in_out! {
        /// `outputs[r]` ends as rank r's `input`, whose length may differ from rank to rank.
        all_gather_v, all_gather_v_async, AllGatherV { input: one, outputs: list }
    }

    in_out! {
        /// Like [`all_gather_single`](Self::all_gather_single) for each pair, as one operation.
        all_gather_coalesced, all_gather_coalesced_async,
        AllGatherCoalesced { inputs: list, outputs: list }
    }

    in_out! {
        /// `output` receives the reduction over all ranks of `inputs[own rank]`.
        reduce_scatter, reduce_scatter_async,
        ReduceScatter { inputs: list, output: one, op: impl Into<Reduction> }
    }

    in_out! {
        /// Like [`reduce_scatter`](Self::reduce_scatter), with the parts one after the other in `input`.
        reduce_scatter_single, reduce_scatter_single_async,
        ReduceScatterSingle { input: one, output: one, op: impl Into<Reduction> }
    }

    in_out! {
        /// Like [`reduce_scatter`](Self::reduce_scatter); the lengths may differ from rank to rank.
        reduce_scatter_v, reduce_scatter_v_async,
        ReduceScatterV { inputs: list, output: one, op: impl Into<Reduction> }
    }

    in_out! {
        /// Like [`reduce_scatter_single`](Self::reduce_scatter_single) for each pair, as one operation.
        reduce_scatter_coalesced, reduce_scatter_coalesced_async,
        ReduceScatterCoalesced { inputs: list, outputs: list, op: impl Into<Reduction> }
    }

    in_out! {
        /// `outputs[r]` ends as rank r's `inputs[own rank]`.
        all_to_all, all_to_all_async, AllToAll { inputs: list, outputs: list }
    }

    in_out! {
        /// Like [`all_to_all`](Self::all_to_all), with equal parts, which lie one after the other in `input` and in
        /// `output`.
        all_to_all_single, all_to_all_single_async,
        AllToAllSingle { input: one, output: one }
    }

    in_out! {
        /// Like [`all_to_all`](Self::all_to_all), with the parts one after the other in `input` and in `output`:
        /// `input_splits[r]` elements go to rank r, `output_splits[r]` come from it.
        all_to_all_v_single, all_to_all_v_single_async,
        AllToAllVSingle { input: one, output: one, input_splits: &[usize], output_splits: &[usize] }
    }

    in_out! {
        /// On the root, `outputs[r]` ends as rank r's `input`; elsewhere `outputs` is empty.
        gather, gather_async, Gather { input: one, outputs: list, root: u32 }
    }

    in_out! {
        /// Like [`gather`](Self::gather); the lengths may differ from rank to rank.
        gather_v, gather_v_async, GatherV { input: one, outputs: list, root: u32 }
    }

    in_out! {
        /// `output` ends as the root's `inputs[own rank]`; elsewhere `inputs` is empty.
        scatter, scatter_async, Scatter { inputs: list, output: one, root: u32 }
    }

    in_out! {
        /// Like [`scatter`](Self::scatter); the lengths may differ from rank to rank.
        scatter_v, scatter_v_async, ScatterV { inputs: list, output: one, root: u32 }
    }

    /// Runs any operation: for memory that is neither a slice nor a vector.
    #[track_caller]
    pub fn execute(&self, op: Op<'_>) -> Result<Done> {
        self.run(op)
    }

    /// Works like [`execute`](Self::execute), and leaves the buffers to the caller: for memory whose owner must not be
    /// dropped everywhere.
    #[track_caller]
    pub fn execute_in_place(&self, op: &mut Op<'_>) -> Result<Done> {
        self.group.run(op, self.options(), Location::caller())
    }

    /// Starts any operation; the [`Work`] returns it with its buffers.
    #[track_caller]
    pub fn execute_async(&self, op: Op<'static>) -> Result<Work<(Op<'static>, Done)>> {
        self.submit(op, |op, done| Ok((op, done)))
    }
}

//! Splits an [`Op`] into [`Step`]s, by the pattern and layout of its kind.

#![deny(clippy::wildcard_enum_match_arm)]

use super::op_header::{OpHeader, hash_counts};
use super::{Collective, Combination, Data, Inputs, Outputs, Position, Step};
use crate::transport::fill::bytes_to_fill;
use crate::wait::Failure;
use rcomm_core::Buffer;
use rcomm_core::arithmetic;
use rcomm_core::{Error, ErrorKind};
use rcomm_core::{Op, Reduction, Sides};
use rcomm_recorder::model::{DType, Layout, OpType, Parts, Pattern, ReduceOp};

/// A reduction, and this rank's factor.
#[derive(Clone, Copy)]
struct Scaled {
    op: ReduceOp,
    factor: f64,
}

impl Scaled {
    const SUM: Self = Self {
        op: ReduceOp::Sum,
        factor: 1.0,
    };

    /// Reads the factor from memory if the caller passed it there.
    #[inline]
    fn new(reduction: &Reduction) -> Result<Self, Failure> {
        let op = reduction.op;
        if op != ReduceOp::PremulSum {
            return Ok(Self { op, factor: 1.0 });
        }
        let factor = reduction.host_factor().map_err(argument_failure)?;
        Ok(Self { op, factor })
    }
}

/// Splits `op`, and passes each step to `perform` in order, until one fails.
#[inline]
pub(crate) fn for_each_step(
    op: &mut Op<'_>,
    position: &Position,
    perform: &mut impl FnMut(Step<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if let Op::Coalesced(ops) = op {
        for op in ops {
            for_each_step(op, position, perform)?;
        }
        return Ok(());
    }
    let kind = op.op_type();
    let reduction = op.reduction().map(Scaled::new).transpose()?;
    let op_header = OpHeader {
        root: op.root(),
        reduce: reduction.map(|reduction| reduction.op),
        ..OpHeader::new(kind, position.seq)
    };
    let sides = op.sides();
    if kind.layout() != Layout::Several {
        return perform_one(kind, sides, op_header, reduction, position, perform);
    }
    let Sides {
        inputs, outputs, ..
    } = sides;
    let count = outputs.len();
    if count == 0 {
        let op_header = with_part(op_header, 0, 0);
        return perform(Step::new(op_header, Vec::new(), Collective::Barrier));
    }
    for (index, output) in outputs.iter_mut().enumerate() {
        let sides = Sides {
            inputs: inputs.get(index..=index).unwrap_or_default(),
            outputs: std::slice::from_mut(output),
            splits: None,
        };
        let op_header = with_part(op_header, index, count);
        perform_one(kind, sides, op_header, reduction, position, perform)?;
    }
    Ok(())
}

/// Makes one step of these buffers and passes it to `perform`. Indexing cannot fail, since the operation was
/// validated: it has as many buffers as its kind requires.
#[inline]
fn perform_one(
    kind: OpType,
    sides: Sides<'_, '_>,
    op_header: OpHeader,
    reduction: Option<Scaled>,
    position: &Position,
    perform: &mut impl FnMut(Step<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let Position { rank, size, .. } = *position;
    let Sides {
        inputs,
        outputs,
        splits,
    } = sides;
    let reduction = reduction.unwrap_or(Scaled::SUM);
    let root = op_header.root.unwrap_or(0) as usize;
    let is_list = kind.layout() == Layout::List;
    let step = |op_header, collective| Step::new(op_header, Vec::new(), collective);
    match kind.pattern() {
        Pattern::Barrier => perform(step(op_header, Collective::Barrier)),
        Pattern::AllReduce => {
            let buffer = &mut outputs[0];
            let op_header = with_count(op_header, buffer);
            let by = combination(buffer, reduction);
            let data = bytes_to_fill(buffer).map_err(argument_failure)?;
            let by = premultiply(by, data, reduction.factor);
            perform(step(op_header, Collective::AllReduce { data, by }))
        }
        Pattern::Reduce => {
            let buffer = &mut outputs[0];
            let op_header = with_count(op_header, buffer);
            let by = combination(buffer, reduction);
            if rank == root {
                let data = bytes_to_fill(buffer).map_err(argument_failure)?;
                let by = premultiply(by, data, reduction.factor);
                let data = Data::Write(data);
                return perform(step(op_header, Collective::Reduce { data, by, root }));
            }
            let bytes = buffer.as_bytes().map_err(argument_failure)?;
            let (by, copy) = premultiplied(by, bytes, reduction.factor);
            let data = Data::Read(copy.as_deref().unwrap_or(bytes));
            perform(step(op_header, Collective::Reduce { data, by, root }))
        }
        Pattern::Broadcast => {
            let buffer = &mut outputs[0];
            let op_header = with_count(op_header, buffer);
            let data = if rank == root {
                Data::Read(buffer.as_bytes().map_err(argument_failure)?)
            } else {
                Data::Write(bytes_to_fill(buffer).map_err(argument_failure)?)
            };
            perform(step(op_header, Collective::Broadcast { data, root }))
        }
        Pattern::AllGather => {
            let input = &inputs[0];
            let op_header = match kind.parts() {
                Parts::Equal => with_count(op_header, input),
                Parts::PerRank | Parts::PerPair => with_list(op_header, input, outputs),
            };
            let input = input.as_bytes().map_err(argument_failure)?;
            let outputs = all_outputs(outputs, is_list, size)?;
            perform(step(op_header, Collective::AllGather { input, outputs }))
        }
        Pattern::ReduceScatter => {
            let output = &mut outputs[0];
            let by = combination(output, reduction);
            if is_list {
                let op_header = with_list(op_header, output, inputs);
                return reduce_scatter_list(
                    inputs,
                    output,
                    by,
                    reduction.factor,
                    op_header,
                    perform,
                );
            }
            let op_header = with_count(op_header, output);
            let bytes = inputs[0].as_bytes().map_err(argument_failure)?;
            let (by, copy) = premultiplied(by, bytes, reduction.factor);
            let inputs = Inputs::Even(copy.as_deref().unwrap_or(bytes), size);
            let output = bytes_to_fill(output).map_err(argument_failure)?;
            let collective = Collective::ReduceScatter { inputs, output, by };
            perform(step(op_header, collective))
        }
        Pattern::AllToAll => {
            let dtype = inputs.first().map_or(DType::U8, Buffer::dtype);
            let typed = OpHeader { dtype, ..op_header };
            let (op_header, lists, inputs, outputs) = if let Some((sent, received)) = splits {
                let counts = sent.iter().chain(received);
                let lists = counts.map(|&count| count as u64).collect();
                let inputs = cut(&inputs[0], sent)?;
                let outputs = cut_mut(&mut outputs[0], received)?;
                (typed, lists, Inputs::List(inputs), Outputs::List(outputs))
            } else if is_list {
                let lists = counts_of(inputs).chain(counts_of(outputs)).collect();
                let inputs = all_inputs(inputs, is_list, size)?;
                (typed, lists, inputs, all_outputs(outputs, is_list, size)?)
            } else {
                let op_header = with_count(op_header, &inputs[0]);
                let inputs = all_inputs(inputs, is_list, size)?;
                let outputs = all_outputs(outputs, is_list, size)?;
                (op_header, Vec::new(), inputs, outputs)
            };
            let collective = Collective::AllToAll { inputs, outputs };
            perform(Step::new(op_header, lists, collective))
        }
        Pattern::Gather => {
            let input = &inputs[0];
            let (op_header, lists) = rooted(op_header, input, outputs, kind);
            let input = input.as_bytes().map_err(argument_failure)?;
            let outputs = if rank == root {
                Some(all_outputs(outputs, is_list, size)?)
            } else {
                None
            };
            let collective = Collective::Gather {
                input,
                outputs,
                root,
            };
            perform(Step::new(op_header, lists, collective))
        }
        Pattern::Scatter => {
            let output = &mut outputs[0];
            let (op_header, lists) = rooted(op_header, output, inputs, kind);
            let inputs = if rank == root {
                Some(all_inputs(inputs, is_list, size)?)
            } else {
                None
            };
            let output = bytes_to_fill(output).map_err(argument_failure)?;
            let collective = Collective::Scatter {
                inputs,
                output,
                root,
            };
            perform(Step::new(op_header, lists, collective))
        }
        Pattern::Send
        | Pattern::Recv
        | Pattern::Block
        | Pattern::Agreement
        | Pattern::OneSided
        | Pattern::Unknown => Err(Failure::Argument(Error::new(
            ErrorKind::InvalidArgument,
            "sends and receives cannot be mixed with collectives in one coalesced block",
        ))),
    }
}

/// Performs a reduce_scatter with one input buffer for each rank.
fn reduce_scatter_list(
    inputs: &[Buffer<'_>],
    output: &mut Buffer<'_>,
    mut by: Combination,
    factor: f64,
    op_header: OpHeader,
    perform: &mut impl FnMut(Step<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let bytes = readable(inputs)?;
    let copies: Vec<Vec<u8>>;
    let inputs = if by.op == ReduceOp::PremulSum {
        let scaled = bytes
            .iter()
            .filter_map(|input| premultiplied(by, input, factor).1);
        copies = scaled.collect();
        by.op = ReduceOp::Sum;
        copies.iter().map(Vec::as_slice).collect()
    } else {
        bytes
    };
    let inputs = Inputs::List(inputs);
    let output = bytes_to_fill(output).map_err(argument_failure)?;
    let collective = Collective::ReduceScatter { inputs, output, by };
    perform(Step::new(op_header, Vec::new(), collective))
}

fn argument_failure(error: Error) -> Failure {
    Failure::Argument(error)
}

/// The header of an operation in which all ranks have as many elements as `buffer`.
#[inline]
fn with_count(op_header: OpHeader, buffer: &Buffer<'_>) -> OpHeader {
    OpHeader {
        dtype: buffer.dtype(),
        count: buffer.len() as u64,
        ..op_header
    }
}

/// The header of an operation in which all ranks have the same list of parts. `own_part` is this rank's part.
fn with_list(op_header: OpHeader, own_part: &Buffer<'_>, parts: &[Buffer<'_>]) -> OpHeader {
    OpHeader {
        dtype: own_part.dtype(),
        own_count: own_part.len() as u64,
        lists: hash_counts(counts_of(parts)),
        ..op_header
    }
}

fn with_part(op_header: OpHeader, index: usize, count: usize) -> OpHeader {
    // A `u32` suffices: four billion buffers do not fit in memory.
    OpHeader {
        part: (index as u32, count as u32),
        ..op_header
    }
}

/// The header and lists of a gather (`own_part` is the input) or scatter (`own_part` is the output).
fn rooted(
    op_header: OpHeader,
    own_part: &Buffer<'_>,
    all_parts: &[Buffer<'_>],
    kind: OpType,
) -> (OpHeader, Vec<u64>) {
    match kind.parts() {
        Parts::Equal => (with_count(op_header, own_part), Vec::new()),
        Parts::PerRank | Parts::PerPair => {
            let op_header = OpHeader {
                dtype: own_part.dtype(),
                own_count: own_part.len() as u64,
                ..op_header
            };
            (op_header, counts_of(all_parts).collect())
        }
    }
}

/// The number of elements of each buffer.
fn counts_of(buffers: &[Buffer<'_>]) -> impl Iterator<Item = u64> {
    buffers.iter().map(|buffer| buffer.len() as u64)
}

fn readable<'a>(buffers: &'a [Buffer<'_>]) -> Result<Vec<&'a [u8]>, Failure> {
    let bytes = buffers.iter().map(Buffer::as_bytes);
    bytes.collect::<Result<_, _>>().map_err(argument_failure)
}

/// The parts for all ranks: the buffers of a list, or equal parts of one buffer.
fn all_inputs<'a>(
    buffers: &'a [Buffer<'_>],
    is_list: bool,
    size: usize,
) -> Result<Inputs<'a>, Failure> {
    if is_list {
        return readable(buffers).map(Inputs::List);
    }
    Ok(Inputs::Even(
        buffers[0].as_bytes().map_err(argument_failure)?,
        size,
    ))
}

/// The parts from all ranks: the buffers of a list, or equal parts of one buffer.
#[inline]
fn all_outputs<'a>(
    buffers: &'a mut [Buffer<'_>],
    is_list: bool,
    size: usize,
) -> Result<Outputs<'a>, Failure> {
    if is_list {
        let bytes = buffers.iter_mut().map(bytes_to_fill);
        let bytes = bytes.collect::<Result<_, _>>().map_err(argument_failure)?;
        return Ok(Outputs::List(bytes));
    }
    let bytes = bytes_to_fill(&mut buffers[0]).map_err(argument_failure)?;
    Ok(Outputs::Even(bytes, size))
}

/// Splits the buffer into consecutive parts with these numbers of elements. The buffer has at least as many elements as
/// their sum.
fn cut<'a>(buffer: &'a Buffer<'_>, counts: &[usize]) -> Result<Vec<&'a [u8]>, Failure> {
    let element = buffer.dtype().size().unwrap_or(1);
    let mut rest = buffer.as_bytes().map_err(argument_failure)?;
    let parts = counts.iter().map(|&count| {
        let (part, after) = rest.split_at(count * element);
        rest = after;
        part
    });
    Ok(parts.collect())
}

/// Works like [`cut`], but returns parts to write to.
fn cut_mut<'a>(buffer: &'a mut Buffer<'_>, counts: &[usize]) -> Result<Vec<&'a mut [u8]>, Failure> {
    let element = buffer.dtype().size().unwrap_or(1);
    let mut rest = bytes_to_fill(buffer).map_err(argument_failure)?;
    let mut parts = Vec::with_capacity(counts.len());
    for &count in counts {
        let (part, after) = rest.split_at_mut(count * element);
        parts.push(part);
        rest = after;
    }
    Ok(parts)
}

fn combination(buffer: &Buffer<'_>, reduction: Scaled) -> Combination {
    Combination {
        dtype: buffer.dtype(),
        op: reduction.op,
    }
}

/// Multiplies `data`, this rank's input, by `factor` if the reduction is `PremulSum`. Returns the reduction that
/// remains: a sum in that case, else `by`.
fn premultiply(by: Combination, data: &mut [u8], factor: f64) -> Combination {
    if by.op != ReduceOp::PremulSum {
        return by;
    }
    arithmetic::scale(by.dtype, data, factor);
    Combination {
        op: ReduceOp::Sum,
        ..by
    }
}

/// Works like [`premultiply`], on a copy of `data`; the copy is `None` if nothing was multiplied.
fn premultiplied(by: Combination, data: &[u8], factor: f64) -> (Combination, Option<Vec<u8>>) {
    if by.op != ReduceOp::PremulSum {
        return (by, None);
    }
    let mut copy = data.to_vec();
    let by = premultiply(by, &mut copy, factor);
    (by, Some(copy))
}

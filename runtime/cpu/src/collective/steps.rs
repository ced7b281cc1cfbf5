//! An [`Op`] taken apart into [`Step`]s.

use super::{Collective, Combination, Data, Inputs, Outputs, Place, Step};
use crate::fill::bytes_to_fill;
use crate::mesh::Failure;
use crate::op_header::{OpHeader, hash_counts};
use rcomm_core::Buffer;
use rcomm_core::arithmetic;
use rcomm_core::{Error, ErrorKind};
use rcomm_core::{Op, Reduction};
use rcomm_recorder::model::{DType, OpType, ReduceOp};

/// Takes `op` apart, and hands each step to `perform` in order.
#[inline]
pub(crate) fn for_each_step(
    op: &mut Op<'_>,
    place: &Place,
    perform: &mut impl FnMut(Step<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if let Op::Coalesced(ops) = op {
        for op in ops {
            for_each_step(op, place, perform)?;
        }
        return Ok(());
    }
    let Place { rank, size, seq } = *place;
    let op_header = OpHeader {
        root: op.root(),
        reduce: op.reduction().map(|reduction| reduction.op),
        ..OpHeader::new(op.op_type(), seq)
    };
    let of = |op_header: OpHeader, buffer: &Buffer<'_>| OpHeader {
        dtype: buffer.dtype(),
        count: buffer.len() as u64,
        ..op_header
    };
    let step = |op_header, collective| Step::new(op_header, Vec::new(), collective);
    let bad = |error: Error| Failure::Argument(error);
    match op {
        Op::Barrier => perform(step(op_header, Collective::Barrier)),
        Op::AllReduce { buffer, op } => {
            let op_header = of(op_header, buffer);
            let by = combination(buffer, *op);
            let data = bytes_to_fill(buffer).map_err(bad)?;
            let by = premultiply(by, data, op.factor);
            perform(step(op_header, Collective::AllReduce { data, by }))
        }
        Op::AllReduceCoalesced { buffers, op } => {
            let count = buffers.len();
            if count == 0 {
                return perform(step(parted(op_header, 0, 0), Collective::Barrier));
            }
            for (at, buffer) in buffers.iter_mut().enumerate() {
                let op_header = parted(of(op_header, buffer), at, count);
                let by = combination(buffer, *op);
                let data = bytes_to_fill(buffer).map_err(bad)?;
                let by = premultiply(by, data, op.factor);
                perform(step(op_header, Collective::AllReduce { data, by }))?;
            }
            Ok(())
        }
        Op::Reduce { buffer, op, root } => {
            let op_header = of(op_header, buffer);
            let by = combination(buffer, *op);
            let root = *root as usize;
            if rank == root {
                let data = bytes_to_fill(buffer).map_err(bad)?;
                let by = premultiply(by, data, op.factor);
                let data = Data::Write(data);
                return perform(step(op_header, Collective::Reduce { data, by, root }));
            }
            let (by, copy) = premultiplied(by, buffer.as_bytes().map_err(bad)?, op.factor);
            let data = Data::Read(match &copy {
                Some(copy) => copy,
                None => buffer.as_bytes().map_err(bad)?,
            });
            perform(step(op_header, Collective::Reduce { data, by, root }))
        }
        Op::Broadcast { buffer, root } => {
            let op_header = of(op_header, buffer);
            let root = *root as usize;
            let data = if rank == root {
                Data::Read(buffer.as_bytes().map_err(bad)?)
            } else {
                Data::Write(bytes_to_fill(buffer).map_err(bad)?)
            };
            perform(step(op_header, Collective::Broadcast { data, root }))
        }
        Op::AllGatherSingle { input, output } => {
            let op_header = of(op_header, input);
            let input = input.as_bytes().map_err(bad)?;
            let outputs = Outputs::Even(bytes_to_fill(output).map_err(bad)?, size);
            perform(step(op_header, Collective::AllGather { input, outputs }))
        }
        Op::AllGather { input, outputs } => {
            let op_header = of(op_header, input);
            let input = input.as_bytes().map_err(bad)?;
            let outputs = Outputs::List(writable(outputs).map_err(bad)?);
            perform(step(op_header, Collective::AllGather { input, outputs }))
        }
        Op::AllGatherV { input, outputs } => {
            let lists: Vec<u64> = outputs.iter().map(|b| b.len() as u64).collect();
            let op_header = OpHeader {
                dtype: input.dtype(),
                own: input.len() as u64,
                lists: hash_counts(lists.iter().copied()),
                ..op_header
            };
            let input = input.as_bytes().map_err(bad)?;
            let outputs = Outputs::List(writable(outputs).map_err(bad)?);
            perform(step(op_header, Collective::AllGather { input, outputs }))
        }
        Op::AllGatherCoalesced { inputs, outputs } => {
            let count = inputs.len();
            if count == 0 {
                return perform(step(parted(op_header, 0, 0), Collective::Barrier));
            }
            for (at, (input, output)) in inputs.iter().zip(outputs).enumerate() {
                let op_header = parted(of(op_header, input), at, count);
                let input = input.as_bytes().map_err(bad)?;
                let outputs = Outputs::Even(bytes_to_fill(output).map_err(bad)?, size);
                perform(step(op_header, Collective::AllGather { input, outputs }))?;
            }
            Ok(())
        }
        Op::ReduceScatterSingle { input, output, op } => {
            let op_header = of(op_header, output);
            reduce_scatter_single(input, output, *op, size, op_header, perform)
        }
        Op::ReduceScatterCoalesced {
            inputs,
            outputs,
            op,
        } => {
            let count = inputs.len();
            if count == 0 {
                return perform(step(parted(op_header, 0, 0), Collective::Barrier));
            }
            for (at, (input, output)) in inputs.iter().zip(outputs).enumerate() {
                let op_header = parted(of(op_header, output), at, count);
                reduce_scatter_single(input, output, *op, size, op_header, perform)?;
            }
            Ok(())
        }
        Op::ReduceScatter { inputs, output, op } | Op::ReduceScatterV { inputs, output, op } => {
            let counts = inputs.iter().map(|buffer| buffer.len() as u64);
            let op_header = OpHeader {
                dtype: output.dtype(),
                own: output.len() as u64,
                lists: hash_counts(counts),
                ..op_header
            };
            let mut by = combination(output, *op);
            let bytes = readable(inputs).map_err(bad)?;
            let copies: Vec<Vec<u8>>;
            let inputs = if by.op == ReduceOp::PremulSum {
                let scaled = bytes
                    .iter()
                    .filter_map(|b| premultiplied(by, b, op.factor).1);
                copies = scaled.collect();
                by.op = ReduceOp::Sum;
                copies.iter().map(Vec::as_slice).collect()
            } else {
                bytes
            };
            let inputs = Inputs::List(inputs);
            let output = bytes_to_fill(output).map_err(bad)?;
            perform(step(
                op_header,
                Collective::ReduceScatter { inputs, output, by },
            ))
        }
        Op::AllToAllSingle { input, output } => {
            let op_header = of(op_header, input);
            let inputs = Inputs::Even(input.as_bytes().map_err(bad)?, size);
            let outputs = Outputs::Even(bytes_to_fill(output).map_err(bad)?, size);
            perform(step(op_header, Collective::AllToAll { inputs, outputs }))
        }
        Op::AllToAll { inputs, outputs } => {
            let lists = counts_of(inputs).chain(counts_of(outputs)).collect();
            let dtype = inputs.first().map_or(DType::U8, Buffer::dtype);
            let inputs = Inputs::List(readable(inputs).map_err(bad)?);
            let outputs = Outputs::List(writable(outputs).map_err(bad)?);
            let op_header = OpHeader { dtype, ..op_header };
            let collective = Collective::AllToAll { inputs, outputs };
            perform(Step::new(op_header, lists, collective))
        }
        Op::AllToAllVSingle {
            input,
            output,
            input_splits,
            output_splits,
        } => {
            let dtype = input.dtype();
            let element = dtype.size().unwrap_or(1);
            let lists = input_splits.iter().chain(&*output_splits);
            let lists = lists.map(|&count| count as u64).collect();
            let mut rest = input.as_bytes().map_err(bad)?;
            let mut inputs = Vec::with_capacity(size);
            for &count in &*input_splits {
                let (part, after) = rest.split_at(count * element);
                inputs.push(part);
                rest = after;
            }
            let mut rest = bytes_to_fill(output).map_err(bad)?;
            let mut outputs = Vec::with_capacity(size);
            for &count in &*output_splits {
                let (part, after) = rest.split_at_mut(count * element);
                outputs.push(part);
                rest = after;
            }
            let op_header = OpHeader { dtype, ..op_header };
            let (inputs, outputs) = (Inputs::List(inputs), Outputs::List(outputs));
            let collective = Collective::AllToAll { inputs, outputs };
            perform(Step::new(op_header, lists, collective))
        }
        Op::Gather {
            input,
            outputs,
            root,
        }
        | Op::GatherV {
            input,
            outputs,
            root,
        } => {
            let root = *root as usize;
            let even = op_header.op == OpType::Gather;
            let (op_header, lists) = rooted(op_header, input, outputs, even);
            let input = input.as_bytes().map_err(bad)?;
            let outputs = if rank == root {
                Some(Outputs::List(writable(outputs).map_err(bad)?))
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
        Op::Scatter {
            inputs,
            output,
            root,
        }
        | Op::ScatterV {
            inputs,
            output,
            root,
        } => {
            let root = *root as usize;
            let even = op_header.op == OpType::Scatter;
            let (op_header, lists) = rooted(op_header, output, inputs, even);
            let inputs = if rank == root {
                Some(Inputs::List(readable(inputs).map_err(bad)?))
            } else {
                None
            };
            let output = bytes_to_fill(output).map_err(bad)?;
            let collective = Collective::Scatter {
                inputs,
                output,
                root,
            };
            perform(Step::new(op_header, lists, collective))
        }
        Op::Send { .. } | Op::Recv { .. } | Op::Coalesced(_) => Err(Failure::Argument(Error::new(
            ErrorKind::InvalidArgument,
            "sends and receives cannot stand among collectives in one coalesced block",
        ))),
    }
}

fn reduce_scatter_single(
    input: &Buffer<'_>,
    output: &mut Buffer<'_>,
    op: Reduction,
    size: usize,
    op_header: OpHeader,
    perform: &mut impl FnMut(Step<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let bytes = input.as_bytes().map_err(Failure::Argument)?;
    let (by, copy) = premultiplied(combination(output, op), bytes, op.factor);
    let inputs = Inputs::Even(copy.as_deref().unwrap_or(bytes), size);
    let output = bytes_to_fill(output).map_err(Failure::Argument)?;
    let collective = Collective::ReduceScatter { inputs, output, by };
    perform(Step::new(op_header, Vec::new(), collective))
}

fn parted(op_header: OpHeader, at: usize, count: usize) -> OpHeader {
    // More than four thousand million buffers do not fit in memory.
    OpHeader {
        part: (at as u32, count as u32),
        ..op_header
    }
}

/// The header and lists of a gather (`own` is the input) or scatter (`own` is the output).
fn rooted(
    op_header: OpHeader,
    own: &Buffer<'_>,
    all: &[Buffer<'_>],
    even: bool,
) -> (OpHeader, Vec<u64>) {
    let op_header = OpHeader {
        dtype: own.dtype(),
        ..op_header
    };
    let len = own.len() as u64;
    if even {
        (
            OpHeader {
                count: len,
                ..op_header
            },
            Vec::new(),
        )
    } else {
        (
            OpHeader {
                own: len,
                ..op_header
            },
            counts_of(all).collect(),
        )
    }
}

fn counts_of(buffers: &[Buffer<'_>]) -> impl Iterator<Item = u64> {
    buffers.iter().map(|buffer| buffer.len() as u64)
}

fn readable<'a>(buffers: &'a [Buffer<'_>]) -> Result<Vec<&'a [u8]>, Error> {
    buffers.iter().map(Buffer::as_bytes).collect()
}

fn writable<'a>(buffers: &'a mut [Buffer<'_>]) -> Result<Vec<&'a mut [u8]>, Error> {
    buffers.iter_mut().map(bytes_to_fill).collect()
}

fn combination(buffer: &Buffer<'_>, reduction: Reduction) -> Combination {
    Combination {
        dtype: buffer.dtype(),
        op: reduction.op,
    }
}

/// Multiplies this rank's own input first where the reduction asks for it; the rest is a sum.
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

/// As [`premultiply`], over a copy.
fn premultiplied(by: Combination, data: &[u8], factor: f64) -> (Combination, Option<Vec<u8>>) {
    if by.op != ReduceOp::PremulSum {
        return (by, None);
    }
    let mut copy = data.to_vec();
    let by = premultiply(by, &mut copy, factor);
    (by, Some(copy))
}

//! The same operation over other buffers.

use super::Op;
use crate::op::buffer::Buffer;
use crate::op::error::Result;

impl<'a> Op<'a> {
    /// The same operation over copies of the buffers.
    ///
    /// # Errors
    /// `InvalidArgument` if a buffer is not in host memory.
    pub fn to_owned(&self) -> Result<Op<'static>> {
        self.map_buffers(&|buffer| buffer.to_owned())
    }

    /// The same operation over what `map` makes of each buffer.
    ///
    /// # Errors
    /// The first of `map`.
    pub fn map_buffers<'b>(
        &self,
        map: &impl Fn(&Buffer<'a>) -> Result<Buffer<'b>>,
    ) -> Result<Op<'b>> {
        let one = map;
        let all = |buffers: &[Buffer<'a>]| buffers.iter().map(one).collect::<Result<Vec<_>>>();
        Ok(match self {
            Self::AllReduce { buffer, op } => Op::AllReduce {
                buffer: one(buffer)?,
                op: *op,
            },
            Self::AllReduceCoalesced { buffers, op } => Op::AllReduceCoalesced {
                buffers: all(buffers)?,
                op: *op,
            },
            Self::Reduce { buffer, op, root } => Op::Reduce {
                buffer: one(buffer)?,
                op: *op,
                root: *root,
            },
            Self::Broadcast { buffer, root } => Op::Broadcast {
                buffer: one(buffer)?,
                root: *root,
            },
            Self::Barrier => Op::Barrier,
            Self::AllGather { input, outputs } => Op::AllGather {
                input: one(input)?,
                outputs: all(outputs)?,
            },
            Self::AllGatherSingle { input, output } => Op::AllGatherSingle {
                input: one(input)?,
                output: one(output)?,
            },
            Self::AllGatherV { input, outputs } => Op::AllGatherV {
                input: one(input)?,
                outputs: all(outputs)?,
            },
            Self::AllGatherCoalesced { inputs, outputs } => Op::AllGatherCoalesced {
                inputs: all(inputs)?,
                outputs: all(outputs)?,
            },
            Self::ReduceScatter { inputs, output, op } => Op::ReduceScatter {
                inputs: all(inputs)?,
                output: one(output)?,
                op: *op,
            },
            Self::ReduceScatterSingle { input, output, op } => Op::ReduceScatterSingle {
                input: one(input)?,
                output: one(output)?,
                op: *op,
            },
            Self::ReduceScatterV { inputs, output, op } => Op::ReduceScatterV {
                inputs: all(inputs)?,
                output: one(output)?,
                op: *op,
            },
            Self::ReduceScatterCoalesced {
                inputs,
                outputs,
                op,
            } => Op::ReduceScatterCoalesced {
                inputs: all(inputs)?,
                outputs: all(outputs)?,
                op: *op,
            },
            Self::AllToAll { inputs, outputs } => Op::AllToAll {
                inputs: all(inputs)?,
                outputs: all(outputs)?,
            },
            Self::AllToAllSingle { input, output } => Op::AllToAllSingle {
                input: one(input)?,
                output: one(output)?,
            },
            Self::AllToAllVSingle {
                input,
                output,
                input_splits,
                output_splits,
            } => Op::AllToAllVSingle {
                input: one(input)?,
                output: one(output)?,
                input_splits: input_splits.clone(),
                output_splits: output_splits.clone(),
            },
            Self::Gather {
                input,
                outputs,
                root,
            } => Op::Gather {
                input: one(input)?,
                outputs: all(outputs)?,
                root: *root,
            },
            Self::GatherV {
                input,
                outputs,
                root,
            } => Op::GatherV {
                input: one(input)?,
                outputs: all(outputs)?,
                root: *root,
            },
            Self::Scatter {
                inputs,
                output,
                root,
            } => Op::Scatter {
                inputs: all(inputs)?,
                output: one(output)?,
                root: *root,
            },
            Self::ScatterV {
                inputs,
                output,
                root,
            } => Op::ScatterV {
                inputs: all(inputs)?,
                output: one(output)?,
                root: *root,
            },
            Self::Send { buffer, peer, tag } => Op::Send {
                buffer: one(buffer)?,
                peer: *peer,
                tag: *tag,
            },
            Self::Recv { buffer, peer, tag } => Op::Recv {
                buffer: one(buffer)?,
                peer: *peer,
                tag: *tag,
            },
            Self::Coalesced(ops) => {
                let ops = ops.iter().map(|op| op.map_buffers(map));
                Op::Coalesced(ops.collect::<Result<_>>()?)
            }
        })
    }

    /// Copies what `filled`, an owned twin of this operation, has written into this one's outputs.
    ///
    /// # Errors
    /// `InvalidArgument` if it is no twin.
    pub fn copy_outputs_from(&mut self, filled: &Op<'_>) -> Result<()> {
        if let (Self::Coalesced(ops), Op::Coalesced(filled)) = (&mut *self, filled) {
            let mut pairs = ops.iter_mut().zip(filled);
            return pairs.try_for_each(|(op, filled)| op.copy_outputs_from(filled));
        }
        let outputs = self.outputs_mut().iter_mut();
        for (output, filled) in outputs.zip(filled.outputs()) {
            // A broadcast's root, and what a reduce leaves alone, may be read-only.
            if output.is_writable() {
                output.copy_from(filled)?;
            }
        }
        Ok(())
    }
}

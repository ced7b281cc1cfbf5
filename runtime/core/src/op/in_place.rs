//! All-gathers and reduce-scatters in place, as NCCL allows them: a rank's input is its own part of the output, or its
//! output is its own part of the input.
//!
//! An algorithm may read its input after it has written parts of its output. So such an input is copied before the
//! operation starts: of an all-gather this rank's part; of a reduce-scatter the whole input, or this rank's part of a
//! list.

use super::Op;
use crate::op::buffer::{Buffer, Device};
use crate::op::error::Result;

impl<'a> Op<'a> {
    /// Copies the inputs that share memory with the output as NCCL allows it, on rank `own_rank` of `size`. Other
    /// memory that overlaps is left as it is, and refused by [`validate`](Self::validate).
    ///
    /// # Errors
    /// `InvalidArgument` if a copy cannot be allocated.
    #[inline]
    pub(crate) fn copy_shared_inputs(&mut self, own_rank: u32, size: u32) -> Result<()> {
        let (own_rank, size) = (own_rank as usize, size as usize);
        match self {
            Self::AllGatherSingle { input, output } => {
                copy_if(is_part(input, output, own_rank, size), input)
            }
            Self::AllGather { input, outputs } | Self::AllGatherV { input, outputs } => {
                let is_own = outputs
                    .get(own_rank)
                    .is_some_and(|part| is_same(input, part));
                copy_if(is_own, input)
            }
            Self::AllGatherCoalesced { inputs, outputs } => {
                let mut pairs = inputs.iter_mut().zip(outputs);
                pairs.try_for_each(|(input, output)| {
                    copy_if(is_part(input, output, own_rank, size), input)
                })
            }
            Self::ReduceScatterSingle { input, output, .. } => {
                copy_if(is_part(output, input, own_rank, size), input)
            }
            Self::ReduceScatter { inputs, output, .. }
            | Self::ReduceScatterV { inputs, output, .. } => match inputs.get_mut(own_rank) {
                Some(input) => copy_if(is_same(input, output), input),
                None => Ok(()),
            },
            Self::ReduceScatterCoalesced {
                inputs, outputs, ..
            } => {
                let mut pairs = inputs.iter_mut().zip(outputs);
                pairs.try_for_each(|(input, output)| {
                    copy_if(is_part(output, input, own_rank, size), input)
                })
            }
            Self::Coalesced(ops) => {
                let (own_rank, size) = (own_rank as u32, size as u32);
                let mut ops = ops.iter_mut();
                ops.try_for_each(|op| op.copy_shared_inputs(own_rank, size))
            }
            Self::AllReduce { .. }
            | Self::AllReduceCoalesced { .. }
            | Self::Reduce { .. }
            | Self::Broadcast { .. }
            | Self::Barrier
            | Self::AllToAll { .. }
            | Self::AllToAllSingle { .. }
            | Self::AllToAllVSingle { .. }
            | Self::Gather { .. }
            | Self::GatherV { .. }
            | Self::Scatter { .. }
            | Self::ScatterV { .. }
            | Self::Send { .. }
            | Self::Recv { .. } => Ok(()),
        }
    }
}

#[inline]
fn copy_if<'a>(shares_memory: bool, input: &mut Buffer<'a>) -> Result<()> {
    if shares_memory {
        *input = input.to_owned()?;
    }
    Ok(())
}

/// Whether `part` is exactly part `own_rank` of the `size` equal parts of `whole`, in foreign memory of the host:
/// slices and vectors cannot share memory.
#[inline]
fn is_part(part: &Buffer<'_>, whole: &Buffer<'_>, own_rank: usize, size: usize) -> bool {
    let is_candidate = is_shareable(part) && is_shareable(whole) && part.dtype() == whole.dtype();
    is_candidate
        && part.len().checked_mul(size) == Some(whole.len())
        && part.as_ptr().addr() == whole.as_ptr().addr() + own_rank * part.size_bytes()
}

/// Whether both buffers are exactly the same foreign memory of the host.
#[inline]
fn is_same(first: &Buffer<'_>, second: &Buffer<'_>) -> bool {
    is_part(first, second, 0, 1)
}

#[inline]
fn is_shareable(buffer: &Buffer<'_>) -> bool {
    buffer.owner().is_some() && !buffer.is_empty() && buffer.device() == Device::Cpu
}

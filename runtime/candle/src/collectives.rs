//! Collectives in terms of tensors.

use crate::memory::{from_candle, read, write};
use candle_core::{Shape, Tensor};
use rcomm::{Op, ProcessGroup, Reduction, Result};

/// Collectives and messages of a group in terms of tensors. Each method does what the operation of its name
/// does.
///
/// # Errors
/// Those of the operation, and those of [`read`] and [`write()`](crate::write) for the tensors.
///
/// # Blocking
/// Until the operation has completed on this rank.
pub trait TensorGroup {
    /// Reduces `tensor` over all ranks, in place: all tensors that share its memory change.
    fn all_reduce_tensor(&self, tensor: &Tensor, op: impl Into<Reduction>) -> Result<()>;

    /// Overwrites `tensor` with the root's tensor, in place.
    fn broadcast_tensor(&self, tensor: &Tensor, root: u32) -> Result<()>;

    /// Returns the ranks' tensors, all of one shape, in one tensor with an additional first dimension: the
    /// index in this dimension is the rank.
    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor>;

    /// Reduces `tensor` over all ranks and returns this rank's part. The first dimension of `tensor` must have
    /// as many entries as the group has ranks; the result is the entry of this rank, without this dimension.
    fn reduce_scatter_tensor(&self, tensor: &Tensor, op: impl Into<Reduction>) -> Result<Tensor>;

    /// Sends a tensor with this tag to `peer`.
    fn send_tensor(&self, tensor: &Tensor, peer: u32, tag: u32) -> Result<()>;

    /// Fills `tensor` with the tensor that `peer` sends with this tag, which has the same length and type.
    fn recv_tensor(&self, tensor: &Tensor, peer: u32, tag: u32) -> Result<()>;
}

impl TensorGroup for ProcessGroup {
    #[track_caller]
    fn all_reduce_tensor(&self, tensor: &Tensor, op: impl Into<Reduction>) -> Result<()> {
        let op = op.into();
        write(tensor, |buffer| self.execute(Op::AllReduce { buffer, op }))?;
        Ok(())
    }

    #[track_caller]
    fn broadcast_tensor(&self, tensor: &Tensor, root: u32) -> Result<()> {
        write(tensor, |buffer| {
            self.execute(Op::Broadcast { buffer, root })
        })?;
        Ok(())
    }

    #[track_caller]
    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        let mut dims = vec![self.size() as usize];
        dims.extend(tensor.dims());
        let gathered = zeros_like(tensor, dims)?;
        read(tensor, |input| {
            write(&gathered, |output| {
                self.execute(Op::AllGatherSingle { input, output })
            })
        })?;
        Ok(gathered)
    }

    #[track_caller]
    fn reduce_scatter_tensor(&self, tensor: &Tensor, op: impl Into<Reduction>) -> Result<Tensor> {
        let op = op.into();
        let part_dims = tensor.dims().get(1..).unwrap_or_default().to_vec();
        let part = zeros_like(tensor, part_dims)?;
        read(tensor, |input| {
            write(&part, |output| {
                self.execute(Op::ReduceScatterSingle { input, output, op })
            })
        })?;
        Ok(part)
    }

    #[track_caller]
    fn send_tensor(&self, tensor: &Tensor, peer: u32, tag: u32) -> Result<()> {
        read(tensor, |buffer| {
            self.execute(Op::Send { buffer, peer, tag })
        })?;
        Ok(())
    }

    #[track_caller]
    fn recv_tensor(&self, tensor: &Tensor, peer: u32, tag: u32) -> Result<()> {
        let peer = Some(peer);
        write(tensor, |buffer| {
            self.execute(Op::Recv { buffer, peer, tag })
        })?;
        Ok(())
    }
}

fn zeros_like(like: &Tensor, dims: Vec<usize>) -> Result<Tensor> {
    Tensor::zeros(Shape::from(dims), like.dtype(), like.device()).map_err(from_candle)
}

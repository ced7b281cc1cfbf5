//! candle's tensors in rcomm's collectives.
//!
//! [`TensorGroup`] adds the collectives that training needs to
//! [`ProcessGroup`](rcomm::ProcessGroup), in terms of tensors:
//!
//! ```no_run
//! # fn step(group: &rcomm::ProcessGroup, gradient: &candle_core::Tensor) -> rcomm::Result<()> {
//! use rcomm_candle::TensorGroup;
//! group.all_reduce_tensor(gradient, rcomm::ReduceOp::Avg)?; // in place
//! # Ok(()) }
//! ```
//!
//! For all other operations [`read`] and [`write()`] lend a tensor's memory as a [`Buffer`](rcomm::Buffer),
//! without a copy. [`copy_of`] and [`tensor_of`] convert between tensors and buffers that own their memory,
//! which asynchronous operations require.
//!
//! Tensors must be in host memory and contiguous. Candle's 8-bit, 6-bit and 4-bit floats are not supported: they are
//! refused with an error.

#![forbid(unsafe_code)]

mod collectives;
mod memory;

pub use collectives::TensorGroup;
pub use memory::{copy_of, read, tensor_of, write};

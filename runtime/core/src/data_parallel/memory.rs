//! [`BucketMemory`]: the memory of a bucket's elements.

use super::gradient::Gradient;
use crate::group::process_group::ProcessGroup;
use crate::group::spare::SpareOps;
use crate::group::work::Work;
use crate::op::buffer::{Buffer, Device, DeviceKind};
use crate::op::error::Result;
use rcomm_recorder::model::ReduceOp;
use std::ops::{Deref, DerefMut};

/// The memory of a bucket's elements: a vector, as hooks take it, or memory that the group's backend has allocated for
/// its operations.
pub(super) enum BucketMemory<T> {
    Vec(Vec<T>),
    /// In the host's memory, of type `T`, and writable.
    Allocated(Buffer<'static>),
}

impl<T> Default for BucketMemory<T> {
    fn default() -> Self {
        Self::Vec(Vec::new())
    }
}

impl<T: Gradient> BucketMemory<T> {
    /// A vector of zeros.
    pub(super) fn vec(len: usize) -> Self {
        Self::Vec(vec![T::default(); len])
    }

    /// Zeros in memory that the ranks of a host reach without a copy between them, or in a vector if the group's
    /// backend has no such memory.
    pub(super) fn allocated(group: &ProcessGroup, len: usize) -> Self {
        let backend = group.backend(DeviceKind::Cpu).filter(|_| len > 0);
        let allocated = backend.and_then(|backend| backend.allocate(T::DTYPE, len).ok());
        let is_fit = |buffer: &Buffer<'static>| {
            buffer.device() == Device::Cpu
                && buffer.is_writable()
                && buffer.as_slice::<T>().is_some()
        };
        allocated
            .filter(is_fit)
            .map_or_else(|| Self::vec(len), Self::of)
    }

    /// The memory that an operation returns.
    fn of(buffer: Buffer<'static>) -> Self {
        match buffer.into_vec() {
            Ok(vec) => Self::Vec(vec),
            Err(buffer) => Self::Allocated(buffer),
        }
    }

    /// The elements as a vector: the same memory, or a copy if a backend has allocated it.
    pub(super) fn into_vec(self) -> Vec<T> {
        match self {
            Self::Vec(vec) => vec,
            Self::Allocated(_) => self.to_vec(),
        }
    }

    /// Starts to reduce the elements over all ranks, in the memory of an operation that has ended, if one is free.
    #[track_caller]
    pub(super) fn all_reduce(
        self,
        group: &ProcessGroup,
        op: ReduceOp,
        spare: &mut SpareOps,
    ) -> Result<Work<Self>> {
        let buffer = match self {
            Self::Vec(vec) => Buffer::from_vec(vec),
            Self::Allocated(buffer) => buffer,
        };
        group.all_reduce_again(buffer, op, spare, |buffer| Ok(Self::of(buffer)))
    }
}

impl<T: Gradient> Deref for BucketMemory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Vec(vec) => vec,
            Self::Allocated(buffer) => buffer.as_slice().unwrap_or_default(),
        }
    }
}

impl<T: Gradient> DerefMut for BucketMemory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Vec(vec) => vec,
            Self::Allocated(buffer) => buffer.as_mut_slice().unwrap_or_default(),
        }
    }
}

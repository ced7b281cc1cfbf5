//! The common part of all operations: the group, the element type, C's memory as buffers, and the start.

use crate::group::Group;
use crate::memory::{self, Owner};
use crate::status::{borrow, call};
use crate::work::{WorkHandle, issue};
use rcomm::{Buffer, DType, Op, ProcessGroup, Result};
use std::ffi::c_void;

/// Makes the buffers of an operation.
pub(crate) struct BufferMaker<'a> {
    group: &'a ProcessGroup,
    owner: &'a Owner,
    dtype: DType,
}

/// Makes an operation on elements of this type, and runs or starts it.
///
/// # Safety
/// `group` is a valid handle; `work` is NULL or may be written; the buffers that `make` puts into the
/// operation stay valid until it has released them.
pub(crate) unsafe fn operate(
    group: *const Group,
    dtype: u8,
    work: *mut *mut WorkHandle,
    make: impl FnOnce(&BufferMaker<'_>) -> Result<Op<'static>>,
) -> i32 {
    call(|| {
        let dtype = memory::dtype_of(dtype)?;
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { borrow(group, "the group")? };
        let op = make(&BufferMaker {
            group: &group.core,
            owner: &group.owner,
            dtype,
        })?;
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        unsafe { issue(group, op, work) }
    })
}

impl BufferMaker<'_> {
    /// Returns the number of elements for all ranks together, if each has `count`.
    pub(crate) fn total(&self, count: usize) -> usize {
        count.saturating_mul(self.group.size() as usize)
    }

    /// Returns a list with the same number for each rank.
    pub(crate) fn same_counts(&self, count: usize) -> Vec<usize> {
        vec![count; self.group.size() as usize]
    }

    /// Returns this rank's number from a list with one number for each rank.
    pub(crate) fn own_count(&self, counts: &[usize]) -> usize {
        counts[self.group.rank() as usize]
    }

    /// Returns `list()` on the root, and an empty list on the other ranks.
    pub(crate) fn at_root<T>(
        &self,
        root: u32,
        list: impl FnOnce() -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        if self.group.rank() == root {
            list()
        } else {
            Ok(Vec::new())
        }
    }

    /// Returns a number for each rank.
    ///
    /// # Safety
    /// `counts` is NULL or holds these numbers, and they stay unchanged during the call.
    pub(crate) unsafe fn counts(&self, counts: *const usize) -> Result<Vec<usize>> {
        let size = self.group.size() as usize;
        // SAFETY: the caller's `counts` is NULL, or holds a number for each rank; the numbers stay unchanged
        // during this call, which copies them.
        Ok(unsafe { memory::array(counts, size, "the list of counts")? }.to_vec())
    }

    /// Makes an input buffer of `count` elements of the operation's type.
    ///
    /// # Safety
    /// See [`memory::input`].
    pub(crate) unsafe fn input(
        &self,
        data: *const c_void,
        count: usize,
    ) -> Result<Buffer<'static>> {
        // SAFETY: the caller guarantees what `memory::input` requires.
        unsafe { memory::input(data, count, self.dtype, self.owner) }
    }

    /// Makes an output buffer of `count` elements of the operation's type.
    ///
    /// # Safety
    /// See [`memory::output`].
    pub(crate) unsafe fn output(&self, data: *mut c_void, count: usize) -> Result<Buffer<'static>> {
        // SAFETY: the caller guarantees what `memory::output` requires.
        unsafe { memory::output(data, count, self.dtype, self.owner) }
    }

    /// Makes a list of input buffers of these lengths.
    ///
    /// # Safety
    /// See [`memory::inputs`].
    pub(crate) unsafe fn inputs(
        &self,
        list: *const *const c_void,
        counts: &[usize],
    ) -> Result<Vec<Buffer<'static>>> {
        // SAFETY: the caller guarantees what `memory::inputs` requires.
        unsafe { memory::inputs(list, counts, self.dtype, self.owner) }
    }

    /// Makes a list of output buffers of these lengths.
    ///
    /// # Safety
    /// See [`memory::outputs`].
    pub(crate) unsafe fn outputs(
        &self,
        list: *const *mut c_void,
        counts: &[usize],
    ) -> Result<Vec<Buffer<'static>>> {
        // SAFETY: the caller guarantees what `memory::outputs` requires.
        unsafe { memory::outputs(list, counts, self.dtype, self.owner) }
    }
}

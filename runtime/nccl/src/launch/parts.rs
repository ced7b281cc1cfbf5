//! The parts of an operation's buffers, as addresses and lengths, and the memory in which a list is staged.

use crate::cuda::stream::CudaStream;
use crate::library::NcclLibrary;
use rcomm_core::Buffer;
use rcomm_core::Op;
use rcomm_core::Result;
use rcomm_recorder::model::{DType, Parts, Pattern};
use std::ffi::c_void;

/// Contiguous elements in the device's memory.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// The address on the device.
    pub(super) at: *mut c_void,
    /// The number of elements.
    pub(super) len: usize,
    pub(super) dtype: DType,
}

impl Part {
    pub(super) fn of(buffer: &Buffer<'_>) -> Self {
        Self {
            // A mutable pointer to a read-only buffer is sound, since the library does not write to inputs.
            at: buffer.as_ptr().cast_mut().cast(),
            len: buffer.len(),
            dtype: buffer.dtype(),
        }
    }

    /// Cuts these elements into consecutive parts of these numbers of elements.
    pub(super) fn cut(self, lens: impl Iterator<Item = usize>) -> impl Iterator<Item = Self> {
        let size = rcomm_core::backend::support::element_size(self.dtype);
        lens.scan(0, move |offset, len| {
            let at = self.at.wrapping_byte_add(*offset * size);
            *offset += len;
            Some(Self { at, len, ..self })
        })
    }
}

/// A copy of bytes from one address of the device to another.
#[derive(Clone, Copy)]
pub(crate) struct BytesCopy {
    pub(super) to: *mut c_void,
    pub(super) from: *mut c_void,
    pub(super) bytes: usize,
}

impl BytesCopy {
    /// Enqueues the copy. The context must be current.
    ///
    /// # Safety
    /// `bytes` bytes at both addresses stay until the stream is done with them.
    pub(crate) unsafe fn enqueue(self, stream: &CudaStream) -> Result<()> {
        let (to, from) = (self.to.addr() as u64, self.from.addr() as u64);
        // SAFETY: the caller keeps `bytes` bytes at both addresses until the stream is done with them.
        unsafe { stream.copy(to, from, self.bytes) }
    }
}

/// Returns the number of bytes of staging memory that an operation needs: the sum of the sizes, each rounded up to
/// [`STAGING_ALIGN`], of the lists that the library takes only as contiguous memory and whose parts are not contiguous.
/// Only the root of an operation has such a list.
pub(crate) fn staging_bytes(library: &NcclLibrary, op: &Op<'_>) -> usize {
    let table = library.table();
    if let Op::Coalesced(ops) = op {
        return ops.iter().map(|op| staging_bytes(library, op)).sum();
    }
    let kind = op.op_type();
    if kind.parts() != Parts::Equal {
        return 0;
    }
    let is_gather = kind.pattern() == Pattern::Gather && table.gather.is_some();
    let is_scatter = kind.pattern() == Pattern::Scatter && table.scatter.is_some();
    let list = if is_gather {
        op.outputs()
    } else if is_scatter {
        op.inputs()
    } else {
        return 0;
    };
    match contiguous_start(list) {
        Some(_) => 0,
        None => list
            .iter()
            .map(Buffer::size_bytes)
            .sum::<usize>()
            .next_multiple_of(STAGING_ALIGN),
    }
}

/// Alignment of a list in the staging memory, in bytes.
pub(super) const STAGING_ALIGN: usize = 256;

/// Returns the address of a list's first part; `None` if the parts are not contiguous, or if the list is empty.
pub(super) fn contiguous_start(list: &[Buffer<'_>]) -> Option<*mut c_void> {
    let first = list.first()?;
    let mut end = first.as_ptr().addr();
    for part in list {
        if part.as_ptr().addr() != end {
            return None;
        }
        end += part.size_bytes();
    }
    Some(Part::of(first).at)
}

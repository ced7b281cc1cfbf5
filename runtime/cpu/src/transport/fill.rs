//! Access to the memory to which an operation writes.

use rcomm_core::{Buffer, Result};

/// The bytes of a buffer of an operation that was submitted to this backend.
///
/// # Errors
/// Those of [`Buffer::bytes_to_fill`].
pub(crate) fn bytes_to_fill<'b>(buffer: &'b mut Buffer<'_>) -> Result<&'b mut [u8]> {
    // SAFETY: a backend keeps no buffer. When it has returned the operation, its caller drops the buffers before the
    // lender's borrow ends, and each buffer makes its `bool`s valid when it is dropped.
    unsafe { buffer.bytes_to_fill() }
}

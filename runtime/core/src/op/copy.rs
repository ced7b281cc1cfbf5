//! Copies an operation with its buffers, and copies results back.

use super::Op;
use crate::op::error::Result;

impl<'a> Op<'a> {
    /// Returns the same operation over copies of the buffers.
    ///
    /// # Errors
    /// `InvalidArgument` if a buffer is not in host memory, or if a copy cannot be allocated.
    pub fn to_owned(&self) -> Result<Op<'static>> {
        self.map_buffers(&|buffer| buffer.to_owned())
    }

    /// Copies the outputs of `filled`, a copy of this operation that was carried out, to the outputs of this
    /// operation. Outputs that may only be read, and outputs without a counterpart in `filled`, are left as they are.
    ///
    /// # Errors
    /// `InvalidArgument` if an output differs in type or length from that of `filled`, or is not in host memory.
    pub fn copy_outputs_from(&mut self, filled: &Op<'_>) -> Result<()> {
        if let (Self::Coalesced(ops), Op::Coalesced(filled)) = (&mut *self, filled) {
            let mut pairs = ops.iter_mut().zip(filled);
            return pairs.try_for_each(|(op, filled)| op.copy_outputs_from(filled));
        }
        let outputs = self.outputs_mut().iter_mut();
        for (output, filled) in outputs.zip(filled.outputs()) {
            // The buffer of a broadcast's root, and one that a reduce does not write, may be read-only.
            if output.is_writable() {
                output.copy_from(filled)?;
            }
        }
        Ok(())
    }
}

//! Codes of element types, reductions and errors for C.

/// Element type: a 32-bit float.
pub const RCOMM_F32: u8 = 0;
/// Element type: a 64-bit float.
pub const RCOMM_F64: u8 = 1;
/// Element type: a 16-bit float.
pub const RCOMM_F16: u8 = 2;
/// Element type: bfloat16, the upper 16 bits of a 32-bit float.
pub const RCOMM_BF16: u8 = 3;
/// Element type: a signed 8-bit integer.
pub const RCOMM_I8: u8 = 4;
/// Element type: an unsigned 8-bit integer.
pub const RCOMM_U8: u8 = 5;
/// Element type: a signed 16-bit integer.
pub const RCOMM_I16: u8 = 6;
/// Element type: a signed 32-bit integer.
pub const RCOMM_I32: u8 = 7;
/// Element type: a signed 64-bit integer.
pub const RCOMM_I64: u8 = 8;
/// Element type: an unsigned 32-bit integer.
pub const RCOMM_U32: u8 = 9;
/// Element type: an unsigned 64-bit integer.
pub const RCOMM_U64: u8 = 10;
/// Element type: a boolean in one byte.
pub const RCOMM_BOOL: u8 = 11;
/// Element type: two 32-bit floats.
pub const RCOMM_COMPLEX64: u8 = 12;
/// Element type: two 64-bit floats.
pub const RCOMM_COMPLEX128: u8 = 13;
/// Element type: an 8-bit float with 4 bits of exponent and 3 of mantissa.
pub const RCOMM_F8E4M3: u8 = 14;
/// Element type: an 8-bit float with 5 bits of exponent and 2 of mantissa.
pub const RCOMM_F8E5M2: u8 = 15;
/// Element type: an unsigned 16-bit integer.
pub const RCOMM_U16: u8 = 16;

/// Reduction: the sum.
pub const RCOMM_SUM: u8 = 0;
/// Reduction: the sum divided by the number of ranks.
pub const RCOMM_AVG: u8 = 1;
/// Reduction: the product.
pub const RCOMM_PRODUCT: u8 = 2;
/// Reduction: the minimum.
pub const RCOMM_MIN: u8 = 3;
/// Reduction: the maximum.
pub const RCOMM_MAX: u8 = 4;
/// Reduction: bitwise and.
pub const RCOMM_BAND: u8 = 5;
/// Reduction: bitwise or.
pub const RCOMM_BOR: u8 = 6;
/// Reduction: bitwise exclusive or.
pub const RCOMM_BXOR: u8 = 7;
/// Reduction: the sum of all inputs, each of which is first multiplied by its rank's factor.
pub const RCOMM_PREMUL_SUM: u8 = 8;

/// Wait hint: the duration is unknown.
pub const RCOMM_WAIT_UNKNOWN: u8 = 0;
/// Wait hint: the other ranks are about to arrive, so the waiting thread should spin.
pub const RCOMM_WAIT_SHORT: u8 = 1;
/// Wait hint: the other ranks may take long, so the waiting thread should sleep at once.
pub const RCOMM_WAIT_LONG: u8 = 2;

/// The call succeeded.
pub const RCOMM_OK: i32 = 0;
/// A deadline passed.
pub const RCOMM_TIMEOUT: i32 = 1;
/// The group was aborted.
pub const RCOMM_ABORTED: i32 = 2;
/// The connection to a peer broke, or its process is gone; or another rank has ended the group because of a rank that
/// the text names.
pub const RCOMM_PEER_LOST: i32 = 3;
/// The ranks disagree on the operation.
pub const RCOMM_MISMATCH: i32 = 4;
/// An argument is invalid; nothing was sent.
pub const RCOMM_INVALID_ARGUMENT: i32 = 5;
/// The operation, reduction or function is not supported; nothing was sent.
pub const RCOMM_UNSUPPORTED: i32 = 6;
/// The store is gone, refused a request, or sent a wrong reply.
pub const RCOMM_STORE: i32 = 7;
/// The ranks could not find each other, or do not agree on the world that they start.
pub const RCOMM_RENDEZVOUS: i32 = 8;
/// The operating system reported an error.
pub const RCOMM_IO: i32 = 9;
/// A peer did not prove that it knows the job's secret.
pub const RCOMM_UNAUTHORIZED: i32 = 10;
/// The backend's library reported an error.
pub const RCOMM_BACKEND: i32 = 11;
/// The world or group was used after it was shut down or destroyed.
pub const RCOMM_CLOSED: i32 = 12;
/// A rank's input contains a NaN while NaNs are rejected.
pub const RCOMM_NOT_A_NUMBER: i32 = 13;
/// An error in rcomm itself.
pub const RCOMM_PANIC: i32 = 255;

/// How values are combined.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Reduction {
    /// `RCOMM_SUM` and so on.
    pub op: u8,
    /// Factor of this rank's input; used for `RCOMM_PREMUL_SUM` only.
    pub factor: f64,
}

impl Reduction {
    /// Returns the reduction with this code; an error if there is none.
    pub(crate) fn read(self) -> rcomm::Result<rcomm::Reduction> {
        let op = rcomm::ReduceOp::from_code(self.op).ok_or_else(|| {
            let message = format!("no reduction has the code {}", self.op);
            rcomm::Error::new(rcomm::ErrorKind::InvalidArgument, message)
        })?;
        Ok(match op {
            rcomm::ReduceOp::PremulSum => rcomm::Reduction::premul_sum(self.factor),
            op => op.into(),
        })
    }
}

/// Returns the wait hint with this code; an error if there is none.
pub(crate) fn wait_hint(code: u8) -> rcomm::Result<rcomm::WaitHint> {
    Ok(match code {
        RCOMM_WAIT_UNKNOWN => rcomm::WaitHint::Unknown,
        RCOMM_WAIT_SHORT => rcomm::WaitHint::Short,
        RCOMM_WAIT_LONG => rcomm::WaitHint::Long,
        other => {
            let message = format!("no wait hint has the code {other}");
            return Err(rcomm::Error::new(
                rcomm::ErrorKind::InvalidArgument,
                message,
            ));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm::{DType, ErrorKind, ReduceOp};

    #[test]
    fn codes_are_those_of_the_rust_types() {
        let types = [
            (RCOMM_F32, DType::F32),
            (RCOMM_F64, DType::F64),
            (RCOMM_F16, DType::F16),
            (RCOMM_BF16, DType::Bf16),
            (RCOMM_I8, DType::I8),
            (RCOMM_U8, DType::U8),
            (RCOMM_I16, DType::I16),
            (RCOMM_I32, DType::I32),
            (RCOMM_I64, DType::I64),
            (RCOMM_U32, DType::U32),
            (RCOMM_U64, DType::U64),
            (RCOMM_BOOL, DType::Bool),
            (RCOMM_COMPLEX64, DType::Complex64),
            (RCOMM_COMPLEX128, DType::Complex128),
            (RCOMM_F8E4M3, DType::F8E4M3),
            (RCOMM_F8E5M2, DType::F8E5M2),
            (RCOMM_U16, DType::U16),
        ];
        let reductions = [
            (RCOMM_SUM, ReduceOp::Sum),
            (RCOMM_AVG, ReduceOp::Avg),
            (RCOMM_PRODUCT, ReduceOp::Product),
            (RCOMM_MIN, ReduceOp::Min),
            (RCOMM_MAX, ReduceOp::Max),
            (RCOMM_BAND, ReduceOp::BitAnd),
            (RCOMM_BOR, ReduceOp::BitOr),
            (RCOMM_BXOR, ReduceOp::BitXor),
            (RCOMM_PREMUL_SUM, ReduceOp::PremulSum),
        ];
        let errors = [
            (RCOMM_TIMEOUT, ErrorKind::Timeout),
            (RCOMM_ABORTED, ErrorKind::Aborted),
            (RCOMM_PEER_LOST, ErrorKind::PeerLost),
            (RCOMM_MISMATCH, ErrorKind::Mismatch),
            (RCOMM_INVALID_ARGUMENT, ErrorKind::InvalidArgument),
            (RCOMM_UNSUPPORTED, ErrorKind::Unsupported),
            (RCOMM_STORE, ErrorKind::Store),
            (RCOMM_RENDEZVOUS, ErrorKind::Rendezvous),
            (RCOMM_IO, ErrorKind::Io),
            (RCOMM_UNAUTHORIZED, ErrorKind::Unauthorized),
            (RCOMM_BACKEND, ErrorKind::Backend),
            (RCOMM_CLOSED, ErrorKind::Closed),
            (RCOMM_NOT_A_NUMBER, ErrorKind::NotANumber),
        ];
        for (code, dtype) in types {
            assert_eq!(code, dtype.code());
        }
        for (code, op) in reductions {
            assert_eq!(code, op.code());
        }
        for (code, kind) in errors {
            assert_eq!(code, i32::from(kind.code()));
        }
        // `DType::Other` has no size and no code here.
        assert_eq!(types.len() + 1, DType::ALL.len());
        assert_eq!(reductions.len(), ReduceOp::ALL.len());
    }
}

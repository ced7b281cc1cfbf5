//! [`Reduction`]: how values are combined, and which element types it accepts.

use crate::op::buffer::Buffer;
use crate::op::error::{Error, ErrorKind, Result};
use half::{bf16, f16};
use rcomm_recorder::model::{DType, ReduceOp};
use std::sync::Arc;

/// A reduction with its parameter.
#[derive(Clone, Debug)]
pub struct Reduction {
    /// How values are combined.
    pub op: ReduceOp,
    /// The number by which this rank's input is multiplied before it is summed; used only by `PremulSum`.
    pub factor: f64,
    /// The memory that has the number instead of `factor`, for `PremulSum`.
    pub scale: Option<Arc<Buffer<'static>>>,
}

impl Reduction {
    /// The sum of all inputs, each multiplied by its own rank's `factor` first.
    pub const fn premul_sum(factor: f64) -> Self {
        Self {
            op: ReduceOp::PremulSum,
            factor,
            scale: None,
        }
    }

    /// Like [`premul_sum`](Self::premul_sum), with the number in `scale` as the factor, which is read when the
    /// operation runs. `scale` holds one element of the type of the operation's elements, in the host's memory or on
    /// the device of the operation's buffers. On the device, earlier work may compute it, and the host does not wait
    /// for that (`ncclScalarDevice`).
    ///
    /// Operations on other types, on another device, or on memory that overlaps what they write are refused.
    pub fn premul_sum_by(scale: Buffer<'static>) -> Self {
        Self {
            scale: Some(Arc::new(scale)),
            ..Self::premul_sum(1.0)
        }
    }

    /// The factor of this rank's input: `factor`, or the number in `scale`, which must be in the host's memory.
    ///
    /// # Errors
    /// `InvalidArgument` if `scale` is not one floating-point number of 16 to 64 bits in the host's memory.
    pub fn host_factor(&self) -> Result<f64> {
        let Some(scale) = &self.scale else {
            return Ok(self.factor);
        };
        let number = match (scale.dtype(), scale.as_bytes()?) {
            (DType::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f64(),
            (DType::Bf16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f64(),
            (DType::F32, &[a, b, c, d]) => f64::from(f32::from_ne_bytes([a, b, c, d])),
            (DType::F64, &[a, b, c, d, e, f, g, h]) => f64::from_ne_bytes([a, b, c, d, e, f, g, h]),
            _ => {
                let message = format!("{scale:?} is not one floating-point number");
                return Err(Error::new(ErrorKind::InvalidArgument, message));
            }
        };
        Ok(number)
    }

    /// Whether `op` can combine elements of type `dtype`.
    ///
    /// | reduction | types |
    /// |---|---|
    /// | sum, product | all; `bool`: or, and |
    /// | avg | all but `bool`; integers: the quotient of the sum is rounded toward zero |
    /// | min, max | all but complex; `bool`: and, or |
    /// | band, bor, bxor | integers, `bool` |
    /// | premul_sum | floats of 16 to 64 bits |
    pub const fn allows(op: ReduceOp, dtype: DType) -> bool {
        use DType::{
            Bf16, Bool, Complex64, Complex128, F8E4M3, F8E5M2, F16, F32, F64, I8, I16, I32, I64,
            U8, U16, U32, U64,
        };
        let is_integer = matches!(dtype, I8 | U8 | I16 | U16 | I32 | U32 | I64 | U64);
        let is_float = matches!(dtype, F16 | Bf16 | F32 | F64);
        let is_float8 = matches!(dtype, F8E4M3 | F8E5M2);
        let is_complex = matches!(dtype, Complex64 | Complex128);
        let is_bool = matches!(dtype, Bool);
        match op {
            ReduceOp::Sum | ReduceOp::Product => {
                is_integer || is_float || is_float8 || is_complex || is_bool
            }
            ReduceOp::Avg => is_integer || is_float || is_float8 || is_complex,
            ReduceOp::Min | ReduceOp::Max => is_integer || is_float || is_float8 || is_bool,
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => is_integer || is_bool,
            ReduceOp::PremulSum => is_float,
        }
    }
}

impl From<ReduceOp> for Reduction {
    fn from(op: ReduceOp) -> Self {
        Self {
            op,
            factor: 1.0,
            scale: None,
        }
    }
}

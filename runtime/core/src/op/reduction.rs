//! [`Reduction`]: how values are combined, and which element types it accepts.

use rcomm_recorder::model::{DType, ReduceOp};

/// A reduction with its parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduction {
    /// How values are combined.
    pub op: ReduceOp,
    /// The number by which this rank's input is multiplied before it is summed; used only by `PremulSum`.
    pub factor: f64,
}

impl Reduction {
    /// The sum of all inputs, each multiplied by its own rank's `factor` first.
    pub const fn premul_sum(factor: f64) -> Self {
        Self {
            op: ReduceOp::PremulSum,
            factor,
        }
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
        let integer = matches!(dtype, I8 | U8 | I16 | U16 | I32 | U32 | I64 | U64);
        let float = matches!(dtype, F16 | Bf16 | F32 | F64);
        let float8 = matches!(dtype, F8E4M3 | F8E5M2);
        let complex = matches!(dtype, Complex64 | Complex128);
        let boolean = matches!(dtype, Bool);
        match op {
            ReduceOp::Sum | ReduceOp::Product => integer || float || float8 || complex || boolean,
            ReduceOp::Avg => integer || float || float8 || complex,
            ReduceOp::Min | ReduceOp::Max => integer || float || float8 || boolean,
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => integer || boolean,
            ReduceOp::PremulSum => float,
        }
    }
}

impl From<ReduceOp> for Reduction {
    fn from(op: ReduceOp) -> Self {
        Self { op, factor: 1.0 }
    }
}

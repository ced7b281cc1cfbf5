//! NCCL's codes for rcomm's element types and reductions, and which types and reductions NCCL lacks.
//!
//! Bytes of any type can be moved; only reductions depend on the type. As in c10d, `bool` is reduced as a byte by
//! maximum and minimum, and complex numbers are reduced as pairs of their parts.

use super::sys::{NcclDataType, NcclRedOp, data_type, red_op};
use crate::library::{NcclLibrary, Version};
use rcomm_core::{Device, Error, ErrorKind, Reduction, Result};
use rcomm_recorder::model::{DType, ReduceOp};
use std::ffi::c_void;

/// The first release that reduces 8-bit floats.
const FLOAT8_SINCE: Version = Version(22_400);

/// An element type of NCCL, and how many of its elements make one element of rcomm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Units {
    pub(crate) data_type: NcclDataType,
    pub(crate) each: usize,
}

impl Units {
    const fn one(data_type: NcclDataType) -> Self {
        Self { data_type, each: 1 }
    }

    /// Returns the units for moving elements of this type.
    pub(crate) fn to_move(dtype: DType) -> Self {
        Self::to_reduce(dtype).unwrap_or(Self {
            data_type: data_type::UINT8,
            each: rcomm_core::backend::support::element_size(dtype),
        })
    }

    /// Returns the units for reducing elements of this type; `None` for types that no release can reduce, and for 8-bit
    /// floats, which not all releases can reduce.
    const fn to_reduce(dtype: DType) -> Option<Self> {
        Some(match dtype {
            DType::I8 => Self::one(data_type::INT8),
            DType::U8 | DType::Bool => Self::one(data_type::UINT8),
            DType::I32 => Self::one(data_type::INT32),
            DType::U32 => Self::one(data_type::UINT32),
            DType::I64 => Self::one(data_type::INT64),
            DType::U64 => Self::one(data_type::UINT64),
            DType::F16 => Self::one(data_type::FLOAT16),
            DType::Bf16 => Self::one(data_type::BFLOAT16),
            DType::F32 => Self::one(data_type::FLOAT32),
            DType::F64 => Self::one(data_type::FLOAT64),
            DType::Complex64 => Self {
                data_type: data_type::FLOAT32,
                each: 2,
            },
            DType::Complex128 => Self {
                data_type: data_type::FLOAT64,
                each: 2,
            },
            DType::F8E4M3 | DType::F8E5M2 | DType::I16 | DType::U16 | DType::Other => return None,
        })
    }
}

/// A reduction in the form that NCCL accepts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum NcclReduction {
    /// A reduction that `nccl.h` names.
    Named(NcclRedOp),
    /// A sum of inputs that are first multiplied by this factor.
    PremulSum(Scalar),
}

/// A factor, in the type of the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scalar {
    /// The value, in the first bytes.
    Value([u8; 8]),
    /// The address of the value in the device's memory.
    OnDevice(*mut c_void),
}

/// Returns how NCCL reduces elements of this type.
///
/// # Errors
/// `Unsupported` names what NCCL, or this release of it, lacks; those of [`Reduction::host_factor`].
pub(crate) fn reduction_of(
    library: &NcclLibrary,
    reduction: &Reduction,
    dtype: DType,
) -> Result<(Units, NcclReduction)> {
    use NcclReduction::{Named, PremulSum};
    let refuse = |message: String| Err(Error::new(ErrorKind::Unsupported, message));
    let op = reduction.op;
    let units = match dtype {
        DType::F8E4M3 | DType::F8E5M2 if library.version() < FLOAT8_SINCE => {
            return refuse(format!(
                "NCCL reduces {dtype} from {FLOAT8_SINCE} on; this library is {}",
                library.version()
            ));
        }
        DType::F8E4M3 => Units::one(data_type::FLOAT8E4M3),
        DType::F8E5M2 => Units::one(data_type::FLOAT8E5M2),
        _ => match Units::to_reduce(dtype) {
            Some(units) => units,
            None => return refuse(format!("NCCL does not reduce elements of type {dtype}")),
        },
    };
    let is_complex = units.each == 2;
    let nccl = match (op, dtype) {
        (ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr, DType::Bool) => Named(red_op::MAX),
        (ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd, DType::Bool) => Named(red_op::MIN),
        (ReduceOp::Product, _) if is_complex => {
            return refuse(format!("NCCL does not multiply elements of type {dtype}"));
        }
        (ReduceOp::Sum, _) => Named(red_op::SUM),
        (ReduceOp::Product, _) => Named(red_op::PROD),
        (ReduceOp::Min, _) => Named(red_op::MIN),
        (ReduceOp::Max, _) => Named(red_op::MAX),
        (ReduceOp::Avg, _) => Named(red_op::AVG),
        (ReduceOp::PremulSum, _) => PremulSum(match &reduction.scale {
            Some(scale) if scale.device() != Device::Cpu => {
                Scalar::OnDevice(scale.as_ptr().cast_mut().cast())
            }
            _ => Scalar::Value(scalar_of(reduction.host_factor()?, dtype)),
        }),
        (ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor, _) => {
            return refuse(format!("NCCL has no {op} for elements of type {dtype}"));
        }
    };
    Ok((units, nccl))
}

/// Returns the factor in the type of the elements, in this machine's byte order.
fn scalar_of(factor: f64, dtype: DType) -> [u8; 8] {
    let mut bytes = [0; 8];
    match dtype {
        DType::F16 => bytes[..2].copy_from_slice(&half::f16::from_f64(factor).to_ne_bytes()),
        DType::Bf16 => bytes[..2].copy_from_slice(&half::bf16::from_f64(factor).to_ne_bytes()),
        DType::F32 => bytes[..4].copy_from_slice(&(factor as f32).to_ne_bytes()),
        // `f64` is the only other type that `Reduction::allows`.
        _ => bytes = factor.to_ne_bytes(),
    }
    bytes
}

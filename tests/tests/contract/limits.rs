//! The operations that a backend's library does not support.

use rcomm::{DType, DeviceKind, ProcessGroup, ReduceOp};

/// The limits of the backend that carries a group.
#[derive(Clone, Copy)]
pub(crate) enum Limits {
    /// The backend supports all operations.
    None,
    /// NCCL has no 16-bit integers, no bitwise operations, no product of complex numbers, no tags, and
    /// receives from a named rank only (`ncclDataType_t`, `ncclRedOp_t` and `ncclRecv` in nccl.h). On truth values,
    /// bitwise "and" and "or" are its minimum and maximum.
    Nccl,
}

impl Limits {
    pub(crate) fn of(group: &ProcessGroup) -> Self {
        match group.backend(DeviceKind::Cpu).map(|backend| backend.name()) {
            Some("nccl") => Self::Nccl,
            _ => Self::None,
        }
    }

    /// Whether the backend refuses this reduction of elements of this type.
    pub(crate) fn refuse(self, op: ReduceOp, dtype: DType) -> bool {
        let Self::Nccl = self else { return false };
        let is_bitwise = matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor);
        match dtype {
            DType::I16 | DType::U16 => true,
            DType::Bool => op == ReduceOp::BitXor,
            DType::Complex64 | DType::Complex128 => op == ReduceOp::Product,
            _ => is_bitwise,
        }
    }
}

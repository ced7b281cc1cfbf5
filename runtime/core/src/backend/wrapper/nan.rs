//! Looks for NaNs in the buffers that an operation reads.

use crate::backend::Backend;
use crate::op::Op;
use crate::op::buffer::{Buffer, Device};
use crate::op::element::Element;
use crate::op::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use num_complex::Complex;
use rcomm_recorder::model::DType;

/// The position of the first NaN: the number of the input (within its operation, for a coalesced block) and of the
/// element. `None` if there is none or the check failed. `backend` searches memory of a device.
pub(super) fn find(op: &Op<'_>, backend: &dyn Backend) -> Option<(u32, u64)> {
    if let Op::Coalesced(ops) = op {
        return ops.iter().find_map(|op| find(op, backend));
    }
    (0..).zip(op.inputs()).find_map(|(at, input)| {
        let element = match input.device() {
            Device::Cpu => first_nan(input).map(|element| element as u64),
            Device::Cuda(_) => backend.find_nan(input).unwrap_or_else(|error| {
                tracing::warn!(%error, ?input, "the NaN check failed");
                None
            }),
        };
        Some((at, element?))
    })
}

/// The position of the first NaN in host memory; `None` if there is none, or elements of the type cannot be NaN.
fn first_nan(buffer: &Buffer<'_>) -> Option<usize> {
    fn position<T: Element>(buffer: &Buffer<'_>, is_nan: impl Fn(&T) -> bool) -> Option<usize> {
        buffer.as_slice::<T>()?.iter().position(is_nan)
    }
    match buffer.dtype() {
        DType::F32 => position::<f32>(buffer, |x| x.is_nan()),
        DType::F64 => position::<f64>(buffer, |x| x.is_nan()),
        DType::F16 => position::<f16>(buffer, |x| x.is_nan()),
        DType::Bf16 => position::<bf16>(buffer, |x| x.is_nan()),
        DType::F8E4M3 => position::<F8E4M3>(buffer, |x| x.to_f32().is_nan()),
        DType::F8E5M2 => position::<F8E5M2>(buffer, |x| x.to_f32().is_nan()),
        DType::Complex64 => position::<Complex<f32>>(buffer, |x| x.is_nan()),
        DType::Complex128 => position::<Complex<f64>>(buffer, |x| x.is_nan()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_nan_is_found_in_every_floating_type() {
        fn first<T: Element>(nan: T) -> Option<usize> {
            first_nan(&Buffer::from_vec(vec![T::default(), nan, nan]))
        }
        assert_eq!(first(f32::NAN), Some(1));
        assert_eq!(first(f64::NAN), Some(1));
        assert_eq!(first(f16::NAN), Some(1));
        assert_eq!(first(bf16::NAN), Some(1));
        assert_eq!(first(F8E4M3::from_f32(f32::NAN)), Some(1));
        assert_eq!(first(F8E5M2::from_f32(f32::NAN)), Some(1));
        assert_eq!(first(Complex::new(0.0, f32::NAN)), Some(1));
        assert_eq!(first(Complex::new(f64::NAN, 0.0)), Some(1));
        assert_eq!(first(f32::INFINITY), None);
        assert_eq!(first(i32::MIN), None);
    }
}

//! Reductions on raw bytes: what NCCL's kernels compute, one rank after the other.
//!
//! `ncclAvg` divides the sum by the number of ranks (NCCL multiplies inputs of floating-point types by the reciprocal
//! instead, `hostToDevRedOp`, enqueue.cc); a user reduction multiplies each rank's input by its factor first
//! (`ncclRedOpCreatePreMulSum`). NCCL promises no order and no rounding. Here floats of 8 and 16 bits are combined in
//! 32 bits and rounded once, so that tests can compare exactly.

use std::ffi::CStr;

use rcomm::{F8E4M3, F8E5M2, bf16, f16};

/// The reduction that one rank asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reduction {
    /// `ncclRedOp_t`: 0 sum, 1 product, 2 max, 3 min, 4 average.
    pub(crate) op: i32,
    /// This rank's factor, 1 unless the reduction was made with one.
    pub(crate) factor: f64,
}

/// A type of elements; arithmetic is done in `Wide`.
trait Number {
    type Wide: Copy;
    const BYTES: usize;
    fn read(bytes: &[u8]) -> Self::Wide;
    fn write(value: Self::Wide, bytes: &mut [u8]);
    fn combine(a: Self::Wide, b: Self::Wide, op: i32) -> Self::Wide;
    fn scale(value: Self::Wide, factor: f64) -> Self::Wide;
    fn divide(value: Self::Wide, ranks: usize) -> Self::Wide;
}

macro_rules! integers {
    ($($type:ty)+) => { $(
        impl Number for $type {
            type Wide = Self;
            const BYTES: usize = size_of::<$type>();

            fn read(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("one element"))
            }
            fn write(value: Self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
            fn combine(a: Self, b: Self, op: i32) -> Self {
                match op {
                    1 => a.wrapping_mul(b),
                    2 => a.max(b),
                    3 => a.min(b),
                    _ => a.wrapping_add(b),
                }
            }
            fn scale(value: Self, factor: f64) -> Self {
                (value as f64 * factor) as Self
            }
            fn divide(value: Self, ranks: usize) -> Self {
                value / ranks as Self
            }
        }
    )+ };
}
integers!(i8 u8 i32 u32 i64 u64);

macro_rules! floats {
    ($($type:ty, $wide:ty, $from_bytes:expr, $to_bytes:expr, $widen:expr, $narrow:expr;)+) => { $(
        impl Number for $type {
            type Wide = $wide;
            const BYTES: usize = size_of::<$type>();

            fn read(bytes: &[u8]) -> $wide {
                $widen($from_bytes(bytes.try_into().expect("one element")))
            }
            fn write(value: $wide, bytes: &mut [u8]) {
                bytes.copy_from_slice(&$to_bytes($narrow(value)));
            }
            fn combine(a: $wide, b: $wide, op: i32) -> $wide {
                match op {
                    1 => a * b,
                    2 => a.max(b),
                    3 => a.min(b),
                    _ => a + b,
                }
            }
            fn scale(value: $wide, factor: f64) -> $wide {
                value * factor as $wide
            }
            fn divide(value: $wide, ranks: usize) -> $wide {
                value / ranks as $wide
            }
        }
    )+ };
}
floats! {
    f32, f32, f32::from_le_bytes, f32::to_le_bytes, |v: f32| v, |v: f32| v;
    f64, f64, f64::from_le_bytes, f64::to_le_bytes, |v: f64| v, |v: f64| v;
    f16, f32, f16::from_le_bytes, f16::to_le_bytes, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::from_le_bytes, bf16::to_le_bytes, bf16::to_f32, bf16::from_f32;
    F8E4M3, f32, |b: [u8; 1]| F8E4M3::from_bits(b[0]), |v: F8E4M3| [v.to_bits()], F8E4M3::to_f32, F8E4M3::from_f32;
    F8E5M2, f32, |b: [u8; 1]| F8E5M2::from_bits(b[0]), |v: F8E5M2| [v.to_bits()], F8E5M2::to_f32, F8E5M2::from_f32;
}

/// Bytes of one element of an `ncclDataType_t`; `None` for an unknown one.
pub(crate) fn size_of_type(data_type: i32) -> Option<usize> {
    Some(match data_type {
        0 | 1 | 10 | 11 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => return None,
    })
}

/// Bytes of one element of an `ncclDataType_t`, 1 for an unknown one, and NCCL's name of the type
/// (`ncclDatatypeToString`, collectives.cc).
pub(crate) fn size_and_name_of_type(data_type: i32) -> (usize, &'static CStr) {
    let name = match data_type {
        0 => c"ncclInt8",
        1 => c"ncclUint8",
        2 => c"ncclInt32",
        3 => c"ncclUint32",
        4 => c"ncclInt64",
        5 => c"ncclUint64",
        6 => c"ncclFloat16",
        7 => c"ncclFloat32",
        8 => c"ncclFloat64",
        9 => c"ncclBfloat16",
        10 => c"ncclFloat8e4m3",
        11 => c"ncclFloat8e5m2",
        _ => c"Unknown",
    };
    (size_of_type(data_type).unwrap_or(1), name)
}

/// Combines the inputs of all ranks, in order of rank.
pub(crate) fn reduce(data_type: i32, inputs: &[(&[u8], Reduction)]) -> Vec<u8> {
    match data_type {
        0 => reduce_as::<i8>(inputs),
        1 => reduce_as::<u8>(inputs),
        2 => reduce_as::<i32>(inputs),
        3 => reduce_as::<u32>(inputs),
        4 => reduce_as::<i64>(inputs),
        5 => reduce_as::<u64>(inputs),
        6 => reduce_as::<f16>(inputs),
        7 => reduce_as::<f32>(inputs),
        8 => reduce_as::<f64>(inputs),
        9 => reduce_as::<bf16>(inputs),
        10 => reduce_as::<F8E4M3>(inputs),
        _ => reduce_as::<F8E5M2>(inputs),
    }
}

fn reduce_as<T: Number>(inputs: &[(&[u8], Reduction)]) -> Vec<u8> {
    let mut out = vec![0; inputs[0].0.len()];
    for (index, slot) in out.chunks_exact_mut(T::BYTES).enumerate() {
        let scaled = |(bytes, reduction): &(&[u8], Reduction)| {
            let value = T::read(&bytes[index * T::BYTES..(index + 1) * T::BYTES]);
            if reduction.factor == 1.0 {
                value
            } else {
                T::scale(value, reduction.factor)
            }
        };
        let mut result = scaled(&inputs[0]);
        for input in &inputs[1..] {
            result = T::combine(result, scaled(input), input.1.op);
        }
        if inputs[0].1.op == 4 {
            result = T::divide(result, inputs.len());
        }
        T::write(result, slot);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn average_and_factors_are_applied() {
        let plain = Reduction { op: 4, factor: 1.0 };
        let (a, b) = (2.0_f32.to_le_bytes(), 6.0_f32.to_le_bytes());
        assert_eq!(
            reduce(7, &[(&a, plain), (&b, plain)]),
            4.0_f32.to_le_bytes()
        );
        let half = Reduction { op: 0, factor: 0.5 };
        assert_eq!(reduce(7, &[(&a, half), (&b, half)]), 4.0_f32.to_le_bytes());
    }
}

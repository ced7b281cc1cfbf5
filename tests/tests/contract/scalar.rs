//! Computes the expected results: reduces a few numbers one after the other.
//!
//! Values are small, so that sums are exact. Products may be rounded at each step. A float of less than 32 bits is
//! reduced in a wider one, and rounded once, at the end.

use rcomm::{Complex, Element, F8E4M3, F8E5M2, ReduceOp, Reduction, bf16, f16};

/// An element whose reductions can be computed here.
pub(crate) trait Scalar: Element + PartialEq {
    /// A small value.
    fn of(small: u8) -> Self;

    /// Reduces `values` in their order.
    fn reduce(op: ReduceOp, values: &[Self]) -> Self;
}

/// The reductions that a type allows, except the one with a factor.
pub(crate) fn reductions<T: Scalar>() -> impl Iterator<Item = ReduceOp> {
    let all = ReduceOp::ALL.iter().copied();
    all.filter(|&op| op != ReduceOp::PremulSum && Reduction::allows(op, T::DTYPE))
}

macro_rules! integers {
    ($($type:ty),+) => {
        $(impl Scalar for $type {
            fn of(small: u8) -> Self {
                small as Self
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let wide = values.iter().map(|&x| x as i128);
                let result = match op {
                    ReduceOp::Sum => wide.sum(),
                    // The sum wraps in the type itself before it is divided.
                    ReduceOp::Avg => wide.sum::<i128>() as $type as i128 / values.len() as i128,
                    ReduceOp::Product => wide.product(),
                    ReduceOp::Min => wide.min().unwrap(),
                    ReduceOp::Max => wide.max().unwrap(),
                    ReduceOp::BitAnd => wide.reduce(|a, b| a & b).unwrap(),
                    ReduceOp::BitOr => wide.reduce(|a, b| a | b).unwrap(),
                    ReduceOp::BitXor => wide.reduce(|a, b| a ^ b).unwrap(),
                    ReduceOp::PremulSum => unreachable!("`reductions` does not return {op} for this type"),
                };
                result as Self
            }
        })+
    };
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

macro_rules! floats {
    ($($type:ty: $wide:ty, $widen:expr, $narrow:expr;)+) => {
        $(impl Scalar for $type {
            fn of(small: u8) -> Self {
                let narrow: fn($wide) -> $type = $narrow;
                narrow(<$wide>::from(small))
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let (widen, narrow): (fn($type) -> $wide, fn($wide) -> $type) = ($widen, $narrow);
                let wide = values.iter().map(|&x| widen(x));
                narrow(match op {
                    ReduceOp::Sum => wide.sum(),
                    ReduceOp::Avg => wide.sum::<$wide>() / values.len() as $wide,
                    ReduceOp::Product => wide.product(),
                    ReduceOp::Min => wide.reduce(<$wide>::min).unwrap(),
                    ReduceOp::Max => wide.reduce(<$wide>::max).unwrap(),
                    _ => unreachable!("`reductions` does not return {op} for this type"),
                })
            }
        })+
    };
}

floats! {
    f32: f32, |x| x, |x| x;
    f64: f64, |x| x, |x| x;
    f16: f32, f16::to_f32, f16::from_f32;
    bf16: f32, bf16::to_f32, bf16::from_f32;
    F8E4M3: f32, F8E4M3::to_f32, F8E4M3::from_f32;
    F8E5M2: f32, F8E5M2::to_f32, F8E5M2::from_f32;
}

macro_rules! complexes {
    ($($part:ty),+) => {
        $(impl Scalar for Complex<$part> {
            fn of(small: u8) -> Self {
                Self::new(<$part>::from(small), 1.0)
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let values_in_order = values.iter().copied();
                match op {
                    ReduceOp::Sum => values_in_order.sum(),
                    ReduceOp::Avg => values_in_order.sum::<Self>() / values.len() as $part,
                    ReduceOp::Product => values_in_order.product(),
                    _ => unreachable!("`reductions` does not return {op} for this type"),
                }
            }
        })+
    };
}

complexes!(f32, f64);

impl Scalar for bool {
    fn of(small: u8) -> Self {
        small % 2 == 1
    }

    fn reduce(op: ReduceOp, values: &[Self]) -> Self {
        match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => values.contains(&true),
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => !values.contains(&false),
            ReduceOp::BitXor => values.iter().filter(|&&x| x).count() % 2 == 1,
            _ => unreachable!("`reductions` does not return {op} for this type"),
        }
    }
}

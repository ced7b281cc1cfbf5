//! The element types of gradients.

use crate::op::element::Element;
use half::{bf16, f16};

/// An element type that gradients may have: `f32`, `f64`, `f16` or `bf16`.
pub trait Gradient: Element + sealed::Sealed {
    /// The value, rounded to `f32`.
    fn to_f32(self) -> f32;

    /// The value of this type that is closest to `value`.
    fn from_f32(value: f32) -> Self;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! gradients {
    ($($type:ty: $to_f32:expr, $from_f32:expr;)+) => {
        $(
            impl sealed::Sealed for $type {}

            impl Gradient for $type {
                fn to_f32(self) -> f32 {
                    let to_f32: fn($type) -> f32 = $to_f32;
                    to_f32(self)
                }

                fn from_f32(value: f32) -> Self {
                    let from_f32: fn(f32) -> $type = $from_f32;
                    from_f32(value)
                }
            }
        )+
    };
}

gradients! {
    f32: |x| x, |x| x;
    f64: |x| x as f32, f64::from;
    f16: f16::to_f32, f16::from_f32;
    bf16: bf16::to_f32, bf16::from_f32;
}

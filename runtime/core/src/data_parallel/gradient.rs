//! The element types of gradients.

use super::mixed::Reducers;
use super::reducer::Reducer;
use crate::op::element::Element;
use half::{bf16, f16};

/// An element type that gradients may have: `f32`, `f64`, `f16` or `bf16`.
pub trait Gradient: Element + sealed::Sealed {
    /// The value, rounded to `f32`.
    fn to_f32(self) -> f32;

    /// The value of this type that is closest to `value`.
    fn from_f32(value: f32) -> Self;

    /// The sum. Sums of 16-bit types are computed in `f32` and rounded once.
    #[must_use]
    fn plus(self, other: Self) -> Self;

    /// The product with a factor. Products of 16-bit types are computed in `f32` and rounded once.
    #[must_use]
    fn times(self, factor: f64) -> Self;
}

mod sealed {
    use super::{Reducer, Reducers};

    pub trait Sealed: Sized {
        /// The reducer of this type, if there is one.
        fn of(reducers: &Reducers) -> Option<&Reducer<Self>>;

        /// The reducer of this type, if there is one.
        fn of_mut(reducers: &mut Reducers) -> Option<&mut Reducer<Self>>;
    }
}

macro_rules! gradients {
    ($($type:ident as $wide:ty: $to_f32:expr, $from_f32:expr, $widen:expr, $narrow:expr;)+) => {
        $(
            impl sealed::Sealed for $type {
                fn of(reducers: &Reducers) -> Option<&Reducer<Self>> {
                    reducers.$type.as_ref()
                }

                fn of_mut(reducers: &mut Reducers) -> Option<&mut Reducer<Self>> {
                    reducers.$type.as_mut()
                }
            }

            impl Gradient for $type {
                fn to_f32(self) -> f32 {
                    let to_f32: fn($type) -> f32 = $to_f32;
                    to_f32(self)
                }

                fn from_f32(value: f32) -> Self {
                    let from_f32: fn(f32) -> $type = $from_f32;
                    from_f32(value)
                }

                fn plus(self, other: Self) -> Self {
                    let widen: fn($type) -> $wide = $widen;
                    let narrow: fn($wide) -> $type = $narrow;
                    narrow(widen(self) + widen(other))
                }

                fn times(self, factor: f64) -> Self {
                    let widen: fn($type) -> $wide = $widen;
                    let narrow: fn($wide) -> $type = $narrow;
                    narrow(widen(self) * factor as $wide)
                }
            }
        )+
    };
}

gradients! {
    f32 as f32: |x| x, |x| x, |x| x, |x| x;
    f64 as f64: |x| x as f32, f64::from, |x| x, |x| x;
    f16 as f32: f16::to_f32, f16::from_f32, f16::to_f32, f16::from_f32;
    bf16 as f32: bf16::to_f32, bf16::from_f32, bf16::to_f32, bf16::from_f32;
}

//! Reductions and element types, and the macro for enums whose codes never change.
//!
//! The codes are part of the ring's layout and of the C binding: append, never renumber.

use serde::{Deserialize, Serialize};

macro_rules! coded {
    (
        $(#[$meta:meta])*
        $name:ident, $what:literal {
            $( $(#[$vmeta:meta])* $variant:ident = $code:literal, $text:literal; )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[repr(u8)]
        pub enum $name {
            $( $(#[$vmeta])* #[serde(rename = $text)] $variant = $code, )+
        }

        impl $name {
            /// All values, in the order of their codes.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            #[doc = concat!("The fixed integer code of this ", $what, ".")]
            #[inline]
            pub const fn code(self) -> u8 {
                self as u8
            }

            #[doc = concat!("The ", $what, " with this code, if there is one.")]
            pub const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $( $code => Some(Self::$variant), )+
                    _ => None,
                }
            }

            #[doc = concat!("The spelling of this ", $what, ".")]
            #[inline]
            pub const fn name(self) -> &'static str {
                match self {
                    $( Self::$variant => $text, )+
                }
            }

            #[doc = concat!("The ", $what, " with exactly this spelling, if there is one.")]
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $( $text => Some(Self::$variant), )+
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

pub(super) use coded;

coded! {
    /// How values are combined.
    ReduceOp, "reduction" {
        /// Addition.
        Sum = 0, "sum";
        /// Addition, then division by the number of ranks.
        Avg = 1, "avg";
        /// Multiplication.
        Product = 2, "product";
        /// The smallest value; NaN if any value is NaN.
        Min = 3, "min";
        /// The largest value; NaN if any value is NaN.
        Max = 4, "max";
        /// Bitwise and.
        BitAnd = 5, "band";
        /// Bitwise or.
        BitOr = 6, "bor";
        /// Bitwise exclusive or.
        BitXor = 7, "bxor";
        /// Each rank multiplies its input by a factor before the sum.
        PremulSum = 8, "premul_sum";
    }
}

coded! {
    /// The type of one element. Names are ATen's, as flight recorder dumps spell them.
    DType, "element type" {
        /// 32-bit IEEE 754.
        F32 = 0, "Float";
        /// 64-bit IEEE 754.
        F64 = 1, "Double";
        /// 16-bit IEEE 754.
        F16 = 2, "Half";
        /// The upper half of an `f32`.
        Bf16 = 3, "BFloat16";
        /// Signed 8-bit integer.
        I8 = 4, "Char";
        /// Unsigned 8-bit integer.
        U8 = 5, "Byte";
        /// Signed 16-bit integer.
        I16 = 6, "Short";
        /// Signed 32-bit integer.
        I32 = 7, "Int";
        /// Signed 64-bit integer.
        I64 = 8, "Long";
        /// Unsigned 32-bit integer.
        U32 = 9, "UInt32";
        /// Unsigned 64-bit integer.
        U64 = 10, "UInt64";
        /// One byte, 0 or 1.
        Bool = 11, "Bool";
        /// Two `f32`: real, imaginary.
        Complex64 = 12, "ComplexFloat";
        /// Two `f64`: real, imaginary.
        Complex128 = 13, "ComplexDouble";
        /// 8-bit float, 4 bits of exponent, 3 of mantissa, no infinity.
        F8E4M3 = 14, "Float8_e4m3fn";
        /// 8-bit float, 5 bits of exponent, 2 of mantissa.
        F8E5M2 = 15, "Float8_e5m2";
        /// Unsigned 16-bit integer.
        U16 = 16, "UInt16";
        /// A type that is not in this list.
        Other = 255, "Other";
    }
}

impl DType {
    /// Bytes of one element; `None` for [`DType::Other`].
    #[inline]
    pub const fn size(self) -> Option<usize> {
        Some(match self {
            Self::I8 | Self::U8 | Self::Bool | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 | Self::Complex64 => 8,
            Self::Complex128 => 16,
            Self::Other => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_are_converted_back_to_their_value() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        }
        for &op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op.code()), Some(op));
            assert_eq!(ReduceOp::from_name(op.name()), Some(op));
        }
    }
}

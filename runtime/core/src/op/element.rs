//! The Rust types that may be elements, and the [`DType`] of each.

use crate::op::buffer::Buffer;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use num_complex::Complex;
use rcomm_recorder::model::DType;

mod sealed {
    pub trait Sealed {}
}

/// A type that buffers hold.
///
/// Sealed, since a [`DType`] must correspond to exactly one Rust type.
pub trait Element:
    sealed::Sealed + Copy + Default + Send + Sync + std::fmt::Debug + 'static
{
    /// The element type that this is.
    const DTYPE: DType;
}

macro_rules! elements {
    ($( $rust:ty => $dtype:ident; )+) => {
        $(
            impl sealed::Sealed for $rust {}
            impl Element for $rust {
                const DTYPE: DType = DType::$dtype;
            }
        )+

        pub(crate) fn zeroed(dtype: DType, len: usize) -> Result<Buffer<'static>> {
            match dtype {
                $( DType::$dtype => Ok(Buffer::from_vec(vec![<$rust>::default(); len])), )+
                DType::Other => Err(Error::new(
                    ErrorKind::InvalidArgument,
                    "elements of an unknown type have no size",
                )),
            }
        }

        #[cfg(test)]
        const SIZES: &[(DType, usize)] = &[$( (DType::$dtype, size_of::<$rust>()) ),+];
    };
}

elements! {
    f32 => F32;
    f64 => F64;
    f16 => F16;
    bf16 => Bf16;
    i8 => I8;
    u8 => U8;
    i16 => I16;
    u16 => U16;
    i32 => I32;
    i64 => I64;
    u32 => U32;
    u64 => U64;
    bool => Bool;
    Complex<f32> => Complex64;
    Complex<f64> => Complex128;
    F8E4M3 => F8E4M3;
    F8E5M2 => F8E5M2;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_type_has_the_size_that_dumps_state() {
        for &(dtype, size) in SIZES {
            assert_eq!(dtype.size(), Some(size), "{dtype}");
        }
        assert_eq!(SIZES.len() + 1, DType::ALL.len());
    }
}

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

/// A type that the elements of a [`Buffer`] may have.
///
/// Sealed, since a [`DType`] must correspond to exactly one Rust type.
pub trait Element:
    sealed::Sealed + Copy + Default + Send + Sync + std::fmt::Debug + 'static
{
    /// The [`DType`] of this Rust type.
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
                $( DType::$dtype => zeros::<$rust>(len).map(Buffer::from_vec), )+
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

/// `len` zeros; an error where `vec!` would panic or abort, since so many cannot be allocated.
fn zeros<T: Element>(len: usize) -> Result<Vec<T>> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(len).map_err(|error| {
        let bytes = len as u128 * size_of::<T>() as u128;
        let message = format!("cannot allocate {bytes} bytes for {len} elements: {error}");
        Error::new(ErrorKind::InvalidArgument, message)
    })?;
    elements.resize(len, T::default());
    Ok(elements)
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
    fn a_length_that_cannot_be_allocated_is_an_error() {
        for len in [usize::MAX, usize::MAX / 2, usize::MAX / 8] {
            let error = Buffer::zeroed(DType::F64, len).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains(&len.to_string()), "{error}");
        }
        assert_eq!(Buffer::zeroed(DType::F64, 3).unwrap().len(), 3);
    }

    #[test]
    fn every_element_type_has_the_size_of_its_dtype() {
        for &(dtype, size) in SIZES {
            assert_eq!(dtype.size(), Some(size), "{dtype}");
        }
        assert_eq!(SIZES.len() + 1, DType::ALL.len());
    }
}

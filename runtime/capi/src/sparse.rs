//! Sums of sparse tensors.

use crate::group::Group;
use crate::memory::{self, array, dtype_of};
use crate::status::{borrow, call, free, give, put, refused};
use rcomm::{
    Buffer, Complex, DType, Element, F8E4M3, F8E5M2, ProcessGroup, ReduceOp, Result, SparseTensor,
    bf16, f16,
};
use std::ffi::c_void;

/// A sparse tensor that rcomm has made.
pub struct Sparse {
    indices: Vec<i64>,
    values: Buffer<'static>,
    places: usize,
}

/// One rank's part of a sum.
struct Part<'a> {
    shape: Vec<u64>,
    sparse_dims: usize,
    indices: &'a [i64],
    values: Buffer<'static>,
}

fn sum<T: Element>(group: &ProcessGroup, part: Part<'_>) -> Result<Sparse> {
    let values = part.values.as_slice::<T>();
    let values = values.ok_or_else(|| refused("the values are misaligned"))?;
    let (indices, values) = (part.indices.to_vec(), values.to_vec());
    let own = SparseTensor::new(part.shape, part.sparse_dims, indices, values)?;
    let sum = group.all_reduce_sparse(&own, ReduceOp::Sum)?;
    Ok(Sparse {
        places: sum.places(),
        indices: sum.indices().to_vec(),
        values: Buffer::from_vec(sum.values().to_vec()),
    })
}

/// The sum of everybody's sparse tensors (COO), with each place once, in ascending order: `*sum`.
///
/// The tensor has `dims` dimensions of the sizes in `shape`, the first `sparse_dims` of them sparse.
/// `indices` holds a row of `places` indices for each sparse dimension, `values` a block of elements (one
/// for each index in the remaining dimensions) for each place.
///
/// # Safety
/// `group` is a living handle; `shape`, `indices` and `values` hold what is said above; `sum` may be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_reduce_sparse(
    group: *const Group,
    shape: *const u64,
    dims: usize,
    sparse_dims: usize,
    indices: *const i64,
    values: *const c_void,
    places: usize,
    dtype: u8,
    sum_of: *mut *mut Sparse,
) -> i32 {
    call(|| {
        let dtype = dtype_of(dtype)?;
        // SAFETY: by the contract.
        let group = unsafe { &borrow(group, "the group")?.0 };
        // SAFETY: by the contract.
        let shape = unsafe { array(shape, dims, "the shape")? }.to_vec();
        let rows = places.checked_mul(sparse_dims);
        let mut block = shape.get(sparse_dims..).unwrap_or_default().iter();
        let block = block.try_fold(1u64, |all, &n| all.checked_mul(n));
        let block = block.and_then(|block| usize::try_from(block).ok());
        let count = block.and_then(|block| block.checked_mul(places));
        let (Some(rows), Some(count)) = (rows, count) else {
            return Err(refused(format!(
                "{places} places of shape {shape:?} do not fit in memory"
            )));
        };
        let part = Part {
            shape,
            sparse_dims,
            // SAFETY: by the contract.
            indices: unsafe { array(indices, rows, "the list of indices")? },
            // SAFETY: by the contract.
            values: unsafe { memory::input(values, count, dtype)? },
        };
        let made = match dtype {
            DType::F32 => sum::<f32>(group, part),
            DType::F64 => sum::<f64>(group, part),
            DType::F16 => sum::<f16>(group, part),
            DType::Bf16 => sum::<bf16>(group, part),
            DType::I8 => sum::<i8>(group, part),
            DType::U8 => sum::<u8>(group, part),
            DType::I16 => sum::<i16>(group, part),
            DType::U16 => sum::<u16>(group, part),
            DType::I32 => sum::<i32>(group, part),
            DType::U32 => sum::<u32>(group, part),
            DType::I64 => sum::<i64>(group, part),
            DType::U64 => sum::<u64>(group, part),
            DType::Bool => sum::<bool>(group, part),
            DType::Complex64 => sum::<Complex<f32>>(group, part),
            DType::Complex128 => sum::<Complex<f64>>(group, part),
            DType::F8E4M3 => sum::<F8E4M3>(group, part),
            DType::F8E5M2 => sum::<F8E5M2>(group, part),
            other => Err(refused(format!("there are no sparse tensors of {other}"))),
        };
        // SAFETY: by the contract.
        unsafe { give(sum_of, made?) }
    })
}

/// What a sparse tensor holds: its places, its rows of indices and its blocks of values, which are there
/// until it is freed. Any place may be NULL.
///
/// # Safety
/// `sparse` is a living handle; the places are NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_sparse_get(
    sparse: *const Sparse,
    places: *mut usize,
    indices: *mut *const i64,
    values: *mut *const c_void,
) -> i32 {
    call(|| {
        // SAFETY: by the contract.
        let sparse = unsafe { borrow(sparse, "the sparse tensor")? };
        if !places.is_null() {
            // SAFETY: by the contract.
            unsafe { put(places, sparse.places)? };
        }
        if !indices.is_null() {
            // SAFETY: by the contract.
            unsafe { put(indices, sparse.indices.as_ptr())? };
        }
        if !values.is_null() {
            // SAFETY: by the contract.
            unsafe { put(values, sparse.values.as_ptr().cast())? };
        }
        Ok(())
    })
}

/// Frees a sparse tensor. NULL is nothing.
///
/// # Safety
/// `sparse` is NULL or a living handle that nobody uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_sparse_free(sparse: *mut Sparse) {
    // SAFETY: by the contract.
    unsafe { free(sparse) }
}

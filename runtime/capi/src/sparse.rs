//! Reductions of sparse tensors.

use crate::group::Group;
use crate::memory::{self, array, dtype_of, kept_by_caller};
use crate::status::{borrow, call, free, give, put, refused};
use crate::work::{Made, WorkHandle, nothing_to_take, start_with_value};
use rcomm::{
    Buffer, Complex, DType, Element, F8E4M3, F8E5M2, ProcessGroup, ReduceOp, Result, SparseTensor,
    bf16, f16,
};
use std::ffi::c_void;

/// A sparse tensor returned by rcomm.
pub struct Sparse {
    indices: Vec<i64>,
    values: Buffer<'static>,
    nnz: usize,
}

impl Made for Sparse {}

impl Sparse {
    /// A copy of this tensor.
    pub(crate) fn of<T: Element>(tensor: &SparseTensor<T>) -> Self {
        Self {
            nnz: tensor.places(),
            indices: tensor.indices().to_vec(),
            values: Buffer::from_vec(tensor.values().to_vec()),
        }
    }
}

/// This rank's input.
struct Part<'a> {
    shape: Vec<u64>,
    sparse_dims: usize,
    indices: &'a [i64],
    values: Buffer<'static>,
}

/// Sums the sparse tensors of all ranks, of this element type. If `work` is not NULL, starts the operation, writes its
/// handle there and returns `None`; otherwise waits for the end and returns the sum.
///
/// # Safety
/// `work` is NULL or may be written.
unsafe fn sum<T: Element>(
    group: &ProcessGroup,
    part: Part<'_>,
    work: *mut *mut WorkHandle,
) -> Result<Option<Sparse>> {
    let values = part.values.as_slice::<T>();
    let values = values.ok_or_else(|| refused("the values are misaligned"))?;
    let (indices, values) = (part.indices.to_vec(), values.to_vec());
    let input = SparseTensor::new(part.shape, part.sparse_dims, indices, values)?;
    let under_way = group.all_reduce_sparse_async(input, ReduceOp::Sum)?;
    let made = |sum: SparseTensor<T>| Sparse::of(&sum);
    // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
    unsafe { start_with_value(group, under_way, work, made) }
}

/// Sums the sparse tensors (COO) of all ranks. The result, `*out` or the tensor that `rcomm_work_sparse` takes from
/// `work`, is coalesced: each index tuple occurs once, in ascending order.
///
/// The tensor has `dims` dimensions with the sizes in `shape`; the first `sparse_dims` of them are sparse. `indices`
/// holds a row of `nnz` indices for each sparse dimension. `values` holds `nnz` blocks, each with all elements of the
/// remaining dimensions (one element if there are none).
///
/// # Safety
/// `group` is a valid handle; `shape`, `indices` and `values` hold what is described above, and are copied; `out` may
/// be written, and may be NULL only if `work` is not NULL; `work` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_all_reduce_sparse(
    group: *const Group,
    shape: *const u64,
    dims: usize,
    sparse_dims: usize,
    indices: *const i64,
    values: *const c_void,
    nnz: usize,
    dtype: u8,
    out: *mut *mut Sparse,
    work: *mut *mut WorkHandle,
) -> i32 {
    call(|| {
        if out.is_null() && work.is_null() {
            return Err(refused(
                "`out` and `work` are both NULL: nothing would take the sum",
            ));
        }
        let dtype = dtype_of(dtype)?;
        // SAFETY: the caller keeps the handle `group` alive during the call.
        let group = unsafe { &borrow(group, "the group")?.core };
        // SAFETY: `shape` is NULL, or holds `dims` values that stay unchanged during the call, which
        // copies them.
        let shape = unsafe { array(shape, dims, "the shape")? }.to_vec();
        let index_count = nnz.checked_mul(sparse_dims);
        let mut block = shape.get(sparse_dims..).unwrap_or_default().iter();
        let block = block.try_fold(1u64, |product, &size| product.checked_mul(size));
        let block = block.and_then(|block| usize::try_from(block).ok());
        let count = block.and_then(|block| block.checked_mul(nnz));
        let (Some(index_count), Some(count)) = (index_count, count) else {
            return Err(refused(format!(
                "the size of {nnz} sparse elements of a tensor of shape {shape:?} ({sparse_dims} sparse \
                 dimensions) overflows; check the number of elements and the shape"
            )));
        };
        let part = Part {
            shape,
            sparse_dims,
            // SAFETY: `indices` is NULL, or holds `index_count` values that stay unchanged during the call,
            // which copies them.
            indices: unsafe { array(indices, index_count, "the list of indices")? },
            // SAFETY: `values` is NULL, or holds `count` elements that stay unchanged during the call, which
            // copies them.
            values: unsafe { memory::input(values, count, dtype, &kept_by_caller())? },
        };
        let sum_of_type = match dtype {
            DType::F32 => sum::<f32>,
            DType::F64 => sum::<f64>,
            DType::F16 => sum::<f16>,
            DType::Bf16 => sum::<bf16>,
            DType::I8 => sum::<i8>,
            DType::U8 => sum::<u8>,
            DType::I16 => sum::<i16>,
            DType::U16 => sum::<u16>,
            DType::I32 => sum::<i32>,
            DType::U32 => sum::<u32>,
            DType::I64 => sum::<i64>,
            DType::U64 => sum::<u64>,
            DType::Bool => sum::<bool>,
            DType::Complex64 => sum::<Complex<f32>>,
            DType::Complex128 => sum::<Complex<f64>>,
            DType::F8E4M3 => sum::<F8E4M3>,
            DType::F8E5M2 => sum::<F8E5M2>,
            other => return Err(refused(format!("there are no sparse tensors of {other}"))),
        };
        // SAFETY: `work` is NULL, or the caller guarantees that a handle may be written there.
        match unsafe { sum_of_type(group, part, work)? } {
            // SAFETY: `out` is NULL, which is refused, or the caller guarantees that a handle may be written there.
            Some(result) => unsafe { give(out, result) },
            None => Ok(()),
        }
    })
}

/// Takes the sum that `work` has produced, once; fails with `RCOMM_INVALID_ARGUMENT` if there is none, or not yet. Does
/// not wait for the operation.
///
/// # Safety
/// `work` is a valid handle; `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_work_sparse(work: *const WorkHandle, out: *mut *mut Sparse) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `work` alive during the call.
        let work = unsafe { borrow(work, "the work")? };
        let sum: Sparse = (work.take()).ok_or_else(|| refused(nothing_to_take("sparse sum")))?;
        // SAFETY: `out` is NULL, which is refused, or the caller guarantees that a handle may be written there.
        unsafe { give(out, sum) }
    })
}

/// Writes the number of index tuples of a sparse tensor and the addresses of its indices and its values; the addresses
/// are valid until the tensor is freed. Each output pointer may be NULL.
///
/// # Safety
/// `sparse` is a valid handle; `nnz`, `indices` and `values` are NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_sparse_get(
    sparse: *const Sparse,
    nnz: *mut usize,
    indices: *mut *const i64,
    values: *mut *const c_void,
) -> i32 {
    call(|| {
        // SAFETY: the caller keeps the handle `sparse` alive during the call.
        let sparse = unsafe { borrow(sparse, "the sparse tensor")? };
        if !nnz.is_null() {
            // SAFETY: `nnz` is not NULL, so the caller guarantees that one value may be written there.
            unsafe { put(nnz, sparse.nnz)? };
        }
        if !indices.is_null() {
            // SAFETY: `indices` is not NULL, so the caller guarantees that one address may be written there.
            unsafe { put(indices, sparse.indices.as_ptr())? };
        }
        if !values.is_null() {
            // SAFETY: `values` is not NULL, so the caller guarantees that one address may be written there.
            unsafe { put(values, sparse.values.as_ptr().cast())? };
        }
        Ok(())
    })
}

/// Frees a sparse tensor. NULL has no effect.
///
/// # Safety
/// `sparse` is NULL or a valid handle that is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_sparse_free(sparse: *mut Sparse) {
    // SAFETY: `sparse` is NULL or a handle of this type that the caller gives up.
    unsafe { free(sparse) }
}

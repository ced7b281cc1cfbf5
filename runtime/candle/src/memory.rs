//! A tensor's memory as a buffer, and back.

use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor};
use rcomm::{Buffer, DType, Error, ErrorKind, Result, bf16, f16};
use std::cell::Cell;
use std::ops::Range;

/// Lends the elements of a tensor for reading, in its shape. Nothing is copied.
///
/// # Blocking
/// While another thread writes the tensor's memory. Until `body` returns, other readers may run, and writers block.
///
/// # Errors
/// `Unsupported` if the tensor is not in host memory, or its element type is not supported; `InvalidArgument` if the
/// tensor is not contiguous. Otherwise the error of `body`.
pub fn read<R>(tensor: &Tensor, body: impl FnOnce(Buffer<'_>) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(not_in_host_memory(tensor));
    };
    let range = range_of(layout)?;
    let buffer = match storage {
        CpuStorage::U8(elements) => Buffer::from_slice(&elements[range]),
        CpuStorage::U32(elements) => Buffer::from_slice(&elements[range]),
        CpuStorage::I16(elements) => Buffer::from_slice(&elements[range]),
        CpuStorage::I32(elements) => Buffer::from_slice(&elements[range]),
        CpuStorage::I64(elements) => Buffer::from_slice(&elements[range]),
        CpuStorage::BF16(elements) => Buffer::from_slice(&elements[range]),
        CpuStorage::F16(elements) => Buffer::from_slice(&elements[range]),
        CpuStorage::F32(elements) => Buffer::from_slice(&elements[range]),
        CpuStorage::F64(elements) => Buffer::from_slice(&elements[range]),
        _ => return Err(unsupported_type(tensor)),
    };
    body(shaped(buffer, layout)?)
}

/// Lends the elements of a tensor for reading and writing, in its shape. Nothing is copied. Every tensor
/// that shares the memory (a clone, a view, the `Var` of the tensor) changes with it.
///
/// # Blocking
/// While another thread uses the tensor's memory. Until `body` returns, any other use of this memory blocks.
///
/// # Errors
/// Those of [`read`].
pub fn write<R>(tensor: &Tensor, body: impl FnOnce(Buffer<'_>) -> Result<R>) -> Result<R> {
    if !tensor.device().is_cpu() {
        return Err(not_in_host_memory(tensor));
    }
    let lend = Lend {
        body: Cell::new(Some(body)),
        result: Cell::new(None),
    };
    let outcome = tensor.inplace_op1(&lend);
    match (lend.result.take(), outcome) {
        (Some(result), _) => result,
        (None, Err(error)) => Err(from_candle(error)),
        (None, Ok(())) => Err(unsupported("candle did not lend the tensor's memory")),
    }
}

/// An in-place operation, through which candle lends a tensor's memory for writing: it runs `body` and keeps the
/// result of `body`.
struct Lend<F, R> {
    body: Cell<Option<F>>,
    result: Cell<Option<Result<R>>>,
}

impl<F, R> Lend<F, R>
where
    F: FnOnce(Buffer<'_>) -> Result<R>,
{
    fn run(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<R> {
        let range = range_of(layout)?;
        let buffer = match storage {
            CpuStorage::U8(elements) => Buffer::from_mut(&mut elements[range]),
            CpuStorage::U32(elements) => Buffer::from_mut(&mut elements[range]),
            CpuStorage::I16(elements) => Buffer::from_mut(&mut elements[range]),
            CpuStorage::I32(elements) => Buffer::from_mut(&mut elements[range]),
            CpuStorage::I64(elements) => Buffer::from_mut(&mut elements[range]),
            CpuStorage::BF16(elements) => Buffer::from_mut(&mut elements[range]),
            CpuStorage::F16(elements) => Buffer::from_mut(&mut elements[range]),
            CpuStorage::F32(elements) => Buffer::from_mut(&mut elements[range]),
            CpuStorage::F64(elements) => Buffer::from_mut(&mut elements[range]),
            _ => {
                return Err(unsupported(
                    "the element type of this tensor is not supported",
                ));
            }
        };
        let body = self.body.take();
        let body = body.ok_or_else(|| unsupported("candle lent a tensor's memory twice"))?;
        body(shaped(buffer, layout)?)
    }
}

impl<F, R> InplaceOp1 for Lend<F, R>
where
    F: FnOnce(Buffer<'_>) -> Result<R>,
{
    fn name(&self) -> &'static str {
        "rcomm"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let result = self.run(storage, layout);
        self.result.set(Some(result));
        Ok(())
    }
}

/// Copies the elements of a tensor, in its shape, into a buffer that owns its memory, as asynchronous
/// operations require.
///
/// # Errors
/// Those of [`read`].
pub fn copy_of(tensor: &Tensor) -> Result<Buffer<'static>> {
    read(tensor, |buffer| buffer.to_owned())
}

/// Makes a tensor of the elements and the shape of a buffer that owns its memory. Nothing is copied.
///
/// # Errors
/// `Unsupported` if the element type is not supported, or the buffer does not own its memory.
pub fn tensor_of(buffer: Buffer<'static>) -> Result<Tensor> {
    fn make<T: rcomm::Element + candle_core::WithDType>(buffer: Buffer<'static>) -> Result<Tensor> {
        let dims: Vec<usize> = buffer
            .shape()
            .iter()
            .map(|&extent| extent as usize)
            .collect();
        let vec: Vec<T> = buffer.into_vec().map_err(|_| {
            unsupported(
                "a buffer that does not own its memory cannot become a tensor: pass a copy of it \
                     (Buffer::to_owned)",
            )
        })?;
        let tensor = Tensor::from_vec(vec, dims, &candle_core::Device::Cpu);
        tensor.map_err(from_candle)
    }
    match buffer.dtype() {
        DType::U8 => make::<u8>(buffer),
        DType::U32 => make::<u32>(buffer),
        DType::I16 => make::<i16>(buffer),
        DType::I32 => make::<i32>(buffer),
        DType::I64 => make::<i64>(buffer),
        DType::Bf16 => make::<bf16>(buffer),
        DType::F16 => make::<f16>(buffer),
        DType::F32 => make::<f32>(buffer),
        DType::F64 => make::<f64>(buffer),
        other => Err(unsupported(format!(
            "a buffer of {other} cannot become a tensor of candle"
        ))),
    }
}

fn range_of(layout: &Layout) -> Result<Range<usize>> {
    let offsets = layout.contiguous_offsets();
    let (start, end) = offsets.ok_or_else(|| {
        let list = |numbers: &[usize]| {
            let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
            numbers.join(", ")
        };
        let message = format!(
            "a tensor of shape ({}) and strides ({}) is not contiguous: call contiguous() first",
            list(layout.dims()),
            list(layout.stride())
        );
        Error::new(ErrorKind::InvalidArgument, message)
    })?;
    Ok(start..end)
}

fn shaped<'a>(buffer: Buffer<'a>, layout: &Layout) -> Result<Buffer<'a>> {
    let dims: Vec<u64> = layout.dims().iter().map(|&extent| extent as u64).collect();
    buffer.with_shape(&dims)
}

fn unsupported(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}

fn not_in_host_memory(tensor: &Tensor) -> Error {
    let place = match tensor.device() {
        candle_core::Device::Cpu => "the host",
        candle_core::Device::Cuda(_) => "a CUDA device",
        candle_core::Device::Metal(_) => "a Metal device",
    };
    unsupported(format!("a tensor on {place} is not in host memory"))
}

fn unsupported_type(tensor: &Tensor) -> Error {
    unsupported(format!(
        "tensors of candle's type {} are not supported",
        tensor.dtype().as_str()
    ))
}

pub(crate) fn from_candle(error: candle_core::Error) -> Error {
    Error::new(ErrorKind::InvalidArgument, error.to_string())
}

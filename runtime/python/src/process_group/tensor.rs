//! PyTorch's tensors as buffers: their memory, their element types, and which tensors are refused.

use crate::arrays::dlpack::{Exchange, View};
use crate::arrays::memory::Shape;
use crate::tensors::Types;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyString, PyTuple, PyType};
use rcomm::{Access, Buffer, DType, Device};
use smallvec::SmallVec;
use std::ptr::NonNull;
use std::sync::Arc;

/// The function that describes objects of `torch.Tensor`; `None` if this version of PyTorch has none.
static EXCHANGE: PyOnceLock<Option<Exchange>> = PyOnceLock::new();

/// `torch.strided`, the layout of dense tensors.
static STRIDED: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Whether an operation reads a tensor, writes it, or both.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
    ReadWrite,
}

/// A result in a row-major copy, which is copied back to its tensor when the operation has ended.
pub(crate) struct CopyBack {
    pub(crate) tensor: Py<PyAny>,
    pub(crate) copy: Py<PyAny>,
}

/// Converts the tensors of one operation into buffers.
pub(crate) struct Tensors<'py, 't> {
    py: Python<'py>,
    types: &'t Types,
    pub(crate) copies: Vec<CopyBack>,
}

impl<'py, 't> Tensors<'py, 't> {
    pub(crate) fn new(py: Python<'py>, types: &'t Types) -> Self {
        Self {
            py,
            types,
            copies: Vec::new(),
        }
    }

    /// The tensor's memory; that of a copy if the tensor's elements are not in row-major order, or if it is a view
    /// whose elements are the conjugates or the negatives of what is in memory.
    pub(crate) fn buffer(
        &mut self,
        tensor: &Bound<'py, PyAny>,
        usage: Use,
    ) -> PyResult<Buffer<'static>> {
        if let Some(view) = self.view(tensor)? {
            return Self::of_memory(tensor, view.address, view.dtype, &view.shape, usage);
        }
        let py = self.py;
        let dtype = self.check(tensor)?;
        let in_order = tensor.call_method0(intern!(py, "is_contiguous"))?;
        let is_plain = in_order.is_truthy()? && !self.is_lazy(tensor, dtype)?;
        let copy = if is_plain {
            None
        } else {
            Some(self.row_major_copy(tensor, usage)?)
        };
        let memory = copy.as_ref().unwrap_or(tensor);
        let address: usize = memory.call_method0(intern!(py, "data_ptr"))?.extract()?;
        Self::of_memory(memory, address, dtype, &shape_of(memory)?, usage)
    }

    /// Describes a tensor whose memory holds its elements in row-major order, without reading its attributes one by
    /// one; `None` for any other tensor.
    fn view(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<View>> {
        let py = self.py;
        let exchange = EXCHANGE.get_or_try_init(py, || {
            let torch = py.import(intern!(py, "torch"))?;
            let kind = torch.getattr(intern!(py, "Tensor"))?;
            Ok::<_, PyErr>(Exchange::of(&kind.cast_into::<PyType>()?))
        })?;
        let view = exchange.as_ref().and_then(|exchange| exchange.view(tensor));
        match view {
            Some(view)
                if !self.is_packed(tensor, view.dtype)? && !self.is_lazy(tensor, view.dtype)? =>
            {
                Ok(Some(view))
            }
            _ => Ok(None),
        }
    }

    /// Whether the tensor's elements are of another type than `described`: DLPack describes some that are narrower than
    /// a byte as whole bytes.
    fn is_packed(&self, tensor: &Bound<'py, PyAny>, described: DType) -> PyResult<bool> {
        if !matches!(described, DType::I8 | DType::U8) {
            return Ok(false);
        }
        let dtype = tensor.getattr(intern!(self.py, "dtype"))?;
        Ok(self.types.of(&dtype) != described)
    }

    /// Whether the tensor is a view whose elements are the conjugates or the negatives of what is in memory.
    fn is_lazy(&self, tensor: &Bound<'py, PyAny>, dtype: DType) -> PyResult<bool> {
        let py = self.py;
        let is_complex = matches!(dtype, DType::Complex64 | DType::Complex128);
        Ok((is_complex && is_set(tensor, intern!(py, "is_conj"))?)
            || is_set(tensor, intern!(py, "is_neg"))?)
    }

    /// The buffer of a tensor's memory: `shape.elements` elements at `address`.
    fn of_memory(
        tensor: &Bound<'py, PyAny>,
        address: usize,
        dtype: DType,
        shape: &Shape,
        usage: Use,
    ) -> PyResult<Buffer<'static>> {
        let access = match usage {
            Use::Read => Access::Read,
            Use::Write | Use::ReadWrite => Access::Write,
        };
        if address == 0 && shape.elements > 0 {
            return Err(without_memory(tensor));
        }
        let owner = Arc::new(tensor.clone().unbind());
        let data = NonNull::new(address as *mut u8).unwrap_or(NonNull::dangling());
        // SAFETY: PyTorch keeps these elements of this type at this address for as long as the tensor lives, which
        // `owner` makes sure of; without elements, no memory is used. It is plain host memory in row-major order
        // (checked by the callers). torch.distributed requires of its callers that nothing else uses the memory until
        // the operation has ended.
        let buffer =
            unsafe { Buffer::from_raw(data, shape.elements, dtype, Device::Cpu, access, owner) };
        let buffer = buffer.map_err(|error| PyValueError::new_err(error.to_string()))?;
        match shape.extents() {
            Some(extents) if extents.len() != 1 => buffer
                .with_shape(extents)
                .map_err(|error| PyValueError::new_err(error.to_string())),
            _ => Ok(buffer),
        }
    }

    /// Calls `buffer` for each tensor of a list.
    pub(crate) fn buffers(
        &mut self,
        tensors: &[Bound<'py, PyAny>],
        usage: Use,
    ) -> PyResult<Vec<Buffer<'static>>> {
        let buffers = tensors.iter().map(|tensor| self.buffer(tensor, usage));
        buffers.collect()
    }

    /// The memory of an input; that of a copy if the input overlaps an output of the same operation.
    pub(crate) fn separate_input(
        &mut self,
        input: &Bound<'py, PyAny>,
        outputs: &[Buffer<'static>],
    ) -> PyResult<Buffer<'static>> {
        let buffer = self.buffer(input, Use::Read)?;
        let (start, end) = extent(&buffer);
        let overlaps = outputs
            .iter()
            .map(extent)
            .any(|(output_start, output_end)| start < output_end && output_start < end);
        if !overlaps {
            return Ok(buffer);
        }
        let copy = input.call_method0(intern!(self.py, "clone"))?;
        self.buffer(&copy, Use::Read)
    }

    /// The memory of each input, as `separate_input` gives it.
    pub(crate) fn separate_inputs(
        &mut self,
        inputs: &[Bound<'py, PyAny>],
        outputs: &[Buffer<'static>],
    ) -> PyResult<Vec<Buffer<'static>>> {
        let buffers = inputs
            .iter()
            .map(|input| self.separate_input(input, outputs));
        buffers.collect()
    }

    /// A copy, in row-major order, of a tensor that is not plain memory in this order. If the operation writes the
    /// tensor, the copy is copied back when the operation has ended; a tensor to which that is not possible is refused.
    fn row_major_copy(
        &mut self,
        tensor: &Bound<'py, PyAny>,
        usage: Use,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        if usage != Use::Read && may_overlap(tensor)? {
            return Err(PyValueError::new_err(
                "rcomm cannot write a tensor some of whose elements may share memory, as those of an expanded one do: \
                 give a clone() of it",
            ));
        }
        let detached = tensor.call_method0(intern!(py, "detach"))?;
        let plain = detached.call_method0(intern!(py, "resolve_conj"))?;
        let plain = plain.call_method0(intern!(py, "resolve_neg"))?;
        let copy = plain.call_method0(intern!(py, "contiguous"))?;
        if usage != Use::Read {
            self.copies.push(CopyBack {
                tensor: detached.unbind(),
                copy: copy.clone().unbind(),
            });
        }
        Ok(copy)
    }

    /// The element type; an error for a tensor that is not a dense one in the host's memory, or whose elements rcomm
    /// cannot communicate.
    fn check(&self, tensor: &Bound<'py, PyAny>) -> PyResult<DType> {
        let py = self.py;
        let on_host = tensor.getattr(intern!(py, "is_cpu")).map_err(|_| {
            PyTypeError::new_err(format!("rcomm takes tensors, not {}", kind_of(tensor)))
        })?;
        if !on_host.is_truthy()? {
            let device = tensor.getattr(intern!(py, "device"))?.str()?;
            return Err(PyValueError::new_err(format!(
                "rcomm takes tensors on the CPU, and this one is on {device}: name a backend for that \
                 device as well, as in init_process_group(\"cpu:rcomm,cuda:nccl\")"
            )));
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let known = self.types.of(&dtype);
        if known == DType::Other {
            return Err(PyValueError::new_err(format!(
                "rcomm cannot communicate elements of type {dtype}: view them as a plain type, \
                 such as torch.uint8"
            )));
        }
        if !is_strided(tensor)? {
            let layout = tensor.getattr(intern!(py, "layout"))?.str()?;
            return Err(PyValueError::new_err(format!(
                "rcomm takes dense tensors, and this one is {layout}: only all_reduce with ReduceOp.SUM takes \
                 sparse ones"
            )));
        }
        Ok(known)
    }
}

/// Whether the tensor is dense: neither sparse nor of another special layout.
pub(crate) fn is_strided(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let strided = STRIDED.get_or_try_init(py, || {
        let torch = py.import(intern!(py, "torch"))?;
        Ok::<_, PyErr>(torch.getattr(intern!(py, "strided"))?.unbind())
    })?;
    Ok(tensor.getattr(intern!(py, "layout"))?.is(strided.bind(py)))
}

/// What this method of the tensor, which takes no arguments, answers.
fn is_set(tensor: &Bound<'_, PyAny>, method: &Bound<'_, PyString>) -> PyResult<bool> {
    tensor.call_method0(method)?.is_truthy()
}

/// Whether two elements of the tensor may lie at one address. The answer may be true although none do, but only for
/// tensors whose dimensions interlock, which only `as_strided` makes.
fn may_overlap(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let extents: Vec<usize> = tensor.getattr(intern!(py, "shape"))?.extract()?;
    let strides: Vec<usize> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
    if extents.contains(&0) {
        return Ok(false);
    }
    let mut dimensions: Vec<_> = strides.into_iter().zip(extents).collect();
    dimensions.retain(|(_, extent)| *extent > 1);
    dimensions.sort_unstable();
    // The farthest element that the dimensions of smaller strides reach.
    let mut reach = 0_usize;
    for (stride, extent) in dimensions {
        if stride <= reach {
            return Ok(true);
        }
        reach = reach.saturating_add(stride.saturating_mul(extent - 1));
    }
    Ok(false)
}

/// The error for a tensor without memory of its own: one that wraps others, or of which PyTorch computes only the
/// shape.
fn without_memory(tensor: &Bound<'_, PyAny>) -> PyErr {
    PyValueError::new_err(format!(
        "rcomm takes tensors that have memory, and this {} has none: of a tensor that wraps others, as DTensor does, \
         give the one inside",
        kind_of(tensor)
    ))
}

fn kind_of(object: &Bound<'_, PyAny>) -> String {
    let name = object.get_type().name();
    name.map_or_else(|_| "object".to_owned(), |name| name.to_string())
}

/// Whether all buffers have the same length.
pub(crate) fn are_even(buffers: &[Buffer<'static>]) -> bool {
    buffers
        .iter()
        .all(|buffer| buffer.len() == buffers[0].len())
}

/// A buffer's first address, and the one after its last.
fn extent(buffer: &Buffer<'_>) -> (usize, usize) {
    let start = buffer.as_ptr().addr();
    (start, start + buffer.size_bytes())
}

/// The tensor's shape.
fn shape_of(tensor: &Bound<'_, PyAny>) -> PyResult<Shape> {
    let shape = tensor.getattr(intern!(tensor.py(), "shape"))?;
    let extents = shape.cast::<PyTuple>()?.iter();
    let extents: SmallVec<[u64; 8]> = extents
        .map(|extent| extent.extract())
        .collect::<PyResult<_>>()?;
    Ok(Shape::of(extents.into_iter()))
}

/// Converts splits in rows to splits in elements; equal splits if none are given.
pub(crate) fn elements(
    tensor: &Bound<'_, PyAny>,
    splits: &[i64],
    ranks: usize,
) -> PyResult<Vec<usize>> {
    let (row_count, row_len) = shape_of(tensor)?.rows();
    if splits.is_empty() {
        return Ok(vec![row_count / ranks.max(1) * row_len; ranks]);
    }
    let in_elements = splits
        .iter()
        .map(|&rows| usize::try_from(rows).ok()?.checked_mul(row_len));
    in_elements.collect::<Option<_>>().ok_or_else(|| {
        let splits: Vec<String> = splits.iter().map(i64::to_string).collect();
        PyValueError::new_err(format!(
            "the splits {}, in rows of {row_len} elements, are negative or too large",
            splits.join(", ")
        ))
    })
}

/// A list of tensors; one tensor is a list of one.
pub(crate) fn list<'py>(tensors: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = tensors.cast::<PyList>() {
        return Ok(list.iter().collect());
    }
    if let Ok(tuple) = tensors.cast::<PyTuple>() {
        return Ok(tuple.iter().collect());
    }
    Ok(vec![tensors.clone()])
}

/// The one tensor of a list, or the tensor itself.
pub(crate) fn lone<'py>(tensors: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let Ok(list) = tensors.cast::<PyList>() else {
        return match list(tensors)?.as_slice() {
            [tensor] => Ok(tensor.clone()),
            tensors => Err(not_one(tensors.len())),
        };
    };
    match list.len() {
        1 => list.get_item(0),
        count => Err(not_one(count)),
    }
}

/// The tensors of the one list in a list of lists, or of a plain list; empty if there are none. More than one list is
/// refused.
pub(crate) fn lone_list<'py>(lists: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let outer = list(lists)?;
    match outer.as_slice() {
        [] => Ok(Vec::new()),
        [inner] if inner.cast::<PyList>().is_ok() || inner.cast::<PyTuple>().is_ok() => list(inner),
        [first, ..] if first.cast::<PyList>().is_ok() || first.cast::<PyTuple>().is_ok() => {
            Err(not_one(outer.len()))
        }
        _ => Ok(outer),
    }
}

/// The error where an operation takes one tensor, or one list of tensors.
fn not_one(found: usize) -> PyErr {
    PyValueError::new_err(format!(
        "{found} tensors, or lists of them, where one is needed: on the CPU a rank has one tensor in an operation"
    ))
}

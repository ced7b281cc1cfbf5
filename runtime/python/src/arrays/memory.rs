//! Arrays of other libraries as buffers.

use super::dlpack;
use super::errors::invalid;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use rcomm::{Access, Buffer, DType, Device};
use std::ptr::NonNull;
use std::sync::Arc;

/// The most dimensions of an array whose extents are kept; arrays of more dimensions are recorded as flat.
const MAX_DIMENSIONS: usize = 8;

/// `numpy.ndarray`, once it was looked up.
static NUMPY: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The arguments of `__dlpack__` that request a versioned capsule, which states whether its memory may be written.
static VERSIONED: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

/// The first type found that is not one of JAX, so that its module is not looked up in every call.
static MUTABLE: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// An array's extents.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    known: [u64; MAX_DIMENSIONS],
    dimensions: usize,
    pub(crate) elements: usize,
}

impl Shape {
    pub(crate) fn of(extents: impl Iterator<Item = u64>) -> Self {
        let mut read = Self {
            known: [0; MAX_DIMENSIONS],
            dimensions: 0,
            elements: 1,
        };
        for extent in extents {
            if let Some(place) = read.known.get_mut(read.dimensions) {
                *place = extent;
            }
            read.dimensions += 1;
            let extent = usize::try_from(extent).unwrap_or(usize::MAX);
            read.elements = read.elements.saturating_mul(extent);
        }
        read
    }

    /// The extents; `None` if there are more than [`MAX_DIMENSIONS`].
    pub(crate) fn extents(&self) -> Option<&[u64]> {
        self.known.get(..self.dimensions)
    }

    /// How many rows (the extent of the first dimension) there are, and how many elements a row has. An array without
    /// dimensions is one row of one element.
    pub(crate) fn rows(&self) -> (usize, usize) {
        match self.dimensions {
            0 => (1, 1),
            _ => {
                let rows = usize::try_from(self.known[0]).unwrap_or(usize::MAX);
                let row = self.extents().map(|extents| &extents[1..]);
                let row = row.map(|row| row.iter().product::<u64>() as usize);
                let row = row.unwrap_or_else(|| self.elements.checked_div(rows).unwrap_or(0));
                (rows, row)
            }
        }
    }
}

/// Whether an operation only reads an array, or writes it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    Write,
}

/// An array's memory, which `owner` keeps alive.
pub(super) struct Memory {
    address: usize,
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    usage: Use,
    owner: Arc<Py<PyAny>>,
}

impl Memory {
    /// The memory of an array, for an operation that reads or writes the array as `usage` says.
    ///
    /// # Errors
    /// `rcomm.InvalidArgument` says why the array cannot be used.
    pub(super) fn of(array: &Bound<'_, PyAny>, usage: Use) -> PyResult<Self> {
        let py = array.py();
        let Some(capsule) = capsule_of(array)? else {
            return Self::of_buffer(array, usage);
        };
        let view = dlpack::read(&capsule)
            .map_err(|reason| invalid(py, &format!("this {} {reason}", kind_of(array))))?;
        if usage == Use::Write && (view.is_read_only || is_immutable(array)) {
            return Err(invalid(
                py,
                &format!(
                    "this {} may only be read, and the operation writes it",
                    kind_of(array)
                ),
            ));
        }
        Ok(Self {
            address: view.address,
            dtype: view.dtype,
            shape: view.shape,
            usage,
            owner: Arc::new(capsule.unbind()),
        })
    }

    /// The memory of an object that has only Python's buffer protocol, such as a `bytearray`. If the object may only be
    /// read, such as `bytes`, it is the memory of a copy.
    fn of_buffer(array: &Bound<'_, PyAny>, usage: Use) -> PyResult<Self> {
        let py = array.py();
        let reader = py.import(intern!(py, "rcomm._arrays"))?;
        let view = reader.call_method1(intern!(py, "view"), (array, usage == Use::Write))?;
        type View<'py> = (usize, u8, u32, Vec<u64>, Bound<'py, PyAny>);
        let (address, code, bits, shape, owner): View<'_> = view.extract()?;
        let dtype = dlpack::dtype_of(code, bits);
        let dtype = dtype.ok_or_else(|| {
            let text = format!(
                "this {} has elements that rcomm cannot communicate",
                kind_of(array)
            );
            invalid(py, &text)
        })?;
        Ok(Self {
            address,
            dtype,
            shape: Shape::of(shape.into_iter()),
            usage,
            owner: Arc::new(owner.unbind()),
        })
    }

    pub(super) fn len(&self) -> usize {
        self.shape.elements
    }

    /// The whole memory as one buffer.
    pub(super) fn buffer(&self, py: Python<'_>) -> PyResult<Buffer<'static>> {
        let buffer = self.piece(py, 0, self.len())?;
        match self.shape.extents() {
            Some(extents) if extents.len() != 1 => buffer
                .with_shape(extents)
                .map_err(|error| invalid(py, &error.to_string())),
            _ => Ok(buffer),
        }
    }

    /// Pieces of these lengths, one after the other.
    ///
    /// # Errors
    /// `rcomm.InvalidArgument` if the lengths, in elements, do not add up to the whole memory.
    pub(super) fn pieces(&self, py: Python<'_>, lens: &[usize]) -> PyResult<Vec<Buffer<'static>>> {
        let total = lens
            .iter()
            .fold(0usize, |sum, len| sum.saturating_add(*len));
        if total != self.len() {
            return Err(invalid(
                py,
                &format!(
                    "the parts of all ranks have {total} elements together, and the array has {}: they must be equal",
                    self.len()
                ),
            ));
        }
        let mut start = 0;
        let mut pieces = Vec::with_capacity(lens.len());
        for &len in lens {
            pieces.push(self.piece(py, start, len)?);
            start += len;
        }
        Ok(pieces)
    }

    /// The `len` elements from `start` on, all of which are within the memory.
    fn piece(&self, py: Python<'_>, start: usize, len: usize) -> PyResult<Buffer<'static>> {
        let bytes = start * self.dtype.size().unwrap_or(0);
        let data = NonNull::new((self.address + bytes) as *mut u8);
        let access = match self.usage {
            Use::Read => Access::Read,
            Use::Write => Access::Write,
        };
        // SAFETY: the array's library says that these elements of this type are at the address, in the host's memory,
        // in row-major order and, for writing, that they may be written (checked by `of` or, for a buffer, by
        // `rcomm/_arrays.py`). `owner` keeps the memory. This module requires of its callers that nothing else uses
        // the memory until the operation has ended.
        let buffer = unsafe {
            Buffer::from_raw(
                data.unwrap_or(NonNull::dangling()),
                len,
                self.dtype,
                Device::Cpu,
                access,
                self.owner.clone(),
            )
        };
        buffer.map_err(|error| invalid(py, &error.to_string()))
    }
}

/// The array's capsule; `None` if the array has no DLPack.
///
/// # Errors
/// `rcomm.InvalidArgument` if the array's library refuses to make one.
fn capsule_of<'py>(array: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = array.py();
    // NumPy gives a capsule without a version in a third of the time, and refuses that for memory that may only be
    // read.
    if is_numpy(array)?
        && let Ok(capsule) = array.call_method0(intern!(py, "__dlpack__"))
    {
        return Ok(Some(capsule));
    }
    let Some(export) = array.getattr_opt(intern!(py, "__dlpack__"))? else {
        return Ok(None);
    };
    let arguments = VERSIONED.get_or_try_init(py, || {
        let arguments = PyDict::new(py);
        arguments.set_item("max_version", (1, 0))?;
        Ok::<_, PyErr>(arguments.unbind())
    })?;
    let capsule = match export.call(PyTuple::empty(py), Some(arguments.bind(py))) {
        // The array's library knows no versions.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => export.call0(),
        other => other,
    };
    capsule.map(Some).map_err(|error| {
        let text = format!(
            "this {} cannot be used by rcomm: {}",
            kind_of(array),
            error.value(py)
        );
        let refused = invalid(py, &text);
        refused.set_cause(py, Some(error));
        refused
    })
}

/// Whether the array is exactly a `numpy.ndarray`. Does not import NumPy.
fn is_numpy(array: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = array.py();
    if let Some(known) = NUMPY.get(py) {
        return Ok(array.get_type().is(known.bind(py)));
    }
    let modules = py.import(intern!(py, "sys"))?.getattr("modules")?;
    let Ok(numpy) = modules.get_item(intern!(py, "numpy")) else {
        return Ok(false);
    };
    let Ok(kind) = numpy.getattr(intern!(py, "ndarray")) else {
        return Ok(false);
    };
    let kind = kind.cast_into::<PyType>()?;
    Ok(array
        .get_type()
        .is(NUMPY.get_or_init(py, || kind.unbind()).bind(py)))
}

/// Whether the array is one of JAX: its memory must not be written, even if its capsule does not state that.
fn is_immutable(array: &Bound<'_, PyAny>) -> bool {
    let (py, kind) = (array.py(), array.get_type());
    if MUTABLE.get(py).is_some_and(|known| kind.is(known.bind(py))) {
        return false;
    }
    let is_of_jax = kind
        .module()
        .is_ok_and(|module| module.to_string_lossy().starts_with("jax"));
    if !is_of_jax {
        // Another thread may have kept another type.
        let _ = MUTABLE.set(py, kind.unbind());
    }
    is_of_jax
}

/// The name of an object's type, for errors.
pub(super) fn kind_of(object: &Bound<'_, PyAny>) -> String {
    let name = object.get_type().fully_qualified_name();
    name.map_or_else(|_| "object".to_owned(), |name| name.to_string())
}

/// A new array of this shape, with the element type of `like`: see `empty` in `rcomm/_arrays.py`.
pub(super) fn empty_like<'py>(
    like: &Bound<'py, PyAny>,
    shape: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let py = like.py();
    let maker = py.import(intern!(py, "rcomm._arrays"))?;
    maker.call_method1(intern!(py, "empty"), (like, PyTuple::new(py, shape)?))
}

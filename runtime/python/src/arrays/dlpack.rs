//! Reads the array that a DLPack capsule, or its library's table of functions, describes, by the structures of
//! `dlpack.h` 1.x.

use super::memory::Shape;
use pyo3::ffi::PyObject;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;
use rcomm::DType;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;

/// The name of a capsule that holds a [`Versioned`].
const VERSIONED: &CStr = c"dltensor_versioned";
/// The name of a capsule that holds an [`Unversioned`].
const UNVERSIONED: &CStr = c"dltensor";
/// The name of a capsule that holds an [`ExchangeTable`].
const EXCHANGE: &CStr = c"dlpack_exchange_api";
/// The newest major version whose structures are those of this file.
const MAJOR: u32 = 1;
/// The bit in [`Versioned::flags`] for memory that may not be written.
const READ_ONLY: u64 = 1;
/// `DLDeviceType` of memory that the host reads and writes: its own, and what CUDA and ROCm pin.
const ON_HOST: [i32; 3] = [1, 3, 11];
/// The most dimensions that are read.
const MAX_DIMENSIONS: usize = 64;

/// `DLDevice`.
#[repr(C)]
struct DeviceView {
    kind: i32,
    number: i32,
}

/// `DLDataType`.
#[repr(C)]
struct TypeView {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct TensorView {
    data: *mut c_void,
    device: DeviceView,
    dimensions: i32,
    dtype: TypeView,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned`; `manager` and `deleter` are for its owner only.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *const c_void,
    flags: u64,
    tensor: TensorView,
}

/// The beginning of `DLManagedTensor`.
#[repr(C)]
struct Unversioned {
    tensor: TensorView,
}

/// `DLPackDLTensorFromPyObjectNoSync`.
type ReadTensor = unsafe extern "C" fn(*mut PyObject, *mut TensorView) -> c_int;

/// `DLPackExchangeAPI` up to the function that is used here.
#[repr(C)]
struct ExchangeTable {
    major: u32,
    minor: u32,
    older: *const c_void,
    allocate: *const c_void,
    export: *const c_void,
    import: *const c_void,
    read: Option<ReadTensor>,
}

/// The array that a capsule or a table of functions describes.
pub(crate) struct View {
    pub(crate) address: usize,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(super) is_read_only: bool,
}

/// The function by which a library describes its arrays of one type without making an object.
pub(crate) struct Exchange {
    kind: Py<PyType>,
    read: ReadTensor,
}

impl Exchange {
    /// The function for arrays of this type; `None` if its library has none, or one of an unknown version.
    pub(crate) fn of(kind: &Bound<'_, PyType>) -> Option<Self> {
        let capsule = kind.getattr(intern!(kind.py(), "__dlpack_c_exchange_api__"));
        let table = content(&capsule.ok()?, EXCHANGE).cast::<ExchangeTable>();
        // SAFETY: a capsule with this name points to a structure that lives as long as the process and begins with the
        // version, whichever that is.
        if table.is_null() || unsafe { (*table).major } != MAJOR {
            return None;
        }
        // SAFETY: as above, and in this version all fields are where this file has them.
        let read = unsafe { (*table).read }?;
        Some(Self {
            kind: kind.clone().unbind(),
            read,
        })
    }

    /// Describes an array; `None` if rcomm cannot use its memory as it is, or if the array is not exactly of this type:
    /// a derived type may have no memory, or another meaning of it.
    #[inline]
    pub(crate) fn view(&self, array: &Bound<'_, PyAny>) -> Option<View> {
        if !array.get_type().is(&self.kind) {
            return None;
        }
        let mut view = MaybeUninit::uninit();
        // SAFETY: the interpreter is held, and the array is of the type of which the function was read.
        if unsafe { (self.read)(array.as_ptr(), view.as_mut_ptr()) } != 0 {
            // The caller finds out what is wrong with the array.
            drop(PyErr::take(array.py()));
            return None;
        }
        // SAFETY: the function has succeeded, so it has filled the structure, whose lists are as long as it says until
        // the array changes. Nothing changes it before this returns.
        unsafe { describe(&view.assume_init(), false) }.ok()
    }
}

/// Reads a capsule, which keeps the array's memory and the structures that describe it for as long as it lives. This
/// function does not take them over: the capsule's destructor frees them.
///
/// # Errors
/// The end of a sentence that begins with "this array" and says why rcomm cannot use the array.
pub(super) fn read(capsule: &Bound<'_, PyAny>) -> Result<View, String> {
    let versioned = content(capsule, VERSIONED).cast::<Versioned>();
    // SAFETY: a capsule with this name points to this structure, which lives as long as the capsule, and the capsule is
    // borrowed. The structure's first field is at the same place in all versions.
    if let Some(major) = unsafe { versioned.as_ref() }.map(|view| view.major) {
        if major > MAJOR {
            return Err(format!(
                "uses version {major} of DLPack, and rcomm reads up to {MAJOR}"
            ));
        }
        // SAFETY: as above, and in this version all fields are where this file has them.
        let view = unsafe { &*versioned };
        // SAFETY: the structure's lists are as long as it says.
        return unsafe { describe(&view.tensor, view.flags & READ_ONLY != 0) };
    }
    let plain = content(capsule, UNVERSIONED).cast::<Unversioned>();
    // SAFETY: a capsule with this name points to this structure, which lives as long as the capsule.
    match unsafe { plain.as_ref() } {
        // SAFETY: the structure's lists are as long as it says.
        Some(view) => unsafe { describe(&view.tensor, false) },
        None => Err("gave no capsule of DLPack".to_owned()),
    }
}

/// What a capsule with this name points to; NULL if the object is none.
fn content(capsule: &Bound<'_, PyAny>, name: &CStr) -> *mut c_void {
    let pointer = capsule.as_ptr();
    // SAFETY: the interpreter is held; any object may be passed. For a capsule with this name the pointer is not NULL.
    unsafe {
        match pyo3::ffi::PyCapsule_IsValid(pointer, name.as_ptr()) {
            1 => pyo3::ffi::PyCapsule_GetPointer(pointer, name.as_ptr()),
            _ => std::ptr::null_mut(),
        }
    }
}

/// Describes an array if rcomm can use it.
///
/// # Errors
/// Same as [`read`].
///
/// # Safety
/// During the call, `shape` holds as many extents as there are dimensions, and so does `strides`; either may be NULL.
unsafe fn describe(view: &TensorView, is_read_only: bool) -> Result<View, String> {
    if !ON_HOST.contains(&view.device.kind) {
        return Err(format!(
            "is on a device (number {} of DLPack's kind {}), and rcomm takes arrays in the host's memory",
            view.device.number, view.device.kind
        ));
    }
    let dtype = dtype_of(view.dtype.code, view.dtype.bits.into());
    let Some(dtype) = dtype.filter(|_| view.dtype.lanes == 1) else {
        return Err(format!(
            "has elements that rcomm cannot communicate (DLPack's type {}, {} bits, {} lanes): view them as a plain \
             type",
            view.dtype.code, view.dtype.bits, view.dtype.lanes
        ));
    };
    let dimensions = usize::try_from(view.dimensions).unwrap_or(0);
    if dimensions > MAX_DIMENSIONS {
        return Err(format!(
            "has {dimensions} dimensions, and rcomm reads up to {MAX_DIMENSIONS}"
        ));
    }
    let list = |list: *const i64| match list.is_null() || dimensions == 0 {
        true => None,
        // SAFETY: the list is not NULL, so it holds an entry for each dimension during this call (the caller's
        // contract).
        false => Some(unsafe { std::slice::from_raw_parts(list, dimensions) }),
    };
    let shape = list(view.shape).unwrap_or(&[]);
    if !is_row_major(shape, list(view.strides)) {
        return Err(
            "is not in row-major order without gaps: pass a contiguous copy, as numpy.ascontiguousarray makes"
                .to_owned(),
        );
    }
    let offset = usize::try_from(view.byte_offset).unwrap_or(usize::MAX);
    Ok(View {
        address: view.data.addr().saturating_add(offset),
        dtype,
        shape: Shape::of(
            shape
                .iter()
                .map(|&extent| u64::try_from(extent).unwrap_or(0)),
        ),
        is_read_only,
    })
}

/// Whether an array of this shape lies in row-major order without gaps; without strides, it does.
fn is_row_major(shape: &[i64], strides: Option<&[i64]>) -> bool {
    let Some(strides) = strides else { return true };
    if shape.contains(&0) {
        return true;
    }
    let mut expected = 1i64;
    for (&extent, &stride) in shape.iter().zip(strides).rev() {
        if extent != 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(extent);
    }
    true
}

/// The element type with this type code of DLPack and this number of bits; `None` if rcomm has none.
pub(super) fn dtype_of(code: u8, bits: u32) -> Option<DType> {
    Some(match (code, bits) {
        (0, 8) => DType::I8,
        (0, 16) => DType::I16,
        (0, 32) => DType::I32,
        (0, 64) => DType::I64,
        (1, 8) => DType::U8,
        (1, 16) => DType::U16,
        (1, 32) => DType::U32,
        (1, 64) => DType::U64,
        (2, 16) => DType::F16,
        (2, 32) => DType::F32,
        (2, 64) => DType::F64,
        (4, 16) => DType::Bf16,
        (5, 64) => DType::Complex64,
        (5, 128) => DType::Complex128,
        (6, 8) => DType::Bool,
        (10, 8) => DType::F8E4M3,
        (12, 8) => DType::F8E5M2,
        _ => return None,
    })
}

//! Shapes and types of PyTorch's tensors, read by their attributes: nothing of PyTorch is linked.

use pyo3::intern;
use pyo3::prelude::*;
use rcomm_recorder::model::DType;
use rcomm_recorder::record::Tensor;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Mutex;

/// The element types seen so far. PyTorch's types are single objects that live as long as the process.
#[derive(Default)]
pub(crate) struct Types(Mutex<HashMap<usize, DType>>);

/// PyTorch's names of the supported types.
const NAMES: &[(&str, DType)] = &[
    ("torch.float32", DType::F32),
    ("torch.float64", DType::F64),
    ("torch.float16", DType::F16),
    ("torch.bfloat16", DType::Bf16),
    ("torch.int8", DType::I8),
    ("torch.uint8", DType::U8),
    ("torch.int16", DType::I16),
    ("torch.int32", DType::I32),
    ("torch.int64", DType::I64),
    ("torch.uint16", DType::U16),
    ("torch.uint32", DType::U32),
    ("torch.uint64", DType::U64),
    ("torch.bool", DType::Bool),
    ("torch.complex64", DType::Complex64),
    ("torch.complex128", DType::Complex128),
    ("torch.float8_e4m3fn", DType::F8E4M3),
    ("torch.float8_e5m2", DType::F8E5M2),
];

impl Types {
    /// The element type; `Other` for one that is not supported.
    pub(crate) fn of(&self, dtype: &Bound<'_, PyAny>) -> DType {
        let address = dtype.as_ptr().addr();
        let cached = |types: &Self| types.0.lock().ok()?.get(&address).copied();
        cached(self).unwrap_or_else(|| {
            let name = dtype.str().map(|name| name.to_string()).unwrap_or_default();
            let found = NAMES.iter().find(|(known, _)| *known == name);
            let dtype = found.map_or(DType::Other, |&(_, dtype)| dtype);
            if let Ok(mut types) = self.0.lock() {
                types.insert(address, dtype);
            }
            dtype
        })
    }
}

/// The most tensors that are read of the inputs, or the outputs, of an operation: DDP and FSDP pass one.
const MAX_TENSORS: usize = 1_024;

/// How many tensors, and how many extents of them in all, are described without a use of the heap.
const INLINE_TENSORS: usize = 2;
const INLINE_EXTENTS: usize = 8;

/// The tensors of one side of an operation: its inputs or its outputs.
#[derive(Default)]
pub(crate) struct Side {
    types: SmallVec<[DType; INLINE_TENSORS]>,
    /// How many dimensions each tensor has.
    dimensions: SmallVec<[usize; INLINE_TENSORS]>,
    extents: SmallVec<[u64; INLINE_EXTENTS]>,
    /// Whether the first tensor is in the host's memory.
    pub(crate) on_host: bool,
}

impl Side {
    /// Reads the first [`MAX_TENSORS`] tensors of a list. An error if the argument is no list of tensors.
    pub(crate) fn read(list: &Bound<'_, PyAny>, types: &Types) -> PyResult<Self> {
        let py = list.py();
        let mut side = Self::default();
        let list = list.cast::<pyo3::types::PyList>()?;
        for tensor in list.iter().take(MAX_TENSORS) {
            if side.types.is_empty() {
                side.on_host = tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?;
            }
            let shape = tensor.getattr(intern!(py, "shape"))?;
            let before = side.extents.len();
            for extent in shape.cast::<pyo3::types::PyTuple>()?.iter() {
                side.extents.push(extent.extract()?);
            }
            side.dimensions.push(side.extents.len() - before);
            side.types
                .push(types.of(&tensor.getattr(intern!(py, "dtype"))?));
        }
        Ok(side)
    }

    /// An empty side, of tensors in the host's memory or elsewhere.
    pub(crate) fn on(on_host: bool) -> Self {
        Self {
            on_host,
            ..Self::default()
        }
    }

    /// Adds a tensor by PyTorch's name of its element type and its extents, unless there are [`MAX_TENSORS`] already.
    pub(crate) fn push(&mut self, dtype: &str, extents: &[i64]) {
        if self.types.len() < MAX_TENSORS {
            self.types
                .push(DType::from_name(dtype).unwrap_or(DType::Other));
            self.dimensions.push(extents.len());
            let sizes = extents
                .iter()
                .map(|&extent| u64::try_from(extent).unwrap_or(0));
            self.extents.extend(sizes);
        }
    }

    /// The tensors in the recorder's form.
    pub(crate) fn tensors(&self) -> SmallVec<[Tensor<'_>; INLINE_TENSORS]> {
        let mut rest = &self.extents[..];
        let tensor = |(&dtype, &dimensions): (&DType, &usize)| {
            let (shape, extents_after) = rest.split_at(dimensions);
            rest = extents_after;
            Tensor { dtype, shape }
        };
        self.types
            .iter()
            .zip(&self.dimensions)
            .map(tensor)
            .collect()
    }
}

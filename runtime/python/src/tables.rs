//! The tables of a report for Python, given to other libraries through Arrow's PyCapsule interface, without a copy.
//!
//! `rcomm-fr analyze --format columns` prints the values, of which this module makes arrays in Arrow's layout.

use arrow_array::cast::AsArray;
use arrow_array::ffi::{FFI_ArrowSchema, to_ffi};
use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::types::{Float32Type, Float64Type, Int64Type};
use arrow_array::{
    Array, ArrayRef, BooleanArray, Float32Array, Float64Array, Int64Array, RecordBatch,
    RecordBatchIterator, StringArray, StructArray,
};
use arrow_schema::{DataType, Field, Schema};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use serde::Deserialize;
use std::ffi::CString;
use std::sync::Arc;

/// The format of the output that is read.
const SCHEMA: &str = "rcomm.columns/1";

/// The output of `rcomm-fr analyze --format columns`.
#[derive(Deserialize)]
struct Document {
    schema: String,
    tables: Vec<TableOfValues>,
}

#[derive(Deserialize)]
struct TableOfValues {
    name: String,
    columns: Vec<Column>,
}

#[derive(Deserialize)]
struct Column {
    name: String,
    values: Values,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Values {
    Int64(Vec<Option<i64>>),
    Float32(Vec<Option<f32>>),
    Float64(Vec<Option<f64>>),
    Bool(Vec<Option<bool>>),
    Text(Vec<Option<String>>),
}

impl Values {
    fn into_array(self) -> ArrayRef {
        match self {
            Self::Int64(values) => Arc::new(Int64Array::from(values)),
            Self::Float32(values) => Arc::new(Float32Array::from(values)),
            Self::Float64(values) => Arc::new(Float64Array::from(values)),
            Self::Bool(values) => Arc::new(BooleanArray::from(values)),
            Self::Text(values) => Arc::new(StringArray::from(values)),
        }
    }
}

/// One table of a report: see `rcomm.Table` in the stubs.
#[pyclass(frozen, module = "rcomm")]
pub(crate) struct Table {
    name: String,
    batch: RecordBatch,
}

/// The tables in the output of `rcomm-fr analyze --format columns`, in the order of the output. Raises ValueError for
/// any other text.
#[pyfunction]
pub(crate) fn read_tables(py: Python<'_>, text: &[u8]) -> PyResult<Vec<Table>> {
    py.detach(|| read(text)).map_err(PyValueError::new_err)
}

fn read(text: &[u8]) -> Result<Vec<Table>, String> {
    let document: Document = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if document.schema != SCHEMA {
        let found = document.schema;
        return Err(format!(
            "the tables have the format {found}, and this module reads {SCHEMA}: use rcomm-fr of the same version"
        ));
    }
    let tables = document.tables.into_iter();
    tables.map(Table::from_values).collect()
}

impl Table {
    fn from_values(table: TableOfValues) -> Result<Self, String> {
        let mut fields = Vec::new();
        let mut arrays = Vec::new();
        for column in table.columns {
            let array = column.values.into_array();
            fields.push(Field::new(column.name, array.data_type().clone(), true));
            arrays.push(array);
        }
        let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays);
        let batch = batch.map_err(|error| format!("table {}: {error}", table.name))?;
        Ok(Self {
            name: table.name,
            batch,
        })
    }
}

fn value_error(error: arrow_schema::ArrowError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A capsule with this name, as Arrow's PyCapsule interface prescribes it, that holds `value`.
fn capsule<'py, T: 'static + Send>(
    py: Python<'py>,
    name: &str,
    value: T,
) -> PyResult<Bound<'py, PyCapsule>> {
    // A library that takes the content marks it as released. Otherwise the capsule's destructor releases it.
    PyCapsule::new(py, value, Some(CString::new(name)?))
}

#[pymethods]
impl Table {
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn columns(&self) -> Vec<String> {
        let schema = self.batch.schema();
        let fields = schema.fields().iter();
        fields.map(|field| field.name().clone()).collect()
    }

    fn __len__(&self) -> usize {
        self.batch.num_rows()
    }

    fn __repr__(&self) -> String {
        let (rows, columns) = (self.batch.num_rows(), self.batch.num_columns());
        format!(
            "<rcomm.Table {:?}, {rows} rows, {columns} columns>",
            self.name
        )
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (field, array) in self
            .batch
            .schema()
            .fields()
            .iter()
            .zip(self.batch.columns())
        {
            let name = field.name();
            match array.data_type() {
                DataType::Int64 => {
                    let values = array.as_primitive::<Int64Type>().iter();
                    dict.set_item(name, values.collect::<Vec<_>>())?;
                }
                DataType::Float32 => {
                    let values = array.as_primitive::<Float32Type>().iter();
                    dict.set_item(name, values.collect::<Vec<_>>())?;
                }
                DataType::Float64 => {
                    let values = array.as_primitive::<Float64Type>().iter();
                    dict.set_item(name, values.collect::<Vec<_>>())?;
                }
                DataType::Boolean => {
                    let values = array.as_boolean().iter();
                    dict.set_item(name, values.collect::<Vec<_>>())?;
                }
                _ => {
                    let values = array.as_string::<i32>().iter();
                    dict.set_item(name, values.collect::<Vec<_>>())?;
                }
            }
        }
        Ok(dict)
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let schema = FFI_ArrowSchema::try_from(&*self.batch.schema()).map_err(value_error)?;
        capsule(py, "arrow_schema", schema)
    }

    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
        // The interface lets a producer ignore the schema that was requested.
        drop(requested_schema);
        let (array, schema) =
            to_ffi(&StructArray::from(self.batch.clone()).to_data()).map_err(value_error)?;
        Ok((
            capsule(py, "arrow_schema", schema)?,
            capsule(py, "arrow_array", array)?,
        ))
    }

    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        drop(requested_schema);
        let batches = [Ok(self.batch.clone())];
        let reader = RecordBatchIterator::new(batches, self.batch.schema());
        let stream = FFI_ArrowArrayStream::new(Box::new(reader));
        capsule(py, "arrow_array_stream", stream)
    }
}

//! Values other than arrays, which travel as JSON. `rcomm/_objects.py` turns values into texts and back.

use super::errors::invalid;
use super::group::ArrayGroup;
use super::issue::CallOptions;
use pyo3::intern;
use pyo3::prelude::*;
use rcomm::{Error, ProcessGroup};
use serde_json::Value;

/// Turns values into JSON and back. With `pickle`, the JSON contains the value's pickle; without, pickles are refused.
#[derive(Clone, Copy)]
pub(super) struct Codec<'py> {
    py: Python<'py>,
    pickle: bool,
}

impl<'py> Codec<'py> {
    pub(super) fn new(py: Python<'py>, pickle: bool) -> Self {
        Self { py, pickle }
    }

    pub(super) fn encode(&self, value: &Bound<'py, PyAny>) -> PyResult<Value> {
        let py = self.py;
        let module = py.import(intern!(py, "rcomm._objects"))?;
        let text = module.call_method1(intern!(py, "encode"), (value, self.pickle))?;
        let text: String = text.extract()?;
        serde_json::from_str(&text)
            .map_err(|error| invalid(py, &format!("the value cannot be sent as JSON: {error}")))
    }

    pub(super) fn decode(&self, value: &Value) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        let module = py.import(intern!(py, "rcomm._objects"))?;
        module.call_method1(intern!(py, "decode"), (value.to_string(), self.pickle))
    }

    pub(super) fn decode_all(&self, values: &[Value]) -> PyResult<Py<PyAny>> {
        let values = values.iter().map(|value| self.decode(value));
        let values = values.collect::<PyResult<Vec<_>>>()?;
        Ok(pyo3::types::PyList::new(self.py, values)?
            .into_any()
            .unbind())
    }
}

impl ArrayGroup {
    /// Runs a blocking call on this group without the interpreter's lock, with the time-out if one is given.
    pub(super) fn run_blocking<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<&Bound<'_, PyAny>>,
        run: impl FnOnce(&ProcessGroup) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let options = CallOptions::read(timeout, true)?;
        let handle = self.handle(py, options.timeout)?;
        let result = py.detach(|| run(&handle));
        result.map_err(|error| self.shared.exception_for(py, &error))
    }
}

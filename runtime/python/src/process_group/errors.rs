//! The core's errors as PyTorch's exceptions.

use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use rcomm::{Error, ErrorKind};
use std::time::Duration;

/// The class that PyTorch has for this kind of error, in `torch.distributed`.
const fn class_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::PeerLost | ErrorKind::Io | ErrorKind::Unauthorized => "DistNetworkError",
        ErrorKind::Store => "DistStoreError",
        _ => "DistBackendError",
    }
}

/// An error as an exception: `ValueError` for a wrong argument; `NotImplementedError` for an operation that does not
/// exist here or a reduction that is not defined for these elements; else one of PyTorch's, all of which are
/// `RuntimeError`s. The exception has the attributes `kind`, the name of the error's kind, such as `Timeout` or
/// `PeerLost`, and `ranks`, the ranks that the error names, by their numbers in the world.
///
/// Programs written for PyTorch search the text of a time-out for PyTorch's own wording, so that text begins with it.
/// `timeout` is the time that it names.
pub(crate) fn exception_for(py: Python<'_>, error: &Error, timeout: Option<Duration>) -> PyErr {
    let text = match (error.kind(), timeout) {
        (ErrorKind::Timeout, Some(timeout)) => {
            format!(
                "rcomm: Timed out waiting {}ms: {error}",
                timeout.as_millis()
            )
        }
        _ => format!("rcomm: {error}"),
    };
    let exception = match error.kind() {
        ErrorKind::InvalidArgument => PyValueError::new_err(text),
        ErrorKind::Unsupported => PyNotImplementedError::new_err(text),
        kind => of_torch(py, class_of(kind), text),
    };
    let value = exception.value(py);
    let kind = format!("{:?}", error.kind());
    // An exception without its attributes is better than another exception.
    let _ = value.setattr(intern!(py, "kind"), kind);
    let _ = value.setattr(intern!(py, "ranks"), error.ranks().to_vec());
    exception
}

/// An exception of this class of `torch.distributed`; a `RuntimeError` if making one fails.
pub(crate) fn of_torch(py: Python<'_>, class: &str, text: String) -> PyErr {
    let exception = py
        .import(intern!(py, "torch.distributed"))
        .and_then(|module| module.getattr(class)?.call1((text.clone(),)));
    match exception {
        Ok(value) => PyErr::from_value(value),
        Err(_) => PyRuntimeError::new_err(text),
    }
}

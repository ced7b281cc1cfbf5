//! The core's errors as the exceptions of `rcomm/_errors.py`.

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use rcomm::{Error, ErrorKind};
use std::path::Path;

/// The name of the class in `rcomm/_errors.py`.
const fn class_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Timeout => "Timeout",
        ErrorKind::Aborted => "Aborted",
        ErrorKind::PeerLost => "PeerLost",
        ErrorKind::Mismatch => "Mismatch",
        ErrorKind::InvalidArgument => "InvalidArgument",
        ErrorKind::Unsupported => "Unsupported",
        ErrorKind::Closed => "Closed",
        _ => "Error",
    }
}

/// An error as an exception that has the error's kind, ranks, operation, sequence number and group as attributes.
/// `records` is where the records of the job's ranks on this host are, for `Error.report()`.
pub(super) fn exception_for(py: Python<'_>, error: &Error, records: Option<&Path>) -> PyErr {
    let exception = of_class(py, class_of(error.kind()), &error.to_string());
    let value = exception.value(py);
    let set_attributes = || -> PyResult<()> {
        value.setattr(intern!(py, "kind"), format!("{:?}", error.kind()))?;
        value.setattr(intern!(py, "ranks"), error.ranks())?;
        value.setattr(intern!(py, "op"), error.op().map(|op| op.name()))?;
        value.setattr(intern!(py, "seq"), error.seq())?;
        value.setattr(intern!(py, "group"), error.group())?;
        value.setattr(intern!(py, "_records"), records)
    };
    // An exception without its attributes is better than another exception.
    let _ = set_attributes();
    exception
}

/// The exception `InvalidArgument`.
pub(super) fn invalid(py: Python<'_>, text: &str) -> PyErr {
    exception_for(py, &Error::new(ErrorKind::InvalidArgument, text), None)
}

/// The exception for a call, in a forked child, on an object of the parent process. `kind` is what the object is.
pub(super) fn used_after_fork(py: Python<'_>, kind: &str) -> PyErr {
    let text = format!(
        "this process was forked from the one that made the {kind}, which works only there: call rcomm.init() in the \
         child, or start the child with multiprocessing's \"spawn\" method"
    );
    exception_for(py, &Error::new(ErrorKind::Closed, text), None)
}

/// An exception of this class of `rcomm/_errors.py`; a `RuntimeError` if making one fails.
fn of_class(py: Python<'_>, class: &str, text: &str) -> PyErr {
    let exception = py
        .import(intern!(py, "rcomm._errors"))
        .and_then(|module| module.getattr(class)?.call1((text,)));
    match exception {
        Ok(value) => PyErr::from_value(value),
        Err(_) => PyRuntimeError::new_err(text.to_owned()),
    }
}

//! The path by which every operation of a group is issued.

use super::errors::{exception_for, invalid, used_after_fork};
use super::group::ArrayGroup;
use super::work::ArrayWork;
use crate::frames::CallSites;
use crate::process_group::callbacks::Callbacks;
use pyo3::prelude::*;
use rcomm::{Done, Error, Op, ProcessGroup, ReduceOp, Reduction};
use rcomm_recorder::record::FlightRecorder;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The state that the groups of a world share.
pub(super) struct Shared {
    pub(super) recorder: Arc<FlightRecorder>,
    pub(super) sites: CallSites,
    pub(super) callbacks: Arc<Callbacks>,
    /// Where the records of the job's ranks on this host are.
    pub(super) records: Option<PathBuf>,
    /// The folder of this run's dumps, which the first dump makes.
    pub(super) dump_dir: PathBuf,
}

impl Shared {
    pub(super) fn exception_for(&self, py: Python<'_>, error: &Error) -> PyErr {
        exception_for(py, error, self.records.as_deref())
    }
}

/// What a blocking call of an operation, or `Work.wait`, returns to the program.
pub(super) enum ReturnValue {
    Object(Py<PyAny>),
    /// The sender's rank in the group.
    Sender,
}

impl ReturnValue {
    pub(super) fn value(&self, py: Python<'_>, done: &Done) -> PyResult<Py<PyAny>> {
        Ok(match self {
            Self::Object(object) => object.clone_ref(py),
            Self::Sender => done.source.into_pyobject(py)?.unbind(),
        })
    }
}

/// How an operation is called.
pub(super) struct CallOptions {
    /// How long the operation may take; `None` for the group's time-out.
    pub(super) timeout: Option<Duration>,
    /// Whether the call waits for the operation's end; otherwise it returns a `Work`.
    pub(super) wait: bool,
}

impl CallOptions {
    pub(super) fn read(timeout: Option<&Bound<'_, PyAny>>, wait: bool) -> PyResult<Self> {
        Ok(Self {
            timeout: timeout.map(duration).transpose()?,
            wait,
        })
    }
}

/// Reads a time-out: a number of seconds, or a `timedelta`.
pub(super) fn duration(timeout: &Bound<'_, PyAny>) -> PyResult<Duration> {
    let py = timeout.py();
    if let Ok(duration) = timeout.extract::<Duration>() {
        return Ok(duration);
    }
    let seconds: f64 = timeout.extract()?;
    if seconds.is_nan() || seconds < 0.0 {
        return Err(invalid(
            py,
            &format!("the time-out is {seconds} s: it must be a number that is not negative"),
        ));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// Reads a reduction: a name, or a `PremulSum`; the sum if none is given.
pub(super) fn reduction(op: Option<&Bound<'_, PyAny>>) -> PyResult<Reduction> {
    let Some(op) = op else {
        return Ok(ReduceOp::Sum.into());
    };
    let py = op.py();
    if let Ok(name) = op.cast::<pyo3::types::PyString>() {
        let name = name.to_string_lossy();
        let known = ReduceOp::ALL.iter().copied();
        let mut known = known.filter(|op| *op != ReduceOp::PremulSum);
        return match known.find(|op| op.name() == name) {
            Some(op) => Ok(op.into()),
            None => Err(invalid(
                py,
                &format!(
                    "rcomm does not know the reduction {name:?}: it has sum, avg, product, min, max, band, bor, bxor, \
                     and rcomm.premul_sum(factor)"
                ),
            )),
        };
    }
    let factor = op.getattr(pyo3::intern!(py, "factor"));
    let factor = factor.and_then(|factor| factor.extract::<f64>());
    factor.map(Reduction::premul_sum).map_err(|_| {
        invalid(
            py,
            "a reduction is a name, such as \"sum\", or rcomm.premul_sum(factor)",
        )
    })
}

impl ArrayGroup {
    /// The group. In a forked child, which cannot use its parent's group, an error.
    pub(super) fn of_this_process(&self, py: Python<'_>) -> PyResult<&ProcessGroup> {
        match self.group.is_own() {
            true => Ok(&self.group),
            false => Err(used_after_fork(py, "group")),
        }
    }

    /// A handle of the group for operations with this time-out, if one is given, and with the calling line of the
    /// program as their call site.
    pub(super) fn handle(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
    ) -> PyResult<ProcessGroup> {
        let group = self.of_this_process(py)?;
        let site = self.shared.sites.of_caller(py, &self.shared.recorder);
        let handle = match site {
            Some(site) => group.called_at(site),
            None => group.clone(),
        };
        Ok(match timeout {
            Some(timeout) => handle.within(timeout),
            None => handle,
        })
    }

    /// Runs an operation and returns its result; or, as `options` say, starts the operation and returns its `Work`.
    pub(super) fn issue(
        &self,
        py: Python<'_>,
        options: &CallOptions,
        mut op: Op<'static>,
        returns: ReturnValue,
    ) -> PyResult<Py<PyAny>> {
        let handle = self.handle(py, options.timeout)?;
        if options.wait {
            // The arrays are let go under the interpreter's lock: elsewhere PyO3 keeps a list of them.
            let done = py.detach(|| handle.execute_in_place(&mut op));
            let done = done.map_err(|error| self.shared.exception_for(py, &error))?;
            return returns.value(py, &done);
        }
        let work = py.detach(|| handle.execute_async(op));
        let work = work.map_err(|error| self.shared.exception_for(py, &error))?;
        let work = ArrayWork::new(work, returns, handle.timeout(), self.shared.clone());
        Ok(Py::new(py, work)?.into_any())
    }
}

//! An operation in progress.

use super::errors::{exception_for, used_after_fork};
use super::issue::{ReturnValue, Shared, duration};
use crate::process_group::detached::{CoreWork, SharedWork};
use crate::process_group::fork::OfProcess;
use pyo3::intern;
use pyo3::prelude::*;
use rcomm::{Done, Error, ErrorKind, WorkStatus};
use rcomm_recorder::model::text;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

enum WorkState {
    UnderWay(SharedWork),
    Ended(Result<Done, Error>),
}

/// An operation of a group, in progress or ended.
#[pyclass(module = "rcomm._native", frozen, weakref)]
pub(crate) struct ArrayWork {
    inner: OfProcess<WorkCell>,
    returns: ReturnValue,
    timeout: Duration,
    op: &'static str,
    seq: u64,
    shared: Arc<Shared>,
}

struct WorkCell(Mutex<WorkState>);

impl WorkCell {
    fn state(&self) -> MutexGuard<'_, WorkState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operation, if it is not known to have ended. No lock is held afterwards.
    fn under_way(&self) -> Option<SharedWork> {
        match &*self.state() {
            WorkState::UnderWay(work) => Some(work.clone()),
            WorkState::Ended(_) => None,
        }
    }

    /// Keeps the result, unless another thread has done so, and drops the operation and its memory.
    fn end(&self, result: Result<Done, Error>) {
        let before = {
            let mut state = self.state();
            match &*state {
                WorkState::Ended(_) => None,
                WorkState::UnderWay(_) => {
                    Some(std::mem::replace(&mut *state, WorkState::Ended(result)))
                }
            }
        };
        // Dropped outside of the lock: this may free the operation's arrays.
        drop(before);
    }

    /// How the operation ended; `None` if it has not. Does not wait for the operation.
    fn outcome(&self, py: Python<'_>) -> Option<Result<Done, Error>> {
        if let Some(work) = self.under_way() {
            if !work.is_completed() {
                return None;
            }
            // After an error this waits until the status of the group's other ranks was read.
            let result = py.detach(|| work.join());
            drop(work);
            self.end(result);
        }
        match &*self.state() {
            WorkState::UnderWay(_) => None,
            WorkState::Ended(outcome) => Some(outcome.clone()),
        }
    }
}

impl ArrayWork {
    pub(super) fn new(
        work: CoreWork,
        returns: ReturnValue,
        timeout: Duration,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            returns,
            timeout,
            op: work.op().name(),
            seq: work.seq(),
            inner: OfProcess::new(WorkCell(Mutex::new(WorkState::UnderWay(SharedWork::new(
                work,
            ))))),
            shared,
        }
    }

    /// The operation's state. In a forked child, which cannot use its parent's operation, an error.
    fn of_this_process(&self, py: Python<'_>) -> PyResult<&WorkCell> {
        match self.inner.is_own() {
            true => Ok(&self.inner),
            false => Err(used_after_fork(py, "operation")),
        }
    }
}

#[pymethods]
impl ArrayWork {
    /// Waits for the operation's end, at most `timeout` seconds if that is given, and returns what the blocking call
    /// returns.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
        let (inner, within) = (
            self.of_this_process(py)?,
            timeout.map(duration).transpose()?,
        );
        if let Some(work) = inner.under_way() {
            let result = py.detach(|| match within {
                Some(within) => match work.wait_timeout(within) {
                    WorkStatus::Queued | WorkStatus::Started => None,
                    WorkStatus::Completed | WorkStatus::Failed => Some(work.join()),
                },
                None => Some(work.join()),
            });
            let Some(result) = result else {
                let message = format!(
                    "{} #{} has not ended after {}: it continues, and may take {} in all",
                    self.op,
                    self.seq,
                    text::duration(within.unwrap_or_default()),
                    text::duration(self.timeout)
                );
                return Err(exception_for(
                    py,
                    &Error::new(ErrorKind::Timeout, message),
                    None,
                ));
            };
            drop(work);
            inner.end(result);
        }
        match inner.outcome(py) {
            Some(Ok(done)) => self.returns.value(py, &done),
            Some(Err(error)) => Err(self.shared.exception_for(py, &error)),
            None => Ok(py.None()),
        }
    }

    /// Whether the operation has ended, with or without an error. Does not wait for the end; after an error, waits
    /// until the status of the group's other ranks was read.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.of_this_process(py)?.outcome(py).is_some())
    }

    /// The exception that `wait` raises; None if there is none so far.
    fn exception<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(match self.of_this_process(py)?.outcome(py) {
            Some(Err(error)) => {
                let raised = self.shared.exception_for(py, &error);
                Some(raised.value(py).clone().into_any())
            }
            _ => None,
        })
    }

    /// Calls `callback` with this Work, on another thread, when the operation has ended; soon, if it already has.
    fn add_done_callback(slf: &Bound<'_, Self>, callback: Py<PyAny>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let inner = this.of_this_process(py)?;
        let kept = slf.clone().unbind();
        let callbacks = this.shared.callbacks.clone();
        let call = move || {
            // If the interpreter has ended, no callbacks run.
            Python::try_attach(|py| {
                if let Err(error) = callback.call1(py, (&kept,)) {
                    error.write_unraisable(py, Some(callback.bind(py)));
                }
                // Dropped while the interpreter is held.
                drop((callback, kept));
            });
        };
        match inner.under_way() {
            Some(work) => py.detach(|| {
                work.on_completion(move |_| callbacks.run(Box::new(call)));
            }),
            None => callbacks.run(Box::new(call)),
        }
        Ok(())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let waiter = py.import(intern!(py, "rcomm._world"))?;
        waiter
            .call_method1(intern!(py, "wait_for"), (slf,))?
            .call_method0(intern!(py, "__await__"))
    }

    /// The operation's name.
    #[getter]
    fn op(&self) -> &'static str {
        self.op
    }

    /// The operation's sequence number in the group, as records and errors show it.
    #[getter]
    fn seq(&self) -> u64 {
        self.seq
    }

    /// How many seconds the operation ran; None before its end, after an error, or where the time was not measured.
    #[getter]
    fn duration(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        Ok(match self.of_this_process(py)?.outcome(py) {
            Some(Ok(done)) => done.duration.map(|ran| ran.as_secs_f64()),
            _ => None,
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let state = match self.of_this_process(py)?.outcome(py) {
            None => "under way",
            Some(Ok(_)) => "completed",
            Some(Err(_)) => "failed",
        };
        Ok(format!("<rcomm.Work {} #{} {state}>", self.op, self.seq))
    }
}

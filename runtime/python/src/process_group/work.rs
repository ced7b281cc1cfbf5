//! [`Work`]: an operation under way, with the methods that PyTorch's programs call.

use super::callbacks::Callbacks;
use super::detached::{CoreWork, SharedWork};
use super::errors::{exception_for, of_torch};
use super::fork::OfProcess;
use super::options::duration;
use super::tensor::CopyBack;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use rcomm::{Done, Error, WorkStatus};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// The results of an operation.
pub(crate) struct Results {
    /// The tensors that the operation wrote, as `result()` and futures return them.
    pub(crate) tensors: Py<PyAny>,
    /// The results that are still to be copied into tensors that are not in row-major order.
    pub(crate) copies: Vec<CopyBack>,
}

enum WorkState {
    UnderWay(SharedWork),
    Ended(Result<Done, Error>),
}

/// The copies of results that are still to be made.
struct Copies {
    left: VecDeque<CopyBack>,
    /// The thread that makes copies now, if one does.
    by: Option<ThreadId>,
}

struct WorkCell {
    state: Mutex<WorkState>,
    tensors: Py<PyAny>,
    copies: Mutex<Copies>,
    /// Notified when a thread no longer copies.
    copied: Condvar,
    timeout: Duration,
    name: &'static str,
    seq: u64,
}

/// An operation of a group, with the methods of `torch.distributed.Work`.
#[pyclass(module = "rcomm._native", frozen, weakref)]
pub(crate) struct Work {
    inner: OfProcess<Arc<WorkCell>>,
    callbacks: Arc<Callbacks>,
}

impl Work {
    pub(crate) fn under_way(
        work: CoreWork,
        results: Results,
        timeout: Duration,
        callbacks: Arc<Callbacks>,
    ) -> Self {
        let (name, seq) = (work.op().name(), work.seq());
        let state = WorkState::UnderWay(SharedWork::new(work));
        Self::new(state, results, timeout, (name, seq), callbacks)
    }

    /// The Work of an operation that has ended without an error, or of one in a coalescing block, whose end only the
    /// block's Work shows.
    pub(crate) fn ended(
        done: Done,
        results: Results,
        timeout: Duration,
        name: &'static str,
        callbacks: Arc<Callbacks>,
    ) -> Self {
        Self::new(
            WorkState::Ended(Ok(done)),
            results,
            timeout,
            (name, 0),
            callbacks,
        )
    }

    fn new(
        state: WorkState,
        results: Results,
        timeout: Duration,
        (name, seq): (&'static str, u64),
        callbacks: Arc<Callbacks>,
    ) -> Self {
        let inner = WorkCell {
            state: Mutex::new(state),
            tensors: results.tensors,
            copies: Mutex::new(Copies {
                left: results.copies.into(),
                by: None,
            }),
            copied: Condvar::new(),
            timeout,
            name,
            seq,
        };
        Self {
            inner: OfProcess::new(Arc::new(inner)),
            callbacks,
        }
    }

    /// The operation's state. In a forked child, which cannot use its parent's operation, an error.
    fn of_this_process(&self) -> PyResult<&WorkCell> {
        if self.inner.is_own() {
            return Ok(&self.inner);
        }
        Err(pyo3::exceptions::PyRuntimeError::new_err(
            "rcomm: this operation is one of the parent process: a forked child cannot wait for it",
        ))
    }
}

impl WorkCell {
    fn state(&self) -> MutexGuard<'_, WorkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operation, if it is not known to have ended. No lock is held afterwards.
    fn under_way(&self) -> Option<SharedWork> {
        match &*self.state() {
            WorkState::UnderWay(work) => Some(work.clone()),
            WorkState::Ended(_) => None,
        }
    }

    /// How the operation ended; `None` if it has not. Without an error, the results are in the tensors. Does not wait
    /// for the operation.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Result<Done, Error>>> {
        let Some(work) = self.under_way() else {
            return self.outcome(py);
        };
        if !work.is_completed() {
            return Ok(None);
        }
        // After an error this waits until the status of the group's other ranks was read.
        let result = py.detach(|| work.join());
        drop(work);
        self.end(result);
        self.outcome(py)
    }

    /// How the operation ended, if its end was seen. Without an error, the results are in the tensors.
    fn outcome(&self, py: Python<'_>) -> PyResult<Option<Result<Done, Error>>> {
        let outcome = match &*self.state() {
            WorkState::UnderWay(_) => None,
            WorkState::Ended(outcome) => Some(outcome.clone()),
        };
        if let Some(Ok(_)) = &outcome {
            self.copy_back(py)?;
        }
        Ok(outcome)
    }

    /// Keeps the result, unless another thread has done so, and drops the operation.
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
        // Dropped outside of the lock: this may free the operation's tensors.
        drop(before);
    }

    fn copies(&self) -> MutexGuard<'_, Copies> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_copy(&self) -> Option<CopyBack> {
        self.copies().left.pop_front()
    }

    /// Copies results, once, into tensors that are not in row-major order. If another thread does so, waits until it
    /// has: PyTorch lets other threads run while it copies. Copies that fail are tried again by the next call.
    fn copy_back(&self, py: Python<'_>) -> PyResult<()> {
        let own_id = thread::current().id();
        {
            let mut copies = self.copies();
            // A copy may run code of a subclass, which may wait for this operation on the same thread.
            if copies.by == Some(own_id) || (copies.by.is_none() && copies.left.is_empty()) {
                return Ok(());
            }
            if copies.by.is_none() {
                copies.by = Some(own_id);
            } else {
                drop(copies);
                py.detach(|| {
                    let copies = self.copies();
                    let waited = self.copied.wait_while(copies, |copies| copies.by.is_some());
                    waited.unwrap_or_else(PoisonError::into_inner).by = Some(own_id);
                });
            }
        }
        let _copying = Copying(self);
        while let Some(copy) = self.next_copy() {
            if let Err(error) = copy.make(py) {
                self.copies().left.push_front(copy);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Waits for the end. If the operation has not ended after `within`, returns a time-out error.
    fn wait(&self, py: Python<'_>, within: Option<Duration>) -> PyResult<()> {
        if let Some(work) = self.under_way() {
            let result = py.detach(|| match within {
                Some(within) => match work.wait_timeout(within) {
                    WorkStatus::Queued | WorkStatus::Started => None,
                    WorkStatus::Completed | WorkStatus::Failed => Some(work.join()),
                },
                None => Some(work.join()),
            });
            let Some(result) = result else {
                let waited = within.unwrap_or_default().as_millis();
                let text = format!(
                    "rcomm: Timed out waiting {waited}ms for {} #{}: the operation itself continues, and may take {} ms in all",
                    self.name,
                    self.seq,
                    self.timeout.as_millis()
                );
                return Err(of_torch(py, "DistBackendError", text));
            };
            drop(work);
            self.end(result);
        }
        match self.outcome(py)? {
            Some(Err(error)) => Err(exception_for(py, &error, Some(self.timeout))),
            _ => Ok(()),
        }
    }

    /// Completes a future with the result or the error of the operation, which has ended.
    fn settle(&self, py: Python<'_>, future: &Bound<'_, PyAny>) -> PyResult<()> {
        match self.poll(py)? {
            Some(Err(error)) => {
                let error = exception_for(py, &error, Some(self.timeout));
                future.call_method1(intern!(py, "set_exception"), (error.value(py),))?;
            }
            _ => {
                future.call_method1(intern!(py, "set_result"), (self.tensors.bind(py),))?;
            }
        }
        Ok(())
    }
}

/// Lives while this thread makes an operation's copies. Its end wakes the threads that wait for them.
struct Copying<'a>(&'a WorkCell);

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        self.0.copies().by = None;
        self.0.copied.notify_all();
    }
}

impl CopyBack {
    /// Copies the result to the tensor.
    pub(crate) fn make(&self, py: Python<'_>) -> PyResult<()> {
        let tensor = self.tensor.bind(py);
        tensor.call_method1(intern!(py, "copy_"), (self.copy.bind(py),))?;
        Ok(())
    }
}

#[pymethods]
impl Work {
    /// Waits for the operation's end, for at most `timeout` if that is given. Raises the operation's error; or, if
    /// `timeout` has passed, a time-out error, and the operation continues.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let within = timeout.map(duration).transpose()?.flatten();
        self.of_this_process()?.wait(py, within)?;
        Ok(true)
    }

    /// Does the same as `wait` without a time-out.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        self.of_this_process()?.wait(py, None)
    }

    /// Does the same as `synchronize`: on the CPU there is no stream to block.
    fn block_current_stream(&self, py: Python<'_>) -> PyResult<()> {
        self.of_this_process()?.wait(py, None)
    }

    /// Whether the operation has ended, with or without an error. Does not wait for the end; after an error, waits
    /// until the status of the group's other ranks was read.
    fn is_completed(&self, py: Python<'_>) -> PyResult<bool> {
        let inner = self.of_this_process()?;
        Ok(match inner.under_way() {
            None => true,
            Some(work) if !work.is_completed() => false,
            Some(_) => inner.poll(py)?.is_some(),
        })
    }

    /// Whether the operation has ended without an error. Waits as `is_completed` does.
    fn is_success(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(matches!(self.of_this_process()?.poll(py)?, Some(Ok(_))))
    }

    /// The exception that `wait` raises; None if there is none so far.
    fn exception<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let inner = self.of_this_process()?;
        Ok(match inner.poll(py)? {
            Some(Err(error)) => {
                let raised = exception_for(py, &error, Some(inner.timeout));
                Some(raised.value(py).clone().into_any())
            }
            _ => None,
        })
    }

    /// The tensors that the operation wrote. Waits for the end.
    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let inner = self.of_this_process()?;
        inner.wait(py, None)?;
        Ok(inner.tensors.clone_ref(py))
    }

    /// The sender's rank in the group, after a receive from any rank; else -1. Waits for the end.
    fn _source_rank(&self, py: Python<'_>) -> PyResult<i64> {
        let inner = self.of_this_process()?;
        inner.wait(py, None)?;
        Ok(match inner.poll(py)? {
            Some(Ok(Done {
                source: Some(rank), ..
            })) => i64::from(rank),
            _ => -1,
        })
    }

    /// Does the same as `_source_rank`.
    fn source_rank(&self, py: Python<'_>) -> PyResult<i64> {
        self._source_rank(py)
    }

    /// A `torch.futures.Future` of the tensors that the operation writes. Callbacks of the future run on separate
    /// threads, or on the one that adds them if the operation has ended.
    fn get_future<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let inner = self.of_this_process()?;
        let futures = py.import(intern!(py, "torch.futures"))?;
        let future = futures.getattr(intern!(py, "Future"))?.call0()?;
        let Some(work) = inner.under_way() else {
            inner.settle(py, &future)?;
            return Ok(future);
        };
        let (operation, kept) = (Arc::clone(&self.inner), future.clone().unbind());
        let callbacks = self.callbacks.clone();
        py.detach(|| {
            work.on_completion(move |_| {
                callbacks.run(Box::new(move || {
                    // If the interpreter has ended, no callbacks run.
                    Python::try_attach(|py| {
                        if let Err(error) = operation.settle(py, kept.bind(py)) {
                            error.write_unraisable(py, Some(kept.bind(py)));
                        }
                        // Dropped while the interpreter is held.
                        drop((operation, kept));
                    });
                }));
            });
        });
        Ok(future)
    }

    /// How long the operation may take.
    #[getter]
    fn timeout(&self) -> PyResult<Duration> {
        Ok(self.of_this_process()?.timeout)
    }

    /// The operation's name.
    fn _get_op_name(&self) -> PyResult<&'static str> {
        Ok(self.of_this_process()?.name)
    }

    /// The operation's sequence number in the group; 0 for one that ran in the calling thread, or is in a coalescing
    /// block.
    fn _get_sequence_number(&self) -> PyResult<u64> {
        Ok(self.of_this_process()?.seq)
    }

    /// How long the operation ran in milliseconds, if it has ended without an error and that was measured; else -1.
    fn _get_duration(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(match self.of_this_process()?.poll(py)? {
            Some(Ok(Done {
                duration: Some(ran),
                ..
            })) => ran.as_secs_f64() * 1e3,
            _ => -1.0,
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let inner = self.of_this_process()?;
        let state = match inner.poll(py)? {
            None => "under way",
            Some(Ok(_)) => "completed",
            Some(Err(_)) => "failed",
        };
        Ok(format!(
            "<rcomm.Work {} #{} {state}>",
            inner.name, inner.seq
        ))
    }
}

/// A list of these tensors.
pub(crate) fn as_list<'py>(py: Python<'py>, tensors: &[Bound<'py, PyAny>]) -> PyResult<Py<PyAny>> {
    Ok(PyList::new(py, tensors)?.into_any().unbind())
}

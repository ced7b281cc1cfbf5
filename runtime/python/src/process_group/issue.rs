//! A group of a world, and the path by which every operation is issued.

use super::callbacks::Callbacks;
use super::detached::SharedGroup;
use super::errors::exception_for;
use super::fork::OfProcess;
use super::options::{Options, non_negative};
use super::tensor::{CopyBack, Tensors, Use, lone};
use super::work::{Results, Work, as_list};
use crate::frames::CallSites;
use crate::tensors::Types;
use pyo3::prelude::*;
use pyo3::types::PyList;
use rcomm::{Done, Error, ErrorKind, Op, ProcessGroup};
use rcomm_recorder::record::{CallSiteId, FlightRecorder};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The error's text in a forked child that uses its parent's process group.
pub(super) const USED_AFTER_FORK: &str = "this process was forked from the one that made the process group, which \
     works only there: call init_process_group in the child, or start the child with multiprocessing's \"spawn\" method";

/// The state that the groups of a world share.
pub(crate) struct WorldState {
    pub(crate) recorder: Arc<FlightRecorder>,
    pub(crate) sites: CallSites,
    pub(crate) types: Types,
    pub(crate) callbacks: Arc<Callbacks>,
    /// The call site of threads that run no Python code of the program.
    pub(crate) no_call_site: CallSiteId,
}

/// The operations of an open coalescing block, which are issued as one when the block ends.
#[derive(Default)]
struct Block {
    ops: Vec<Op<'static>>,
    tensors: Vec<Py<PyAny>>,
    copies: Vec<CopyBack>,
    /// The longest time-out that was given to one of the operations; `None` for the group's.
    timeout: Option<std::time::Duration>,
}

/// A group of a world, with the operations of `torch.distributed.ProcessGroup`.
#[pyclass(module = "rcomm._native", frozen, weakref)]
pub(crate) struct Group {
    pub(crate) group: OfProcess<SharedGroup>,
    pub(crate) shared: Arc<WorldState>,
    /// The open coalescing block, if there is one.
    block: Mutex<Option<Block>>,
}

impl Group {
    pub(crate) fn new(group: SharedGroup, shared: Arc<WorldState>) -> Self {
        Self {
            group: OfProcess::new(group),
            shared,
            block: Mutex::default(),
        }
    }

    /// The group. In a forked child, which cannot use its parent's group, an error.
    pub(crate) fn of_this_process(&self, py: Python<'_>) -> PyResult<&ProcessGroup> {
        if self.group.is_own() {
            return Ok(&self.group);
        }
        let error = Error::new(ErrorKind::Closed, USED_AFTER_FORK);
        Err(exception_for(py, &error, None))
    }

    pub(crate) fn tensors<'py>(&self, py: Python<'py>) -> Tensors<'py, '_> {
        Tensors::new(py, &self.shared.types)
    }

    fn block(&self) -> MutexGuard<'_, Option<Block>> {
        self.block.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A handle of the group for operations with the time-out of the options, and with the calling line of the program
    /// as their call site.
    pub(crate) fn handle(&self, py: Python<'_>, options: &Options) -> PyResult<ProcessGroup> {
        let group = self.of_this_process(py)?;
        let site = self.shared.sites.of_caller(py, &self.shared.recorder);
        let handle = group.called_at(site.unwrap_or(self.shared.no_call_site));
        Ok(match options.timeout {
            Some(timeout) => handle.within(timeout),
            None => handle,
        })
    }

    /// Runs or starts an operation that writes `results`; in an open coalescing block, keeps the operation until the
    /// block ends.
    pub(crate) fn issue(
        &self,
        py: Python<'_>,
        options: &Options,
        tensors: Tensors<'_, '_>,
        mut op: Op<'static>,
        results: Py<PyAny>,
    ) -> PyResult<Work> {
        let handle = self.handle(py, options)?;
        let (timeout, name) = (handle.timeout(), op.op_type().name());
        let callbacks = self.shared.callbacks.clone();
        let mut results = Results {
            tensors: results,
            copies: tensors.copies,
        };
        let mut block = self.block();
        if let Some(block) = &mut *block {
            block.ops.push(op);
            block.tensors.push(results.tensors.clone_ref(py));
            block.copies.append(&mut results.copies);
            block.timeout = block.timeout.max(options.timeout);
            return Ok(Work::ended(
                Done::default(),
                results,
                timeout,
                name,
                callbacks,
            ));
        }
        drop(block);
        // A rank that is alone in its group waits for no other, so the operation runs on this thread at once.
        if !options.blocking && self.group.size() > 1 {
            let work = py.detach(|| handle.execute_async(op));
            let work = work.map_err(|error| exception_for(py, &error, Some(timeout)))?;
            return Ok(Work::under_way(work, results, timeout, callbacks));
        }
        // The tensors are let go under the interpreter's lock: elsewhere PyO3 keeps a list of them.
        let done = py.detach(|| handle.execute_in_place(&mut op));
        let done = done.map_err(|error| exception_for(py, &error, Some(timeout)))?;
        for copy in std::mem::take(&mut results.copies) {
            copy.make(py)?;
        }
        Ok(Work::ended(done, results, timeout, name, callbacks))
    }

    /// Runs or starts a receive from `peer`; from any rank if `peer` is `None`.
    pub(crate) fn receive(
        &self,
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        peer: Option<u32>,
        tag: i64,
    ) -> PyResult<Work> {
        let tag = non_negative(tag, "the tag")?;
        let tensor = lone(tensors)?;
        let mut memory = self.tensors(py);
        let buffer = memory.buffer(&tensor, Use::Write)?;
        let op = Op::Recv { buffer, peer, tag };
        let options = Options::read(None)?;
        self.issue(py, &options, memory, op, as_list(py, &[tensor])?)
    }

    /// Opens a coalescing block: operations are kept until `end_block`.
    pub(crate) fn begin_block(&self) {
        self.block().get_or_insert_default();
    }

    /// Starts the kept operations as one; `None` if there are none.
    pub(crate) fn end_block(&self, py: Python<'_>) -> PyResult<Option<Work>> {
        let block = self.block().take();
        let Some(block) = block.filter(|block| !block.ops.is_empty()) else {
            return Ok(None);
        };
        let options = Options {
            blocking: false,
            timeout: block.timeout,
        };
        let mut tensors = self.tensors(py);
        tensors.copies = block.copies;
        let results = PyList::new(py, block.tensors)?.into_any().unbind();
        let op = Op::Coalesced(block.ops);
        self.issue(py, &options, tensors, op, results).map(Some)
    }
}

//! The operations of a group under the names that `torch.distributed` calls them by.
//!
//! Most take tensors and PyTorch's option object or, as older programs pass them, the fields of that object one by one.
//! An operation whose options say that it is not asynchronous runs in the calling thread, as does every operation of a
//! group of one rank. A call of any other operation starts the operation and returns. In a coalescing block a call only
//! keeps the operation.

use super::detached;
use super::errors::exception_for;
use super::issue::Group;
use super::options::{self, Options, non_negative, reduction};
use super::tensor::{Use, are_even, elements, is_strided, list, lone, lone_list};
use super::work::{Work, as_list};
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use rcomm::{GroupOptions, Op};
use std::time::Duration;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;

#[pymethods]
impl Group {
    /// This process's rank in the group.
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    /// The number of ranks in the group.
    fn size(&self) -> u32 {
        self.group.size()
    }

    /// The group's name in records and errors.
    #[getter]
    fn name(&self) -> &str {
        self.group.name()
    }

    /// The members' ranks in the world, in the order of their ranks in the group.
    #[getter]
    fn ranks(&self) -> Vec<u32> {
        self.group.ranks().to_vec()
    }

    /// How long an operation may take.
    #[getter]
    fn timeout(&self) -> Duration {
        self.group.timeout()
    }

    /// Sets how long an operation that is issued from now on may take.
    fn set_timeout(&self, py: Python<'_>, timeout: Any<'_, '_>) -> PyResult<()> {
        if let Some(timeout) = options::duration(timeout)? {
            self.of_this_process(py)?.set_timeout(timeout);
        }
        Ok(())
    }

    /// Gives the operations issued from now on this much more time, until the first collective among them has ended.
    fn _add_ephemeral_timeout(&self, py: Python<'_>, timeout: Any<'_, '_>) -> PyResult<()> {
        if let Some(timeout) = options::duration(timeout)? {
            self.of_this_process(py)?.extend_timeout(timeout);
        }
        Ok(())
    }

    /// The number of the newest collective; 0 if there was none.
    fn _get_sequence_number_for_group(&self) -> i64 {
        self.group.status().last_enqueued.max(0)
    }

    #[pyo3(signature = (tensors, opts=None, timeout=None, *, op=None))]
    fn allreduce<'py>(
        slf: &Bound<'py, Self>,
        tensors: Any<'_, 'py>,
        opts: Option<Any<'_, 'py>>,
        timeout: Option<Any<'_, 'py>>,
        op: Option<Any<'_, 'py>>,
    ) -> PyResult<Py<PyAny>> {
        let (py, group) = (slf.py(), slf.get());
        let options = Options::read(opts)?.within(timeout)?;
        let reduce_op = reduction(opts, op)?;
        let tensor = lone(tensors)?;
        let mut memory = group.tensors(py);
        let buffer = match memory.buffer(&tensor, Use::ReadWrite) {
            Err(_) if !is_strided(&tensor).unwrap_or(true) => {
                let sparse = py.import(intern!(py, "rcomm._sparse"))?;
                let arguments = (slf, &tensor, reduce_op.op.name());
                let reduced = sparse.call_method1(intern!(py, "all_reduce"), arguments);
                return reduced.map(Bound::unbind);
            }
            buffer => buffer?,
        };
        let op = Op::AllReduce {
            buffer,
            op: reduce_op,
        };
        let results = tensors.clone().unbind();
        let work = group.issue(py, &options, memory, op, results)?;
        Ok(Py::new(py, work)?.into_any())
    }

    #[pyo3(signature = (tensors, opts=None, timeout=None, *, op=None))]
    fn allreduce_coalesced(
        &self,
        py: Python<'_>,
        tensors: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
        op: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        let op = reduction(opts, op)?;
        let reduced = list(tensors)?;
        let mut memory = self.tensors(py);
        let buffers = memory.buffers(&reduced, Use::ReadWrite)?;
        let op = Op::AllReduceCoalesced { buffers, op };
        self.issue(py, &options, memory, op, as_list(py, &reduced)?)
    }

    #[pyo3(signature = (tensors, opts=None, timeout=None, *, root=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        tensors: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
        root: Option<i64>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        let root = options::root(opts, root)?;
        let tensor = lone(tensors)?;
        let usage = if root == self.group.rank() {
            Use::Read
        } else {
            Use::ReadWrite
        };
        let mut memory = self.tensors(py);
        let buffer = memory.buffer(&tensor, usage)?;
        let op = Op::Broadcast { buffer, root };
        self.issue(py, &options, memory, op, as_list(py, &[tensor])?)
    }

    #[pyo3(signature = (tensors, opts=None, op=None, timeout=None, *, root=None))]
    fn reduce(
        &self,
        py: Python<'_>,
        tensors: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
        op: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
        root: Option<i64>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        // Older programs pass the root in the place of the options.
        let reduce_op = match (op, opts) {
            (None, Some(opts)) if opts.extract::<i64>().is_ok() => reduction(None, None)?,
            _ => reduction(opts, op)?,
        };
        let root = options::root(opts, root)?;
        let tensor = lone(tensors)?;
        let mut memory = self.tensors(py);
        let buffer = memory.buffer(&tensor, Use::ReadWrite)?;
        let op = Op::Reduce {
            buffer,
            op: reduce_op,
            root,
        };
        self.issue(py, &options, memory, op, as_list(py, &[tensor])?)
    }

    /// Gathers into a list with one tensor for each rank; their lengths may differ from rank to rank.
    #[pyo3(signature = (output_tensors, input_tensors, opts=None, timeout=None))]
    fn allgather(
        &self,
        py: Python<'_>,
        output_tensors: Any<'_, '_>,
        input_tensors: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        let into = lone_list(output_tensors)?;
        let mut memory = self.tensors(py);
        let outputs = memory.buffers(&into, Use::Write)?;
        let input = memory.separate_input(&lone(input_tensors)?, &outputs)?;
        let op = match are_even(&outputs) {
            true => Op::AllGather { input, outputs },
            false => Op::AllGatherV { input, outputs },
        };
        let results = as_list(py, &[as_list(py, &into)?.into_bound(py)])?;
        self.issue(py, &options, memory, op, results)
    }

    #[pyo3(signature = (output, input, opts=None, timeout=None))]
    fn all_gather_single(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        let mut memory = self.tensors(py);
        let into = memory.buffer(output, Use::Write)?;
        let input = memory.separate_input(input, std::slice::from_ref(&into))?;
        let op = Op::AllGatherSingle {
            input,
            output: into,
        };
        self.issue(
            py,
            &options,
            memory,
            op,
            as_list(py, std::slice::from_ref(output))?,
        )
    }

    /// Runs several all-gathers as one operation; each has one output and one input.
    #[pyo3(signature = (outputs, inputs, opts=None))]
    fn all_gather_single_coalesced(
        &self,
        py: Python<'_>,
        outputs: Any<'_, '_>,
        inputs: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?;
        let (into, from) = (list(outputs)?, list(inputs)?);
        let mut memory = self.tensors(py);
        let outputs = memory.buffers(&into, Use::Write)?;
        let inputs = memory.separate_inputs(&from, &outputs)?;
        let op = Op::AllGatherCoalesced { inputs, outputs };
        self.issue(py, &options, memory, op, as_list(py, &into)?)
    }

    /// All-gathers several tensors as one operation: `output_lists[r]` receives all inputs of rank r.
    #[pyo3(signature = (output_lists, input_list, opts=None))]
    fn allgather_coalesced(
        &self,
        py: Python<'_>,
        output_lists: Any<'_, '_>,
        input_list: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?;
        let inputs = list(input_list)?;
        let outputs_by_rank: Vec<Vec<_>> = list(output_lists)?
            .iter()
            .map(list)
            .collect::<PyResult<_>>()?;
        if let Some(wrong) = outputs_by_rank
            .iter()
            .find(|outputs| outputs.len() != inputs.len())
        {
            return Err(PyValueError::new_err(format!(
                "{} outputs of one rank for {} inputs: give each rank as many as there are inputs",
                wrong.len(),
                inputs.len()
            )));
        }
        let mut memory = self.tensors(py);
        let mut ops = Vec::new();
        for (index, input) in inputs.iter().enumerate() {
            let into = outputs_by_rank.iter().map(|outputs| outputs[index].clone());
            let into: Vec<_> = into.collect();
            let outputs = memory.buffers(&into, Use::Write)?;
            let input = memory.separate_input(input, &outputs)?;
            ops.push(Op::AllGather { input, outputs });
        }
        let results = output_lists.clone().unbind();
        self.issue(py, &options, memory, Op::Coalesced(ops), results)
    }

    /// Gathers on the root, which lists one output for each rank; the others list none.
    #[pyo3(signature = (output_tensors, input_tensors, opts=None, timeout=None, *, root=None))]
    fn gather(
        &self,
        py: Python<'_>,
        output_tensors: Any<'_, '_>,
        input_tensors: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
        root: Option<i64>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        let root = options::root(opts, root)?;
        let into = lone_list(output_tensors)?;
        let mut memory = self.tensors(py);
        let outputs = memory.buffers(&into, Use::Write)?;
        let input = memory.separate_input(&lone(input_tensors)?, &outputs)?;
        let op = Op::Gather {
            input,
            outputs,
            root,
        };
        let results = as_list(py, &[as_list(py, &into)?.into_bound(py)])?;
        self.issue(py, &options, memory, op, results)
    }

    /// Gathers on the root into `output`, one part after the other. The other ranks ignore `output`.
    #[pyo3(signature = (output, input, opts=None))]
    fn gather_single(
        &self,
        py: Python<'_>,
        output: Option<Any<'_, '_>>,
        input: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let parts = match (options::root(opts, None)? == self.group.rank(), output) {
            (true, Some(output)) => {
                let flat = output.call_method1(intern!(py, "view"), (-1,))?;
                let parts = flat.call_method1(intern!(py, "chunk"), (self.group.size(),))?;
                list(&parts)?
            }
            _ => Vec::new(),
        };
        let input = lone(input)?.call_method1(intern!(py, "reshape"), (-1,))?;
        let parts = as_list(py, &parts)?.into_bound(py);
        self.gather(py, &parts, &input, opts, None, None)
    }

    /// Scatters from the root, which lists one input for each rank; the others list none.
    #[pyo3(signature = (output_tensors, input_tensors, opts=None, timeout=None, *, root=None))]
    fn scatter(
        &self,
        py: Python<'_>,
        output_tensors: Any<'_, '_>,
        input_tensors: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
        root: Option<i64>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        let root = options::root(opts, root)?;
        let into = lone(output_tensors)?;
        let mut memory = self.tensors(py);
        let output = memory.buffer(&into, Use::Write)?;
        let inputs = lone_list(input_tensors)?;
        let inputs = memory.separate_inputs(&inputs, std::slice::from_ref(&output))?;
        let op = Op::Scatter {
            inputs,
            output,
            root,
        };
        self.issue(py, &options, memory, op, as_list(py, &[into])?)
    }

    /// Reduces lists with one tensor for each rank, whose lengths may differ; each rank gets the reduction of the
    /// tensors for that rank.
    #[pyo3(signature = (output_tensors, input_tensors, opts=None, timeout=None, *, op=None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        output_tensors: Any<'_, '_>,
        input_tensors: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
        op: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        let reduce_op = reduction(opts, op)?;
        let into = lone(output_tensors)?;
        let mut memory = self.tensors(py);
        let output = memory.buffer(&into, Use::Write)?;
        let inputs = lone_list(input_tensors)?;
        let inputs = memory.separate_inputs(&inputs, std::slice::from_ref(&output))?;
        let op = match are_even(&inputs) {
            true => Op::ReduceScatter {
                inputs,
                output,
                op: reduce_op,
            },
            false => Op::ReduceScatterV {
                inputs,
                output,
                op: reduce_op,
            },
        };
        self.issue(py, &options, memory, op, as_list(py, &[into])?)
    }

    #[pyo3(signature = (output, input, opts=None, timeout=None, *, op=None))]
    fn reduce_scatter_single(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
        op: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        let reduce_op = reduction(opts, op)?;
        let mut memory = self.tensors(py);
        let into = memory.buffer(output, Use::Write)?;
        let input = memory.separate_input(input, std::slice::from_ref(&into))?;
        let op = Op::ReduceScatterSingle {
            input,
            output: into,
            op: reduce_op,
        };
        self.issue(
            py,
            &options,
            memory,
            op,
            as_list(py, std::slice::from_ref(output))?,
        )
    }

    /// Runs several reduce-scatters as one operation; each has one output and one input.
    #[pyo3(signature = (outputs, inputs, opts=None, *, op=None))]
    fn reduce_scatter_single_coalesced(
        &self,
        py: Python<'_>,
        outputs: Any<'_, '_>,
        inputs: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
        op: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?;
        let reduce_op = reduction(opts, op)?;
        let (into, from) = (list(outputs)?, list(inputs)?);
        let mut memory = self.tensors(py);
        let outputs = memory.buffers(&into, Use::Write)?;
        let inputs = memory.separate_inputs(&from, &outputs)?;
        let op = Op::ReduceScatterCoalesced {
            inputs,
            outputs,
            op: reduce_op,
        };
        self.issue(py, &options, memory, op, as_list(py, &into)?)
    }

    /// Sends rows of `input` to each rank, and receives rows of `output` from each. A tensor without split sizes is
    /// split into equal parts.
    #[pyo3(signature = (output, input, output_split_sizes=Vec::new(), input_split_sizes=Vec::new(), opts=None, timeout=None))]
    #[allow(clippy::too_many_arguments)]
    fn all_to_all_single(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Any<'_, '_>,
        output_split_sizes: Vec<i64>,
        input_split_sizes: Vec<i64>,
        opts: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        let ranks = self.group.size() as usize;
        let mut memory = self.tensors(py);
        let into = memory.buffer(output, Use::Write)?;
        let from = memory.separate_input(input, std::slice::from_ref(&into))?;
        let op = if output_split_sizes.is_empty() && input_split_sizes.is_empty() {
            Op::AllToAllSingle {
                input: from,
                output: into,
            }
        } else {
            Op::AllToAllVSingle {
                input_splits: elements(input, &input_split_sizes, ranks)?,
                output_splits: elements(output, &output_split_sizes, ranks)?,
                input: from,
                output: into,
            }
        };
        self.issue(
            py,
            &options,
            memory,
            op,
            as_list(py, std::slice::from_ref(output))?,
        )
    }

    /// Exchanges a tensor with each rank; sizes may differ from pair to pair.
    #[pyo3(signature = (output_tensors, input_tensors, opts=None))]
    fn alltoall(
        &self,
        py: Python<'_>,
        output_tensors: Any<'_, '_>,
        input_tensors: Any<'_, '_>,
        opts: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?;
        let (into, from) = (list(output_tensors)?, list(input_tensors)?);
        let mut memory = self.tensors(py);
        let outputs = memory.buffers(&into, Use::Write)?;
        let inputs = memory.separate_inputs(&from, &outputs)?;
        let op = Op::AllToAll { inputs, outputs };
        self.issue(py, &options, memory, op, as_list(py, &into)?)
    }

    #[pyo3(signature = (tensors, dst_rank, tag=0))]
    fn send(
        &self,
        py: Python<'_>,
        tensors: Any<'_, '_>,
        dst_rank: i64,
        tag: i64,
    ) -> PyResult<Work> {
        let peer = non_negative(dst_rank, "the destination")?;
        let tag = non_negative(tag, "the tag")?;
        let tensor = lone(tensors)?;
        let mut memory = self.tensors(py);
        let buffer = memory.buffer(&tensor, Use::Read)?;
        let op = Op::Send { buffer, peer, tag };
        let options = Options::read(None)?;
        self.issue(py, &options, memory, op, as_list(py, &[tensor])?)
    }

    #[pyo3(signature = (tensors, src_rank, tag=0))]
    fn recv(
        &self,
        py: Python<'_>,
        tensors: Any<'_, '_>,
        src_rank: i64,
        tag: i64,
    ) -> PyResult<Work> {
        let source = non_negative(src_rank, "the source")?;
        self.receive(py, tensors, Some(source), tag)
    }

    /// Receives from any rank; `_source_rank` of the Work names the sender.
    #[pyo3(signature = (tensors, tag=0))]
    fn recv_anysource(&self, py: Python<'_>, tensors: Any<'_, '_>, tag: i64) -> PyResult<Work> {
        self.receive(py, tensors, None, tag)
    }

    #[pyo3(signature = (opts=None, timeout=None))]
    fn barrier(
        &self,
        py: Python<'_>,
        opts: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Work> {
        let options = Options::read(opts)?.within(timeout)?;
        let memory = self.tensors(py);
        self.issue(py, &options, memory, Op::Barrier, as_list(py, &[])?)
    }

    /// A barrier through the store, in which rank 0 of the group waits for each member. The error of a time-out begins
    /// with gloo's text, which names the members that did not arrive on rank 0 of the group only. What follows names
    /// them on every rank or, if rank 0 of the group published no result, names that rank.
    #[pyo3(signature = (timeout=None, wait_all_ranks=false))]
    fn monitored_barrier(
        &self,
        py: Python<'_>,
        timeout: Option<Any<'_, '_>>,
        wait_all_ranks: bool,
    ) -> PyResult<()> {
        self.run_monitored_barrier(py, timeout, wait_all_ranks)
    }

    /// Keeps the operations that are called from now on, until `end_coalescing` starts them as one.
    fn start_coalescing(&self) {
        self.begin_block();
    }

    /// Starts the kept operations as one; None if there are none.
    fn end_coalescing(&self, py: Python<'_>) -> PyResult<Option<Work>> {
        self.end_block(py)
    }

    /// Makes pending operations fail soon, and later ones at once.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.of_this_process(py)?;
        py.detach(|| group.abort("torch.distributed.ProcessGroup.abort()"));
        Ok(())
    }

    /// Makes a group of this group's members without these ranks, which are ranks of the world. All remaining members
    /// call this with the same list.
    fn shrink(&self, py: Python<'_>, excluding: Vec<u32>) -> PyResult<Self> {
        let group = self.of_this_process(py)?;
        let options = GroupOptions {
            timeout: Some(group.timeout()),
            ..GroupOptions::named(group.desc())
        };
        let remaining = py.detach(|| group.shrink(&excluding, &options));
        let remaining = remaining.map_err(|error| exception_for(py, &error, options.timeout))?;
        Ok(Self::new(detached::shared(remaining), self.shared.clone()))
    }

    /// Waits for pending operations, at most for `within`, and refuses later ones. Does nothing in a forked child.
    fn shutdown(&self, py: Python<'_>, within: Duration) -> PyResult<()> {
        if !self.group.is_own() {
            return Ok(());
        }
        let group = self.group.within(within);
        py.detach(|| group.destroy())
            .map_err(|error| exception_for(py, &error, Some(within)))
    }
}

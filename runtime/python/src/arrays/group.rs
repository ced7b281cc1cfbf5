//! The operations of a group over arrays.
//!
//! An operation runs in the calling thread, which gets the result; with `wait=False` the call starts the operation and
//! returns a `Work`. Where an operation has a part for each rank, the parts lie one after the other in one array, in
//! order of rank: equal parts, or parts of `rows[r]` rows (the extents of the first dimension). The stubs in
//! `rcomm/_native.pyi` document the operations.

use super::errors::invalid;
use super::issue::{CallOptions, ReturnValue, Shared, duration, reduction};
use super::memory::{Memory, Use};
use super::objects::Codec;
use super::parts::{extents, total};
use crate::process_group::detached::{self, SharedGroup};
use crate::process_group::fork::OfProcess;
use pyo3::prelude::*;
use pyo3::types::PyList;
use rcomm::{GroupOptions, MissingRanks, Op};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;

/// An ordered set of ranks that call operations together.
#[pyclass(module = "rcomm._native", frozen, weakref)]
pub(crate) struct ArrayGroup {
    pub(super) group: OfProcess<SharedGroup>,
    pub(super) shared: Arc<Shared>,
}

impl ArrayGroup {
    pub(super) fn new(group: SharedGroup, shared: Arc<Shared>) -> Self {
        Self {
            group: OfProcess::new(group),
            shared,
        }
    }
}

#[pymethods]
impl ArrayGroup {
    /// This process's rank in the group.
    #[getter]
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    /// The number of ranks in the group.
    #[getter]
    fn size(&self) -> u32 {
        self.group.size()
    }

    /// The group's purpose, as records and errors show it.
    #[getter]
    fn name(&self) -> &str {
        self.group.desc()
    }

    /// The members' ranks in the world, in the order of their ranks in the group.
    #[getter]
    fn ranks(&self) -> Vec<u32> {
        self.group.ranks().to_vec()
    }

    /// How many seconds an operation may take.
    #[getter]
    fn get_timeout(&self) -> f64 {
        self.group.timeout().as_secs_f64()
    }

    #[setter]
    fn set_timeout(&self, py: Python<'_>, timeout: Any<'_, '_>) -> PyResult<()> {
        self.of_this_process(py)?.set_timeout(duration(timeout)?);
        Ok(())
    }

    #[pyo3(signature = (x, op=None, *, out=None, timeout=None, wait=true))]
    fn all_reduce(
        &self,
        x: Any<'_, '_>,
        op: Option<Any<'_, '_>>,
        out: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let (py, options) = (x.py(), CallOptions::read(timeout, wait)?);
        let op = reduction(op)?;
        let (result, memory) = Self::in_place(x, out)?;
        let buffer = memory.buffer(py)?;
        self.issue(
            py,
            &options,
            Op::AllReduce { buffer, op },
            ReturnValue::Object(result.unbind()),
        )
    }

    #[pyo3(signature = (xs, op=None, *, timeout=None, wait=true))]
    fn all_reduce_coalesced(
        &self,
        py: Python<'_>,
        xs: Vec<Bound<'_, PyAny>>,
        op: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let options = CallOptions::read(timeout, wait)?;
        let op = reduction(op)?;
        let buffers = xs.iter().map(|x| Memory::of(x, Use::Write)?.buffer(py));
        let buffers = buffers.collect::<PyResult<_>>()?;
        let results = PyList::new(py, &xs)?.into_any().unbind();
        let op = Op::AllReduceCoalesced { buffers, op };
        self.issue(py, &options, op, ReturnValue::Object(results))
    }

    #[pyo3(signature = (x, root=0, op=None, *, out=None, timeout=None, wait=true))]
    fn reduce(
        &self,
        x: Any<'_, '_>,
        root: u32,
        op: Option<Any<'_, '_>>,
        out: Option<Any<'_, '_>>,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let (py, options) = (x.py(), CallOptions::read(timeout, wait)?);
        let op = reduction(op)?;
        let (result, buffer) = match self.is_root(root) {
            true => {
                let (result, memory) = Self::in_place(x, out)?;
                (result.unbind(), memory.buffer(py)?)
            }
            false => (py.None(), Memory::of(x, Use::Read)?.buffer(py)?),
        };
        self.issue(
            py,
            &options,
            Op::Reduce { buffer, op, root },
            ReturnValue::Object(result),
        )
    }

    #[pyo3(signature = (x, root=0, *, timeout=None, wait=true))]
    fn broadcast(
        &self,
        x: Any<'_, '_>,
        root: u32,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let (py, options) = (x.py(), CallOptions::read(timeout, wait)?);
        let usage = match self.is_root(root) {
            true => Use::Read,
            false => Use::Write,
        };
        let buffer = Memory::of(x, usage)?.buffer(py)?;
        let result = ReturnValue::Object(x.clone().unbind());
        self.issue(py, &options, Op::Broadcast { buffer, root }, result)
    }

    #[pyo3(signature = (x, *, out=None, rows=None, timeout=None, wait=true))]
    fn all_gather(
        &self,
        x: Any<'_, '_>,
        out: Option<Any<'_, '_>>,
        rows: Option<Vec<usize>>,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let (py, options) = (x.py(), CallOptions::read(timeout, wait)?);
        let arrays = Self::arrays(x, out, |from| self.gathered(py, from, rows.as_deref()))?;
        let input = arrays.from.buffer(py)?;
        let op = match rows {
            Some(rows) => {
                let lens = self.parts(py, &rows, arrays.from.shape.rows().1)?;
                let outputs = arrays.into.pieces(py, &lens)?;
                Op::AllGatherV { input, outputs }
            }
            None => Op::AllGatherSingle {
                input,
                output: arrays.into.buffer(py)?,
            },
        };
        self.issue(
            py,
            &options,
            op,
            ReturnValue::Object(arrays.result.unbind()),
        )
    }

    #[pyo3(signature = (x, root=0, *, out=None, rows=None, timeout=None, wait=true))]
    fn gather(
        &self,
        x: Any<'_, '_>,
        root: u32,
        out: Option<Any<'_, '_>>,
        rows: Option<Vec<usize>>,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let (py, options) = (x.py(), CallOptions::read(timeout, wait)?);
        let (input, outputs, result) = if self.is_root(root) {
            let arrays = Self::arrays(x, out, |from| self.gathered(py, from, rows.as_deref()))?;
            let row = arrays.from.shape.rows().1;
            let lens = match &rows {
                Some(rows) => self.parts(py, rows, row)?,
                None => self.equal_parts(py, &arrays.into)?,
            };
            let outputs = arrays.into.pieces(py, &lens)?;
            (arrays.from.buffer(py)?, outputs, arrays.result.unbind())
        } else {
            (Memory::of(x, Use::Read)?.buffer(py)?, Vec::new(), py.None())
        };
        let op = match rows {
            Some(_) => Op::GatherV {
                input,
                outputs,
                root,
            },
            None => Op::Gather {
                input,
                outputs,
                root,
            },
        };
        self.issue(py, &options, op, ReturnValue::Object(result))
    }

    #[pyo3(signature = (x=None, root=0, *, out=None, rows=None, timeout=None, wait=true))]
    #[allow(clippy::too_many_arguments)]
    fn scatter(
        &self,
        py: Python<'_>,
        x: Option<Any<'_, '_>>,
        root: u32,
        out: Option<Any<'_, '_>>,
        rows: Option<Vec<usize>>,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let options = CallOptions::read(timeout, wait)?;
        let (inputs, result, into) = if self.is_root(root) {
            let x = x.ok_or_else(|| invalid(py, "the root of a scatter must give an array"))?;
            let arrays = Self::arrays(x, out, |from| self.own_part(py, from, rows.as_deref()))?;
            let inputs = self.parts_for_all_ranks(py, &arrays.from, rows.as_deref())?;
            (inputs, arrays.result, arrays.into)
        } else {
            let out = out.ok_or_else(|| {
                invalid(
                    py,
                    "a scatter needs out= on every rank but the root, which alone knows the shape",
                )
            })?;
            (Vec::new(), out.clone(), Memory::of(out, Use::Write)?)
        };
        let output = into.buffer(py)?;
        let op = match rows {
            Some(_) => Op::ScatterV {
                inputs,
                output,
                root,
            },
            None => Op::Scatter {
                inputs,
                output,
                root,
            },
        };
        self.issue(py, &options, op, ReturnValue::Object(result.unbind()))
    }

    #[pyo3(signature = (x, op=None, *, out=None, rows=None, timeout=None, wait=true))]
    fn reduce_scatter(
        &self,
        x: Any<'_, '_>,
        op: Option<Any<'_, '_>>,
        out: Option<Any<'_, '_>>,
        rows: Option<Vec<usize>>,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let (py, options) = (x.py(), CallOptions::read(timeout, wait)?);
        let reduce_op = reduction(op)?;
        let arrays = Self::arrays(x, out, |from| self.own_part(py, from, rows.as_deref()))?;
        let output = arrays.into.buffer(py)?;
        let op = match rows {
            Some(rows) => Op::ReduceScatterV {
                inputs: self.parts_for_all_ranks(py, &arrays.from, Some(&rows))?,
                output,
                op: reduce_op,
            },
            None => Op::ReduceScatterSingle {
                input: arrays.from.buffer(py)?,
                output,
                op: reduce_op,
            },
        };
        self.issue(
            py,
            &options,
            op,
            ReturnValue::Object(arrays.result.unbind()),
        )
    }

    #[pyo3(signature = (x, *, out=None, rows=None, rows_out=None, timeout=None, wait=true))]
    fn all_to_all(
        &self,
        x: Any<'_, '_>,
        out: Option<Any<'_, '_>>,
        rows: Option<Vec<usize>>,
        rows_out: Option<Vec<usize>>,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let (py, options) = (x.py(), CallOptions::read(timeout, wait)?);
        let (rows, rows_out) = match (rows, rows_out) {
            (None, None) => {
                let arrays = Self::arrays(x, out, |from| extents(py, from))?;
                let op = Op::AllToAllSingle {
                    input: arrays.from.buffer(py)?,
                    output: arrays.into.buffer(py)?,
                };
                return self.issue(
                    py,
                    &options,
                    op,
                    ReturnValue::Object(arrays.result.unbind()),
                );
            }
            (Some(rows), Some(rows_out)) => (rows, rows_out),
            (Some(rows), None) => {
                let rows_out = self.swap_rows(py, &rows, options.timeout)?;
                (rows, rows_out)
            }
            (None, Some(_)) => {
                return Err(invalid(
                    py,
                    "an all_to_all with rows_out= needs rows= as well",
                ));
            }
        };
        let arrays = Self::arrays(x, out, |from| {
            Self::with_rows(py, from, total(py, &rows_out)?)
        })?;
        let row = arrays.from.shape.rows().1;
        let op = Op::AllToAllVSingle {
            input: arrays.from.buffer(py)?,
            output: arrays.into.buffer(py)?,
            input_splits: self.parts(py, &rows, row)?,
            output_splits: self.parts(py, &rows_out, row)?,
        };
        self.issue(
            py,
            &options,
            op,
            ReturnValue::Object(arrays.result.unbind()),
        )
    }

    #[pyo3(signature = (*, timeout=None, wait=true))]
    fn barrier(
        &self,
        py: Python<'_>,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let options = CallOptions::read(timeout, wait)?;
        self.issue(py, &options, Op::Barrier, ReturnValue::Object(py.None()))
    }

    #[pyo3(signature = (*, timeout=None, all=false))]
    fn monitored_barrier(
        &self,
        py: Python<'_>,
        timeout: Option<Any<'_, '_>>,
        all: bool,
    ) -> PyResult<()> {
        let missing = match all {
            true => MissingRanks::All,
            false => MissingRanks::First,
        };
        self.run_blocking(py, timeout, |group| group.monitored_barrier(missing))
    }

    #[pyo3(signature = (x, to, *, tag=0, timeout=None, wait=true))]
    fn send(
        &self,
        x: Any<'_, '_>,
        to: u32,
        tag: u32,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let (py, options) = (x.py(), CallOptions::read(timeout, wait)?);
        let buffer = Memory::of(x, Use::Read)?.buffer(py)?;
        let op = Op::Send {
            buffer,
            peer: to,
            tag,
        };
        self.issue(py, &options, op, ReturnValue::Object(py.None()))
    }

    #[pyo3(signature = (x, source=None, *, tag=0, timeout=None, wait=true))]
    fn recv(
        &self,
        x: Any<'_, '_>,
        source: Option<u32>,
        tag: u32,
        timeout: Option<Any<'_, '_>>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let (py, options) = (x.py(), CallOptions::read(timeout, wait)?);
        let buffer = Memory::of(x, Use::Write)?.buffer(py)?;
        let op = Op::Recv {
            buffer,
            peer: source,
            tag,
        };
        let returns = match source {
            Some(source) => ReturnValue::Object(source.into_pyobject(py)?.into_any().unbind()),
            None => ReturnValue::Sender,
        };
        self.issue(py, &options, op, returns)
    }

    #[pyo3(signature = (value=None, root=0, *, pickle=false, timeout=None))]
    fn broadcast_object(
        &self,
        py: Python<'_>,
        value: Option<Any<'_, '_>>,
        root: u32,
        pickle: bool,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Py<PyAny>> {
        let codec = Codec::new(py, pickle);
        let mut sent = match value {
            Some(value) if self.is_root(root) => codec.encode(value)?,
            _ => Value::Null,
        };
        let sent = self.run_blocking(py, timeout, move |group| {
            group.broadcast_object(&mut sent, root)?;
            Ok(sent)
        })?;
        Ok(codec.decode(&sent)?.unbind())
    }

    #[pyo3(signature = (value, *, pickle=false, timeout=None))]
    fn all_gather_object(
        &self,
        value: Any<'_, '_>,
        pickle: bool,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Py<PyAny>> {
        let codec = Codec::new(value.py(), pickle);
        let sent = codec.encode(value)?;
        let values =
            self.run_blocking(value.py(), timeout, |group| group.all_gather_object(&sent))?;
        codec.decode_all(&values)
    }

    #[pyo3(signature = (value, root=0, *, pickle=false, timeout=None))]
    fn gather_object(
        &self,
        value: Any<'_, '_>,
        root: u32,
        pickle: bool,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Py<PyAny>> {
        let codec = Codec::new(value.py(), pickle);
        let sent = codec.encode(value)?;
        let values = self.run_blocking(value.py(), timeout, |group| {
            group.gather_object(&sent, root)
        })?;
        match values {
            Some(values) => codec.decode_all(&values),
            None => Ok(value.py().None()),
        }
    }

    #[pyo3(signature = (values=None, root=0, *, pickle=false, timeout=None))]
    fn scatter_object(
        &self,
        py: Python<'_>,
        values: Option<Vec<Bound<'_, PyAny>>>,
        root: u32,
        pickle: bool,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Py<PyAny>> {
        let codec = Codec::new(py, pickle);
        let values = values.unwrap_or_default();
        let sent = values.iter().map(|value| codec.encode(value));
        let sent = sent.collect::<PyResult<Vec<_>>>()?;
        let got = self.run_blocking(py, timeout, |group| group.scatter_object(&sent, root))?;
        Ok(codec.decode(&got)?.unbind())
    }

    #[pyo3(signature = (value, to, *, tag=0, pickle=false, timeout=None))]
    fn send_object(
        &self,
        value: Any<'_, '_>,
        to: u32,
        tag: u32,
        pickle: bool,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<()> {
        let sent = Codec::new(value.py(), pickle).encode(value)?;
        self.run_blocking(value.py(), timeout, |group| {
            group.send_object(&sent, to, tag)
        })
    }

    #[pyo3(signature = (source, *, tag=0, pickle=false, timeout=None))]
    fn recv_object(
        &self,
        py: Python<'_>,
        source: u32,
        tag: u32,
        pickle: bool,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Py<PyAny>> {
        let got: Value = self.run_blocking(py, timeout, |group| group.recv_object(source, tag))?;
        Ok(Codec::new(py, pickle).decode(&got)?.unbind())
    }

    #[pyo3(signature = (color, key=0, *, name="", timeout=None))]
    fn split(
        &self,
        py: Python<'_>,
        color: Option<u32>,
        key: i64,
        name: &str,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Option<Self>> {
        let options = GroupOptions {
            timeout: timeout.map(duration).transpose()?,
            ..GroupOptions::named(name)
        };
        let part = self.run_blocking(py, None, |group| group.split(color, key, &options))?;
        Ok(part.map(|part| Self::new(detached::shared(part), self.shared.clone())))
    }

    #[pyo3(signature = (without, *, timeout=None))]
    fn shrink(
        &self,
        py: Python<'_>,
        without: Vec<u32>,
        timeout: Option<Any<'_, '_>>,
    ) -> PyResult<Self> {
        let left = self.run_blocking(py, timeout, |group| {
            group.shrink(&without, &GroupOptions::named(group.desc()))
        })?;
        Ok(Self::new(detached::shared(left), self.shared.clone()))
    }

    #[pyo3(signature = (within=5.0))]
    fn find_absent(&self, py: Python<'_>, within: f64) -> PyResult<Vec<u32>> {
        let within = Duration::try_from_secs_f64(within).map_err(|_| {
            let text = format!("within is {within}: it must be a number of seconds from 0 to 1e19");
            invalid(py, &text)
        })?;
        self.run_blocking(py, None, |group| group.find_absent(within))
    }

    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let group = self.of_this_process(py)?;
        py.detach(|| group.abort(reason));
        Ok(())
    }

    #[pyo3(signature = (*, timeout=None))]
    fn destroy(&self, py: Python<'_>, timeout: Option<Any<'_, '_>>) -> PyResult<()> {
        self.run_blocking(py, timeout, |group| group.clone().destroy())
    }

    fn __repr__(&self) -> String {
        let (rank, size) = (self.group.rank(), self.group.size());
        format!("<rcomm.Group {} rank {rank} of {size}>", self.group.desc())
    }
}

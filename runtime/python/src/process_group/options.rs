//! The arguments that torch.distributed passes besides the tensors: option objects, or their fields one by
//! one.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use rcomm::{ReduceOp, Reduction};
use std::time::Duration;

/// `c10d::ReduceOp::RedOpType` in PyTorch's order (`torch/csrc/distributed/c10d/Types.hpp`).
const REDUCTIONS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
    ReduceOp::PremulSum,
];

/// `torch.distributed.ReduceOp`; `None` if its hash is not its number.
static REDUCE_OP: PyOnceLock<Option<Py<PyAny>>> = PyOnceLock::new();

/// The options of an operation.
pub(crate) struct Options {
    /// Whether the operation runs in the calling thread; otherwise the call returns a Work at once.
    pub(crate) blocking: bool,
    /// How long the operation may take; `None` for the group's time-out.
    pub(crate) timeout: Option<Duration>,
}

impl Options {
    /// Reads the fields that all option objects have.
    pub(crate) fn read(opts: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let mut read = Self {
            blocking: false,
            timeout: None,
        };
        let Some(opts) = opts else { return Ok(read) };
        let py = opts.py();
        if let Some(is_async) = opts.getattr_opt(intern!(py, "asyncOp"))? {
            read.blocking = !is_async.is_truthy()?;
        }
        if let Some(timeout) = opts.getattr_opt(intern!(py, "timeout"))? {
            read.timeout = duration(&timeout)?;
        } else if is_duration(opts)? {
            read.timeout = duration(opts)?;
        }
        Ok(read)
    }

    /// The same options, with the time-out that was passed separately, if one was.
    pub(crate) fn within(mut self, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        if let Some(timeout) = timeout {
            self.timeout = duration(timeout)?.or(self.timeout);
        }
        Ok(self)
    }
}

fn is_duration(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    object.hasattr(intern!(object.py(), "total_seconds"))
}

/// Reads a time-out: a `timedelta`, or a number of seconds. `None` where the value is `None` or not positive, which
/// means that none was set.
pub(crate) fn duration(timeout: &Bound<'_, PyAny>) -> PyResult<Option<Duration>> {
    let py = timeout.py();
    if timeout.is_none() {
        return Ok(None);
    }
    // A timedelta is recognized by `days`: trying to read it as a number would raise an exception at every operation.
    let Some(days) = timeout.getattr_opt(intern!(py, "days"))? else {
        return Ok(from_seconds(timeout.extract()?));
    };
    // PyTorch passes -1 ms for an unset time-out, which a timedelta holds as -1 days and some seconds.
    if days.extract::<i64>()? < 0 {
        return Ok(None);
    }
    let seconds: f64 = timeout
        .call_method0(intern!(py, "total_seconds"))?
        .extract()?;
    Ok(from_seconds(seconds))
}

fn from_seconds(seconds: f64) -> Option<Duration> {
    let is_positive = seconds > 0.0;
    is_positive.then(|| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// The reduction of an option object, or one that was passed separately; a sum if there is neither.
pub(crate) fn reduction(
    opts: Option<&Bound<'_, PyAny>>,
    op: Option<&Bound<'_, PyAny>>,
) -> PyResult<Reduction> {
    if let Some(op) = op {
        return read_reduction(op);
    }
    let Some(opts) = opts else {
        return Ok(ReduceOp::Sum.into());
    };
    match opts.getattr_opt(intern!(opts.py(), "reduceOp"))? {
        Some(op) => read_reduction(&op),
        None if is_duration(opts)? => Ok(ReduceOp::Sum.into()),
        None => read_reduction(opts),
    }
}

/// Reads a `ReduceOp`, or a `ReduceOp.RedOpType`.
fn read_reduction(op: &Bound<'_, PyAny>) -> PyResult<Reduction> {
    let py = op.py();
    let known = usize::try_from(code_of(op)?).ok();
    let known = known.and_then(|code| REDUCTIONS.get(code).copied());
    let known = known
        .ok_or_else(|| PyValueError::new_err(format!("rcomm does not know the reduction {op}")))?;
    if known != ReduceOp::PremulSum {
        return Ok(known.into());
    }
    let factor = op.getattr_opt(intern!(py, "factor"))?;
    let factor = factor.map(|factor| match factor.extract::<f64>() {
        Ok(factor) => Ok(factor),
        Err(_) => factor.call_method0(intern!(py, "item"))?.extract(),
    });
    match factor {
        Some(factor) => Ok(Reduction::premul_sum(factor?)),
        None => Err(PyValueError::new_err(
            "this version of PyTorch does not expose the factor of PREMUL_SUM: multiply first, then sum",
        )),
    }
}

/// The number of a `ReduceOp` or `ReduceOp.RedOpType` in PyTorch's order.
fn code_of(op: &Bound<'_, PyAny>) -> PyResult<isize> {
    let py = op.py();
    let reduce_op = REDUCE_OP.get_or_try_init(py, || {
        let c10d = py.import(intern!(py, "torch._C._distributed_c10d"))?;
        let class = c10d.getattr(intern!(py, "ReduceOp"))?;
        let largest = class.call1((class.getattr(intern!(py, "MAX"))?,))?;
        let is_hash = largest.hash()? == code_in(&largest)?;
        Ok::<_, PyErr>(is_hash.then(|| class.unbind()))
    })?;
    // The hash of a `ReduceOp` is its number, in the versions of PyTorch that were tried. To read `op` takes three
    // times as long.
    let is_hash = |class: &Py<PyAny>| op.get_type().is(class.bind(py));
    match reduce_op.as_ref().is_some_and(is_hash) {
        true => op.hash(),
        false => code_in(op),
    }
}

/// The number that a `ReduceOp` holds, or a `ReduceOp.RedOpType` is.
fn code_in(op: &Bound<'_, PyAny>) -> PyResult<isize> {
    let py = op.py();
    let inner = op.getattr_opt(intern!(py, "op"))?;
    let kind = inner.as_ref().unwrap_or(op);
    match kind.extract() {
        Ok(code) => Ok(code),
        Err(_) => kind.getattr(intern!(py, "value"))?.extract(),
    }
}

/// The root of an option object, or a number passed in its place or separately; 0 if there is neither.
pub(crate) fn root(opts: Option<&Bound<'_, PyAny>>, root: Option<i64>) -> PyResult<u32> {
    let root = match (root, opts) {
        (Some(root), _) => root,
        (None, None) => 0,
        (None, Some(opts)) => match opts.getattr_opt(intern!(opts.py(), "rootRank"))? {
            Some(root) => root.extract()?,
            None => opts.extract().unwrap_or(0),
        },
    };
    non_negative(root, "root")
}

/// A rank of the group or a tag, in the core's type. `name` is the argument's name in the error.
pub(crate) fn non_negative(number: i64, name: &str) -> PyResult<u32> {
    u32::try_from(number).map_err(|_| {
        let message = format!("{name} is {number}: it must be from 0 to {}", u32::MAX);
        PyValueError::new_err(message)
    })
}

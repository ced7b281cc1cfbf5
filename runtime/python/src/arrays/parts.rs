//! The parts of all ranks in one array, and the arrays of an operation.

use super::errors::{exception_for, invalid};
use super::group::ArrayGroup;
use super::memory::{Memory, Use, empty_like};
use pyo3::prelude::*;
use rcomm::Buffer;
use std::time::Duration;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;

/// The arrays of an operation.
pub(super) struct Arrays<'py> {
    /// The memory of the input.
    pub(super) from: Memory,
    /// The memory of `result`.
    pub(super) into: Memory,
    /// The caller's array for the result, or a new one if the caller gave none.
    pub(super) result: Bound<'py, PyAny>,
}

/// The rows of all parts together.
///
/// # Errors
/// `rcomm.InvalidArgument` if they are more than an array can have.
pub(super) fn total(py: Python<'_>, rows: &[usize]) -> PyResult<usize> {
    let total = rows
        .iter()
        .try_fold(0_usize, |total, &rows| total.checked_add(rows));
    total.ok_or_else(|| invalid(py, "the parts have more rows than an array can have"))
}

impl ArrayGroup {
    pub(super) fn ranks_in_group(&self) -> usize {
        self.group.size() as usize
    }

    /// The array that a reduction works in, and its memory: `x`, or `out`, which first becomes a copy of `x`.
    ///
    /// # Errors
    /// `rcomm.InvalidArgument` if an array cannot be used, or if `out` shares memory with `x` or has another length or
    /// element type.
    pub(super) fn in_place<'py>(
        x: Any<'_, 'py>,
        out: Option<Any<'_, 'py>>,
    ) -> PyResult<(Bound<'py, PyAny>, Memory)> {
        let Some(out) = out else {
            return Ok((x.clone(), Memory::of(x, Use::Write)?));
        };
        let py = x.py();
        let (from, into) = (Memory::of(x, Use::Read)?, Memory::of(out, Use::Write)?);
        let (from, mut to) = (from.buffer(py)?, into.buffer(py)?);
        let (start, end) = (to.as_ptr().addr(), to.as_ptr().addr() + to.size_bytes());
        let overlaps =
            from.as_ptr().addr() < end && start < from.as_ptr().addr() + from.size_bytes();
        if overlaps {
            return Err(invalid(
                py,
                "the result of a reduction shares memory with its input: omit out= to reduce in place",
            ));
        }
        let copied = py.detach(|| to.copy_from(&from));
        copied.map_err(|error| exception_for(py, &error, None))?;
        Ok((out.clone(), into))
    }

    /// The input, and for the result `out` or a new array, of the shape that `shape` gives.
    pub(super) fn arrays<'py>(
        x: Any<'_, 'py>,
        out: Option<Any<'_, 'py>>,
        shape: impl FnOnce(&Memory) -> PyResult<Vec<usize>>,
    ) -> PyResult<Arrays<'py>> {
        let from = Memory::of(x, Use::Read)?;
        let result = match out {
            Some(out) => out.clone(),
            None => empty_like(x, &shape(&from)?)?,
        };
        let into = Memory::of(&result, Use::Write)?;
        Ok(Arrays { from, into, result })
    }

    /// How many elements the part of each rank has, in an array whose rows have `row` elements.
    ///
    /// # Errors
    /// `rcomm.InvalidArgument` if there are not as many numbers of rows as ranks, or if one is too large.
    pub(super) fn parts(&self, py: Python<'_>, rows: &[usize], row: usize) -> PyResult<Vec<usize>> {
        if rows.len() != self.ranks_in_group() {
            let text = format!(
                "{} numbers of rows in a group of {} ranks: one is needed for each rank",
                rows.len(),
                self.ranks_in_group()
            );
            return Err(invalid(py, &text));
        }
        let parts = rows.iter().map(|rows| rows.checked_mul(row));
        let parts = parts.collect::<Option<Vec<_>>>();
        parts.ok_or_else(|| invalid(py, "the numbers of rows are too large"))
    }

    /// The lengths of equal parts of an array, one for each rank.
    ///
    /// # Errors
    /// `rcomm.InvalidArgument` if the array does not divide into such parts.
    pub(super) fn equal_parts(&self, py: Python<'_>, whole: &Memory) -> PyResult<Vec<usize>> {
        let ranks = self.ranks_in_group();
        if !whole.len().is_multiple_of(ranks) {
            let text = format!(
                "{} elements do not divide into {ranks} equal parts",
                whole.len()
            );
            return Err(invalid(py, &text));
        }
        Ok(vec![whole.len() / ranks; ranks])
    }

    /// The parts for all ranks in one array: in the root's for a scatter, in each rank's for a reduce-scatter.
    pub(super) fn parts_for_all_ranks(
        &self,
        py: Python<'_>,
        whole: &Memory,
        rows: Option<&[usize]>,
    ) -> PyResult<Vec<Buffer<'static>>> {
        let lens = match rows {
            Some(rows) => self.parts(py, rows, whole.shape.rows().1)?,
            None => self.equal_parts(py, whole)?,
        };
        whole.pieces(py, &lens)
    }

    /// The extents of an array with `rows` rows like those of `array`.
    ///
    /// # Errors
    /// `rcomm.InvalidArgument` if `array` has no dimensions, or more than are kept.
    pub(super) fn with_rows(py: Python<'_>, array: &Memory, rows: usize) -> PyResult<Vec<usize>> {
        let mut shape = extents(py, array)?;
        match shape.first_mut() {
            Some(first) => *first = rows,
            None => return Err(invalid(py, "an array without dimensions has no rows")),
        }
        Ok(shape)
    }

    /// The extents of an array for the parts of all ranks, each like `from`; with `rows`, joined by rows.
    pub(super) fn gathered(
        &self,
        py: Python<'_>,
        from: &Memory,
        rows: Option<&[usize]>,
    ) -> PyResult<Vec<usize>> {
        match rows {
            Some(rows) => Self::with_rows(py, from, total(py, rows)?),
            None => Ok([vec![self.ranks_in_group()], extents(py, from)?].concat()),
        }
    }

    /// The extents of this rank's part of `whole`.
    ///
    /// # Errors
    /// `rcomm.InvalidArgument` if `whole` does not divide into equal parts, where `rows` is `None`, or has no
    /// dimensions, or more than are kept.
    pub(super) fn own_part(
        &self,
        py: Python<'_>,
        whole: &Memory,
        rows: Option<&[usize]>,
    ) -> PyResult<Vec<usize>> {
        let (row_count, ranks) = (whole.shape.rows().0, self.ranks_in_group());
        let own_rows = match rows {
            Some(rows) => rows.get(self.group.rank() as usize).copied().unwrap_or(0),
            None if row_count.is_multiple_of(ranks) => row_count / ranks,
            None => {
                let text =
                    format!("{row_count} rows do not divide into {ranks} equal parts: give out=");
                return Err(invalid(py, &text));
            }
        };
        Self::with_rows(py, whole, own_rows)
    }

    pub(super) fn is_root(&self, root: u32) -> bool {
        self.group.rank() == root
    }

    /// How many rows each rank sends to this one, where this rank sends `rows`. All members call this; blocks until
    /// they have.
    pub(super) fn swap_rows(
        &self,
        py: Python<'_>,
        rows: &[usize],
        timeout: Option<Duration>,
    ) -> PyResult<Vec<usize>> {
        let mut sent: Vec<u64> = rows.iter().map(|&rows| rows as u64).collect();
        // A list of the wrong length is refused here, before the exchange, on this rank alone.
        self.parts(py, rows, 1)?;
        sent.resize(self.ranks_in_group(), 0);
        let handle = self.handle(py, timeout)?;
        let mut received = vec![0u64; sent.len()];
        let swapped = py.detach(|| handle.all_to_all_single(&sent, &mut received));
        swapped.map_err(|error| self.shared.exception_for(py, &error))?;
        Ok(received.into_iter().map(|rows| rows as usize).collect())
    }
}

/// An array's extents.
///
/// # Errors
/// `rcomm.InvalidArgument` if the array has more dimensions than are kept.
pub(super) fn extents(py: Python<'_>, array: &Memory) -> PyResult<Vec<usize>> {
    let shape = array.shape.extents();
    let shape =
        shape.ok_or_else(|| invalid(py, "the array has more than 8 dimensions: give out="))?;
    Ok(shape.iter().map(|&extent| extent as usize).collect())
}

//! The monitored barrier, whose time-out errors have gloo's wording, for which programs written for PyTorch search.

use super::errors::{exception_for, of_torch};
use super::issue::Group;
use super::options::Options;
use pyo3::intern;
use pyo3::prelude::*;
use rcomm::{ErrorKind, MissingRanks};
use std::time::Duration;

impl Group {
    /// Runs a monitored barrier. The error of a time-out begins with gloo's text, which names the missing members on
    /// rank 0 of the group only, and there not if the time-out is zero. Then follows rcomm's text, which names them on
    /// every rank or, if rank 0 of the group published no result, names that rank.
    pub(crate) fn run_monitored_barrier(
        &self,
        py: Python<'_>,
        timeout: Option<&Bound<'_, PyAny>>,
        wait_all_ranks: bool,
    ) -> PyResult<()> {
        let mut options = Options::read(timeout)?;
        let at_once = timeout.is_some_and(|timeout| is_zero(timeout).unwrap_or(false));
        if at_once {
            options.timeout = Some(Duration::from_millis(1));
        }
        let handle = self.handle(py, &options)?;
        let missing = match wait_all_ranks {
            true => MissingRanks::All,
            false => MissingRanks::First,
        };
        let result = py.detach(|| handle.monitored_barrier(missing));
        let Err(error) = result else { return Ok(()) };
        let timeout = handle.timeout();
        if error.kind() != ErrorKind::Timeout {
            return Err(exception_for(py, &error, Some(timeout)));
        }
        let (own_rank, ms) = (handle.rank(), timeout.as_millis());
        let absent = error
            .ranks()
            .iter()
            .filter_map(|&rank| handle.group_rank(rank));
        let absent: Vec<String> = absent.map(|rank| rank.to_string()).collect();
        let gloo_text = match absent.as_slice() {
            _ if own_rank != 0 => format!(
                "Rank {own_rank} successfully reached monitoredBarrier, but received errors while waiting for \
                 send/recv from rank 0"
            ),
            _ if at_once => format!("Rank {own_rank} timed out in monitoredBarrier after 0 ms"),
            [rank] => format!("Rank {rank} failed to pass monitoredBarrier in {ms} ms"),
            ranks => format!(
                "Ranks {} failed to pass monitoredBarrier in {ms} ms",
                ranks.join(", ")
            ),
        };
        let text = format!("rcomm: {gloo_text}. With ranks numbered as in the world: {error}");
        Err(of_torch(py, "DistBackendError", text))
    }
}

/// Whether a time-out, or that of an option object, is zero.
fn is_zero(timeout: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = timeout.py();
    let timeout = timeout
        .getattr_opt(intern!(py, "timeout"))?
        .unwrap_or_else(|| timeout.clone());
    let seconds: f64 = timeout
        .call_method0(intern!(py, "total_seconds"))?
        .extract()?;
    Ok(seconds == 0.0)
}

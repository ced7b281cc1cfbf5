//! Stores which job is shown.

use super::processes::ProcessJob;
use std::sync::{Arc, Mutex, PoisonError};

/// The job that all sources of one view show. Cloned handles share the choice.
///
/// A job that the user named or chose remains until another is chosen. Without a choice, a view begins with a job that
/// has an error ([`NodeJobs::begin`](crate::NodeJobs::begin)), else the first poll takes the newest job; the view keeps
/// it either way, see [`RingSource`](super::RingSource).
#[derive(Clone, Debug, Default)]
pub struct JobChoice(Arc<Mutex<Shown>>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Shown {
    job: Option<String>,
    chosen: bool,
    /// The job whose processes are shown in place of rings; `None` while rings are shown.
    processes: Option<ProcessJob>,
}

impl JobChoice {
    /// Shows the job that the user named; without one, a poll will set the job.
    pub fn of(job: Option<String>) -> Self {
        let chosen = job.is_some();
        Self(Arc::new(Mutex::new(Shown {
            job,
            chosen,
            processes: None,
        })))
    }

    /// Shows another job from the next poll on, as chosen by the user.
    pub fn choose(&self, job: &str) {
        self.set(job, true);
    }

    /// The job that is shown, and whether the user chose it; `None` until the user, the beginning of the view or the
    /// first poll has set one.
    pub fn shown(&self) -> Option<(String, bool)> {
        let shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shown.job.clone().map(|job| (job, shown.chosen))
    }

    /// Shows a job that the user did not choose.
    pub(in crate::live) fn show_unchosen(&self, job: &str) {
        self.set(job, false);
    }

    fn set(&self, job: &str, chosen: bool) {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let processes = shown.processes.take().filter(|_| !chosen);
        *shown = Shown {
            job: Some(job.to_owned()),
            chosen,
            processes,
        };
    }

    /// The job whose processes are shown in place of rings; `None` while rings are shown.
    pub(super) fn shown_processes(&self) -> Option<ProcessJob> {
        let shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shown.processes.clone()
    }

    /// Sets the job whose processes are shown in place of rings; `None` if rings are shown.
    pub(super) fn show_processes(&self, job: Option<ProcessJob>) {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shown.processes = job;
    }
}

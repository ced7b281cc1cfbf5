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
    /// Whether the user named or chose the job.
    chosen: bool,
    /// Whether a process of the job was seen alive since it was first shown.
    was_alive: bool,
    /// The job whose processes are shown instead of rings; `None` while rings are shown.
    processes: Option<ProcessJob>,
}

impl JobChoice {
    /// Shows the job that the user named; without one, a poll will set the job.
    pub fn of(job: Option<String>) -> Self {
        let chosen = job.is_some();
        Self(Arc::new(Mutex::new(Shown {
            job,
            chosen,
            ..Shown::default()
        })))
    }

    /// Shows another job from the next poll on, as chosen by the user.
    pub fn choose(&self, job: &str) {
        self.set(job, true, false);
    }

    /// The job that is shown, and whether the user chose it; `None` until the user, the beginning of the view or the
    /// first poll has set one.
    pub fn shown(&self) -> Option<(String, bool)> {
        let shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shown.job.clone().map(|job| (job, shown.chosen))
    }

    /// Shows a job that the user did not choose; `is_alive`: one of its processes is alive.
    pub(in crate::live) fn show_unchosen(&self, job: &str, is_alive: bool) {
        self.set(job, false, is_alive);
    }

    fn set(&self, job: &str, chosen: bool, was_alive: bool) {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let processes = shown.processes.take().filter(|_| !chosen);
        *shown = Shown {
            job: Some(job.to_owned()),
            chosen,
            was_alive,
            processes,
        };
    }

    /// Notes that a process of the shown job is alive.
    pub(super) fn note_alive(&self) {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shown.was_alive = true;
    }

    /// Whether a process of the shown job was seen alive since it was first shown.
    pub(super) fn was_alive(&self) -> bool {
        let shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shown.was_alive
    }

    /// The job whose processes are shown instead of rings; `None` while rings are shown.
    pub(super) fn shown_processes(&self) -> Option<ProcessJob> {
        let shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shown.processes.clone()
    }

    /// Sets the job whose processes are shown instead of rings; `None` if rings are shown.
    pub(super) fn show_processes(&self, job: Option<ProcessJob>) {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shown.processes = job;
    }
}

#[cfg(test)]
mod tests {
    use super::JobChoice;
    use crate::live::source::{RingSource, Source};
    use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
    use std::path::Path;
    use std::time::{Duration, Instant};

    fn recorder(directory: &Path, job: &str) -> FlightRecorder {
        let mut config = RecorderConfig::new(job, 0, 2);
        config.placement = Placement::Dir(directory.to_owned());
        FlightRecorder::create(&config).expect("a ring can be made in a fresh directory")
    }

    #[test]
    fn a_living_job_replaces_at_once_one_that_was_over_when_it_was_first_shown() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        recorder(directory.path(), "over").mark_closed();
        let choice = JobChoice::default();
        let mut source = RingSource::showing(directory.path().to_owned(), choice.clone());
        let deadline = Instant::now() + Duration::from_secs(60);
        source.poll(deadline).expect("there is a ring");
        assert_eq!(choice.shown(), Some(("over".to_owned(), false)));
        let _living = recorder(directory.path(), "living");
        // New rings are searched for every two seconds.
        while choice.shown() != Some(("living".to_owned(), false)) {
            assert!(Instant::now() < deadline, "{:?}", choice.shown());
            std::thread::sleep(Duration::from_millis(50));
            source.poll(deadline).expect("there is a ring");
        }
    }
}

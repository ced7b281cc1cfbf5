//! A world that could not be made: its ring holds the reason.

use crate::op::error::{Error, ErrorKind};
use rcomm_recorder::model::{FailureKind, Rank};
use rcomm_recorder::publish::{KeptJobs, remove_jobs_beside};
use rcomm_recorder::record::FlightRecorder;
use std::sync::Arc;

/// The ring of a world that may never be made.
pub(super) struct FailedInit {
    pub(super) rank: Rank,
    pub(super) recorder: Option<Arc<FlightRecorder>>,
    /// How many dead jobs keep their rings, and how much memory these may take.
    pub(super) kept_jobs: KeptJobs,
}

impl FailedInit {
    /// Ends the making of the world. An error is recorded in the ring, which is closed and kept. But the ring is
    /// removed after `InvalidArgument` or `Unsupported`: they are mistakes in the call and no failure of the job.
    /// Without an error the ring stays as it is.
    ///
    /// A rank leaves the rings of dead jobs to the lowest rank of its host. That rank may have died before it removed
    /// them, and its death may be why the world cannot be made. So after an error the lowest rank that is left does.
    pub(super) fn end(&mut self, error: Option<&Error>) {
        let Some(recorder) = self.recorder.take() else {
            return;
        };
        let Some(error) = error else {
            return;
        };
        if matches!(
            error.kind(),
            ErrorKind::InvalidArgument | ErrorKind::Unsupported
        ) {
            return remove(&recorder);
        }
        let mut failure = error.failure(self.rank);
        if !error.ranks().is_empty() && failure.kind == FailureKind::Backend {
            // Ranks that did not arrive at the rendezvous are recorded like ranks that do not arrive at an
            // operation.
            failure.kind = FailureKind::Timeout;
        }
        recorder.note_failure(&failure);
        remove_jobs_beside(recorder.storage(), &self.kept_jobs);
        recorder.mark_closed();
    }
}

impl Drop for FailedInit {
    fn drop(&mut self) {
        // `end` was not called, so making the world has panicked.
        if let Some(recorder) = &self.recorder {
            recorder.mark_closed();
        }
    }
}

fn remove(recorder: &FlightRecorder) {
    if let Err(error) = recorder.discard() {
        tracing::warn!(%error, "the ring file could not be removed");
    }
}

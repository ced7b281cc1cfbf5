//! A world that could not be made: its ring holds the reason.

use crate::op::error::{Error, ErrorKind};
use rcomm_recorder::model::{FailureKind, Rank};
use rcomm_recorder::record::FlightRecorder;
use std::sync::Arc;

/// The ring of a world that may never be made.
pub(super) struct FailedInit {
    pub(super) rank: Rank,
    pub(super) recorder: Option<Arc<FlightRecorder>>,
}

impl FailedInit {
    /// Ends the attempt to make the world. A ring that holds the reason of a failure is kept; that of a rank
    /// that was refused before anything happened is removed.
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
            // The ranks did not arrive, which is recorded like ranks that do not arrive at an operation.
            failure.kind = FailureKind::Timeout;
        }
        recorder.note_failure(&failure);
        recorder.mark_closed();
    }
}

impl Drop for FailedInit {
    fn drop(&mut self) {
        // The world was not made because of a panic.
        if let Some(recorder) = &self.recorder {
            recorder.mark_closed();
        }
    }
}

fn remove(recorder: &FlightRecorder) {
    if let Err(error) = recorder.close() {
        tracing::warn!(%error, "the ring file could not be removed");
    }
}

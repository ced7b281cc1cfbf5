//! Handlers of the API; `routes` maps paths to them.

pub(crate) mod app_state;
pub(crate) mod events;
pub(crate) mod explain;
pub(crate) mod matrix;
pub(crate) mod records;
pub(crate) mod select;
pub(crate) mod snapshots;
pub(crate) mod timeline;
pub(crate) mod uploaded;
pub(crate) mod uploads;

use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use crate::state::store::Frame;
use rcomm_analyzer::{Report, Snapshot};
use serde::Deserialize;
use std::sync::Arc;

/// Selects a snapshot: the newest, an earlier one, or that of an upload.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct SnapshotSelector {
    /// Number of a kept snapshot.
    pub(crate) at: Option<u64>,
    /// Id of an upload.
    pub(crate) upload: Option<String>,
}

impl SnapshotSelector {
    /// The snapshot with its records; earlier snapshots are kept without them.
    pub(crate) fn frame(&self, app: &AppState) -> Result<Arc<Frame>, Refusal> {
        match (&self.upload, self.at) {
            (Some(_), Some(_)) => Err(Refusal::Query(
                "`at` and `upload` exclude each other".into(),
            )),
            (Some(id), None) => app
                .uploads
                .get(id)
                .ok_or_else(|| Refusal::NoUpload(id.clone())),
            (None, at) => {
                let frame = app.store.frame().ok_or(Refusal::NotYet)?;
                match at {
                    Some(number) if number != frame.snapshot.number => {
                        Err(Refusal::NoRecords(number))
                    }
                    _ => Ok(frame),
                }
            }
        }
    }

    /// The snapshot as JSON.
    pub(crate) fn text(&self, app: &AppState) -> Result<Arc<str>, Refusal> {
        match self.frame(app) {
            Err(Refusal::NoRecords(number)) => {
                let text = app.store.past(number);
                text.map(Arc::from).ok_or(Refusal::NoSnapshot(number))
            }
            frame => frame.map(|frame| frame.text.clone()),
        }
    }

    /// The report alone.
    pub(crate) fn report(&self, app: &AppState) -> Result<Arc<Report>, Refusal> {
        #[derive(Deserialize)]
        struct KeptReport {
            report: Report,
        }
        match self.frame(app) {
            Err(Refusal::NoRecords(number)) => {
                let text = app.store.past(number);
                let text = text.ok_or(Refusal::NoSnapshot(number))?;
                let past: KeptReport =
                    serde_json::from_str(&text).map_err(|_| Refusal::NoSnapshot(number))?;
                Ok(Arc::new(past.report))
            }
            frame => frame.map(|frame| frame.body.report.clone()),
        }
    }

    /// The records.
    pub(crate) fn snapshot(&self, app: &AppState) -> Result<Arc<Snapshot>, Refusal> {
        self.frame(app).map(|frame| frame.snapshot.clone())
    }
}

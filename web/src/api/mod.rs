//! Handlers of the API; `routes` maps paths to them.

pub(crate) mod app_state;
pub(crate) mod events;
pub(crate) mod explain;
pub(crate) mod jobs;
pub(crate) mod matrix;
pub(crate) mod records;
pub(crate) mod reducers;
pub(crate) mod select;
pub(crate) mod snapshots;
pub(crate) mod timeline;
pub(crate) mod uploaded;
pub(crate) mod uploads;

use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use crate::state::jobs::{MAX_WATCHED, NotWatched, WatchedJob};
use crate::state::snapshot::{RankRuns, Status, ranks_of};
use crate::state::store::{Frame, SnapshotStore};
use rcomm_analyzer::{Report, Snapshot, States};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How long a request waits for the first snapshot of a job that was not watched before.
const FIRST_LOOK: Duration = Duration::from_secs(5);

/// Selects a snapshot: the newest, an earlier one, or that of an upload.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct SnapshotSelector {
    /// Number of a kept snapshot.
    pub(crate) at: Option<u64>,
    /// Id of an upload.
    pub(crate) upload: Option<String>,
    /// A job of this node; otherwise the one that the server shows.
    pub(crate) job: Option<String>,
}

impl SnapshotSelector {
    /// The newest snapshot or that of an upload, with its records. [`Refusal::NoRecords`] if `at` is another number
    /// than that of the newest, since of earlier ones only the JSON form is kept. Also refused if `upload` is combined
    /// with `at` or `job`, the upload or the job is not known, or there is no snapshot yet.
    pub(crate) async fn frame(&self, app: &AppState) -> Result<Arc<Frame>, Refusal> {
        match (&self.upload, self.at) {
            (Some(_), Some(_)) => Err(Refusal::Query(
                "`at` and `upload` exclude each other".into(),
            )),
            (Some(_), None) if self.job.is_some() => Err(Refusal::Query(
                "`job` and `upload` exclude each other".into(),
            )),
            (Some(id), None) => app
                .uploads
                .get(id)
                .ok_or_else(|| Refusal::NoUpload(id.clone())),
            (None, at) => {
                let shown = Shown::of(self.job.as_deref(), app).await?;
                let frame = shown.store().frame().ok_or(Refusal::NotYet)?;
                match at {
                    Some(number) if number != frame.snapshot.number => {
                        Err(Refusal::NoRecords(number))
                    }
                    _ => Ok(frame),
                }
            }
        }
    }

    /// The selected snapshot as JSON, also an earlier one.
    pub(crate) async fn text(&self, app: &AppState) -> Result<Arc<str>, Refusal> {
        match self.frame(app).await {
            Err(Refusal::NoRecords(number)) => {
                let shown = Shown::of(self.job.as_deref(), app).await?;
                let text = shown.store().past(number);
                text.map(Arc::from).ok_or(Refusal::NoSnapshot(number))
            }
            frame => frame.map(|frame| frame.text.clone()),
        }
    }

    /// The report of the selected snapshot, also of an earlier one. If neither `at` nor `upload` is given, the findings
    /// state their ages as of this request, because a job that stands still is analyzed again only now and then.
    pub(crate) async fn report(&self, app: &AppState) -> Result<Arc<Report>, Refusal> {
        Ok(self.judged(app).await?.report)
    }

    /// Like [`Self::report`], with what the states of the ranks follow from.
    pub(crate) async fn judged(&self, app: &AppState) -> Result<Judged, Refusal> {
        #[derive(Deserialize)]
        struct KeptReport {
            status: Status,
            report: Report,
        }
        match self.frame(app).await {
            Err(Refusal::NoRecords(number)) => {
                let shown = Shown::of(self.job.as_deref(), app).await?;
                let text = shown.store().past(number);
                let text = text.ok_or(Refusal::NoSnapshot(number))?;
                let past: KeptReport =
                    serde_json::from_str(&text).map_err(|_| Refusal::NoSnapshot(number))?;
                Ok(Judged {
                    report: Arc::new(past.report),
                    seen: Seen::Past(past.status.rank_states),
                })
            }
            frame => {
                let frame = frame?;
                let mut report = frame.body.report.clone();
                if self.upload.is_none() && self.at.is_none() {
                    let shown = Shown::of(self.job.as_deref(), app).await?;
                    report = Arc::new(report.after(shown.store().newest_age_ms()));
                }
                let seen = Seen::Snapshot(frame.snapshot.clone());
                Ok(Judged { report, seen })
            }
        }
    }

    /// The newest snapshot or that of an upload, with its records; see [`Self::frame`].
    pub(crate) async fn snapshot(&self, app: &AppState) -> Result<Arc<Snapshot>, Refusal> {
        self.frame(app).await.map(|frame| frame.snapshot.clone())
    }
}

/// A report, and the data from which the states of its ranks follow.
pub(crate) struct Judged {
    pub(crate) report: Arc<Report>,
    seen: Seen,
}

enum Seen {
    Snapshot(Arc<Snapshot>),
    /// The states of the ranks at that moment.
    Past(RankRuns),
}

impl Judged {
    /// The states that every view shows.
    pub(crate) fn states(&self) -> States {
        match &self.seen {
            Seen::Snapshot(snapshot) => States::of_snapshot(snapshot, &BTreeSet::new()),
            Seen::Past(runs) => States::of_past(&self.report, ranks_of(runs)),
        }
    }
}

/// Selects a job.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct WhichJob {
    /// A job of this node; otherwise the one that the server shows.
    pub(crate) job: Option<String>,
}

/// The snapshots of the job that a request is about. The job stays watched while this value exists.
#[derive(Clone)]
pub(crate) enum Shown {
    /// The job that the server shows if a request names none.
    Main(SnapshotStore),
    /// Another job of this node.
    Other(Arc<WatchedJob>),
}

impl Shown {
    /// The job of this name, or the one that the server shows if there is no name. Waits up to [`FIRST_LOOK`] for the
    /// first snapshot of a job that was not watched before; afterwards its store may still be empty.
    pub(crate) async fn of(job: Option<&str>, app: &AppState) -> Result<Self, Refusal> {
        let Some(name) = job.map(str::to_owned) else {
            return Ok(Self::Main(app.store.clone()));
        };
        let is_shown = app
            .store
            .newest()
            .is_some_and(|snapshot| *snapshot.job == *name);
        if is_shown {
            return Ok(Self::Main(app.store.clone()));
        }
        let Some(jobs) = app.jobs.clone() else {
            return Err(Refusal::NoJob(name));
        };
        let asked = name.clone();
        let watched = tokio::task::spawn_blocking(move || jobs.watch(&asked));
        let watched = watched.await.map_err(|_| Refusal::Stopping)?;
        let watched = watched.map_err(|reason| match reason {
            NotWatched::Unknown => Refusal::NoJob(name),
            NotWatched::TooMany => Refusal::ManyJobs(MAX_WATCHED),
            NotWatched::NoThread(error) => Refusal::Thread(error),
        })?;
        if watched.store.frame().is_none() {
            let mut changes = watched.store.changes();
            let first = changes.wait_for(Option::is_some);
            // If no snapshot exists by then, the store stays empty, and the handler decides what to answer.
            let _ = tokio::time::timeout(FIRST_LOOK, first).await;
        }
        Ok(Self::Other(watched))
    }

    pub(crate) fn store(&self) -> &SnapshotStore {
        match self {
            Self::Main(store) => store,
            Self::Other(watched) => &watched.store,
        }
    }
}

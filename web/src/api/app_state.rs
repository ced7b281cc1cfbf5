//! State shared by all handlers.

use crate::api::uploaded::Uploads;
use crate::http::traffic::Traffic;
use crate::metrics::Exemplars;
use crate::otel::Counts;
use crate::state::jobs::Jobs;
use crate::state::store::SnapshotStore;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// State that every handler gets: the snapshots, the uploads and the server's own counters.
#[derive(Clone)]
pub(crate) struct AppState {
    pub(crate) store: SnapshotStore,
    /// The jobs of this node; `None` if the server's source is not the rings of this node.
    pub(crate) jobs: Option<Jobs>,
    pub(crate) uploads: Arc<Uploads>,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) exemplars: Exemplars,
    /// Counts of the OpenTelemetry exporter, if one runs.
    pub(crate) exported: Option<Arc<Counts>>,
    /// One permit: answers that copy all records are built one at a time, to bound memory.
    pub(crate) heavy: Arc<Semaphore>,
}

impl AppState {
    pub(crate) fn new(
        store: SnapshotStore,
        jobs: Option<Jobs>,
        uploads: Uploads,
        traffic: Arc<Traffic>,
        exemplars: Exemplars,
        exported: Option<Arc<Counts>>,
    ) -> Self {
        Self {
            store,
            jobs,
            uploads: Arc::new(uploads),
            traffic,
            exemplars,
            exported,
            heavy: Arc::new(Semaphore::new(1)),
        }
    }
}

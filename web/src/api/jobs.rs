//! The jobs of this node.

use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use crate::state::jobs::JobRow;
use axum::Json;
use axum::extract::State;
use serde::Serialize;

/// The jobs with rings on this node, those in trouble first; empty if the server's source is not the rings of this
/// node.
#[derive(Serialize)]
pub(crate) struct JobList {
    jobs: Vec<JobRow>,
}

pub(crate) async fn jobs(State(app): State<AppState>) -> Result<Json<JobList>, Refusal> {
    let Some(jobs) = app.jobs.clone() else {
        return Ok(Json(JobList { jobs: Vec::new() }));
    };
    // One request at a time reads files; requests that wait for it get the same list.
    let listed = tokio::task::spawn_blocking(move || jobs.list(&app.store));
    let jobs = listed.await.map_err(|_| Refusal::Stopping)?;
    Ok(Json(JobList { jobs }))
}

//! Snapshots: the newest, past ones and those of uploads, and their exports.

use super::{Shown, SnapshotSelector, WhichJob};
use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use crate::state::snapshot::{Point, Status};
use axum::Json;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use rcomm_analyzer::Report;
use rcomm_analyzer::export::perfetto;
use serde::Serialize;

fn json(text: &str) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        text.to_owned(),
    )
        .into_response()
}

pub(crate) async fn picture(
    State(app): State<AppState>,
    Query(which): Query<SnapshotSelector>,
) -> Result<Response, Refusal> {
    Ok(json(&which.text(&app).await?))
}

pub(crate) async fn report(
    State(app): State<AppState>,
    Query(which): Query<SnapshotSelector>,
) -> Result<Json<Report>, Refusal> {
    Ok(Json(Report::clone(&*which.report(&app).await?)))
}

pub(crate) async fn status(
    State(app): State<AppState>,
    Query(which): Query<WhichJob>,
) -> Result<Json<Status>, Refusal> {
    let shown = Shown::of(which.job.as_deref(), &app).await?;
    let frame = shown.store().frame().ok_or(Refusal::NotYet)?;
    Ok(Json(frame.body.status.clone()))
}

/// The kept snapshots.
#[derive(Serialize)]
pub(crate) struct KeptSnapshots {
    points: Vec<Point>,
}

pub(crate) async fn history(
    State(app): State<AppState>,
    Query(which): Query<WhichJob>,
) -> Result<Json<KeptSnapshots>, Refusal> {
    let shown = Shown::of(which.job.as_deref(), &app).await?;
    Ok(Json(KeptSnapshots {
        points: shown.store().points(),
    }))
}

pub(crate) async fn metrics(State(app): State<AppState>, headers: HeaderMap) -> Response {
    let accept = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .unwrap_or_default();
    let form = crate::metrics::Form::preferred_by(accept);
    let mut body = app.store.metrics(form, app.exemplars);
    app.traffic.write(form, app.exported.as_deref(), &mut body);
    ([(header::CONTENT_TYPE, form.content_type())], body).into_response()
}

/// A timeline for ui.perfetto.dev. Requests are answered one at a time, since each copies all records.
pub(crate) async fn perfetto_trace(
    State(app): State<AppState>,
    Query(which): Query<SnapshotSelector>,
) -> Result<Response, Refusal> {
    let snapshot = which.snapshot(&app).await?;
    let _turn = app.heavy.acquire().await.map_err(|_| Refusal::Stopping)?;
    let written = tokio::task::spawn_blocking(move || {
        let dumps: Vec<_> = snapshot.dumps().map(|(_, dump)| dump.clone()).collect();
        let mut trace = Vec::new();
        perfetto::write(&dumps, &snapshot.report, &mut trace).map(|()| trace)
    });
    let trace = written
        .await
        .map_err(|_| Refusal::Stopping)?
        .map_err(|error| Refusal::Query(error.to_string()))?;
    let headers = [
        (header::CONTENT_TYPE, "application/json"),
        (
            header::CONTENT_DISPOSITION,
            "attachment; filename=\"rcomm-trace.json\"",
        ),
    ];
    Ok((headers, trace).into_response())
}

//! All routes.
//!
//! | method and path | answer |
//! |---|---|
//! | `GET /`, `GET /reports/{id}` | the page: of the live job, of an upload |
//! | `GET /assets/{file}` | the files of the page |
//! | `GET /api/v1` | the list of the routes of the API, as JSON |
//! | `GET /api/v1/openapi.json` | the description of the routes, OpenAPI 3.1 |
//! | `GET /api/v1/picture` | the report, its age, and the matrix of the group that matters most |
//! | `GET /api/v1/report` | the report, `rcomm.report/1` |
//! | `GET /api/v1/status` | job, age and sources of the snapshot |
//! | `GET /api/v1/jobs` | the jobs with rings on this node, those in trouble first |
//! | `GET /api/v1/events` | server-sent events: `picture` first, then `delta` or `picture` whenever it changes |
//! | `GET /api/v1/history` | number, time and some figures of each snapshot that is kept |
//! | `GET /api/v1/select?filter=` | rows that match a filter |
//! | `GET /api/v1/filter-keys` | the terms of the filter language |
//! | `GET /api/v1/explain?code=` | what a finding's code means, and what to do |
//! | `GET /api/v1/matrix?group=` | the rank × sequence matrix of a group |
//! | `GET /api/v1/timeline` | the newest operations of each rank |
//! | `GET /api/v1/reducers` | the newest step of each reducer on each rank |
//! | `GET /api/v1/perfetto` | a timeline for ui.perfetto.dev |
//! | `GET /api/v1/records` | the records of this node, or their changes, for a collector |
//! | `POST /api/v1/uploads` | analyzes dumps, returns the address of the report |
//! | `GET /metrics` | Prometheus: OpenMetrics 1.0 or text 0.0.4, chosen by `Accept` |
//! | `GET /healthz` | 200 while the server runs; no token |
//! | `GET /readyz` | 200 once the sources were read; no token |
//!
//! `picture`, `report`, `select`, `matrix`, `timeline`, `reducers` and `perfetto` take `upload=ID`, and the first
//! three `at=NUMBER` of a kept snapshot. These, `status`, `events` and `history` take `job=NAME` for another job
//! of this node than the one that the server shows.

use crate::api::app_state::AppState;
use crate::api::{
    events, explain, jobs, matrix, records, reducers, select, snapshots, timeline,
    uploads as uploading,
};
use crate::http::access::{Access, guard};
use crate::http::assets;
use crate::http::compress::compressed;
use crate::http::error::Refusal;
use crate::http::limits::Limits;
use crate::http::traffic::Traffic;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use std::sync::Arc;

/// The routes that `GET /api/v1` lists.
pub(crate) const API: [&str; 20] = [
    "/api/v1/openapi.json",
    "/api/v1/picture",
    "/api/v1/report",
    "/api/v1/status",
    "/api/v1/jobs",
    "/api/v1/events",
    "/api/v1/history",
    "/api/v1/select",
    "/api/v1/filter-keys",
    "/api/v1/explain",
    "/api/v1/matrix",
    "/api/v1/timeline",
    "/api/v1/reducers",
    "/api/v1/perfetto",
    "/api/v1/records",
    "/api/v1/uploads",
    "/metrics",
    "/healthz",
    "/readyz",
    "/api/v1",
];

/// Maximum length of a URI, in bytes.
const MAX_URI: usize = 8 * 1024;
/// Maximum length of a request body other than an upload, in bytes.
const MAX_BODY: usize = 64 * 1024;
/// Maximum size of an upload's form in addition to its files, in bytes.
const MAX_FORM_OVERHEAD: u64 = 8 << 20;

/// The whole server without its socket: routes, limits and access control.
pub(crate) fn router(app: AppState, access: Access, limits: Limits) -> Router {
    let form =
        usize::try_from(limits.upload.saturating_add(MAX_FORM_OVERHEAD)).unwrap_or(usize::MAX);
    let bounds = Bounds {
        limits,
        traffic: app.traffic.clone(),
    };
    Router::new()
        .route("/", get(async || assets::page()))
        .route("/reports/{id}", get(async || assets::page()))
        .route(
            "/assets/{*file}",
            get(async |Path(file): Path<String>| assets::part(&file)),
        )
        .route("/api/v1", get(async || Json(API)))
        .route("/api/v1/openapi.json", get(async || assets::description()))
        .route("/api/v1/picture", get(snapshots::picture))
        .route("/api/v1/report", get(snapshots::report))
        .route("/api/v1/status", get(snapshots::status))
        .route("/api/v1/jobs", get(jobs::jobs))
        .route("/api/v1/events", get(events::events))
        .route("/api/v1/history", get(snapshots::history))
        .route("/api/v1/select", get(select::select))
        .route("/api/v1/filter-keys", get(select::filter_keys))
        .route("/api/v1/explain", get(explain::explain))
        .route("/api/v1/matrix", get(matrix::group_matrix))
        .route("/api/v1/timeline", get(timeline::timeline))
        .route("/api/v1/reducers", get(reducers::reducers))
        .route("/api/v1/perfetto", get(snapshots::perfetto_trace))
        .route("/api/v1/records", get(records::records))
        .route(
            "/api/v1/uploads",
            post(uploading::upload).layer(DefaultBodyLimit::max(form)),
        )
        .route("/metrics", get(snapshots::metrics))
        .route("/healthz", get(async || "alive\n"))
        .route("/readyz", get(ready))
        .fallback(async |uri: Uri| Refusal::NoRoute(uri.path().to_owned()))
        .method_not_allowed_fallback(async |method: Method| {
            Refusal::NoMethod(method.as_str().chars().take(16).collect())
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(app)
        .layer(from_fn_with_state(access, guard))
        .layer(from_fn(compressed))
        .layer(from_fn_with_state(bounds, bounded))
}

async fn ready(State(app): State<AppState>) -> Result<&'static str, Refusal> {
    app.store.newest().ok_or(Refusal::NotYet).map(|_| "ready\n")
}

#[derive(Clone)]
struct Bounds {
    limits: Limits,
    traffic: Arc<Traffic>,
}

/// Applies the limits to every request and counts it.
async fn bounded(State(bounds): State<Bounds>, request: Request, next: Next) -> Response {
    let length = request
        .uri()
        .path_and_query()
        .map_or(0, |path| path.as_str().len());
    if length > MAX_URI {
        bounds.traffic.count_request(false);
        return Refusal::LongUri(length, MAX_URI).into_response();
    }
    // Large uploads may arrive over slow connections: give them ten times as long.
    let times = if request.method() == Method::POST {
        10
    } else {
        1
    };
    let answered = tokio::time::timeout(bounds.limits.answer * times, next.run(request));
    let mut response = match answered.await {
        Ok(response) => response,
        Err(_) => Refusal::TookTooLong.into_response(),
    };
    let denied = matches!(
        response.status(),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::MISDIRECTED_REQUEST
    );
    bounds.traffic.count_request(denied);
    // Answers about a job are private and out of date at once: forbid caching.
    let headers = response.headers_mut();
    if !headers.contains_key(header::CACHE_CONTROL) {
        headers.insert(
            header::CACHE_CONTROL,
            header::HeaderValue::from_static("no-store"),
        );
    }
    response
}

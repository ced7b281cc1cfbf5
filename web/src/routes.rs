//! Every route, in one place.
//!
//! | method and path | answer |
//! |---|---|
//! | `GET /` | the page |
//! | `GET /assets/{file}` | its parts |
//! | `GET /api/v1` | the list of the routes below, as JSON |
//! | `GET /api/v1/report` | the report, `rcomm.report/1` |
//! | `GET /api/v1/status` | job, age and sources of the picture |
//! | `GET /api/v1/events` | server-sent events: `report` whenever it changes |
//! | `GET /metrics` | Prometheus: OpenMetrics 1.0 or text 0.0.4, as `Accept` asks |
//! | `GET /healthz` | 200 while the server runs; no token |
//! | `GET /readyz` | 200 once the sources were looked at; no token |

use crate::access::{Access, guard};
use crate::assets;
use crate::board::Board;
use crate::error::Refusal;
use crate::metrics;
use axum::Json;
use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use rcomm_analyzer::{Report, Snapshot};
use serde::Serialize;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};

const API: [&str; 5] = [
    "/api/v1/report",
    "/api/v1/status",
    "/api/v1/events",
    "/metrics",
    "/healthz",
];

/// The whole server, without its socket.
pub fn router(board: Board, access: Access) -> Router {
    Router::new()
        .route("/", get(async || assets::page()))
        .route(
            "/assets/{file}",
            get(async |Path(file): Path<String>| assets::part(&file)),
        )
        .route("/api/v1", get(async || Json(API)))
        .route("/api/v1/report", get(report))
        .route("/api/v1/status", get(status))
        .route("/api/v1/events", get(events))
        .route("/metrics", get(scrape))
        .route("/healthz", get(async || "alive\n"))
        .route("/readyz", get(ready))
        .fallback(async |uri: Uri| Refusal::NoRoute(uri.path().to_owned()))
        .with_state(board)
        .layer(from_fn_with_state(access, guard))
}

fn newest(board: &Board) -> Result<Arc<Snapshot>, Refusal> {
    board.newest().ok_or(Refusal::NotYet)
}

async fn report(State(board): State<Board>) -> Result<Json<Report>, Refusal> {
    Ok(Json(Report::clone(&newest(&board)?.report)))
}

/// How fresh the picture is.
#[derive(Serialize)]
struct Status {
    job: String,
    number: u64,
    judged_at_ns: i64,
    judging_took_ms: f64,
    ranks: usize,
    silent_ranks: Vec<u32>,
    sources: Vec<SourceState>,
}

#[derive(Serialize)]
struct SourceState {
    name: String,
    answered: usize,
    known: usize,
    silent_for_ms: Option<f64>,
    error: Option<String>,
}

fn state_of(snapshot: &Snapshot) -> Status {
    let sources = snapshot.sources.iter().map(|source| SourceState {
        name: source.name.clone(),
        answered: source.answered,
        known: source.known,
        silent_for_ms: source.silence.map(|silence| silence.as_secs_f64() * 1e3),
        error: source.error.clone(),
    });
    Status {
        job: snapshot.job.clone(),
        number: snapshot.number,
        judged_at_ns: snapshot.at.wall_ns,
        judging_took_ms: snapshot.cost.as_secs_f64() * 1e3,
        ranks: snapshot.ranks.len(),
        silent_ranks: snapshot
            .ranks
            .iter()
            .filter(|view| view.silent)
            .map(|view| view.rank)
            .collect(),
        sources: sources.collect(),
    }
}

async fn status(State(board): State<Board>) -> Result<Json<Status>, Refusal> {
    Ok(Json(state_of(&*newest(&board)?)))
}

/// One message of the event stream.
#[derive(Serialize)]
struct Message<'a> {
    status: Status,
    report: &'a Report,
}

async fn events(State(board): State<Board>) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let changes = WatchStream::new(board.changes()).filter_map(|newest| {
        let snapshot = newest?;
        let message = Message {
            status: state_of(&snapshot),
            report: &snapshot.report,
        };
        let event = Event::default()
            .event("report")
            .id(snapshot.number.to_string());
        // A report is plain data: it always has a JSON form.
        event.json_data(&message).ok().map(Ok)
    });
    Sse::new(changes).keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
}

async fn scrape(State(board): State<Board>, headers: HeaderMap) -> Response {
    let accept = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .unwrap_or_default();
    let form = metrics::Form::wanted_by(accept);
    let body = board.metrics(form, metrics::Exemplars::Without);
    ([(header::CONTENT_TYPE, form.content_type())], body).into_response()
}

async fn ready(State(board): State<Board>) -> Result<&'static str, Refusal> {
    newest(&board).map(|_| "ready\n")
}

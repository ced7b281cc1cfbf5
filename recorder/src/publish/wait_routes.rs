//! The routes of an endpoint that show what the threads of the process wait for, and for how long.

use super::endpoint::Served;
use super::share::Visitor;
use super::threads::own_threads;
use super::waits::{WaitStatistics, is_wait_name};
use crate::model::Rank;
use crate::record::decode;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

/// Returns the process's waits; does not block.
pub(super) type ListWaits = Arc<dyn Fn() -> Vec<WaitStatistics> + Send + Sync>;

/// The process's waits, at this moment.
fn waits_of(served: &Mutex<ListWaits>) -> Vec<WaitStatistics> {
    let list = served
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    list()
}

/// Answers `GET /waits`.
pub(super) async fn list(State(served): State<Arc<Served>>) -> Json<Vec<WaitStatistics>> {
    Json(waits_of(&served.waits))
}

/// Answers `GET /threads`.
pub(super) async fn threads(Extension(visitor): Extension<Arc<Visitor>>) -> Response {
    match visitor.elsewhere(own_threads).await {
        Ok(Ok(threads)) => Json(threads).into_response(),
        Ok(Err(error)) => {
            let why = format!("the system does not show this process its threads: {error}\n");
            (StatusCode::INTERNAL_SERVER_ERROR, why).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Answers `GET /metrics`.
pub(super) async fn metrics(State(served): State<Arc<Served>>) -> impl IntoResponse {
    const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
    let (memory, _) = served.recorder.memory();
    let rank = decode::identity(memory, 0).rank;
    let text = as_metrics(rank, &waits_of(&served.waits));
    ([(header::CONTENT_TYPE, TEXT)], text)
}

/// A family of metrics: its name without `rcomm_`, its type, its help, and the value of each wait.
type Family = (
    &'static str,
    &'static str,
    &'static str,
    fn(&WaitStatistics) -> f64,
);

const FAMILIES: [Family; 5] = [
    ("waits_total", "counter", "Waits that have ended.", |wait| {
        wait.count as f64
    }),
    (
        "wait_seconds_total",
        "counter",
        "How long these waits took together.",
        |wait| seconds(wait.total_ns),
    ),
    (
        "wait_seconds_max",
        "gauge",
        "How long the longest of these waits took.",
        |wait| seconds(wait.max_ns),
    ),
    (
        "waiting_threads",
        "gauge",
        "Threads that wait now.",
        |wait| wait.waiting.into(),
    ),
    (
        "waiting_seconds",
        "gauge",
        "For how long at least one thread has waited without a break; 0 if none waits.",
        |wait| seconds(wait.waiting_ns),
    ),
];

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// The waits of a rank as metrics, in Prometheus' text format 0.0.4. Names are those that
/// [`is_wait_name`] admits, so that no label needs an escape.
fn as_metrics(rank: Option<Rank>, waits: &[WaitStatistics]) -> String {
    let rank = rank.map_or(String::new(), |rank| format!("rank=\"{rank}\","));
    let mut text = String::new();
    for (name, kind, help, value) in FAMILIES {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "# HELP rcomm_{name} {help}\n# TYPE rcomm_{name} {kind}"
        );
        for wait in waits.iter().filter(|wait| is_wait_name(&wait.name)) {
            let value = value(wait);
            let _ = writeln!(text, "rcomm_{name}{{{rank}wait=\"{}\"}} {value}", wait.name);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_written_as_metrics_with_rank_and_name() {
        let waits = [
            WaitStatistics {
                name: "rcomm.work".to_owned(),
                count: 3,
                total_ns: 1_500_000_000,
                max_ns: 1_000_000_000,
                waiting: 2,
                waiting_ns: 250_000_000,
            },
            WaitStatistics {
                name: "not \" plain".to_owned(),
                ..WaitStatistics::default()
            },
        ];
        let text = as_metrics(Some(7), &waits);
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                "rcomm_waits_total{rank=\"7\",wait=\"rcomm.work\"} 3",
                "rcomm_wait_seconds_total{rank=\"7\",wait=\"rcomm.work\"} 1.5",
                "rcomm_wait_seconds_max{rank=\"7\",wait=\"rcomm.work\"} 1",
                "rcomm_waiting_threads{rank=\"7\",wait=\"rcomm.work\"} 2",
                "rcomm_waiting_seconds{rank=\"7\",wait=\"rcomm.work\"} 0.25",
            ]
        );
    }
}

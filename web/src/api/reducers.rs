//! The newest step of each reducer on each rank.

use super::SnapshotSelector;
use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use axum::Json;
use axum::extract::{Query, State};
use rcomm_analyzer::ReducerView;
use rcomm_analyzer::format::GroupNames;
use rcomm_recorder::model::{Rank, ReducerBucket};
use serde::Serialize;

/// The newest step of each reducer on each rank. Empty if no program uses one.
#[derive(Serialize)]
pub(crate) struct Reducers {
    reducers: Vec<Row>,
}

/// One step. Times are in ms.
#[derive(Serialize)]
struct Row {
    rank: Rank,
    host: String,
    group: String,
    /// Number of the step in its reducer, from 1.
    step: u64,
    /// When the step ended, wall clock, ns since the epoch; as text, since it exceeds JavaScript's exact integers.
    ended_ns: String,
    step_ms: f64,
    forward_ms: f64,
    backward_ms: f64,
    communication_ms: f64,
    /// The part of communication that the backward pass hid.
    hidden_ms: f64,
    /// The part of communication for which the rank waited.
    exposed_ms: f64,
    /// Size of all gradients.
    bytes: u64,
    bucket_count: u32,
    /// All buckets of the step, or those that were under way the longest.
    buckets: Vec<Bucket>,
}

/// One bucket. Times are in ms; `ready` and `sent` count from the first gradient of the step.
#[derive(Serialize)]
struct Bucket {
    index: u32,
    parameters: u32,
    bytes: u64,
    ready_ms: f64,
    sent_ms: f64,
    communication_ms: f64,
    exposed_ms: f64,
}

pub(crate) async fn reducers(
    State(app): State<AppState>,
    Query(selector): Query<SnapshotSelector>,
) -> Result<Json<Reducers>, Refusal> {
    let snapshot = selector.snapshot(&app).await?;
    let names = GroupNames::of(&snapshot.report);
    Ok(Json(Reducers {
        reducers: snapshot
            .reducers()
            .iter()
            .map(|view| row(view, &names))
            .collect(),
    }))
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn row(view: &ReducerView<'_>, names: &GroupNames) -> Row {
    let times = &view.step.times;
    Row {
        rank: view.rank,
        host: view.dump.identity.host.clone(),
        group: names.name(&view.group),
        step: times.step,
        ended_ns: view.step.ended_ns.to_string(),
        step_ms: ms(times.total_ns()),
        forward_ms: ms(times.forward_ns),
        backward_ms: ms(times.backward_ns),
        communication_ms: ms(times.communication_ns),
        hidden_ms: ms(times.hidden_ns()),
        exposed_ms: ms(times.exposed_ns),
        bytes: times.bytes,
        bucket_count: times.bucket_count,
        buckets: view.step.buckets.iter().map(bucket).collect(),
    }
}

fn bucket(recorded: &ReducerBucket) -> Bucket {
    Bucket {
        index: recorded.index,
        parameters: recorded.parameters,
        bytes: recorded.bytes,
        ready_ms: ms(recorded.ready_ns),
        sent_ms: ms(recorded.sent_ns),
        communication_ms: ms(recorded.communication_ns),
        exposed_ms: ms(recorded.exposed_ns),
    }
}

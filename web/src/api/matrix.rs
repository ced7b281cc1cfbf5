//! The rank × sequence matrix of any group.

use super::SnapshotSelector;
use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use crate::state::snapshot::Focus;
use axum::Json;
use axum::extract::{Query, State};
use rcomm_analyzer::matrix::{Rows, matrix};
use rcomm_recorder::model::Rank;
use serde::Deserialize;

/// Maximum number of columns in an answer.
const MAX_COLUMNS: usize = 256;

#[derive(Debug, Deserialize)]
pub(crate) struct MatrixQuery {
    /// Name of the group.
    group: String,
    /// Global rank of any member, which distinguishes groups of the same name.
    rank: Option<Rank>,
    /// Number of collectives to show, from 1 to [`MAX_COLUMNS`]; 32 by default.
    columns: Option<usize>,
    /// Whether every rank gets a separate row; otherwise ranks with equal cells share a row.
    #[serde(default)]
    each: bool,
    /// This and the next two select the snapshot, as in [`SnapshotSelector`].
    at: Option<u64>,
    upload: Option<String>,
    job: Option<String>,
}

pub(crate) async fn group_matrix(
    State(app): State<AppState>,
    Query(wanted): Query<MatrixQuery>,
) -> Result<Json<Focus>, Refusal> {
    let which = SnapshotSelector {
        at: wanted.at,
        upload: wanted.upload,
        job: wanted.job,
    };
    let snapshot = which.snapshot(&app).await?;
    let groups = snapshot.report.groups.iter().map(|group| &group.group);
    let group = groups
        .filter(|group| group.name == wanted.group)
        .find(|group| wanted.rank.is_none_or(|rank| group.ranks.contains(&rank)))
        .ok_or(Refusal::NoGroup(wanted.group))?;
    let columns = wanted.columns.unwrap_or(32).clamp(1, MAX_COLUMNS);
    let rows = if wanted.each {
        Rows::Each
    } else {
        Rows::Folded
    };
    Ok(Json(Focus {
        group: group.clone(),
        matrix: matrix(snapshot.dumps(), group, &snapshot.report, columns, rows),
    }))
}

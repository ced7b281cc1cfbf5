//! The rank × sequence matrix of any group.

use super::Which;
use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use crate::state::snapshot::Focus;
use axum::Json;
use axum::extract::{Query, State};
use rcomm_analyzer::matrix::{Rows, matrix};
use rcomm_recorder::model::Rank;
use serde::Deserialize;

/// Columns at most.
const MOST_COLUMNS: usize = 256;

#[derive(Debug, Deserialize)]
pub(crate) struct MatrixQuery {
    /// Name of the group.
    group: String,
    /// Any member: groups may share a name.
    rank: Option<Rank>,
    /// Newest collectives to show.
    columns: Option<usize>,
    /// One row for each rank, instead of one for those alike.
    #[serde(default)]
    each: bool,
    at: Option<u64>,
    upload: Option<String>,
}

pub(crate) async fn group_matrix(
    State(app): State<AppState>,
    Query(wanted): Query<MatrixQuery>,
) -> Result<Json<Focus>, Refusal> {
    let which = Which {
        at: wanted.at,
        upload: wanted.upload,
    };
    let snapshot = which.snapshot(&app)?;
    let groups = snapshot.report.groups.iter().map(|group| &group.group);
    let group = groups
        .filter(|group| group.name == wanted.group)
        .find(|group| wanted.rank.is_none_or(|rank| group.ranks.contains(&rank)))
        .ok_or(Refusal::NoGroup(wanted.group))?;
    let columns = wanted.columns.unwrap_or(32).clamp(1, MOST_COLUMNS);
    let rows = if wanted.each {
        Rows::Each
    } else {
        Rows::Folded
    };
    Ok(Json(Focus {
        group: group.clone(),
        matrix: matrix(snapshot.dumps(), group, columns, rows),
    }))
}

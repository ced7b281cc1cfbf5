//! Explains a finding's code: its meaning, possible causes, and what to do.

use crate::http::error::Refusal;
use axum::Json;
use axum::extract::Query;
use rcomm_analyzer::{Code, explain as explanation};
use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize)]
pub(crate) struct ExplainQuery {
    code: String,
}

/// The text of `rcomm-fr explain`, in parts.
#[derive(Debug, Serialize)]
pub(crate) struct Explained {
    code: &'static str,
    name: &'static str,
    meaning: &'static str,
    causes: &'static [&'static str],
    actions: &'static [&'static str],
}

pub(crate) async fn explain(
    Query(wanted): Query<ExplainQuery>,
) -> Result<Json<Explained>, Refusal> {
    let code = Code::parse(&wanted.code).ok_or_else(|| {
        Refusal::Query(format!(
            "{:?} is neither the code nor the name of a finding",
            wanted.code
        ))
    })?;
    let text = explanation(code);
    Ok(Json(Explained {
        code: code.id(),
        name: code.name(),
        meaning: text.meaning,
        causes: text.causes,
        actions: text.actions,
    }))
}

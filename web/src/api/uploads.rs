//! Upload of dumps by a browser.

use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use axum::Json;
use axum::extract::{Multipart, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// Address of an upload's report.
#[derive(Serialize)]
pub(crate) struct StoredUpload {
    id: String,
    /// The page.
    url: String,
}

pub(crate) async fn upload(
    State(app): State<AppState>,
    form: Multipart,
) -> Result<Response, Refusal> {
    let id = app.uploads.take(form).await?;
    let url = format!("/reports/{id}");
    let headers = [(header::LOCATION, url.clone())];
    Ok((StatusCode::CREATED, headers, Json(StoredUpload { id, url })).into_response())
}

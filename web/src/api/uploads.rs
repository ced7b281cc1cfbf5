//! Dumps that a browser brings.

use crate::error::Refusal;
use crate::routes::Shared;
use axum::Json;
use axum::extract::{Multipart, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// Where the report of an upload is found from now on.
#[derive(Serialize)]
pub(crate) struct Kept {
    id: String,
    /// The page.
    url: String,
}

pub(crate) async fn upload(
    State(shared): State<Shared>,
    form: Multipart,
) -> Result<Response, Refusal> {
    let id = shared.uploads.take(form).await?;
    let url = format!("/reports/{id}");
    let headers = [(header::LOCATION, url.clone())];
    Ok((StatusCode::CREATED, headers, Json(Kept { id, url })).into_response())
}

//! What a client is told when it does not get what it asked for.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// A refusal: a status for programs, a sentence for people.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(
        "the token is missing or wrong; open the address that rcomm-web printed at its start, or send `Authorization: Bearer TOKEN`"
    )]
    NoToken,
    #[error("this server does not answer as {0:?}; name it with --host-name if it should")]
    UnknownHost(String),
    #[error("pages of {0:?} may not ask this server")]
    ForeignOrigin(String),
    #[error("the sources have not been looked at yet; ask again in a moment")]
    NotYet,
    #[error("there is nothing at {0:?}; GET /api/v1 lists what there is")]
    NoRoute(String),
    #[error("{0} is not allowed there; GET /api/v1 lists what is")]
    NoMethod(String),
    #[error("the address has {0} bytes, at most {1} are read")]
    LongAddress(usize, usize),
    #[error("the answer took longer than it may")]
    TookTooLong,
    #[error("{0}")]
    Query(String),
    #[error("no group is called {0:?}")]
    NoGroup(String),
    #[error("picture {0} is not kept (any more); GET /api/v1/history lists those that are")]
    NoPicture(u64),
    #[error("of picture {0} only the report is kept; its records are not")]
    NoRecords(u64),
    #[error("upload {0:?} is not kept (any more)")]
    NoUpload(String),
    #[error("the upload cannot be used: {0}")]
    Upload(String),
    #[error("the upload is larger than {0} bytes; use rcomm-fr, or raise --upload-limit")]
    TooLarge(u64),
    #[error("the server's disk refuses: {0}")]
    Disk(std::io::Error),
    #[error("the server is stopping")]
    Stopping,
}

#[derive(Serialize)]
struct Body {
    error: String,
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::NoToken => StatusCode::UNAUTHORIZED,
            Self::UnknownHost(_) => StatusCode::MISDIRECTED_REQUEST,
            Self::ForeignOrigin(_) => StatusCode::FORBIDDEN,
            Self::NotYet | Self::Stopping => StatusCode::SERVICE_UNAVAILABLE,
            Self::NoRoute(_)
            | Self::NoGroup(_)
            | Self::NoPicture(_)
            | Self::NoRecords(_)
            | Self::NoUpload(_) => StatusCode::NOT_FOUND,
            Self::NoMethod(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::LongAddress(..) => StatusCode::URI_TOO_LONG,
            Self::TookTooLong => StatusCode::GATEWAY_TIMEOUT,
            Self::Query(_) => StatusCode::BAD_REQUEST,
            Self::Upload(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Disk(_) => StatusCode::INSUFFICIENT_STORAGE,
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = Body {
            error: self.to_string(),
        };
        (self.status(), Json(body)).into_response()
    }
}

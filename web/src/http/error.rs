//! Errors as clients receive them.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// A refused request: a status code and a sentence.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(
        "the token is missing or wrong; open the address that rcomm-web printed at its start, or send `Authorization: Bearer TOKEN`"
    )]
    NoToken,
    #[error("host name {0:?} is not allowed; add it with --host-name")]
    UnknownHost(String),
    #[error("requests from pages of {0:?} are not allowed")]
    ForeignOrigin(String),
    #[error("the sources have not been read yet; try again in a moment")]
    NotYet,
    #[error("no route {0:?}; GET /api/v1 lists the routes")]
    NoRoute(String),
    #[error("method {0} is not allowed on this route; GET /api/v1 lists the routes")]
    NoMethod(String),
    #[error("the request URI has {0} bytes; the limit is {1}")]
    LongUri(usize, usize),
    #[error("the request timed out")]
    TookTooLong,
    #[error("{0}")]
    Query(String),
    #[error("no group named {0:?}")]
    NoGroup(String),
    #[error("snapshot {0} is not kept (any more); GET /api/v1/history lists the kept ones")]
    NoSnapshot(u64),
    #[error("the records of snapshot {0} are not kept; only the newest snapshot has its records")]
    NoRecords(u64),
    #[error("job {0:?} has no rings on this node; GET /api/v1/jobs lists the jobs that have")]
    NoJob(String),
    #[error(
        "{0} other jobs are shown, which is the limit; close one of their pages, or try again later"
    )]
    ManyJobs(usize),
    #[error("the server failed to start a thread: {0}")]
    Thread(std::io::Error),
    #[error("upload {0:?} is not kept (any more)")]
    NoUpload(String),
    #[error("the upload cannot be used: {0}")]
    Upload(String),
    #[error("the upload is larger than {0} bytes; use rcomm-fr, or raise --upload-limit")]
    TooLarge(u64),
    #[error("the server failed to write to disk: {0}")]
    Disk(std::io::Error),
    #[error("the system gives no random numbers for the address of the report: {0}")]
    NoRandom(getrandom::Error),
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
            Self::NotYet
            | Self::Stopping
            | Self::ManyJobs(_)
            | Self::Thread(_)
            | Self::NoRandom(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::NoRoute(_)
            | Self::NoGroup(_)
            | Self::NoSnapshot(_)
            | Self::NoRecords(_)
            | Self::NoUpload(_)
            | Self::NoJob(_) => StatusCode::NOT_FOUND,
            Self::NoMethod(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::LongUri(..) => StatusCode::URI_TOO_LONG,
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

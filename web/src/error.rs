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
}

#[derive(Serialize)]
struct Body {
    error: String,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match self {
            Self::NoToken => StatusCode::UNAUTHORIZED,
            Self::UnknownHost(_) => StatusCode::MISDIRECTED_REQUEST,
            Self::ForeignOrigin(_) => StatusCode::FORBIDDEN,
            Self::NotYet => StatusCode::SERVICE_UNAVAILABLE,
            Self::NoRoute(_) => StatusCode::NOT_FOUND,
        };
        (
            status,
            Json(Body {
                error: self.to_string(),
            }),
        )
            .into_response()
    }
}

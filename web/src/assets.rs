//! The page, compiled in: looking at a hang needs no network.

use crate::error::Refusal;
use axum::http::header;
use axum::response::{IntoResponse, Response};

const PAGE: &str = include_str!("../assets/index.html");

/// Name, content type and text of every part of the page.
const PARTS: [(&str, &str, &str); 2] = [
    (
        "app.js",
        "text/javascript; charset=utf-8",
        include_str!("../assets/app.js"),
    ),
    (
        "style.css",
        "text/css; charset=utf-8",
        include_str!("../assets/style.css"),
    ),
];

pub(crate) fn page() -> Response {
    answer("text/html; charset=utf-8", PAGE)
}

pub(crate) fn part(file: &str) -> Result<Response, Refusal> {
    let found = PARTS.iter().find(|(name, ..)| *name == file);
    let (_, content_type, text) =
        found.ok_or_else(|| Refusal::NoRoute(format!("/assets/{file}")))?;
    Ok(answer(content_type, text))
}

fn answer(content_type: &'static str, text: &'static str) -> Response {
    // The same binary always has the same page, but the next binary answers on the same port.
    (
        [
            (header::CONTENT_TYPE, content_type),
            (header::CACHE_CONTROL, "no-cache"),
        ],
        text,
    )
        .into_response()
}

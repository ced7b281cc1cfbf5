//! The page's files, compiled in, so that the page needs no other server.

use crate::http::error::Refusal;
use axum::http::header;
use axum::response::{IntoResponse, Response};

const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

macro_rules! parts {
    ($($kind:ident $file:literal)+) => {
        &[$(($file, $kind, include_str!(concat!("../../assets/", $file)))),+]
    };
}

/// Name, content type and text of every part of the page.
const PARTS: &[(&str, &str, &str)] = parts! {
    SCRIPT "app.js"
    SCRIPT "format.js"
    SCRIPT "graph.js"
    SCRIPT "history.js"
    SCRIPT "jobs.js"
    SCRIPT "matrix.js"
    SCRIPT "ranks.js"
    SCRIPT "reducers.js"
    SCRIPT "tables.js"
    SCRIPT "timeline.js"
    SCRIPT "upload.js"
    SCRIPT "verdict.js"
    SCRIPT "vendor/uPlot.esm.min.js"
    STYLE "vendor/uPlot.min.css"
    STYLE "style.css"
};

pub(crate) fn page() -> Response {
    answer(
        "text/html; charset=utf-8",
        include_str!("../../assets/index.html"),
    )
}

/// The description of the API (OpenAPI).
pub(crate) fn description() -> Response {
    answer(
        "application/json",
        include_str!("../../assets/openapi.json"),
    )
}

/// Returns a file of the page; refused if the page has none of this name.
pub(crate) fn part(file: &str) -> Result<Response, Refusal> {
    let found = PARTS.iter().find(|(name, ..)| *name == file);
    let (_, content_type, text) =
        found.ok_or_else(|| Refusal::NoRoute(format!("/assets/{file}")))?;
    Ok(answer(content_type, text))
}

fn answer(content_type: &'static str, text: &'static str) -> Response {
    // Another version of this program may answer on the same port later, so browsers must revalidate.
    (
        [
            (header::CONTENT_TYPE, content_type),
            (header::CACHE_CONTROL, "no-cache"),
        ],
        text,
    )
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::compress::gzip;

    #[test]
    fn the_whole_page_takes_less_than_100_kb_compressed() {
        let page = include_str!("../../assets/index.html");
        let texts = PARTS.iter().map(|(.., text)| *text).chain([page]);
        let packed =
            texts.map(|text| gzip(text.as_bytes()).map_or(text.len(), |bytes| bytes.len()));
        let bytes: usize = packed.sum();
        assert!(bytes < 100_000, "{bytes} bytes");
    }
}

//! Compression of answers, for clients that understand gzip.

use axum::body::{Body, HttpBody as _, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write as _;

/// Minimum size of a body that is compressed, in bytes before compression: smaller ones fit into one packet as they
/// are.
const MIN_BYTES: u64 = 1024;
/// Maximum size of a body that is compressed, in bytes before compression: both forms of a larger one would take too
/// much memory.
const MAX_BYTES: u64 = 64 << 20;

/// Compresses text and JSON whose length is known; never a stream, whose events the encoder would hold back.
pub(crate) async fn compressed(request: Request, next: Next) -> Response {
    let accepts = accepts_gzip(request.headers());
    let mut response = next.run(request).await;
    if !is_text(response.headers()) {
        return response;
    }
    let vary = HeaderValue::from_static("accept-encoding");
    response.headers_mut().append(header::VARY, vary);
    let length = response.body().size_hint().exact();
    let fits = length.is_some_and(|length| (MIN_BYTES..=MAX_BYTES).contains(&length));
    if !accepts || !fits || response.headers().contains_key(header::CONTENT_ENCODING) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(bytes) = to_bytes(body, MAX_BYTES as usize).await else {
        // A body of known length is in memory: reading it does not fail.
        return Response::from_parts(parts, Body::empty());
    };
    let plain = bytes.clone();
    // A megabyte takes some 10 ms, in which this thread would serve no other client.
    let packed = tokio::task::spawn_blocking(move || gzip(&plain)).await;
    let Ok(Some(packed)) = packed else {
        return Response::from_parts(parts, Body::from(bytes));
    };
    parts.headers.remove(header::CONTENT_LENGTH);
    let gzip = HeaderValue::from_static("gzip");
    parts.headers.insert(header::CONTENT_ENCODING, gzip);
    Response::from_parts(parts, Body::from(packed))
}

/// The bytes compressed; `None` if that fails.
pub(super) fn gzip(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::with_capacity(bytes.len() / 4), Compression::fast());
    encoder.write_all(bytes).ok()?;
    encoder.finish().ok()
}

/// Whether `Accept-Encoding` lists gzip with a weight above zero (`gzip;q=0` refuses it).
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let named = headers.get_all(header::ACCEPT_ENCODING).iter();
    let named = named.filter_map(|value| value.to_str().ok());
    named.flat_map(|value| value.split(',')).any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_gzip = parts
            .next()
            .is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let weight = parts.find_map(|part| part.strip_prefix("q="));
        is_gzip && weight.is_none_or(|weight| weight.parse().is_ok_and(|weight: f32| weight > 0.0))
    })
}

fn is_text(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or("");
    let texts = ["text/", "application/json", "application/openmetrics-text"];
    texts.iter().any(|text| kind.starts_with(text)) && !kind.starts_with("text/event-stream")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_used_only_where_it_is_accepted() {
        let accepts = |value: &'static str| {
            let value = HeaderValue::from_static(value);
            accepts_gzip(&HeaderMap::from_iter([(header::ACCEPT_ENCODING, value)]))
        };
        assert!(accepts("gzip, deflate, br, zstd"));
        assert!(accepts("br;q=1.0, GZIP;q=0.5"));
        assert!(!accepts("gzip;q=0, br"));
        assert!(!accepts("identity"));
        assert!(!accepts_gzip(&HeaderMap::new()));
    }

    #[test]
    fn text_and_json_are_compressed_and_event_streams_and_images_are_not() {
        let text = |kind: &'static str| {
            let kind = HeaderValue::from_static(kind);
            is_text(&HeaderMap::from_iter([(header::CONTENT_TYPE, kind)]))
        };
        assert!(text("text/javascript; charset=utf-8"));
        assert!(text("application/json"));
        assert!(!text("text/event-stream"));
        assert!(!text("image/png"));
    }
}

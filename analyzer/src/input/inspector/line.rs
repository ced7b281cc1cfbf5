//! Parses one line of a log of NCCL's Inspector.

use super::trends::{OperationKind, Sample};
use serde::Deserialize;

/// The content of a line.
pub(super) enum Line {
    /// A record of an operation: its kind, the rank in the communicator, and what was measured.
    Operation(OperationKind, u32, Sample),
    /// An object of the log that records no operation.
    Other,
}

/// An object of the log, as far as it is read. Other keys, such as the trace of each channel, are ignored.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Object {
    header: Option<Header>,
    coll_perf: Option<Performance>,
    p2p_perf: Option<Performance>,
}

#[derive(Clone, Debug, Deserialize)]
struct Header {
    id: String,
    #[serde(default)]
    comm_name: String,
    rank: u32,
    n_ranks: u32,
}

/// The values of `coll_perf` or `p2p_perf`.
#[derive(Debug, Deserialize)]
struct Performance {
    #[serde(rename = "coll", alias = "p2p")]
    function: String,
    #[serde(rename = "coll_msg_size_bytes", alias = "p2p_msg_size_bytes")]
    bytes: u64,
    #[serde(rename = "coll_exec_time_us", alias = "p2p_exec_time_us")]
    time_us: f64,
    #[serde(
        rename = "coll_busbw_gbs",
        alias = "p2p_busbw_gbs",
        default = "not_logged"
    )]
    bus_gbs: f64,
}

/// The value of a bandwidth that was not logged.
fn not_logged() -> f64 {
    -1.0
}

/// The number of bytes that are kept of a communicator's number and name and of a function's name.
const MAX_TEXT: usize = 128;

/// Cuts a text to [`MAX_TEXT`] bytes, or before the character that goes beyond.
fn cut(mut text: String) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

/// Parses a line; `None` if it is no object of this log, or records an operation with invalid values, or without a
/// header in the line or before it. `latest` holds the newest header; it applies to later lines that have none.
pub(super) fn parse(bytes: &[u8], latest: &mut Object) -> Option<Line> {
    let object: Object = serde_json::from_slice(bytes).ok()?;
    if object.header.is_some() {
        latest.header = object.header;
    }
    let Some(performance) = object.coll_perf.or(object.p2p_perf) else {
        return Some(Line::Other);
    };
    let header = latest.header.clone()?;
    let is_valid_time = performance.time_us.is_finite() && performance.time_us >= 0.0;
    if !is_valid_time || header.rank >= header.n_ranks {
        return None;
    }
    let operation = OperationKind {
        communicator: cut(header.id),
        name: cut(header.comm_name),
        ranks: header.n_ranks,
        function: cut(performance.function),
        bytes: performance.bytes,
    };
    let sample = Sample {
        us: performance.time_us as f32,
        bus_gbs: performance.bus_gbs as f32,
    };
    Some(Line::Operation(operation, header.rank, sample))
}

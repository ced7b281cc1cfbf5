//! Tests the printers and exports.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod difference;
mod html;
mod human;
mod in_flight;
mod json;
mod matrix;
mod perfetto;
mod sample;

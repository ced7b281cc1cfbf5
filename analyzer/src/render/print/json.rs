//! Writes the report as JSON: `rcomm.report/1`, described by `schema/report.schema.json`.
//!
//! Keys have the order of the fields in the types, and all lists of the report have a stable order, so two reports of
//! one input are equal byte by byte.

use rcomm_verdict::Report;
use std::io::{self, Write};

/// The JSON Schema of what [`write()`] prints.
pub const SCHEMA: &str = include_str!("../../../schema/report.schema.json");

/// Writes the report, indented and ended by a line break.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, report).map_err(io::Error::from)?;
    out.write_all(b"\n")
}

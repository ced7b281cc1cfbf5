//! The report as JSON: `rcomm.report/1`, described by `schema/report.schema.json`.
//!
//! Keys come in the order in which the types declare them, and everything in the report has a stable
//! order, so two reports of one input are the same bytes.

use rcomm_verdict::Report;
use std::io::{self, Write};

/// The JSON Schema of what [`write()`] prints.
pub const SCHEMA: &str = include_str!("../../../schema/report.schema.json");

/// Writes the report, indented, with a line end.
///
/// # Errors
/// Errors of `out`.
pub fn write(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, report).map_err(io::Error::from)?;
    out.write_all(b"\n")
}

//! `rcomm-fr query SQL PATH...`: queries the records as tables.

use super::judge::{Keep, judge};
use crate::cli::args::{QueryArgs, QueryFormat};
use crate::cli::failure::Failure;
use crate::cli::output;
use anstream::ColorChoice;
use rcomm_analyzer::export::tables::{TableFormat, Tables, write};
use std::io::{self, Cursor};
use std::process::ExitCode;

pub(super) fn run(args: &QueryArgs) -> Result<ExitCode, Failure> {
    let judged = judge(&args.paths, &args.judge, Keep::Records)?;
    let tables = Tables::new(&judged.dumps, &judged.report)?;
    let answer = tables.query(&args.sql)?;
    let format = match args.format {
        QueryFormat::Text => TableFormat::Text,
        QueryFormat::Csv => TableFormat::Csv,
        QueryFormat::Parquet => TableFormat::Parquet,
    };
    let mut buffer = Cursor::new(Vec::new());
    write(&answer, format, &mut buffer)?;
    let bytes = buffer.into_inner();
    // The bytes are written unchanged: bytes of a Parquet file may look like color codes, which must not be removed.
    let raw = |out: &mut dyn io::Write| out.write_all(&bytes);
    output::write_to(args.output.as_deref(), ColorChoice::AlwaysAnsi, raw)?;
    Ok(ExitCode::SUCCESS)
}

//! `rcomm-fr diff A B`: compares two runs, or two moments of one run.

use super::analyze::layout;
use super::judge::{Keep, judge};
use crate::cli::args::{DiffArgs, DiffFormat};
use crate::cli::failure::Failure;
use crate::cli::output;
use anstream::ColorChoice;
use rcomm_analyzer::print::human;
use rcomm_analyzer::{Difference, Report};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// At most this many bytes of a saved report are read.
const MAX_REPORT: u64 = 256 << 20;

pub(super) fn run(args: &DiffArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    let before = report_of(&args.before, args)?;
    let after = report_of(&args.after, args)?;
    let difference = Difference::between(&before, &after);
    output::write_to(args.output.as_deref(), color, |out| match args.format {
        DiffFormat::Text => human::write_difference(&difference, &layout(args.verbose), out),
        DiffFormat::Json => {
            serde_json::to_writer_pretty(&mut *out, &difference).map_err(io::Error::from)?;
            writeln!(out)
        }
    })?;
    for (path, report) in [(&args.before, &before), (&args.after, &after)] {
        if report.input.ranks_read == 0 {
            return Err(Failure::NothingToCompare { path: path.clone() });
        }
    }
    Ok(match difference.new.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(1),
    })
}

/// The report that was saved at this path as JSON, or else the report on the records there.
fn report_of(path: &PathBuf, args: &DiffArgs) -> Result<Report, Failure> {
    match saved_report(path) {
        Some(report) => Ok(report),
        None => Ok(judge(std::slice::from_ref(path), &args.judge, Keep::Report)?.report),
    }
}

/// The report that was saved at this path as JSON; `None` if there is none, or if it cannot be parsed.
fn saved_report(path: &Path) -> Option<Report> {
    let file = File::open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut file = io::BufReader::new(file.take(MAX_REPORT));
    // A report begins with the name of its schema, so the first bytes distinguish it from other files.
    let mut start = [0; 64];
    let mut filled = 0;
    while filled < start.len() {
        match file.read(&mut start[filled..]).ok()? {
            0 => break,
            read => filled += read,
        }
    }
    let head = String::from_utf8_lossy(&start[..filled]);
    if !head.contains(Report::SCHEMA) {
        return None;
    }
    let report: ReportWithoutStacks =
        serde_json::from_reader((&start[..filled]).chain(file)).ok()?;
    serde_json::from_value(report.0.into()).ok()
}

/// A saved report without its stacks, which are not compared: they are as deep as the program's calls, and the parser
/// refuses what is deeper than 128 levels, unless it skips it.
struct ReportWithoutStacks(Map<String, Value>);

impl<'de> Deserialize<'de> for ReportWithoutStacks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = Map<String, Value>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a report")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
                let mut kept = Map::new();
                while let Some(key) = members.next_key::<String>()? {
                    if key == "stacks" {
                        members.next_value::<IgnoredAny>()?;
                    } else {
                        kept.insert(key, members.next_value()?);
                    }
                }
                Ok(kept)
            }
        }

        deserializer.deserialize_map(Members).map(Self)
    }
}

//! `rcomm-fr analyze PATH...`: judges records and prints the report.

use super::judge::{Judged, Keep, judge};
use super::look;
use crate::cli::args::{AnalyzeArgs, Format, JudgeArgs};
use crate::cli::failure::Failure;
use crate::cli::output;
use anstream::{AutoStream, ColorChoice};
use rcomm_analyzer::export::{columns, perfetto};
use rcomm_analyzer::print::human::{self, Detail, Layout};
use rcomm_analyzer::print::{html, json};
use std::io::{self, Write};
use std::process::ExitCode;

pub(super) fn run(args: &AnalyzeArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    let keep = match args.show.format {
        Format::Html | Format::Perfetto | Format::Columns => Keep::Records,
        Format::Text | Format::Json => Keep::Report,
    };
    let judge_args = JudgeArgs {
        redact: args.redact,
        ..args.judge.clone()
    };
    let judged = judge(&args.paths, &judge_args, keep)?;
    let code = show(&judged, &args.show, color)?;
    let input = &judged.report.input;
    let has_records = input.ranks_read > 0 || judged.report.end.is_some();
    let has_nothing = !has_records && judged.report.findings.is_empty();
    // An archive may come from another node, so advice about the jobs of this node could mislead.
    if has_nothing && !judged.from_archive && args.show.format == Format::Text {
        let advice = look::advice_for_paths();
        let mut stderr = AutoStream::new(io::stderr(), color);
        // The report is printed; without standard error only the advice is lost.
        let _ = stderr.write_all(advice.as_bytes());
    }
    Ok(code)
}

/// Writes the report in the chosen format and returns the exit code of its verdict.
pub(super) fn show(
    judged: &Judged,
    args: &crate::cli::args::ShowReportArgs,
    color: ColorChoice,
) -> Result<ExitCode, Failure> {
    let layout = layout(args.verbose);
    let Judged { report, dumps, .. } = judged;
    let print = |out: &mut dyn Write| -> io::Result<()> {
        match args.format {
            Format::Text => human::write(report, &layout, out),
            Format::Json => json::write(report, out),
            Format::Html => html::write(report, dumps, out),
            Format::Perfetto => perfetto::write(dumps, report, out),
            Format::Columns => columns::write(dumps, report, out),
        }
    };
    output::write_to(args.output.as_deref(), color, print)?;
    Ok(ExitCode::from(report.exit_code()))
}

/// The page layout for standard output.
pub(super) fn layout(verbose: bool) -> Layout {
    Layout {
        width: output::page_width(),
        detail: if verbose {
            Detail::Verbose
        } else {
            Detail::Brief
        },
    }
}

//! `rcomm-fr explain [CODE]...`: prints the explanations of finding codes.

use crate::cli::args::ExplainArgs;
use crate::cli::failure::Failure;
use crate::cli::output;
use rcomm_analyzer::{Code, explain, print::human};
use std::process::ExitCode;

pub(super) fn run(args: &ExplainArgs, color: anstream::ColorChoice) -> Result<ExitCode, Failure> {
    let codes = args
        .codes
        .iter()
        .map(|given| {
            Code::parse(given).ok_or_else(|| Failure::UnknownCode {
                given: given.clone(),
            })
        })
        .collect::<Result<Vec<Code>, Failure>>()?;
    let layout = human::Layout {
        width: output::page_width(),
        ..human::Layout::default()
    };
    output::write_to(None, color, |out| {
        if codes.is_empty() {
            return human::write_codes(&layout, out);
        }
        for (index, &code) in codes.iter().enumerate() {
            if index > 0 {
                writeln!(out)?;
            }
            human::write_explanation(&explain(code), &layout, out)?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

//! A job that hangs, and the analysis that names the cause.
//!
//! Four ranks, each in a separate process, train in two groups each: tensor-parallel pairs and data-parallel pairs. In
//! step 5, rank 2 does not return from loading its data. The watchdogs of the other ranks fire after 3 s, every rank
//! leaves a dump, and the analysis names the rank, the group, the operation, and the rank's phase.
//!
//! ```text
//! cargo run --example hang              # rank 2 hangs while it loads data; the same as --stop
//! cargo run --example hang -- --kill    # rank 2 is killed, and its ring is read instead
//! cargo run --example hang -- --hold    # rank 2 hangs while it loads data, and the job stays until ctrl-c
//! ```
#![allow(clippy::print_stderr)]

mod job;
mod training;

use anyhow::{Result, bail};
use rcomm_analyzer::print::human;
use rcomm_analyzer::{Policy, analyze};
use std::io::Write;
use std::process::ExitCode;

/// The fault of rank 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Rank 2 never returns from loading data.
    Hang,
    /// Rank 2 is killed while it loads data.
    Kill,
    /// Rank 2 never returns from loading data. The time-out is a day, so that a user can inspect the job while it
    /// hangs.
    Hold,
}

impl Fault {
    /// The option of this program that selects the fault.
    fn argument(self) -> &'static str {
        match self {
            Self::Hang => "--stop",
            Self::Kill => "--kill",
            Self::Hold => "--hold",
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let fault = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] | ["--stop"] => Fault::Hang,
        ["--kill"] => Fault::Kill,
        ["--hold"] => Fault::Hold,
        _ => {
            eprintln!("usage: hang [--stop | --kill | --hold]");
            return ExitCode::from(2);
        }
    };
    // With RANK set, this process is one of the four ranks; without RANK, it starts the ranks.
    let result = match std::env::var_os("RANK") {
        Some(_) => training::run(fault),
        None => run_and_analyze(fault),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the job, waits for its end, and prints the analysis of the records. With [`Fault::Hold`] there is no
/// analysis.
fn run_and_analyze(fault: Fault) -> Result<()> {
    let job = job::Job::start(fault)?;
    if fault == Fault::Hold {
        return job.hold();
    }
    let outcome = job.end_and_collect()?;
    let report = analyze(&outcome.dumps, &Policy::default());
    // Colors are used only if the output is a terminal.
    let mut out = anstream::stdout().lock();
    writeln!(out, "\n== analysis of the records\n")?;
    human::write(&report, &human::Layout::default(), &mut out)?;
    let directory = outcome.directory.display();
    writeln!(
        out,
        "\nThe dumps stay in {directory}: rcomm-fr analyze {directory}"
    )?;
    let expected = job::CULPRIT;
    match report.findings.first() {
        None => bail!("the analysis names no rank, but rank {expected} is at fault"),
        Some(finding) if finding.culprit_ranks != [expected] => bail!(
            "the first finding is `{}`, but rank {expected} is at fault",
            finding.sentence
        ),
        Some(_) => Ok(()),
    }
}

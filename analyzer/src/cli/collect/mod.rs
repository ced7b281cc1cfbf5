//! `rcomm-fr collect`: gathers the records of a job into one archive before its allocation ends.
//!
//! It takes the records on this node ([`local`]), the records and stacks that it gets from the ranks of a running
//! PyTorch job ([`running`]), and the archives that a command prints for each of a list of hosts ([`remote`]). The
//! manifest of the archive ([`archive`]) lists what could not be read, so an incomplete archive never looks complete.

mod archive;
mod local;
mod native_stack;
mod py_spy;
mod remote;
mod running;

use super::analyze::layout;
use super::judge::{Keep, judge, this_host};
use super::{output, rings};
use crate::cli::args::{AsOf, CollectArgs, JudgeArgs};
use crate::cli::failure::Failure;
use archive::Archive;
use rcomm_analyzer::Place;
use rcomm_analyzer::format::{format_ranks, printable};
use rcomm_analyzer::load::Absence;
use rcomm_analyzer::print::human;
use rcomm_analyzer::redact::Redactor;
use running::Asked;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

pub(super) fn run(args: &CollectArgs, color: anstream::ColorChoice) -> Result<ExitCode, Failure> {
    let hosts = remote::hosts(args)?;
    let command = remote::RemoteCommand::parse(args)?;
    let redactor = match args.redact {
        true => Some(Redactor::new().map_err(Failure::NoKey)?),
        false => None,
    };
    let prints_archive = output::is_stdout(&args.output);
    if args.analyze && prints_archive {
        return Err(Failure::Usage {
            sentence: "--analyze prints the report to standard output: name a file for the archive"
                .to_owned(),
        });
    }
    let asks = args.ask || !args.torch_store.is_empty() || !args.worker_server.is_empty();
    if args.exception_dump && !asks {
        return Err(Failure::Usage {
            sentence: "--exception-dump is for a running job: add --ask or --torch-store"
                .to_owned(),
        });
    }
    let mut archive = Archive::create(&args.output, redactor)?;
    let unfollowed = local::collect(args, &mut archive)?;
    if let Some(command) = command {
        remote::collect(&hosts, &command, args, &mut archive)?;
    }
    let mut asked = match asks {
        true => running::collect(args, &mut archive)?,
        false => Asked::default(),
    };
    if args.rings {
        local::collect_rings(asked.rings.as_ref().unwrap_or(&args.place), &mut archive)?;
    } else if let Some(place) = &asked.rings
        && !rings::find(place)?.is_empty()
    {
        local::collect_rings(place, &mut archive)?;
    }
    let culprits = note_absent_ranks(args, &asked, &mut archive)?;
    if !args.no_native_stack {
        asked.take_native_stacks(&culprits, &mut archive)?;
    }
    let world_size = args.world_size.or(asked.world_size());
    let manifest = archive.finish(world_size)?;

    // Standard output may be the archive: messages about it go to standard error.
    let mut stderr = anstream::AutoStream::new(std::io::stderr(), color);
    for line in &asked.job {
        let _ = writeln!(stderr, "{line}");
    }
    let _ = writeln!(stderr, "{}", manifest.format_summary(&args.output));
    // The report names them, too.
    if !args.analyze {
        write_absences(&manifest.absent, &mut stderr);
        for Place { ranks, place } in asked.places.iter().take(10) {
            let ranks = format_ranks(ranks);
            let _ = writeln!(stderr, "now: {ranks} in {}", printable(place));
        }
    }
    for note in unfollowed.iter().chain(&asked.notes) {
        let _ = writeln!(stderr, "note: {}", printable(note));
    }
    if args.analyze {
        return analyze_archive(args, asks.then_some(&asked), color);
    }
    Ok(if manifest.files.is_empty() {
        ExitCode::from(2)
    } else if manifest.absent.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// Writes what is not in the archive: at most 20 sentences, and the number of the others; the manifest lists all.
fn write_absences(absent: &[Absence], out: &mut impl Write) {
    let sentences = Absence::sentences(absent);
    for sentence in sentences.iter().take(20) {
        let _ = writeln!(out, "absent: {}", printable(sentence));
    }
    if let Some(rest) = sentences.len().checked_sub(21) {
        let _ = writeln!(out, "and {} more, named in the manifest", rest + 1);
    }
}

/// Judges the archive, prints the report, and returns the exit code of its verdict.
fn analyze_archive(
    args: &CollectArgs,
    asked: Option<&Asked>,
    color: anstream::ColorChoice,
) -> Result<ExitCode, Failure> {
    let judge_args = judge_args(args, asked);
    let paths = std::slice::from_ref(&args.output);
    let report = judge(paths, &judge_args, Keep::Report)?.report;
    output::write_to(None, color, |out| {
        human::write(&report, &layout(false), out)
    })?;
    Ok(ExitCode::from(report.exit_code()))
}

/// How the archive is judged: records for which running ranks were asked are a snapshot of a running job.
fn judge_args(args: &CollectArgs, asked: Option<&Asked>) -> JudgeArgs {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_ns = now.map_or(0, |now| i64::try_from(now.as_nanos()).unwrap_or(i64::MAX));
    JudgeArgs {
        world_size: args.world_size.or(asked.and_then(Asked::world_size)),
        snapshot: asked.is_some(),
        as_of: asked.map(|_| AsOf(now_ns)),
        ..JudgeArgs::default()
    }
}

/// Adds an absence for each rank without a record that should exist according to the user, its process or other ranks'
/// groups. Returns the ranks at fault by the records in the archive.
fn note_absent_ranks(
    args: &CollectArgs,
    asked: &Asked,
    archive: &mut Archive,
) -> Result<BTreeSet<u32>, Failure> {
    let mut absent: BTreeMap<u32, String> = asked.silent.clone();
    let mut culprits = BTreeSet::new();
    if !archive.is_empty() {
        let gathered = archive.flush_records()?.to_owned();
        let judge_args = judge_args(args, Some(asked));
        let report = judge(&[gathered], &judge_args, Keep::Report)?.report;
        let findings = report.findings.iter();
        culprits.extend(findings.flat_map(|finding| &finding.culprit_ranks));
        for rank in report.ranks {
            if rank.read {
                absent.remove(&rank.rank);
            } else {
                let reason = || "no readable record was gathered".to_owned();
                absent.entry(rank.rank).or_insert_with(reason);
            }
        }
    }
    for (rank, reason) in absent {
        archive.add_absence(Absence {
            host: String::new(),
            path: String::new(),
            rank: Some(rank),
            reason,
        });
    }
    Ok(culprits)
}

//! `rcomm-fr collect`: gathers the records of a job into one archive before its allocation ends.
//!
//! It takes the records on this node ([`local`]) and the archives that a command prints for each of a list of hosts
//! ([`remote`]). The manifest of the archive ([`archive`]) lists what could not be read, so an incomplete archive never
//! looks complete.

mod archive;
mod local;
mod remote;

use super::judge::{Keep, judge};
use crate::cli::args::{CollectArgs, JudgeArgs};
use crate::cli::failure::Failure;
use archive::{Absence, Archive};
use rcomm_analyzer::redact::Redactor;
use std::io::Write;
use std::process::ExitCode;

pub(super) fn run(args: &CollectArgs, color: anstream::ColorChoice) -> Result<ExitCode, Failure> {
    let hosts = remote::hosts(args)?;
    let command = remote::RemoteCommand::parse(args)?;
    let redactor = match args.redact {
        true => Some(Redactor::new().map_err(Failure::NoKey)?),
        false => None,
    };
    let mut archive = Archive::create(&args.output, redactor)?;
    local::collect(args, &mut archive)?;
    if let Some(command) = command {
        remote::collect(&hosts, &command, args, &mut archive)?;
    }
    if args.rings {
        local::collect_rings(args, &mut archive)?;
    }
    note_absent_ranks(args, &mut archive)?;
    let manifest = archive.finish()?;

    // Standard output may be the archive: messages about it go to standard error.
    let mut stderr = anstream::AutoStream::new(std::io::stderr(), color);
    let _ = writeln!(stderr, "{}", manifest.format_summary(&args.output));
    // Twenty are printed; the manifest lists all.
    for absence in manifest.absent.iter().take(20) {
        let _ = writeln!(stderr, "absent: {}", absence.format());
    }
    if let Some(rest) = manifest.absent.len().checked_sub(21) {
        let _ = writeln!(stderr, "and {} more, named in the manifest", rest + 1);
    }
    Ok(if manifest.files.is_empty() {
        ExitCode::from(2)
    } else if manifest.absent.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// Adds an absence for each rank that should exist, according to the user or to other ranks' groups, but has no record.
fn note_absent_ranks(args: &CollectArgs, archive: &mut Archive) -> Result<(), Failure> {
    if archive.is_empty() {
        return Ok(());
    }
    let judge_args = JudgeArgs {
        world_size: args.world_size,
        ..JudgeArgs::default()
    };
    let gathered = archive.so_far()?.to_owned();
    let report = judge(&[gathered], &judge_args, Keep::Report)?.report;
    for rank in report.ranks.iter().filter(|rank| !rank.read) {
        archive.absent(Absence {
            host: String::new(),
            path: String::new(),
            rank: Some(rank.rank),
            reason: "no readable record of it was gathered".to_owned(),
        });
    }
    Ok(())
}

/// The name of this host; `localhost` if it has none.
fn this_host() -> String {
    let name = rustix::system::uname();
    match name.nodename().to_str() {
        Ok(name) if !name.is_empty() => name.to_owned(),
        _ => "localhost".to_owned(),
    }
}

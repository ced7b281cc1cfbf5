//! `rcomm-fr dump`: writes rings as dump files.

use super::rings;
use crate::cli::args::{DumpArgs, DumpFormat};
use crate::cli::failure::Failure;
use crate::cli::output;
use anstream::ColorChoice;
use rcomm_recorder::publish::{Dump, RingReader, write_dump_file};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(super) fn run(args: &DumpArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    let paths: Vec<PathBuf> = if args.rings.is_empty() {
        let rings = rings::find(&args.place)?;
        rings.into_iter().map(|listing| listing.path).collect()
    } else {
        args.rings.clone()
    };
    if paths.is_empty() {
        return Err(Failure::NoRing {
            wanted: args
                .place
                .job
                .as_ref()
                .map_or_else(|| "any job".to_owned(), |job| format!("job {job}")),
            directory: rings::directory(&args.place),
        });
    }
    let mut written = Vec::new();
    let mut unread = Vec::new();
    let mut unwritten = Vec::new();
    for path in &paths {
        match RingReader::attach(path).and_then(|ring| ring.read()) {
            Err(error) => unread.push(error),
            Ok(dump) => {
                let bytes = match args.format {
                    DumpFormat::Pickle => dump.to_pickle(),
                    DumpFormat::Json => dump.to_json(),
                };
                let target = file_for(&dump, &args.output, args.format);
                match write_dump_file(&target, &bytes) {
                    Ok(path) => written.push(path),
                    // What hinders this dump, such as its job's folder, may not hinder the next one.
                    Err(error) => unwritten.push(error),
                }
            }
        }
    }
    output::write_to(None, color, |out| {
        written
            .iter()
            .try_for_each(|path| writeln!(out, "{}", path.display()))
    })?;
    let mut stderr = anstream::AutoStream::new(std::io::stderr(), color);
    for error in &unread {
        let _ = writeln!(stderr, "left out: {error}");
    }
    let mut unwritten = unwritten.into_iter();
    if let Some(first) = unwritten.next() {
        for error in unwritten {
            let _ = writeln!(stderr, "not written: {error}");
        }
        return Err(first.into());
    }
    Ok(match (written.is_empty(), unread.is_empty()) {
        (true, _) => ExitCode::from(2),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::from(1),
    })
}

/// The file `<folder>/<job>/rank_<N>`, the name that PyTorch's tools expect; JSON dumps end in `.json`. `/` and control
/// characters in the job's name become `_`; without a usable name, the folder is `job`. The dumps of attempt `A` after
/// the first are in `<folder>/<job>/attempt_<A>`.
fn file_for(dump: &Dump, folder: &Path, format: DumpFormat) -> PathBuf {
    let identity = &dump.identity;
    let job: String = identity
        .job
        .chars()
        .map(|c| if c == '/' || c.is_control() { '_' } else { c })
        .collect();
    let job = match job.as_str() {
        "" | "." | ".." => "job",
        job => job,
    };
    let mut folder = folder.join(job);
    if identity.attempt > 0 {
        folder.push(format!("attempt_{}", identity.attempt));
    }
    let rank = identity.rank.unwrap_or_default();
    folder.join(match format {
        DumpFormat::Pickle => format!("rank_{rank}"),
        DumpFormat::Json => format!("rank_{rank}.json"),
    })
}

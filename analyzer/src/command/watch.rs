//! `rcomm-fr watch DIR`: the report of a folder into which dumps still arrive.
//!
//! The folder is looked at several times a second, not subscribed to: on a network file system a
//! subscription hears nothing of what other hosts write.

use super::analyze::show;
use super::judge::{Judged, Keep, judge};
use crate::cli::{Format, WatchArgs};
use crate::failure::Failure;
use anstream::{AutoStream, ColorChoice};
use rcomm_analyzer::Report;
use rcomm_analyzer::print::human::one_line;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

/// Between two looks at the folder.
const LOOK: Duration = Duration::from_millis(100);

/// Folders below the watched one that are looked into.
const MAX_DEPTH: usize = 16;

/// Size and time of every file: what tells that something arrived.
type Listing = BTreeMap<PathBuf, (u64, Option<SystemTime>)>;

pub(super) fn run(args: &WatchArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    let began = Instant::now();
    let deadline = args.timeout.map(|timeout| began + timeout);
    let keep = match args.show.format {
        Format::Html | Format::Perfetto => Keep::Records,
        Format::Text | Format::Json => Keep::Report,
    };
    let mut stderr = AutoStream::new(io::stderr(), color);
    let mut seen = Listing::new();
    let mut changed = began;
    let mut judged: Option<Judged> = None;
    let mut said = String::new();
    loop {
        let listing = list(&args.dir);
        if listing != seen {
            seen = listing;
            changed = Instant::now();
            if !seen.is_empty() {
                let now = judge(std::slice::from_ref(&args.dir), &args.judge, keep)?;
                let line = say(&now.report);
                if line != said {
                    let at = began.elapsed().as_secs_f64();
                    // Whoever closed standard error wants only the report.
                    let _ = writeln!(stderr, "{at:7.1} s  {line}");
                    said = line;
                }
                judged = Some(now);
            }
        }
        let complete = judged.as_ref().is_some_and(|now| is_complete(&now.report));
        let settled = changed.elapsed() >= args.settle;
        let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if (complete && settled) || late {
            break;
        }
        std::thread::sleep(LOOK);
    }
    match judged {
        Some(judged) => show(&judged, &args.show, color),
        None => Err(Failure::NothingArrived {
            dir: args.dir.clone(),
            after: began.elapsed(),
        }),
    }
}

/// Every rank that should have left a record did, whole.
fn is_complete(report: &Report) -> bool {
    report.input.ranks_read > 0 && report.input.ranks_read >= report.input.ranks_expected
}

fn say(report: &Report) -> String {
    let input = &report.input;
    format!(
        "{} of {} ranks  {}",
        input.ranks_read,
        input.ranks_expected.max(input.ranks_read),
        one_line(report)
    )
}

/// Everything below the folder. What cannot be listed now is not there yet.
fn list(folder: &Path) -> Listing {
    let mut listing = Listing::new();
    walk(folder, 0, &mut listing);
    listing
}

fn walk(folder: &Path, depth: usize, listing: &mut Listing) {
    let Ok(items) = fs::read_dir(folder) else {
        return;
    };
    for item in items.flatten() {
        let path = item.path();
        match item.metadata() {
            Ok(meta) if meta.is_dir() && depth < MAX_DEPTH => walk(&path, depth + 1, listing),
            Ok(meta) if meta.is_file() => {
                listing.insert(path, (meta.len(), meta.modified().ok()));
            }
            _ => {}
        }
    }
}

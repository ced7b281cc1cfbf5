//! `rcomm-fr rings`: lists, shows and removes the rings of this node.

use crate::cli::args::{RemoveStaleArgs, RingPlace, RingsAction, RingsArgs, ShowArgs};
use crate::cli::failure::Failure;
use crate::cli::output;
use anstream::ColorChoice;
use rcomm_analyzer::format::{bytes, count, duration_ms, grouped, printable};
use rcomm_analyzer::print::human::{self, Detail, Layout};
use rcomm_analyzer::source::ring_directory;
use rcomm_recorder::publish::{
    RingListing, RingReader, RingSummary, list_rings, remove_stale_rings,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

pub(super) fn run(args: &RingsArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    match &args.action {
        None => list(&args.list, color),
        Some(RingsAction::List(place)) => list(place, color),
        Some(RingsAction::Show(show_args)) => show(show_args, color),
        Some(RingsAction::RemoveStale(remove_args)) => remove_stale(remove_args, color),
    }
}

/// The directory in the arguments, or the user's default one.
pub(super) fn directory(place: &RingPlace) -> PathBuf {
    ring_directory(place.dir.as_deref())
}

/// The rings in the directory; if a job is given, only its rings and those that cannot be read. Fails if the directory
/// cannot be listed.
pub(super) fn find(place: &RingPlace) -> Result<Vec<RingListing>, Failure> {
    let mut rings = list_rings(&directory(place))?;
    if let Some(job) = &place.job {
        rings.retain(|listing| match &listing.ring {
            Ok(ring) => ring.identity.job == *job,
            Err(_) => true,
        });
    }
    Ok(rings)
}

fn list(place: &RingPlace, color: ColorChoice) -> Result<ExitCode, Failure> {
    let rings = find(place)?;
    let now = now_ns();
    // A name of a job or a path may be long: one line for each job has them, so that the rows fit a terminal.
    let mut rows: BTreeMap<(&str, &Path), Vec<Vec<String>>> = BTreeMap::new();
    let mut unreadable = Vec::new();
    for listing in &rings {
        match &listing.ring {
            Ok(ring) => {
                let folder = listing.path.parent().unwrap_or(Path::new(""));
                let of_job = rows.entry((&ring.identity.job, folder)).or_default();
                of_job.push(row(ring, &listing.path, now));
            }
            Err(error) => unreadable.push(error.to_string()),
        }
    }
    let layout = Layout {
        // No line is cut, so that paths can be copied.
        width: usize::MAX,
        ..Layout::default()
    };
    output::write_to(None, color, |out| {
        if rings.is_empty() {
            let of_job = place.job.as_ref().map(|job| format!(" of job {job}"));
            let of_job = of_job.unwrap_or_default();
            let directory = directory(place);
            let text = format!("no rings{of_job} in {}", directory.display());
            return writeln!(out, "{}", printable(&text));
        }
        for ((job, folder), rows) in rows {
            // Whoever wrote the rings named the job and its folder.
            let head = format!(
                "job {job}: {} in {}",
                count(rows.len() as u64, "ring"),
                folder.display()
            );
            writeln!(out, "{}", printable(&head))?;
            human::write_table(
                "",
                &[
                    "rank",
                    "attempt",
                    "process",
                    "pid",
                    "host",
                    "heartbeat",
                    "operations",
                    "size",
                    "file",
                ],
                rows,
                &layout,
                out,
            )?;
        }
        for error in &unreadable {
            writeln!(out, "  unreadable: {}", printable(error))?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The cells of a ring in the table of its job in [`list`].
fn row(ring: &RingSummary, path: &Path, now: i64) -> Vec<String> {
    let identity = &ring.identity;
    vec![
        identity
            .rank
            .map_or_else(|| "?".to_owned(), |rank| rank.to_string()),
        identity.attempt.to_string(),
        if ring.alive { "alive" } else { "gone" }.to_owned(),
        identity.pid.to_string(),
        identity.host.clone(),
        match ring.heartbeat_ns {
            ..=0 => "never".to_owned(),
            heartbeat_ns => format!("{} ago", duration_ms((now - heartbeat_ns) as f64 / 1e6)),
        },
        grouped(ring.records),
        bytes(ring.size_bytes),
        path.file_name()
            .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
    ]
}

fn show(args: &ShowArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    let path = match args.ring.parse::<u32>() {
        Err(_) => PathBuf::from(&args.ring),
        Ok(rank) => newest_of(rank, &args.place)?,
    };
    let ring = RingReader::attach(&path)?;
    let alive = ring.is_alive();
    let dump = ring.read()?;
    let layout = Layout {
        width: output::page_width(),
        detail: if args.verbose {
            Detail::Verbose
        } else {
            Detail::Brief
        },
    };
    output::write_to(None, color, |out| {
        let process = if alive { "is alive" } else { "is gone" };
        let first = format!(
            "{}: {} issued, {}, its process {process}",
            printable(&path.display().to_string()),
            count(ring.records(), "operation"),
            bytes(ring.size_bytes() as u64),
        );
        // A path is copied by users, so it is not broken.
        let page = textwrap::Options::new(layout.width)
            .break_words(false)
            .word_splitter(textwrap::WordSplitter::NoHyphenation);
        writeln!(out, "{}", textwrap::fill(&first, page))?;
        human::write_record(&dump, &layout, out)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The ring of the rank's newest attempt. Fails if no ring matches, or if the rings that match are of several jobs.
fn newest_of(rank: u32, place: &RingPlace) -> Result<PathBuf, Failure> {
    let wanted = match &place.job {
        Some(job) => format!("rank {rank} of job {job}"),
        None => format!("rank {rank}"),
    };
    let mut matching: Vec<(String, u32, PathBuf)> = find(place)?
        .into_iter()
        .filter_map(|listing| {
            let identity = listing.ring.ok()?.identity;
            (identity.rank == Some(rank)).then_some((identity.job, identity.attempt, listing.path))
        })
        .collect();
    let jobs: std::collections::BTreeSet<&String> = matching.iter().map(|(job, ..)| job).collect();
    if jobs.len() > 1 {
        return Err(Failure::SeveralRings {
            wanted,
            matching: matching.len(),
        });
    }
    matching.sort();
    match matching.pop() {
        Some((.., path)) => Ok(path),
        None => Err(Failure::NoRing {
            wanted,
            directory: directory(place),
        }),
    }
}

fn remove_stale(args: &RemoveStaleArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    let removed = if args.dry_run {
        find(&args.place)?
            .into_iter()
            .filter(|listing| listing.ring.as_ref().is_ok_and(|ring| !ring.alive))
            .map(|listing| listing.path)
            .collect()
    } else {
        remove_stale_rings(&directory(&args.place), args.place.job.as_deref())?
    };
    let verb = if args.dry_run {
        "would remove"
    } else {
        "removed"
    };
    output::write_to(None, color, |out| {
        for path in &removed {
            writeln!(out, "{verb} {}", printable(&path.display().to_string()))?;
        }
        writeln!(out, "{verb} {}", count(removed.len() as u64, "ring"))
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The current time, ns since the epoch.
fn now_ns() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
        })
}

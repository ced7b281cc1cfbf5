//! `rcomm-fr watch DIR`: reports on a folder in which dumps still arrive.
//!
//! The folder is polled several times a second: on a network file system, notifications do not report the writes of
//! other hosts.

use super::analyze::show;
use super::judge::{Judged, Keep, judge, memory_limit_error, over_memory_limit, policy};
use crate::cli::args::{Format, JudgeArgs, WatchArgs};
use crate::cli::failure::Failure;
use anstream::{AutoStream, ColorChoice};
use rcomm_analyzer::load::{Change, Follower, LoadOptions};
use rcomm_analyzer::logs::{self, Log};
use rcomm_analyzer::print::human::{format_ranks_read, one_line};
use rcomm_analyzer::ras::{self, RasReport};
use rcomm_analyzer::{Analysis, Report, Unread};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The time between two polls of the folder.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

pub(super) fn run(args: &WatchArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    let began = Instant::now();
    let deadline = args.timeout.map(|timeout| began + timeout);
    let keep = match args.show.format {
        Format::Html | Format::Perfetto | Format::Columns => Keep::Records,
        Format::Text | Format::Json => Keep::Report,
    };
    let mut stderr = AutoStream::new(io::stderr(), color);
    let mut follower = Follower::new(vec![args.dir.clone()]);
    let mut analysis = Analysis::new(policy(&args.judge));
    let mut other_input = OtherInput::default();
    let mut last_change = began;
    let mut latest: Option<Report> = None;
    let mut printed = String::new();
    // If standard error is closed, only the report is printed.
    let _ = writeln!(stderr, "{:7.1} s  {}", 0.0, format_awaited(&args.dir));
    loop {
        if let Some(report) = poll(&mut follower, &mut analysis, &mut other_input, &args.judge)? {
            last_change = Instant::now();
            let line = format_progress(&report);
            if line != printed {
                let elapsed = began.elapsed().as_secs_f64();
                let _ = writeln!(stderr, "{elapsed:7.1} s  {line}");
                printed = line;
            }
            latest = Some(report);
        }
        let is_complete = latest.as_ref().is_some_and(is_complete);
        let is_settled = last_change.elapsed() >= args.settle;
        let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if (is_complete && is_settled) || is_late {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    match latest {
        // These formats show the records themselves, which were not kept: read them again.
        Some(_) if keep == Keep::Records => {
            let dir = std::slice::from_ref(&args.dir);
            show(&judge(dir, &args.judge, keep)?, &args.show, color)
        }
        Some(report) => {
            let dumps = Vec::new();
            show(
                &Judged {
                    report,
                    dumps,
                    from_archive: false,
                },
                &args.show,
                color,
            )
        }
        None => Err(Failure::NothingArrived {
            dir: args.dir.clone(),
            after: began.elapsed(),
        }),
    }
}

/// The line about what the command waits for: the folder, or records in it.
fn format_awaited(dir: &Path) -> String {
    let folder = dir.display();
    match dir.exists() {
        true => format!("waiting for records in {folder}"),
        false => format!("waiting for {folder} to appear"),
    }
}

/// Input other than records, by path.
#[derive(Default)]
struct OtherInput {
    ras: BTreeMap<String, RasReport>,
    logs: BTreeMap<String, Log>,
}

/// Reads the files that changed since the last poll and judges all records; `None` if no file changed or none is left.
fn poll(
    follower: &mut Follower,
    analysis: &mut Analysis,
    other_input: &mut OtherInput,
    args: &JudgeArgs,
) -> Result<Option<Report>, Failure> {
    let options = LoadOptions {
        jobs: args.jobs,
        ..LoadOptions::default()
    };
    let mut dumps_read = 0;
    let mut over_limit = false;
    let poll = follower.poll(&options, |change| match change {
        Change::Outdated(path) => {
            analysis.forget(&path);
            other_input.ras.remove(&path);
            other_input.logs.remove(&path);
        }
        Change::Ras(path, report) => {
            other_input.ras.insert(path, report);
        }
        Change::Log(log) => {
            other_input.logs.insert(log.path.clone(), log);
        }
        // Above the memory limit, the remaining dumps are dropped; the command then fails.
        Change::Dump(_) if over_limit => {}
        Change::Dump(loaded) => {
            loaded.add_to(analysis);
            dumps_read += 1;
            over_limit = over_memory_limit(args);
        }
    })?;
    if over_limit {
        return Err(memory_limit_error(args, dumps_read));
    }
    let Some(poll) = poll else { return Ok(None) };
    for problem in poll.problems {
        analysis.add_problem(problem, Unread::Part);
    }
    if poll.files == 0 {
        return Ok(None);
    }
    let mut report = analysis.report();
    report.input.files = poll.files;
    ras::join(&mut report, other_input.ras.values());
    let logs: Vec<Log> = other_input.logs.values().cloned().collect();
    logs::join(&mut report, &logs);
    Ok(Some(report))
}

/// Whether records of every rank were read, and it is known that the job has no more ranks.
fn is_complete(report: &Report) -> bool {
    let input = &report.input;
    input.ranks_read > 0 && input.ranks_read >= input.ranks_expected && !input.may_have_more
}

/// The line on the records so far: how many ranks were read, and the verdict with its sentence.
fn format_progress(report: &Report) -> String {
    format!("{}  {}", format_ranks_read(&report.input), one_line(report))
}

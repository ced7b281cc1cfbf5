//! Reads paths and makes a report, for `analyze`, `watch`, `diff`, `collect`, `query` and a call without a sub-command.

use super::on_node::{self, OnNode};
use crate::cli::args::JudgeArgs;
use crate::cli::failure::Failure;
use crate::cli::progress::Meter;
use rcomm_analyzer::load::{self, LoadOptions, Loaded, LoadedDump, Progress, Spare};
use rcomm_analyzer::redact::Redactor;
use rcomm_analyzer::source::RankProcess;
use rcomm_analyzer::{Analysis, Code, Policy, Problem, Report, Threads, Unread, logs, ras, stacks};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, LaunchRecord};
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

/// What is kept in memory after the judgment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// Only the report. While records are judged, 56 bytes of each operation are held; `--redact` needs all records.
    Report,
    /// Also the dumps, for formats that show them.
    Records,
}

/// A report, with its dumps if they were kept.
pub(super) struct Judged {
    pub(super) report: Report,
    /// The dumps in ascending order of rank, without those that were set aside; empty unless they were kept.
    pub(super) dumps: Vec<Dump>,
    /// Whether an archive of `collect` was read, which may come from another node.
    pub(super) from_archive: bool,
}

/// Reads all records below `paths`, and further records of the same jobs on this node, and judges them. Logs, stacks
/// and reports of NCCL's RAS below `paths` are joined to the report.
///
/// # Errors
///
/// If no path and no pattern gives a file, a pattern is not valid, the records need more memory than `--memory-limit`,
/// or the system has no random numbers for pseudonyms.
pub(super) fn judge(paths: &[PathBuf], args: &JudgeArgs, keep: Keep) -> Result<Judged, Failure> {
    let meter = Meter::new("reading", "files");
    let show_progress = |progress: Progress| meter.show(progress.done, progress.files);
    let spare = Spare::default();
    let options = LoadOptions {
        jobs: args.jobs,
        progress: Some(&show_progress),
        spare: Some(&spare),
        ..LoadOptions::default()
    };
    let threads = Arc::new(Threads::new(args.jobs));
    let mut analysis = Some(Analysis::new(policy(args)).with_workers(threads));
    let mut kept: Vec<LoadedDump> = Vec::new();
    let mut on_node = OnNode::default();
    let mut dumps_read = 0;
    let redactor = match args.redact {
        true => Some(Redactor::new().map_err(Failure::NoKey)?),
        false => None,
    };
    let mut to_redact: Vec<LoadedDump> = Vec::new();
    let loaded = load::load(paths, &options, |loaded: LoadedDump| {
        let Some(analysis_so_far) = &mut analysis else {
            return;
        };
        on_node.note(&loaded);
        dumps_read += 1;
        if let Some(redactor) = &redactor {
            // The texts of a record may name the host of a later one, so all hosts are learned before the first record
            // is changed.
            redactor.learn(&loaded.dump);
            to_redact.push(loaded);
        } else {
            loaded.add_to(analysis_so_far);
            match keep {
                Keep::Records => kept.push(loaded),
                Keep::Report => spare.keep(loaded.dump.entries),
            }
        }
        if over_memory_limit(args) {
            // A report on only some of the records would be useless: free the memory at once.
            analysis = None;
            kept.clear();
            to_redact.clear();
        }
    })?;
    drop(meter);
    let Some(mut analysis) = analysis else {
        return Err(memory_limit_error(args, dumps_read));
    };
    let mut loaded = loaded;
    let launches_without_records = match dumps_read {
        0 => on_node::launches_in(paths),
        _ => Vec::new(),
    };
    let (launches, rings) = (on_node.launches(paths), on_node.rings());
    if let Some(redactor) = &redactor {
        for launch in launches_without_records.iter().chain(&launches) {
            redactor.learn_launch(launch);
        }
        for (_, ring) in &rings {
            redactor.learn(ring);
        }
        for mut record in to_redact {
            redactor.record(&mut record);
            record.add_to(&mut analysis);
            if keep == Keep::Records {
                kept.push(record);
            }
        }
        leave_out_texts(&mut loaded, redactor);
    }
    let redacted_launch = |mut launch: LaunchRecord| {
        if let Some(redactor) = &redactor {
            redactor.launch(&mut launch);
        }
        launch
    };
    for problem in loaded.problems {
        analysis.add_problem(problem, Unread::Part);
    }
    if let Some(world_size) = loaded.world_size {
        analysis.expect(world_size);
    }
    if dumps_read == 0 {
        // At least the ranks whose stacks were taken exist.
        if let Some(highest) = loaded.stacks.iter().map(|stacks| stacks.rank).max() {
            analysis.expect(highest.saturating_add(1));
        }
        let launches = launches_without_records.into_iter();
        let launches: Vec<_> = launches.map(redacted_launch).collect();
        if let Some(launch) = launches.first() {
            analysis.expect(launch.world_size);
        }
        analysis.add_launches(launches);
    }
    let launches = launches.into_iter().map(redacted_launch);
    analysis.add_launches(launches.collect());
    for (path, dump) in rings {
        let mut ring = LoadedDump {
            dump,
            path,
            cut: false,
            written_ns: None,
        };
        if let Some(redactor) = &redactor {
            redactor.record(&mut ring);
        }
        ring.add_to(&mut analysis);
    }
    let mut report = analysis.finish();
    report.input.files = loaded.files;
    ras::join(&mut report, loaded.ras.iter().map(|(_, report)| report));
    logs::join(&mut report, &loaded.logs);
    stacks::join(&mut report, &loaded.stacks);
    name_stack_commands(&mut report);
    let set_aside_paths: HashSet<&str> = report
        .problems
        .iter()
        .filter(|problem| problem.code == Code::N300)
        .flat_map(Problem::paths)
        .collect();
    kept.retain(|loaded| !set_aside_paths.contains(loaded.path.as_str()));
    kept.sort_by_key(|loaded| loaded.dump.identity.rank);
    Ok(Judged {
        dumps: kept.into_iter().map(|loaded| loaded.dump).collect(),
        from_archive: loaded.has_manifest,
        report,
    })
}

/// Adds the command that takes a rank's stack to findings that ask for it, where the rank's process is on this node.
fn name_stack_commands(report: &mut Report) {
    if report
        .findings
        .iter()
        .all(|finding| finding.rank_of_stack().is_none())
    {
        return;
    }
    let processes = RankProcess::list();
    let here = this_host();
    let on_node = report.ranks.iter().filter(|rank| rank.host == here);
    let recorded: HashSet<(Rank, u32)> = on_node.map(|rank| (rank.rank, rank.pid)).collect();
    // Another process may have got the number of one that has ended.
    let runs = processes
        .iter()
        .map(|process| (process.launched.rank, process.pid));
    let running: BTreeMap<Rank, u32> = runs.filter(|process| recorded.contains(process)).collect();
    stacks::name_commands(report, |rank| running.get(&rank).copied());
}

/// The name of this host; `localhost` if it has none.
pub(super) fn this_host() -> String {
    let name = rustix::system::uname();
    match name.nodename().to_str() {
        Ok(name) if !name.is_empty() => name.to_owned(),
        _ => "localhost".to_owned(),
    }
}

/// Replaces the names in problems, and leaves out logs, stacks and RAS reports, which can hold names of any form.
fn leave_out_texts(loaded: &mut Loaded, redactor: &Redactor) {
    let problems = std::mem::take(&mut loaded.problems).into_iter();
    let redacted = problems.map(|problem| redactor.problem(problem));
    loaded.problems = redacted.collect();
    let logs = loaded.logs.iter().map(|log| &log.path);
    let stacks = loaded.stacks.iter().map(|stacks| &stacks.path);
    let texts = logs
        .chain(loaded.ras.iter().map(|(path, _)| path))
        .chain(stacks);
    let left_out = texts.map(|path| {
        let sentence = "left aside: logs, stacks and RAS reports are not redacted";
        Problem::stale_dump(redactor.path(path), sentence)
    });
    loaded.problems.extend(left_out);
    loaded.logs.clear();
    loaded.ras.clear();
    loaded.stacks.clear();
}

/// Whether the process uses more memory than `--memory-limit` allows.
pub(super) fn over_memory_limit(args: &JudgeArgs) -> bool {
    args.memory_limit
        .is_some_and(|limit| resident_bytes() > limit.0)
}

/// The error for exceeding `--memory-limit` after `dumps_read` dumps were read.
pub(super) fn memory_limit_error(args: &JudgeArgs, dumps_read: usize) -> Failure {
    Failure::MemoryLimit {
        limit: args.memory_limit.map_or(0, |limit| limit.0),
        dumps_read,
    }
}

/// The policy that the arguments ask for.
pub(super) fn policy(args: &JudgeArgs) -> Policy {
    Policy {
        now_ns: args.as_of.map(|then| then.0),
        // `--as-of` asks which operations were overdue at that time, as in a snapshot.
        snapshot: args.snapshot || args.as_of.is_some(),
        snapshot_of_rings: true,
        overdue: args.overdue,
        world_size: args.world_size.map(std::num::NonZeroU32::get),
        ..Policy::default()
    }
}

/// The resident memory of this process, bytes; 0 if the system does not show it.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .unwrap_or(0);
    pages.saturating_mul(rustix::param::page_size() as u64)
}

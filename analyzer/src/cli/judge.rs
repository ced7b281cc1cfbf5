//! Reads paths and makes a report: what `analyze`, `watch`, `diff` and `collect` share.

use super::on_node::{self, OnNode};
use crate::cli::args::JudgeArgs;
use crate::cli::failure::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rcomm_analyzer::load::{self, LoadOptions, LoadedDump, Progress};
use rcomm_analyzer::{Analysis, Code, Extent, Policy, Report, Unread, logs, ras};
use rcomm_recorder::publish::Dump;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Faster work shows no bar: it would only flicker.
const BAR_AFTER: Duration = Duration::from_secs(1);

/// Whether the records themselves are wanted in addition to the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// No: memory holds what the verdict needs, 56 bytes an operation.
    Report,
    /// Yes: pictures are made from them.
    Records,
}

/// A report, and what it was made from if that was wanted.
pub(super) struct Judged {
    pub(super) report: Report,
    /// By rank; empty unless wanted.
    pub(super) dumps: Vec<Dump>,
}

/// Reads everything below `paths` and judges it.
pub(super) fn judge(paths: &[PathBuf], args: &JudgeArgs, keep: Keep) -> Result<Judged, Failure> {
    let meter = Meter::new();
    let progress = |progress| meter.show(progress);
    let options = LoadOptions {
        jobs: args.jobs,
        progress: Some(&progress),
        ..LoadOptions::default()
    };
    let mut analysis = Some(Analysis::new(policy(args)));
    let mut kept: Vec<LoadedDump> = Vec::new();
    let mut on_node = OnNode::default();
    let mut read = 0;
    let loaded = load::load(paths, &options, |loaded: LoadedDump| {
        let Some(judge) = &mut analysis else {
            return;
        };
        let extent = if loaded.cut {
            Extent::Cut
        } else {
            Extent::Whole
        };
        judge.add_from(&loaded.path, &loaded.dump, extent);
        on_node.note(&loaded);
        if loaded.dump.identity.dump_time_ns == 0
            && let Some(written_ns) = written_ns(&loaded.path)
        {
            judge.note_written(written_ns);
        }
        read += 1;
        if keep == Keep::Records {
            kept.push(loaded);
        }
        if too_large(args) {
            // What was taken in is of no use without the rest: give the memory back at once.
            analysis = None;
            kept.clear();
        }
    })?;
    meter.finish();
    let Some(mut analysis) = analysis else {
        return Err(memory_limit(args, read));
    };
    for problem in loaded.problems {
        analysis.add_problem(problem, Unread::Part);
    }
    if read == 0 {
        let launches = on_node::launches_in(paths);
        if let Some(launch) = launches.first() {
            analysis.expect(launch.world_size);
        }
        analysis.add_launches(launches);
    }
    analysis.add_launches(on_node.launches());
    for (path, dump) in on_node.rings() {
        analysis.add_from(&path, &dump, Extent::Whole);
    }
    let mut report = analysis.finish();
    report.input.files = loaded.files;
    ras::join(&mut report, loaded.ras.iter().map(|(_, report)| report));
    logs::join(&mut report, &loaded.logs);
    let aside: HashSet<&str> = report
        .problems
        .iter()
        .filter(|problem| problem.code == Code::N300)
        .map(|problem| problem.path.as_str())
        .collect();
    kept.retain(|loaded| !aside.contains(loaded.path.as_str()));
    kept.sort_by_key(|loaded| loaded.dump.identity.rank);
    Ok(Judged {
        dumps: kept.into_iter().map(|loaded| loaded.dump).collect(),
        report,
    })
}

/// When a file was written, ns since the epoch; `None` for the member of an archive.
fn written_ns(path: &str) -> Option<i64> {
    let written = std::fs::metadata(path).ok()?.modified().ok()?;
    let since = written.duration_since(std::time::UNIX_EPOCH).ok()?;
    i64::try_from(since.as_nanos()).ok()
}

/// Whether more memory is in use than was allowed.
pub(super) fn too_large(args: &JudgeArgs) -> bool {
    args.memory_limit
        .is_some_and(|limit| resident_bytes() > limit.0)
}

/// The error where more memory is in use than was allowed, after `read` records.
pub(super) fn memory_limit(args: &JudgeArgs, read: usize) -> Failure {
    Failure::MemoryLimit {
        limit: args.memory_limit.map_or(0, |limit| limit.0),
        read,
    }
}

pub(super) fn policy(args: &JudgeArgs) -> Policy {
    Policy {
        now_ns: args.as_of.map(|then| then.0),
        // Who names a time wants to know what was overdue then.
        snapshot: args.snapshot || args.as_of.is_some(),
        overdue: args.overdue,
        world_size: args.world_size.map(std::num::NonZeroU32::get),
        ..Policy::default()
    }
}

/// Memory of this process that is in use; 0 where the system does not show it.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .unwrap_or(0);
    pages.saturating_mul(rustix::param::page_size() as u64)
}

/// A bar on standard error, on a terminal only, for work that takes longer than a second.
pub(super) struct Meter {
    began: Instant,
    bar: OnceLock<ProgressBar>,
}

impl Meter {
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            bar: OnceLock::new(),
        }
    }

    pub(super) fn show(&self, progress: Progress) {
        if self.began.elapsed() < BAR_AFTER {
            return;
        }
        let bar = self.bar.get_or_init(|| {
            // Draws nothing where standard error is no terminal.
            let target = ProgressDrawTarget::stderr();
            let bar = ProgressBar::with_draw_target(Some(progress.files as u64), target);
            let style =
                ProgressStyle::with_template("reading {wide_bar} {pos}/{len} files, {eta} left")
                    .unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.with_style(style)
        });
        bar.set_position(progress.done as u64);
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = self.bar.get() {
            bar.finish_and_clear();
        }
    }
}

//! Reads lines of launchers (torchrun, Slurm, `rcomm-run`) and of the kernel's out-of-memory killer.

use super::Line;
use super::scan::{between, leading_number, number_after};
use super::torch::Events;
use rcomm_recorder::model::Rank;
use rcomm_verdict::logs::{Ended, Event};

/// The state of reading torchrun's list of failures: the section, and the global and the local rank of the process
/// whose lines are read.
#[derive(Debug, Default)]
pub(super) struct FailureList {
    inside: Section,
    rank: Option<Rank>,
    local_rank: Option<u32>,
}

/// The part of torchrun's list in which a line is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Section {
    #[default]
    Outside,
    Failures,
    RootCause,
}

/// Adds the events of a line.
pub(super) fn read_line(line: &Line<'_>, failures: &mut FailureList, found: &mut Events) {
    let text = line.text;
    read_list_line(text.trim(), failures, found);
    if text.contains("failed (exitcode: ") {
        let ended = Ended {
            // A number that cannot be read counts as 1, the usual exit code of a failure.
            code: number_after(text, "failed (exitcode: ").unwrap_or(1),
            local_rank: number_after(text, "local_rank: "),
            pid: number_after(text, "(pid: "),
            first: false,
        };
        found.push((None, Event::Ended(ended)));
    } else if is_termination(text) {
        found.push((None, Event::Terminated));
    } else if text.contains("srun: error: ") {
        slurm(text, found);
    } else if text.contains("rcomm-run: rank ") {
        rcomm_run(text, found);
    } else if text.contains("Out of memory: Killed process") || text.contains("oom_kill event") {
        let pid = number_after(text, "Killed process ");
        found.push((None, Event::OutOfMemory { pid }));
    }
}

/// Whether a launcher states that it was asked to end the job: `slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT …`,
/// or `Received 15 death signal, shutting down workers` of torchrun.
fn is_termination(text: &str) -> bool {
    let by_slurm = text.contains("slurmstepd: error: *** ") && text.contains(" CANCELLED AT ");
    let by_torchrun = text.contains("Received ") && text.contains(" death signal, shutting down");
    by_slurm || by_torchrun
}

/// Reads torchrun's list: the heading of a section, then `key : value` lines for each process.
fn read_list_line(text: &str, failures: &mut FailureList, found: &mut Events) {
    if text == "Failures:" {
        failures.inside = Section::Failures;
    } else if text.starts_with("Root Cause (first observed failure)") {
        failures.inside = Section::RootCause;
    } else if text.starts_with("=====") {
        failures.inside = Section::Outside;
    }
    if failures.inside == Section::Outside {
        return;
    }
    let Some((key, value)) = text.split_once(':') else {
        return;
    };
    match key.trim() {
        "rank" => {
            failures.rank = leading_number(value.trim()).map(|(rank, _)| rank);
            failures.local_rank = number_after(value, "local_rank: ");
        }
        "exitcode" => {
            let Some((code, _)) = leading_number(value.trim()) else {
                return;
            };
            let ended = Ended {
                code,
                local_rank: failures.local_rank.take(),
                pid: number_after(value, "(pid: "),
                first: failures.inside == Section::RootCause,
            };
            found.push((failures.rank.take(), Event::Ended(ended)));
        }
        _ => {}
    }
}

/// Reads `srun: error: node07: task 3: Killed`, or `tasks 0,2-3: Exited with exit code 1`, which does not show which of
/// them ended first, so that the end names no rank.
fn slurm(text: &str, found: &mut Events) {
    let Some((_, rest)) = text.split_once(": task") else {
        return;
    };
    let rest = rest.strip_prefix('s').unwrap_or(rest).trim_start();
    let Some((tasks, end)) = rest.split_once(':') else {
        return;
    };
    let is_list = tasks.starts_with(|c: char| c.is_ascii_digit())
        && tasks
            .bytes()
            .all(|byte| byte.is_ascii_digit() || b",-".contains(&byte));
    if !is_list {
        return;
    }
    let task: Option<Rank> = tasks.parse().ok();
    let end = end.trim();
    // A signal counts as the negative of its number.
    let code = match end {
        "Killed" => -9,
        "Terminated" => -15,
        "Out Of Memory" => -9,
        _ if end.starts_with("Segmentation fault") => -11,
        _ if end.starts_with("Aborted") => -6,
        _ if end.starts_with("Bus error") => -7,
        _ => match number_after(end, "exit code ") {
            Some(code) => code,
            None => return,
        },
    };
    if end == "Out Of Memory" {
        found.push((None, Event::OutOfMemory { pid: None }));
    }
    let ended = Ended {
        code,
        local_rank: None,
        pid: None,
        first: false,
    };
    found.push((task, Event::Ended(ended)));
}

/// Reads `rcomm-run: rank 3 (process 812) was killed by SIGKILL (9) after 1.2 s`.
fn rcomm_run(text: &str, found: &mut Events) {
    let Some((_, rest)) = text.split_once("rcomm-run: rank ") else {
        return;
    };
    let Some((rank, rest)) = leading_number::<Rank>(rest) else {
        return;
    };
    let signal = between(rest, " was killed by ", &[')', ','])
        .and_then(|signal| number_after::<i32>(signal, "("))
        .and_then(i32::checked_neg);
    let Some(code) = signal.or_else(|| number_after(rest, " exited with ")) else {
        return;
    };
    let ended = Ended {
        code,
        local_rank: None,
        pid: number_after(rest, "(process "),
        first: true,
    };
    found.push((Some(rank), Event::Ended(ended)));
}

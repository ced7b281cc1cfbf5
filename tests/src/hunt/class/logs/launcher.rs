//! What launchers write when processes end.

use super::{Line, clock};
use crate::hunt::Case;
use crate::hunt::job::{MS, SECOND};
use crate::hunt::run::Gone;
use rcomm_recorder::model::Rank;
use std::collections::BTreeMap;

/// How long one of torchrun's agents waits between two looks at its processes.
const LOOKS_NS: i64 = 100 * MS;

/// The processes of each host that failed: rank and end, by time. Those that a launcher had ended are left out.
fn failed(case: &Case) -> BTreeMap<u32, Vec<(Rank, Gone)>> {
    let mut hosts: BTreeMap<u32, Vec<(Rank, Gone)>> = BTreeMap::new();
    for (rank, life) in (0..).zip(&case.history.lives) {
        let Some(gone) = life.gone.filter(|gone| gone.code != Some(0)) else {
            continue;
        };
        if life.signalled.is_none_or(|signalled| gone.at < signalled) {
            hosts
                .entry(case.job.host(rank))
                .or_default()
                .push((rank, gone));
        }
    }
    for failed in hosts.values_mut() {
        failed.sort_by_key(|&(rank, gone)| (gone.at, rank));
    }
    hosts
}

/// The exit code of a process, or the negative number of its signal.
fn code(gone: &Gone) -> i32 {
    gone.signal.map_or(gone.code.unwrap_or(1), |signal| -signal)
}

/// Writes what torchrun writes: the agent of each host reports the processes that it found ended at its first look
/// after a failure, and calls the lowest of these ranks the root cause.
pub(super) fn torchrun(case: &Case, lines: &mut Vec<Line>) {
    if let Some(asked) = case.history.asked {
        for host in 0..=case.job.host(case.job.world() - 1) {
            let (time, micros) = clock(asked);
            let place = "torch/distributed/elastic/agent/server/api.py:719]";
            lines.push(Line {
                at: asked,
                host,
                rank: None,
                text: format!(
                    "W0921 {time}.{micros:06} {} {place} Received 15 death signal, shutting down workers",
                    900 + host
                ),
            });
        }
    }
    for (host, failed) in failed(case) {
        let Some(&(_, first)) = failed.first() else {
            continue;
        };
        let look = (first.at / LOOKS_NS + 1) * LOOKS_NS + i64::from(host) * 7 * MS;
        let mut found: Vec<&(Rank, Gone)> =
            failed.iter().filter(|(_, gone)| gone.at <= look).collect();
        found.sort_by_key(|(rank, _)| *rank);
        let Some((root, others)) = found.split_first() else {
            continue;
        };
        let mut say = |at: i64, text: String| {
            lines.push(Line {
                at,
                host,
                rank: None,
                text,
            });
        };
        let place = |rank: Rank| (rank % case.job.per_host, 1000 + rank);
        let (local, pid) = place(root.0);
        let (time, micros) = clock(look);
        say(
            look,
            format!(
                "E0921 {time}.{micros:06} {} torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: {}) \
                 local_rank: {local} (pid: {pid}) of binary: /usr/bin/python3",
                900 + host,
                code(&root.1)
            ),
        );
        let rule = |character: &str| character.repeat(60);
        let mut table = vec![rule("="), "train.py FAILED".to_owned(), rule("-")];
        table.push("Failures:".to_owned());
        let row = |index: usize, (rank, gone): &(Rank, Gone)| {
            let (local, pid) = place(*rank);
            let cause = match gone.signal {
                Some(9) => format!("Signal 9 (SIGKILL) received by PID {pid}"),
                Some(6) => format!("Signal 6 (SIGABRT) received by PID {pid}"),
                _ => "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
                    .to_owned(),
            };
            vec![
                format!("[{index}]:"),
                format!("  time      : 2026-09-21_{time}"),
                format!("  host      : host{host}"),
                format!("  rank      : {rank} (local_rank: {local})"),
                format!("  exitcode  : {} (pid: {pid})", code(gone)),
                "  error_file: <N/A>".to_owned(),
                format!("  traceback : {cause}"),
            ]
        };
        if others.is_empty() {
            table.push("  <NO_OTHER_FAILURES>".to_owned());
        }
        for (index, other) in others.iter().enumerate() {
            table.extend(row(index + 1, other));
        }
        table.push(rule("-"));
        table.push("Root Cause (first observed failure):".to_owned());
        table.extend(row(0, root));
        table.push(rule("="));
        // The agent ends the others before it raises its error.
        for text in table {
            say(look + 40 * MS, text);
        }
    }
}

/// Writes what Slurm writes: one line for each task that failed, or for several tasks of a host that end alike at about
/// the same time. Slurm writes that a step is cancelled before its tasks end.
pub(super) fn srun(case: &Case, lines: &mut Vec<Line>) {
    let mut say = |at: i64, text: String| {
        lines.push(Line {
            at,
            host: 0,
            rank: None,
            text,
        });
    };
    let lives = &case.history.lives;
    if let Some(signalled) = lives.iter().filter_map(|life| life.signalled).min() {
        let (time, _) = clock(signalled);
        if case.history.asked.is_none() {
            say(
                signalled - MS,
                "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
                    .to_owned(),
            );
        }
        say(
            signalled,
            format!(
                "slurmstepd: error: *** STEP 4711.0 ON host0 CANCELLED AT 2026-09-21T{time} ***"
            ),
        );
    }
    let mut ends: BTreeMap<(u32, i64, i32), Vec<Rank>> = BTreeMap::new();
    for (rank, life) in (0..).zip(lives) {
        if let Some(gone) = life.gone.filter(|gone| gone.code != Some(0)) {
            // Those that end in the same tenth of a second are in one line.
            let key = (case.job.host(rank), gone.at / (SECOND / 10), code(&gone));
            ends.entry(key).or_default().push(rank);
        }
    }
    for ((host, at, code), ranks) in ends {
        let how = match code {
            -9 => "Killed".to_owned(),
            -6 => "Aborted (core dumped)".to_owned(),
            -15 => "Terminated".to_owned(),
            code => format!("Exited with exit code {code}"),
        };
        let tasks: Vec<String> = ranks.iter().map(u32::to_string).collect();
        let (tasks, plural) = (tasks.join(","), if ranks.len() == 1 { "" } else { "s" });
        say(
            (at + 1) * (SECOND / 10),
            format!("srun: error: host{host}: task{plural} {tasks}: {how}"),
        );
    }
}

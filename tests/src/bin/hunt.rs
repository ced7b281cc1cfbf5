//! Hunts for false verdicts in simulated jobs: `hunt --seeds 0..10000`, and `hunt --seed 17 --out FOLDER` for one.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use anyhow::{Context, Result};
use clap::Parser;
use rcomm_recorder::publish::Dump;
use rcomm_tests::hunt::{Case, Class, Grade};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Judges simulated jobs whose truth is known, and prints one line for each whose report is not right.
///
/// A report is wrong if it accuses a rank that did nothing wrong, or if its verdict is false: that all is well while
/// the job hangs or a rank has crashed, that something is wrong with a healthy job, or an end that the job did not
/// have. It is in doubt if it states nothing false and does not name the rank at fault. The exit code is 1 if any
/// report was wrong.
#[derive(Parser)]
#[command(name = "hunt")]
struct Options {
    /// The seeds, as FIRST..END.
    #[arg(long, value_parser = range, default_value = "0..2000", conflicts_with = "seed")]
    seeds: (u64, u64),

    /// The class of the jobs.
    #[arg(long, value_enum, default_value_t = Class::Any)]
    class: Class,

    /// Judges this seed only, and prints its report.
    #[arg(long)]
    seed: Option<u64>,

    /// Writes the records of the seed to this folder.
    #[arg(long, value_name = "FOLDER", requires = "seed")]
    out: Option<PathBuf>,

    /// Prints a line for each seed, also for those that were judged right.
    #[arg(long)]
    all: bool,

    /// Prints no line for seeds whose report is in doubt.
    #[arg(long, conflicts_with = "all")]
    wrong_only: bool,

    /// Number of threads.
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

fn range(text: &str) -> Result<(u64, u64), String> {
    let parse = |(first, end): (&str, &str)| Some((first.parse().ok()?, end.parse().ok()?));
    let range = text.split_once("..").and_then(parse);
    range
        .filter(|(first, end)| first < end)
        .ok_or_else(|| format!("{text:?} is not FIRST..END, like 0..1000"))
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    if let Some(seed) = options.seed {
        return one(options.class, seed, options.out.as_deref());
    }
    let (first, end) = options.seeds;
    let next = AtomicU64::new(first);
    let totals: Mutex<BTreeMap<(String, Grade), u64>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..options.threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    let case = Case::of(options.class, seed);
                    let (report, grade, why) = case.judge();
                    let shown = match grade {
                        Grade::Right => options.all,
                        Grade::Doubt => !options.wrong_only,
                        Grade::Wrong => true,
                    };
                    if shown {
                        let verdict = report.verdict;
                        println!("{seed:>8} {grade} {verdict:?}: {case}: {why}");
                    }
                    let kind = case.faults.first();
                    let kind = kind.map_or("no fault".into(), |fault| format!("{:?}", fault.wrong));
                    let mut totals = totals.lock().unwrap_or_else(PoisonError::into_inner);
                    *totals.entry((kind, grade)).or_default() += 1;
                }
            });
        }
    });
    let totals = totals.into_inner().unwrap_or_else(PoisonError::into_inner);
    let kinds: std::collections::BTreeSet<&String> = totals.keys().map(|(kind, _)| kind).collect();
    let count = |kind: Option<&String>, grade| {
        let counts = totals.iter().filter(|((its_kind, its_grade), _)| {
            kind.is_none_or(|kind| its_kind == kind) && *its_grade == grade
        });
        counts.map(|(_, count)| count).sum::<u64>()
    };
    println!(
        "{:<16} {:>8} {:>8} {:>8}",
        "fault", "right", "doubt", "wrong"
    );
    for kind in kinds.into_iter().map(Some).chain([None]) {
        let [right, doubt, wrong] =
            [Grade::Right, Grade::Doubt, Grade::Wrong].map(|grade| count(kind, grade));
        let name = kind.map_or("all", String::as_str);
        println!("{name:<16} {right:>8} {doubt:>8} {wrong:>8}");
    }
    Ok(match count(None, Grade::Wrong) {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// The end of a record in one line: its reason, its last sign of life, and its newest operations, with times in seconds
/// since the minute began.
fn tail(dump: &Dump) -> String {
    let second = |ns: i64| match ns {
        0 => "-".to_owned(),
        ns => format!("{:.3}", (ns % 60_000_000_000) as f64 / 1e9),
    };
    let identity = &dump.identity;
    let rank = identity.rank.unwrap_or_default();
    let mut line = format!("rank {rank}");
    if let Some(status) = &dump.status {
        let beat = second(status.heartbeat_ns);
        line += &format!(
            " ({}, beat {beat}, phase {:?}, exit {:?})",
            identity.reason, status.phase, status.exit
        );
    }
    let newest = dump.entries.iter().rev().take(4).rev();
    for entry in newest {
        let group = &dump.groups[entry.group as usize].info;
        let number = match entry.is_p2p {
            true => entry.p2p_seq_id,
            false => entry.collective_seq_id,
        };
        line += &format!(
            ", {} #{number} on {}/{} {:?} {:?} {}..{}",
            entry.op.name(),
            group.desc,
            group.name,
            entry.peer,
            entry.state,
            second(entry.time_created_ns),
            second(entry.time_discovered_completed_ns)
        );
    }
    line
}

/// Judges one seed, and prints its report.
fn one(class: Class, seed: u64, out: Option<&std::path::Path>) -> Result<ExitCode> {
    let case = Case::of(class, seed);
    let (report, grade, why) = case.judge();
    println!("seed {seed}: {case}\n{grade} {why}\n{:?}", case.truth);
    println!("{:?}", report.verdict);
    if let Some(end) = &report.end {
        println!("  end: {}", end.sentence);
    }
    for finding in &report.findings {
        println!(
            "  {} {:?} {:.2} {}",
            finding.code, finding.culprit_ranks, finding.confidence, finding.sentence
        );
        for doubt in &finding.doubts {
            println!("      but {doubt}");
        }
    }
    for problem in &report.problems {
        println!("  {} {}", problem.code, problem.sentence);
    }
    for dump in &case.dumps {
        println!("  {}", tail(dump));
    }
    for (name, text) in &case.logs {
        println!("  {name}:\n{text}");
    }
    if let Some(folder) = out {
        case.write(folder).context("cannot write the records")?;
        println!("the records are in {}", folder.display());
    }
    Ok(match grade {
        Grade::Wrong => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    })
}

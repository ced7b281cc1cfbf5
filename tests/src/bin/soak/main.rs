//! A soak: rounds of jobs of real processes, each with random operations on random groups, and in some of them a fault.
//!
//! ```sh
//! cargo run --release -p rcomm-tests --bin soak -- --seed 7 --minutes 60
//! ```
//!
//! Every result is checked against what the ranks' inputs must give. In a round with a fault, every rank but the faulty
//! one must get, in time, an error that names the faulty one. In a round without a fault, no rank may get an error,
//! even if a rank is started late. In a round whose launcher is ended, no rank may be left. After its world has ended,
//! no rank may hold more descriptors or threads than before. The seed and the number of the round decide all random
//! choices, and a round that was wrong is printed as the command that repeats it.
//!
//! If ranks time out without a fault because other programs kept the processor, which the system's counts of their
//! threads' turns must show, the round says nothing about rcomm. It is printed, counted, and made again with ten times
//! the time-out, and must be right then. If more than a tenth of the rounds, and more than ten, would be made again,
//! the further ones are wrong.
//!
//! With `--long`, one job lives through all rounds and makes and destroys their groups. Memory, threads and descriptors
//! of each rank must not grow between the second and the last quarter of its samples, except for noise.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program whose result is what it prints"
)]

mod draw;
mod launched;
mod long;
mod processor;
mod rank;

use crate::draw::Plan;
use crate::processor::{Turns, were_starved};
use anyhow::{Context, anyhow, bail, ensure};
use clap::{Args, Parser, Subcommand};
use rcomm_tests::process::free_port;
use rcomm_tests::usage::Held;
use serde::{Deserialize, Serialize};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
#[command(about = "Repeats random jobs, with and without faults, and checks every result")]
struct Cli {
    #[command(subcommand)]
    role: Option<Role>,
    #[command(flatten)]
    soak: Soak,
}

#[derive(Debug, Args)]
struct Soak {
    /// The number from which all random choices follow.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many minutes to make rounds for.
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
    /// The number of the first round.
    #[arg(long, default_value_t = 0)]
    round: u64,
    /// How many rounds to make at most (not with --long).
    #[arg(long)]
    rounds: Option<u64>,
    /// Let one job live through all rounds, without faults, and judge what each rank uses.
    #[arg(long)]
    long: bool,
    /// How much later than its time-out an error may come, in seconds; set it higher on a busy machine.
    #[arg(long, default_value_t = 10)]
    slack: u64,
    /// The time-out of operations, in seconds; set it higher where ranks may get no processor for so long.
    #[arg(long, default_value_t = 3)]
    timeout: u64,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Work as one rank of a round.
    #[command(hide = true)]
    Rank { seed: u64, round: u64 },
    /// Work as one rank of a job that lives through all rounds.
    #[command(hide = true)]
    LongRank { seed: u64, round: u64, seconds: f64 },
}

/// What a rank reports at its end.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RankReport {
    /// The number of operations whose results were checked.
    pub(crate) checked: u64,
    /// Wrong results.
    pub(crate) wrong: Vec<String>,
    /// The error that ended the rank's work, with the ranks that the error names; `None` if the rank completed its
    /// work.
    pub(crate) error: Option<(String, Vec<u32>)>,
    /// Whether that error is the rank's own time-out, and not a consequence of another rank's failure.
    pub(crate) timed_out: bool,
    /// Time from the start of the failed operation to its error, in ms.
    pub(crate) waited_ms: u64,
    /// The turns in that time of the rank's thread that waited longest for the processor.
    pub(crate) turns: Turns,
    /// How many more descriptors and threads the rank had after its world than before.
    pub(crate) left: (i64, i64),
    /// The most memory that the rank used, in KiB.
    pub(crate) memory_kib: u64,
    /// The number of rounds that the rank has completed, in a job that lives through many.
    pub(crate) rounds: u64,
    /// What the rank used between rounds, in a job that lives through many.
    pub(crate) samples: Vec<Sample>,
}

/// What a rank uses between two rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) round: u64,
    pub(crate) memory_kib: u64,
    pub(crate) held: Held,
}

/// How long the ranks of a round may take beyond the time-out of operations, and how long a launcher may take.
const ENDING: Duration = Duration::from_secs(180);

/// The most rounds that are made again because their ranks did not get the processor, or a tenth of all if that is
/// more: with more, the machine is no place for a soak, or the counts of turns hide a fault.
const MOST_STARVED: u64 = 10;

/// The factor by which the time-out grows when a round is made again whose ranks did not get the processor.
const MORE_TIME: u32 = 10;

/// How long operations may take, and how much later an error may come.
#[derive(Clone, Copy)]
struct Limits {
    timeout: Duration,
    slack: Duration,
}

/// The totals of all rounds, with the slowest error and the largest memory of a rank.
#[derive(Debug, Default)]
struct Totals {
    rounds: u64,
    faults: u64,
    launchers: u64,
    late: u64,
    starved: u64,
    ranks: u64,
    checked: u64,
    slowest_error_ms: u64,
    memory_kib: u64,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.role {
        Some(Role::Rank { seed, round }) => rank::run(&Plan::of(seed, round)).map(|()| true),
        Some(Role::LongRank {
            seed,
            round,
            seconds,
        }) => long::rank(seed, round, seconds).map(|()| true),
        None if cli.soak.long => long::soak(&cli.soak),
        None => soak(&cli.soak),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Makes rounds until the time is over or `--rounds` are made. Returns whether all were right.
fn soak(args: &Soak) -> anyhow::Result<bool> {
    let began = Instant::now();
    let limit = Duration::try_from_secs_f64(args.minutes * 60.0);
    let limit = limit.context("--minutes is not a valid number of minutes")?;
    let limits = Limits {
        timeout: Duration::from_secs(args.timeout),
        slack: Duration::from_secs(args.slack),
    };
    let (mut totals, mut bad) = (Totals::default(), 0);
    for round in args.round.. {
        let over =
            began.elapsed() >= limit || args.rounds.is_some_and(|most| totals.rounds >= most);
        if over {
            break;
        }
        let plan = Plan::of(args.seed, round);
        totals.rounds += 1;
        if plan.launcher.is_some() && launched::launcher().is_none() {
            println!(
                "round {round} is skipped: rcomm-run is not built (`cargo build -p rcomm-tools`)"
            );
            continue;
        }
        totals.faults += u64::from(plan.fault.is_some());
        totals.launchers += u64::from(plan.launcher.is_some());
        totals.late += u64::from(plan.late.is_some());
        let done = match try_round(&plan, &limits, &mut totals) {
            Ok(Round::Starved(errors))
                if totals.starved >= MOST_STARVED.max(totals.rounds / 10) =>
            {
                Err(anyhow!(
                    "its ranks did not get the processor, as those of {} rounds before it, which are too many to learn \
                     anything from this soak; {errors}",
                    totals.starved
                ))
            }
            Ok(Round::Starved(errors)) => {
                totals.starved += 1;
                println!(
                    "round {round}, {plan}: made again, its ranks did not get the processor: {errors}"
                );
                let timeout = limits.timeout * MORE_TIME;
                let more = Limits { timeout, ..limits };
                try_round(&plan, &more, &mut totals).and_then(|round| match round {
                    Round::Right => Ok(()),
                    Round::Starved(errors) => bail!(
                        "its ranks did not get the processor again, with a time-out of {timeout:?}; {errors}"
                    ),
                })
            }
            done => done.map(|_| ()),
        };
        if let Err(error) = done {
            bad += 1;
            println!("round {round}, {plan}: {error:#}");
            println!(
                "again: soak --seed {} --round {round} --rounds 1 --timeout {} --slack {}",
                args.seed, args.timeout, args.slack
            );
        }
    }
    println!(
        "seed {}: {} rounds in {:.0} s, {} with a fault, {} with a fault of the launcher, {} with a late rank, \
         {} made again for want of the processor; {} ranks, {} operations checked; slowest error {} ms after \
         the start of its operation; at most {} MiB per rank; rounds that were wrong: {bad}",
        args.seed,
        totals.rounds,
        began.elapsed().as_secs_f64(),
        totals.faults,
        totals.launchers,
        totals.late,
        totals.starved,
        totals.ranks,
        totals.checked,
        totals.slowest_error_ms,
        totals.memory_kib >> 10,
    );
    Ok(bad == 0)
}

/// The result of a round that was not wrong.
enum Round {
    Right,
    /// The ranks timed out because they did not get the processor; with their errors.
    Starved(String),
}

fn try_round(plan: &Plan, limits: &Limits, totals: &mut Totals) -> anyhow::Result<Round> {
    if plan.launcher.is_some() {
        return launched::try_round(plan, limits).map(|()| Round::Right);
    }
    let mut ranks = Ranks::start(plan, limits, "rank", &[])?;
    let reports = ranks.wait(plan, ENDING + limits.timeout)?;
    // The error of one rank may follow from that of another: all errors are needed to see the cause.
    let errors: Vec<String> = reports
        .iter()
        .filter_map(|(rank, report)| {
            let (text, _) = report.error.as_ref()?;
            let Turns { ran, waited, count } = report.turns;
            Some(format!(
                "rank {rank}, after {} ms, with {count} turns of {ran:?} on the processor and {waited:?} of wait for \
                 it: {text}",
                report.waited_ms
            ))
        })
        .collect();
    let is_starved = plan.fault.is_none() && did_not_get_the_processor(&reports);
    for (rank, report) in reports {
        totals.ranks += 1;
        totals.checked += report.checked;
        totals.slowest_error_ms = totals.slowest_error_ms.max(report.waited_ms);
        totals.memory_kib = totals.memory_kib.max(report.memory_kib);
        ensure!(
            report.wrong.is_empty(),
            "rank {rank} got wrong results: {}",
            report.wrong.join("; ")
        );
        let (fds, threads) = report.left;
        ensure!(
            fds <= 0 && threads <= 0,
            "rank {rank} is left with {fds} more descriptors and {threads} more threads"
        );
        match (&report.error, &plan.fault) {
            (None, None) => {}
            (Some(_), None) if is_starved => {}
            (Some(_), None) => bail!("no fault was planned; {}", errors.join("; ")),
            (None, Some(_)) => bail!("rank {rank} got no error"),
            (Some((text, named)), Some(fault)) => {
                ensure!(
                    named == &[fault.rank],
                    "rank {rank} names {named:?}: {text}"
                );
                let limit = limits.timeout + limits.slack;
                let waited = Duration::from_millis(report.waited_ms);
                ensure!(
                    waited <= limit,
                    "rank {rank} got its error after {waited:?}, later than {limit:?}: {text}"
                );
            }
        }
    }
    Ok(match is_starved {
        true => Round::Starved(errors.join("; ")),
        false => Round::Right,
    })
}

/// Whether ranks timed out, and the system's counts say that it was for want of the processor.
fn did_not_get_the_processor(reports: &[(u32, RankReport)]) -> bool {
    let failed = || {
        let reports = reports.iter().map(|(_, report)| report);
        reports.filter(|report| report.error.is_some())
    };
    let waits = failed().map(|report| (report.turns, Duration::from_millis(report.waited_ms)));
    let waits: Vec<(Turns, Duration)> = waits.collect();
    let longest = waits.iter().map(|(_, time)| *time).max();
    failed().any(|report| report.timed_out) && were_starved(&waits, longest.unwrap_or_default())
}

/// The processes of a job. They are killed when the value is dropped.
struct Ranks {
    processes: Vec<Child>,
    /// Where the job leaves its files.
    folder: tempfile::TempDir,
}

impl Ranks {
    /// Starts the ranks of a plan, each as `role`, with the seed, the number of the round, and `more` arguments.
    fn start(plan: &Plan, limits: &Limits, role: &str, more: &[String]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let port = free_port().to_string();
        let mut ranks = Self {
            processes: Vec::new(),
            folder,
        };
        let late = plan.late.as_ref();
        let in_time = (0..plan.ranks).filter(|rank| late.is_none_or(|late| late.rank != *rank));
        for rank in in_time.chain(late.map(|late| late.rank)) {
            if let Some(late) = late.filter(|late| late.rank == rank) {
                std::thread::sleep(Duration::from_millis(late.ms));
            }
            let mut command = Command::new(std::env::current_exe()?);
            command
                .args([role, &plan.seed.to_string(), &plan.round.to_string()])
                .args(more)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", plan.ranks.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("LOCAL_WORLD_SIZE", plan.ranks.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", &port)
                .env("TORCHELASTIC_RUN_ID", format!("soak-{port}"))
                .env("RCOMM_TRANSPORT", plan.transport)
                .env("RCOMM_TIMEOUT_MS", limits.timeout.as_millis().to_string())
                .env("RCOMM_INIT_TIMEOUT_MS", "60000")
                .env("RCOMM_SIGNAL_INTERVAL_MS", "100")
                .env("RCOMM_RING_DIR", ranks.folder.path().join("rings"))
                .env("RCOMM_DUMP_DIR", ranks.folder.path().join("dumps"))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::null());
            // A late rank is started last; it is inserted so that `processes` stays in the order of ranks.
            let index = ranks.processes.len().min(rank as usize);
            ranks.processes.insert(index, command.spawn()?);
        }
        Ok(ranks)
    }

    /// Waits until all ranks but the faulty one have ended, and returns their reports.
    fn wait(&mut self, plan: &Plan, limit: Duration) -> anyhow::Result<Vec<(u32, RankReport)>> {
        let culprit = plan.fault.as_ref().map(|fault| fault.rank);
        let until = Instant::now() + limit;
        let mut all = Vec::new();
        for (rank, child) in (0..).zip(&mut self.processes) {
            if Some(rank) == culprit {
                continue;
            }
            while child.try_wait()?.is_none() {
                ensure!(Instant::now() < until, "rank {rank} does not end");
                std::thread::sleep(Duration::from_millis(5));
            }
            let mut text = String::new();
            if let Some(mut pipe) = child.stdout.take() {
                std::io::Read::read_to_string(&mut pipe, &mut text)?;
            }
            let report = serde_json::from_str(&text);
            all.push((
                rank,
                report.with_context(|| format!("rank {rank} reported {text:?}"))?,
            ));
        }
        Ok(all)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.processes {
            // The process may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

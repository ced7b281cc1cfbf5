//! The fault suite: injects faults into jobs of real processes, and prints a table of the results.
//!
//! ```sh
//! cargo build -p rcomm-tools && cargo run -p rcomm-tests --bin faults -- list
//! cargo run -p rcomm-tests --bin faults -- one store-host-freeze
//! cargo run -p rcomm-tests --bin faults -- all
//! ```
//!
//! A row in which a rank is lost is right if every surviving rank got an error in time (the time-out and two seconds,
//! or `--slack`) that names the right ranks and no other, the analysis of the records names them too, and every rank
//! left a record. Other rows expect an error at the start or of the store, the end of all processes, or a job that runs
//! to its end (`scenario::Expect`). In every row no descriptor, thread, process, socket or temporary file may be left,
//! and the same job must be able to start again in the same way at the same port.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program whose result is what it prints"
)]

mod apply;
mod around;
#[path = "../../../../recorder/tests/certificates/mod.rs"]
mod certificates;
mod extra;
mod job;
mod judge;
mod leaks;
mod network;
mod processes;
mod rank;
mod relay;
mod rows;
mod scenario;
mod stranger;

use crate::job::Job;
use crate::judge::Row;
use crate::rank::{EventKind, RankArgs};
use crate::rows::SCENARIOS;
use crate::scenario::{At, Cut, Expect, Fault, Scenario, Start};
use crate::stranger::StrangerArgs;
use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use rcomm_tests::process::free_port;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
#[command(about = "Injects faults into jobs of real processes, and prints the results")]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print the names of all rows.
    List,
    /// Try some rows.
    One {
        /// Names of rows, or, if no row has one of these names, beginnings of names.
        #[arg(required = true)]
        names: Vec<String>,
        /// Print the ranks' errors too.
        #[arg(long)]
        verbose: bool,
    },
    /// Try all rows.
    All,
    /// Try the rows of the short list, which take about a minute.
    Short {
        /// How much later than its time-out an error may come, in seconds: more on a busy machine.
        #[arg(long, default_value_t = 2)]
        slack: u64,
    },
    /// Work as a rank of a job under test.
    #[command(hide = true)]
    Rank(RankArgs),
    /// Read the rings and ask the endpoints of a job under test.
    #[command(hide = true)]
    Observe { rings: PathBuf },
    /// Try on a job under test what a user can who does not own it, and print what worked as JSON.
    #[command(hide = true)]
    Stranger(StrangerArgs),
    /// Try one row in this mount namespace, and print it as JSON.
    #[command(hide = true)]
    Inside {
        name: String,
        /// How much later than its time-out an error may come, in milliseconds.
        slack_ms: u64,
    },
}

fn main() -> ExitCode {
    let all_right = match Cli::parse().command {
        Action::List => {
            for row in SCENARIOS {
                println!(
                    "{:28} {:?}, {:?}, ranks {:?}",
                    row.name, row.start, row.fault, row.culprits
                );
            }
            Ok(true)
        }
        Action::One { names, verbose } => {
            let is_named = |row: &&Scenario| names.iter().any(|name| row.name == name);
            let begins_so = |row: &&Scenario| names.iter().any(|name| row.name.starts_with(name));
            let exact: Vec<_> = SCENARIOS.iter().filter(is_named).collect();
            match exact.is_empty() {
                true => table(SCENARIOS.iter().filter(begins_so), verbose, job::SLACK),
                false => table(exact.into_iter(), verbose, job::SLACK),
            }
        }
        Action::All => table(SCENARIOS.iter(), false, job::SLACK),
        Action::Short { slack } => {
            let slack = Duration::from_secs(slack);
            table(SCENARIOS.iter().filter(|row| row.short), true, slack)
        }
        Action::Rank(args) => rank::run(&args).map(|()| true),
        Action::Observe { rings } => around::observe(&rings),
        Action::Stranger(args) => stranger::run(&args).map(|()| true),
        Action::Inside { name, slack_ms } => {
            inside(&name, Duration::from_millis(slack_ms)).map(|()| true)
        }
    };
    match all_right {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Tries rows and prints them; returns whether all those are right that can be tried on this system.
fn table<'a>(
    rows: impl Iterator<Item = &'a Scenario>,
    verbose: bool,
    slack: Duration,
) -> anyhow::Result<bool> {
    println!(
        "| {:28} | {:14} | {:5} | {:46} | {:7} | {:5} | {:7} | took (s) | result |",
        "fault", "error (s)", "named", "verdict", "records", "leaks", "restart"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let (mut tried, mut right, mut skipped) = (0, 0, 0);
    for scenario in rows {
        let began = Instant::now();
        let row = try_row(scenario, slack);
        if let Some(reason) = &row.skipped {
            skipped += 1;
            println!("| {:28} | skipped: {reason} |", row.name);
            continue;
        }
        tried += 1;
        right += usize::from(row.is_right());
        print_row(&row, began.elapsed());
        for detail in row.wrong.iter().chain(&row.leaks) {
            println!("    {detail}");
        }
        if verbose {
            for error in &row.errors {
                println!("    {error}");
            }
        }
    }
    println!("{right} of {tried} rows right, {skipped} skipped");
    if tried + skipped == 0 {
        bail!("no row has such a name");
    }
    Ok(right == tried)
}

fn print_row(row: &Row, took: Duration) {
    let fraction = |counts: &Option<(usize, usize)>| {
        counts.map_or("-".to_owned(), |(right, all)| format!("{right}/{all}"))
    };
    let errors = row.got_error.map_or("-".to_owned(), |(last, got, all)| {
        let late = if row.in_time == Some(false) {
            " LATE"
        } else {
            ""
        };
        format!("{last:.2} {got}/{all}{late}")
    });
    let verdict = row
        .verdict
        .as_ref()
        .map_or("-".to_owned(), |(text, right)| {
            format!("{}{text}", if *right { "" } else { "NO: " })
        });
    let restart = match row.restart {
        None => "-",
        Some(true) => "yes",
        Some(false) => "NO",
    };
    println!(
        "| {:28} | {errors:14} | {:5} | {verdict:46} | {:7} | {:5} | {restart:7} | {:8.1} | {} |",
        row.name,
        fraction(&row.named),
        fraction(&row.records),
        row.leaks.len(),
        took.as_secs_f64(),
        if row.is_right() { "right" } else { "WRONG" }
    );
}

/// Tries one row, in a separate mount namespace if it changes mounts.
fn try_row(scenario: &Scenario, slack: Duration) -> Row {
    let tried = match scenario.fault {
        Fault::Memory(_) | Fault::DumpFolder | Fault::DiskStalls | Fault::ReadOnlyRings => {
            run_in_mount_namespace(scenario, slack)
        }
        _ => run(scenario, slack),
    };
    tried.unwrap_or_else(|error| Row {
        name: scenario.name.to_owned(),
        wrong: vec![format!("{error:#}")],
        ..Row::default()
    })
}

/// A row that cannot be tried on this system.
fn skip(scenario: &Scenario, reason: impl std::fmt::Display) -> Row {
    Row {
        name: scenario.name.to_owned(),
        skipped: Some(reason.to_string()),
        ..Row::default()
    }
}

/// Runs the scenario in a mount namespace of its own. Returns a skipped row if this host allows none.
fn run_in_mount_namespace(scenario: &Scenario, slack: Duration) -> anyhow::Result<Row> {
    let probe = Command::new("unshare").args(["-m", "true"]).output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        let reason =
            "`unshare -m` fails: it is not installed, or this user may not make a mount namespace";
        return Ok(skip(scenario, reason));
    }
    let mut command = Command::new("unshare");
    command
        .args(["-m", "--propagation", "private"])
        .arg(std::env::current_exe()?);
    let slack_ms = slack.as_millis().to_string();
    let done = command
        .args(["inside", scenario.name, &slack_ms])
        .output()?;
    let error = String::from_utf8_lossy(&done.stderr);
    serde_json::from_slice(&done.stdout).with_context(|| format!("the row ended early: {error}"))
}

/// Runs the scenario of this name, and prints its row as JSON for [`run_in_mount_namespace`].
fn inside(name: &str, slack: Duration) -> anyhow::Result<()> {
    let scenario = SCENARIOS
        .iter()
        .find(|row| row.name == name)
        .context("no row has this name")?;
    println!("{}", serde_json::to_string(&run(scenario, slack)?)?);
    Ok(())
}

/// Starts the job, applies its fault, and checks the results.
fn run(scenario: &Scenario, slack: Duration) -> anyhow::Result<Row> {
    if scenario.start == Start::Launcher && !processes::launcher()?.exists() {
        return Ok(skip(
            scenario,
            "rcomm-run is not built: `cargo build -p rcomm-tools`",
        ));
    }
    let folder = tempfile::tempdir()?;
    let port = free_port();
    let mut job = match Job::new(scenario, folder.path(), port) {
        Ok(job) => job,
        Err(error) if scenario.start == Start::Hosts => return Ok(skip(scenario, error)),
        Err(error) => return Err(error),
    };
    let mut row = Row {
        name: scenario.name.to_owned(),
        ..Row::default()
    };
    if scenario.fault == Fault::OtherUser
        && let Err(error) = stranger::probe()
    {
        return Ok(skip(scenario, error));
    }
    let began = rank::now_ms();
    match job.start() {
        Err(error) if scenario.fault == Fault::DiskStalls => return Ok(skip(scenario, error)),
        started => started?,
    }
    let starts = !matches!(scenario.expect, Expect::Refused(_) | Expect::OnlyCulprit(_));
    let happens_early = matches!(
        scenario.fault,
        Fault::Itself(..) | Fault::InInit(_) | Fault::InShutdown(_)
    );
    if starts && !happens_early && !job.wait_until_ready() {
        row.wrong.push(format!(
            "not every rank completed its first steps: {}",
            job.output().trim()
        ));
    }
    let mut fault_ms = match job.apply_fault() {
        Err(error)
            if matches!(
                scenario.fault,
                Fault::Network(Cut::Delay | Cut::Connections)
            ) =>
        {
            return Ok(skip(scenario, error));
        }
        applied => applied?,
    };
    let gone = match scenario.expect {
        Expect::Named | Expect::Refused(_) => scenario.culprits,
        _ => &[],
    };
    match scenario.expect {
        Expect::Healthy | Expect::OnlyCulprit(_) => {
            std::thread::sleep(job::TIMEOUT / 2);
            if scenario.expect == Expect::Healthy {
                row.judge_records(scenario, &job);
            }
            job.ask_to_stop()?;
            job.wait_for_end(job::TIME_LIMIT);
            judge_health(&mut row, scenario, &job);
        }
        Expect::Ended => {
            job.wait_for_end(job::SLACK);
        }
        Expect::Named | Expect::CutOff | Expect::Apart | Expect::Refused(_) | Expect::StoreLost => {
            if !job.wait_for_survivors(gone) && scenario.start != Start::Launcher {
                row.wrong
                    .push("a rank has not dropped its world".to_owned());
            }
        }
    }
    let events = job.events();
    if matches!(scenario.expect, Expect::Refused(_)) && !matches!(scenario.fault, Fault::InInit(_))
    {
        fault_ms = began;
    } else if let Some(fault) = events.iter().rfind(|event| event.kind == EventKind::Fault) {
        fault_ms = fault.at_ms;
    } else if matches!(
        scenario.fault,
        Fault::Itself(_, At::Between | At::Call | At::End)
    ) {
        row.wrong
            .push(format!("the fault did not happen: {}", job.output().trim()));
    }
    row.judge_errors(scenario, &events, fault_ms, slack);
    if scenario.expect != Expect::Healthy {
        row.judge_records(scenario, &job);
    }
    row.judge_leaks_and_results(&events);
    row.keep_errors(&events);
    job.launcher_slowdown = None;
    judge_launcher(&mut row, scenario, &mut job);
    row.leaks.extend(job.processes_left());
    row.restart = Some(job.restart()?);
    if row.restart == Some(false) {
        row.wrong
            .push(format!("the restart failed: {}", job.output().trim()));
    }
    row.leaks.extend(job.rest());
    Ok(row)
}

/// Checks that a launcher whose job has failed ends by itself, unless the fault was applied to the launcher.
fn judge_launcher(row: &mut Row, scenario: &Scenario, job: &mut Job<'_>) {
    let is_culprit = matches!(scenario.fault, Fault::Launcher(..) | Fault::Store);
    if scenario.start == Start::Launcher
        && !is_culprit
        && !job.wait_for_end(job::LAUNCHER_END_LIMIT)
    {
        row.wrong.push("the launcher has not ended".to_owned());
    }
}

/// Checks that every rank has shut down cleanly. If only the culprit may fail ([`Expect::OnlyCulprit`]), another end is
/// right too if the output contains the expected words and no error, besides an intruder's own, blames another rank.
fn judge_health(row: &mut Row, scenario: &Scenario, job: &Job<'_>) {
    let events = job.events();
    let (ended, all) = (job.ended(), scenario.ranks as usize);
    let mut blames = Vec::new();
    for event in &events {
        if let EventKind::Failed { ranks, text, .. } = &event.kind {
            let is_intruders_own = matches!(scenario.fault, Fault::Duplicate | Fault::Foreign)
                && scenario.culprits.contains(&event.rank);
            if !is_intruders_own {
                blames.push((event.rank, ranks.clone(), text.clone()));
            }
        }
    }
    if ended >= all && blames.is_empty() {
        return;
    }
    let Expect::OnlyCulprit(words) = scenario.expect else {
        row.wrong.push(format!(
            "{ended} of {all} ranks shut down cleanly: {}",
            job.output().trim()
        ));
        return;
    };
    if !job.output().contains(words) {
        row.wrong.push(format!("no error says {words:?}"));
    }
    for (rank, ranks, text) in blames {
        if ranks.iter().any(|rank| !scenario.culprits.contains(rank)) {
            row.wrong
                .push(format!("rank {rank} blames {ranks:?}: {text}"));
        }
    }
}

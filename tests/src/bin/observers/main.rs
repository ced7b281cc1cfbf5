//! Measures what observers cost a job: its collectives and steps of the example `ddp` are timed while nothing,
//! `rcomm-top`, `rcomm-web` or a client of an endpoint observes it.
//!
//! ```sh
//! cargo build --release -p rcomm-tests -p rcomm-top -p rcomm-web --bins
//! target/release/observers --rounds 20
//! ```
//!
//! The ranks are the same processes all the time. A round measures every row under every observer, in an order that
//! changes from round to round. It measures twice without an observer: these two differ by the noise of the machine,
//! and an effect that is not larger than their difference proves nothing. The tables have, for each observer, the
//! median over the rounds of the increase over the mean of these two.
//!
//! The last table compares the costs with what an observer may cost: a hundredth of the time of a large message or of a
//! step, 100 ns of that of a small one. Where the times of the rounds differ too much to decide, the processor time of
//! the ranks does. The second measurement without an observer is judged like an observer: a bar that it does not pass
//! says nothing about the others either.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program whose result is what it prints"
)]

mod bar;
#[path = "../../../../examples/ddp/model.rs"]
mod model;
mod rank;
#[path = "../../../../examples/ddp/train.rs"]
mod train;
mod watch;

use crate::bar::{Bar, Side, side};
use crate::rank::{Measured, Row};
use crate::watch::{Kind, Watching};
use anyhow::{Context, ensure};
use clap::{Parser, Subcommand};
use rcomm_tests::process::free_port;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};

#[derive(Debug, Parser)]
#[command(about = "Measures collectives with and without observers")]
struct Cli {
    #[command(subcommand)]
    role: Option<Role>,
    /// How many rounds to make.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// The number of ranks.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Leave out messages of more bytes than this.
    #[arg(long, default_value_t = usize::MAX)]
    largest: usize,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Work as one rank.
    #[command(hide = true)]
    Rank { largest: usize },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.role {
        Some(Role::Rank { largest }) => rank::run(largest),
        None => observe(&cli),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The measurements of one observer: per row, those of all rounds.
type Rounds = Vec<Vec<Measured>>;

fn observe(cli: &Cli) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut kinds = vec![Kind::Nothing, Kind::Again];
    for kind in [Kind::Top, Kind::Web, Kind::Endpoint] {
        match kind.missing_program()? {
            Some(program) => println!("skipped: {} is not built", program.display()),
            None => kinds.push(kind),
        }
    }
    let rows: Vec<&Row> = rank::rows(cli.largest).collect();
    println!("load before: {}", load());
    let mut job = Job::start(cli, folder.path())?;
    // The first measurements meet cold caches.
    job.measure(rows.len())?;
    let mut all: Vec<Rounds> = vec![vec![Vec::new(); rows.len()]; kinds.len()];
    for round in 0..cli.rounds {
        for turn in 0..kinds.len() {
            let at = (round + turn) % kinds.len();
            let watching = Watching::begin(kinds[at], folder.path())?;
            let measured = job.measure(rows.len())?;
            watching.end()?;
            for (row, measured) in measured.into_iter().enumerate() {
                all[at][row].push(measured);
            }
        }
    }
    job.end()?;
    println!("load after: {}", load());
    print("time", &rows, &kinds, &all, |measured| measured.ns);
    print(
        "processor time of all ranks",
        &rows,
        &kinds,
        &all,
        |measured| measured.processor_ns,
    );
    print_sides(cli.ranks, &rows, &kinds, &all);
    Ok(())
}

/// Prints on which side of its bar each observer's cost is, and what decides that.
fn print_sides(ranks: u32, rows: &[&Row], kinds: &[Kind], all: &[Rounds]) {
    println!(
        "\nallowed: 1 % for messages of 1 MiB or more and for a step, 100 ns for smaller messages"
    );
    let names: Vec<String> = kinds[1..]
        .iter()
        .map(|kind| format!("{:>24}", kind.name()))
        .collect();
    println!("{:>10} {}", "work", names.join(" "));
    let (mut within, mut above, mut unknown) = (0, 0, 0);
    for (at, row) in rows.iter().enumerate() {
        let cells: Vec<String> = (1..kinds.len())
            .map(|kind| {
                let values = |kind: usize, number: fn(&Measured) -> f64| -> Vec<f64> {
                    all[kind][at].iter().map(number).collect()
                };
                let judge = |number: fn(&Measured) -> f64, ranks| {
                    let bar = match row.is_large() {
                        true => Bar::Share,
                        false => Bar::Nanoseconds(ranks),
                    };
                    side(bar, &values(kind, number), &values(0, number))
                };
                let time_side = judge(|measured| measured.ns, 1);
                let (side, measure) = match time_side {
                    Side::Unknown => (
                        judge(|measured| measured.processor_ns, ranks),
                        "processor time",
                    ),
                    decided => (decided, "time"),
                };
                let shown = match side {
                    Side::Within => format!("within, {measure}"),
                    Side::Above => format!("ABOVE, {measure}"),
                    Side::Unknown => "cannot tell".to_owned(),
                };
                if kind > 1 {
                    match side {
                        Side::Within => within += 1,
                        Side::Above => above += 1,
                        Side::Unknown => unknown += 1,
                    }
                }
                format!("{shown:>24}")
            })
            .collect();
        println!("{:>10} {}", row.name, cells.join(" "));
    }
    println!("{within} within, {above} above, {unknown} not decided");
}

fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.trim().to_owned()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[half],
        _ => f64::midpoint(values[half - 1], values[half]),
    }
}

/// The ninth decile: nine tenths of the values are not larger.
fn ninth_decile(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len() * 9).div_ceil(10);
    values
        .get(at.saturating_sub(1))
        .copied()
        .unwrap_or(f64::NAN)
}

fn print(
    title: &str,
    rows: &[&Row],
    kinds: &[Kind],
    all: &[Rounds],
    number: impl Fn(&Measured) -> f64,
) {
    println!("\n{title}");
    let names: Vec<String> = kinds[2..]
        .iter()
        .map(|kind| format!("{:>24}", kind.name()))
        .collect();
    println!(
        "{:>10} {:>14} {:>24} {}",
        "work",
        "nothing",
        "nothing against itself",
        names.join(" ")
    );
    for (at, row) in rows.iter().enumerate() {
        let values = |kind: usize| all[kind][at].iter().map(&number);
        let base: Vec<f64> = values(0)
            .zip(values(1))
            .map(|(first, second)| f64::midpoint(first, second))
            .collect();
        let ratio = |kind: usize| -> Vec<f64> {
            values(kind)
                .zip(&base)
                .map(|(value, base)| value / base - 1.0)
                .collect()
        };
        // Both measurements without an observer are equally far from their mean.
        let difference: Vec<f64> = ratio(0).iter().map(|half| (2.0 * half).abs()).collect();
        let itself = format!(
            "{:.1} %, 9 of 10 < {:.1} %",
            100.0 * median(difference.clone()),
            100.0 * ninth_decile(difference)
        );
        let nothing = median(base.clone());
        let effects: Vec<String> = (2..kinds.len())
            .map(|kind| {
                let effect = median(ratio(kind));
                let shown = format!("{:+.1} % ({:+.0} ns)", 100.0 * effect, effect * nothing);
                format!("{shown:>24}")
            })
            .collect();
        println!(
            "{:>10} {:>11.2} µs {itself:>24} {}",
            row.name,
            nothing / 1_000.0,
            effects.join(" ")
        );
    }
}

/// The ranks, which measure on request.
struct Job {
    ranks: Vec<(Child, BufReader<ChildStdout>)>,
}

impl Job {
    fn start(cli: &Cli, folder: &Path) -> anyhow::Result<Self> {
        let port = free_port().to_string();
        let mut ranks = Vec::new();
        for rank in 0..cli.ranks {
            let mut child = Command::new(std::env::current_exe()?)
                .args(["rank", &cli.largest.to_string()])
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", cli.ranks.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("LOCAL_WORLD_SIZE", cli.ranks.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", &port)
                .env("TORCHELASTIC_RUN_ID", "observers")
                .env("RCOMM_RING_DIR", watch::rings(folder))
                .env("RCOMM_DUMP_DIR", folder.join("dumps"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let output = child.stdout.take();
            let output = output.context("the standard output of a rank is not piped")?;
            ranks.push((child, BufReader::new(output)));
        }
        Ok(Self { ranks })
    }

    /// Measures every row. The times are those of rank 0, the processor times the sums of all ranks.
    fn measure(&mut self, rows: usize) -> anyhow::Result<Vec<Measured>> {
        for (rank, _) in &mut self.ranks {
            let input = rank.stdin.as_mut();
            let input = input.context("the standard input of a rank is not piped")?;
            input.write_all(b"go\n")?;
        }
        let mut sum: Option<Vec<Measured>> = None;
        for (rank, (_, output)) in self.ranks.iter_mut().enumerate() {
            let mut line = String::new();
            output.read_line(&mut line)?;
            let measured: Vec<Measured> = serde_json::from_str(&line)
                .with_context(|| format!("rank {rank} reported {line:?}"))?;
            ensure!(measured.len() == rows, "rank {rank} reported {line:?}");
            match &mut sum {
                None => sum = Some(measured),
                Some(sum) => {
                    for (sum, its) in sum.iter_mut().zip(measured) {
                        sum.processor_ns += its.processor_ns;
                    }
                }
            }
        }
        sum.context("the job has no ranks")
    }

    fn end(mut self) -> anyhow::Result<()> {
        // Ranks end with the end of their input.
        for (rank, _) in &mut self.ranks {
            drop(rank.stdin.take());
        }
        for (number, (rank, _)) in self.ranks.iter_mut().enumerate() {
            let status = rank.wait()?;
            ensure!(status.success(), "rank {number} failed: {status}");
        }
        Ok(())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for (rank, _) in &mut self.ranks {
            // The process may have ended already.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

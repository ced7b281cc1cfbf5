//! The matrix of how jobs live and end: `lives` runs it, `lives --list` names its rows.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use anyhow::{Result, bail};
use clap::Parser;
use rcomm_tests::lives::{self, Cell, ROWS, Row, Source, TimedAnswer, Transport};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs jobs of real processes, does one thing to each, and judges it live and from what it leaves.
///
/// When a job has ended, prints the first and the last answer of each source, and the wrong ones between them; at the
/// end one line for each row, transport and source. The exit code is 1 if any answer was wrong: the last one, or one on
/// the way to it. "Not yet" is allowed on the way. The exit code is 2 if the matrix could not be run.
#[derive(Parser)]
#[command(name = "lives")]
struct Options {
    /// Names the rows and what happens in each, and runs nothing.
    #[arg(long)]
    list: bool,

    /// How often each row is run over each transport.
    #[arg(long, default_value_t = 1)]
    runs: u32,

    /// Number of jobs that run at the same time.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    at_once: u32,

    /// Copies the files of jobs with a wrong answer to this folder.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,

    /// Runs the rows over this transport only: shm or tcp.
    #[arg(long)]
    transport: Option<String>,

    /// The rows to run; all if none is named.
    rows: Vec<String>,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if let Some(code) = lives::part_of_a_job(&args) {
        return code;
    }
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(options: &Options) -> Result<bool> {
    if options.list {
        for row in ROWS {
            println!("{:<18} {}", row.name, row.about);
        }
        return Ok(true);
    }
    let is_named =
        |row: &&Row| options.rows.is_empty() || options.rows.iter().any(|name| name == row.name);
    if let Some(unknown) = options
        .rows
        .iter()
        .find(|name| !ROWS.iter().any(|row| row.name == *name))
    {
        bail!("no row is called {unknown:?}; `lives --list` names them");
    }
    let all = Transport::ALL.into_iter();
    let transports: Vec<Transport> = all
        .filter(|transport| {
            options
                .transport
                .as_ref()
                .is_none_or(|name| name == transport.name())
        })
        .collect();
    if transports.is_empty() {
        let given = options.transport.as_deref().unwrap_or_default();
        bail!("there is no transport {given:?}; --transport must be shm or tcp");
    }
    let program = std::env::current_exe()?;
    let mut jobs: Vec<(&'static Row, Transport)> = Vec::new();
    for row in ROWS.iter().filter(is_named) {
        match row.skip_reason() {
            Some(reason) => println!("{:<18} skipped: {reason}", row.name),
            None => jobs.extend(transports.iter().map(|&transport| (row, transport))),
        }
    }
    // The jobs are made run after run, so that a matrix that is interrupted has about the same number of runs of each
    // row.
    let runs = std::iter::repeat_n(jobs, options.runs as usize);
    let jobs: Vec<_> = runs.flatten().collect();
    let tally = Mutex::new(Tally::default());
    let next = AtomicUsize::new(0);
    let worker = || -> Result<()> {
        while let Some(&(row, transport)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let cells = lives::run(&program, row, transport, options.keep.as_deref())?;
            lock(&tally).add(row, transport, cells);
        }
        Ok(())
    };
    std::thread::scope(|scope| -> Result<()> {
        let workers: Vec<_> = (0..options.at_once).map(|_| scope.spawn(worker)).collect();
        for worker in workers {
            worker
                .join()
                .map_err(|_| anyhow::anyhow!("a row panicked"))??;
        }
        Ok(())
    })?;
    let tally = lock(&tally);
    tally.print();
    Ok(tally.is_right())
}

fn lock(tally: &Mutex<Tally>) -> std::sync::MutexGuard<'_, Tally> {
    // A worker that panicked did so before it counted its job.
    tally
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The answers of one source in all runs of one row over one transport.
#[derive(Default)]
struct Line {
    runs: usize,
    right: usize,
    /// The number of answers that were not true.
    wrong: usize,
    /// How often each answer came first.
    first: BTreeMap<String, usize>,
    /// The times at which the first answers came, in seconds.
    seconds: Vec<f64>,
    /// How often each answer came last.
    last: BTreeMap<String, usize>,
}

#[derive(Default)]
struct Tally {
    jobs: usize,
    /// By index of the row, transport, and index of the source.
    lines: BTreeMap<(usize, &'static str, usize), Line>,
}

impl Tally {
    /// Prints the answers of a job, and counts them.
    fn add(&mut self, row: &Row, transport: Transport, cells: Vec<Cell>) {
        self.jobs += 1;
        let index = ROWS.iter().position(|known| known.name == row.name);
        for cell in cells {
            print(row, transport, &cell);
            let key = (
                index.unwrap_or_default(),
                transport.name(),
                cell.source as usize,
            );
            let line = self.lines.entry(key).or_default();
            if cell.last.is_none() && cell.is_right {
                continue;
            }
            line.runs += 1;
            line.right += usize::from(cell.is_right);
            line.wrong += cell.wrong.len();
            let answer = |timed: &Option<TimedAnswer>| {
                let answer = timed.as_ref().map(|timed| timed.answer.to_string());
                answer.unwrap_or_else(|| "none".into())
            };
            *line.first.entry(answer(&cell.first)).or_default() += 1;
            *line.last.entry(answer(&cell.last)).or_default() += 1;
            line.seconds.extend(cell.first.map(|first| first.at));
        }
    }

    fn is_right(&self) -> bool {
        let mut lines = self.lines.values();
        lines.all(|line| line.right == line.runs && line.wrong == 0)
    }

    fn print(&self) {
        println!(
            "\n| row | over | source | runs | right | wrong on the way | first answer | after s | last answer |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for (&(row, transport, source), line) in &self.lines {
            let (row, source) = (ROWS[row].name, Source::ALL[source].name());
            if line.runs == 0 {
                println!("| {row} | {transport} | {source} | 0 | no answer | | | | |");
                continue;
            }
            let (runs, right, wrong) = (line.runs, line.right, line.wrong);
            let (first, last) = (answers(&line.first, runs), answers(&line.last, runs));
            let min = line.seconds.iter().copied().fold(f64::INFINITY, f64::min);
            let max = line
                .seconds
                .iter()
                .copied()
                .fold(f64::NEG_INFINITY, f64::max);
            let after = match source {
                "live" if !line.seconds.is_empty() => format!("{min:.1} to {max:.1}"),
                _ => String::new(),
            };
            println!(
                "| {row} | {transport} | {source} | {runs} | {right} | {wrong} | {first} | {after} | {last} |"
            );
        }
        let sum = |number: fn(&Line) -> usize| self.lines.values().map(number).sum::<usize>();
        println!(
            "\n{} jobs, {} judgments; wrong: {} last answers, {} on the way",
            self.jobs,
            sum(|line| line.runs),
            sum(|line| line.runs - line.right),
            sum(|line| line.wrong)
        );
    }
}

/// Lists the answers, such as `STUCK E101 [2]`, each with its number of runs if not all runs gave it.
fn answers(counts: &BTreeMap<String, usize>, runs: usize) -> String {
    let each = counts.iter().map(|(answer, times)| match *times == runs {
        true => answer.clone(),
        false => format!("{answer} ({times})"),
    });
    each.collect::<Vec<_>>().join(", ")
}

fn print(row: &Row, transport: Transport, cell: &Cell) {
    let Some(last) = &cell.last else {
        println!(
            "{:<18} {:<4} {:<12} no answer",
            row.name,
            transport.name(),
            cell.source.name()
        );
        return;
    };
    let (first, at) = cell.first.as_ref().map_or_else(Default::default, |first| {
        (first.answer.to_string(), format!("{:.1}", first.at))
    });
    println!(
        "{:<18} {:<4} {:<12} {first:<24} {at:>8}  {:<24} {}",
        row.name,
        transport.name(),
        cell.source.name(),
        last.answer.to_string(),
        cell.wrong.len(),
    );
    if !cell.is_right {
        println!("    wrong last: {}", last.answer.sentence);
    }
    for wrong in &cell.wrong {
        println!(
            "    wrong at {:.2} s: {}: {}",
            wrong.at, wrong.answer, wrong.answer.sentence
        );
    }
}

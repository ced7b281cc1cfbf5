//! The matrix of how jobs live and end: `lives` runs it, `lives --list` names its rows.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use anyhow::{Result, bail};
use clap::Parser;
use rcomm_tests::lives::{self, Cell, ROWS, Row, Transport};
use std::path::Path;
use std::process::ExitCode;

/// Runs jobs of real processes, does one thing to each, and judges it live and from what it leaves.
///
/// The exit code is 1 if any answer was wrong: the last one, or one on the way to it. "Not yet" is
/// allowed on the way.
#[derive(Parser)]
#[command(name = "lives")]
struct Options {
    /// Names the rows and what happens in each, and runs nothing.
    #[arg(long)]
    list: bool,

    /// How often each row is run over each transport.
    #[arg(long, default_value_t = 1)]
    runs: u32,

    /// Over this transport alone: shm or tcp.
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
            println!("{:<16} {}", row.name, row.about);
        }
        return Ok(true);
    }
    let named =
        |row: &&Row| options.rows.is_empty() || options.rows.iter().any(|it| it == row.name);
    if let Some(unknown) = options
        .rows
        .iter()
        .find(|it| !ROWS.iter().any(|row| row.name == *it))
    {
        bail!("no row is called {unknown:?}; `lives --list` names them");
    }
    let all = Transport::ALL.into_iter();
    let transports: Vec<Transport> = all
        .filter(|it| {
            options
                .transport
                .as_ref()
                .is_none_or(|name| name == it.name())
        })
        .collect();
    if transports.is_empty() {
        bail!("--transport is shm or tcp");
    }
    let program = std::env::current_exe()?;
    println!(
        "{:<16} {:<4} {:<12} {:<24} {:>8}  {:<24} wrong on the way",
        "row", "over", "source", "first answer", "after s", "last answer"
    );
    let mut tally = Tally::default();
    for row in ROWS.iter().filter(named) {
        if let Some(why) = row.skipped() {
            println!("{:<16} skipped: {why}", row.name);
            continue;
        }
        for &transport in &transports {
            for _ in 0..options.runs {
                tally.job(&program, row, transport)?;
            }
        }
    }
    println!(
        "{} jobs, {} judgements; wrong: {} last answers, {} on the way",
        tally.jobs, tally.cells, tally.wrong_last, tally.wrong_before
    );
    Ok(tally.wrong_last + tally.wrong_before == 0)
}

#[derive(Default)]
struct Tally {
    jobs: usize,
    cells: usize,
    wrong_last: usize,
    wrong_before: usize,
}

impl Tally {
    fn job(&mut self, program: &Path, row: &Row, transport: Transport) -> Result<()> {
        self.jobs += 1;
        for cell in lives::run(program, row, transport)? {
            self.cells += usize::from(cell.last.is_some());
            self.wrong_last += usize::from(!cell.is_right);
            self.wrong_before += cell.wrong.len();
            print(row, transport, &cell);
        }
        Ok(())
    }
}

fn print(row: &Row, transport: Transport, cell: &Cell) {
    let Some(last) = &cell.last else {
        println!(
            "{:<16} {:<4} {:<12} none was left",
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
        "{:<16} {:<4} {:<12} {first:<24} {at:>8}  {:<24} {}",
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

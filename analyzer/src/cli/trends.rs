//! `rcomm-fr trends PATH...`: shows how the times of operations change, from the logs of NCCL's Inspector.

use crate::cli::args::{TrendsArgs, TrendsFormat};
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::cli::progress::Meter;
use anstream::{AutoStream, ColorChoice};
use rcomm_analyzer::format::{bytes, count, duration_ms, printable};
use rcomm_analyzer::inspector::{RankTrend, Reader, Trend, Trends};
use rcomm_analyzer::load::walk;
use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Maximum number of rows without `--verbose`.
const MAX_ROWS: usize = 20;

pub(super) fn run(args: &TrendsArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    let mut files = Vec::new();
    let mut stderr = AutoStream::new(io::stderr(), color);
    for path in &args.paths {
        files.extend(files_of(path, &mut stderr)?);
    }
    files.sort();
    files.dedup();
    let mut reader = Reader::default();
    let mut has_records = false;
    let meter = Meter::new("reading", "files");
    for (done, path) in files.iter().enumerate() {
        meter.show(done, files.len());
        let failed = |source| Failure::Read {
            path: path.clone(),
            source,
        };
        let file = File::open(path).map_err(failed)?;
        match reader.add(BufReader::with_capacity(1 << 20, file)) {
            Ok(0) => {
                let path = path.display().to_string();
                let _ = writeln!(
                    stderr,
                    "{}: left aside: no record of NCCL's Inspector in it",
                    printable(&path)
                );
            }
            Ok(_) => has_records = true,
            Err(source) => return Err(failed(source)),
        }
    }
    drop(meter);
    if !has_records {
        return Err(Failure::Usage {
            sentence: "none of these files is a log of NCCL's Inspector (its JSON lines, not its Prometheus output)"
                .to_owned(),
        });
    }
    let trends = reader.finish();
    output::write_to(args.output.as_deref(), color, |out| match args.format {
        TrendsFormat::Text => write_text(&trends, args.verbose, out),
        TrendsFormat::Json => {
            serde_json::to_writer_pretty(&mut *out, &trends).map_err(io::Error::from)?;
            writeln!(out)
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The file, or the files below the folder. Names on `stderr` the links below the folder that were not followed. Fails
/// if the path, or a folder below it, cannot be read.
fn files_of(path: &Path, stderr: &mut dyn Write) -> Result<Vec<PathBuf>, Failure> {
    let failed = |source| Failure::Read {
        path: path.to_owned(),
        source,
    };
    if !std::fs::metadata(path).map_err(failed)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let (mut files, mut problem) = (Vec::new(), None);
    walk(path, &mut |file| files.push(file), &mut |left| {
        let text = left.why.to_string();
        if left.is_link {
            let path = left.path.display().to_string();
            let _ = writeln!(stderr, "{}: not followed: {text}", printable(&path));
        } else {
            let error = io::Error::new(left.why.kind(), text);
            problem.get_or_insert_with(|| (left.path.to_owned(), error));
        }
    });
    match problem {
        None => Ok(files),
        Some((path, source)) => Err(Failure::Read { path, source }),
    }
}

fn write_text(trends: &Trends, verbose: bool, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "{} of {}, as NCCL's Inspector logged them",
        count(trends.records, "record"),
        count(trends.files, "process log"),
    )?;
    writeln!(
        out,
        "Trends only: Inspector writes an operation once it has completed, so what hangs is not here."
    )?;
    if trends.unread_lines > 0 {
        let lines = count(trends.unread_lines, "line");
        writeln!(out, "{lines} left aside: not a record, or cut short.")?;
    }
    if trends.left_out_records > 0 {
        let records = count(trends.left_out_records, "record");
        writeln!(out, "{records} left out: too many different operations.")?;
    }
    writeln!(out)?;
    let shown = if verbose { usize::MAX } else { MAX_ROWS };
    let rows = trends.trends.iter().take(shown).map(row);
    table(std::iter::once(HEAD.map(str::to_owned)).chain(rows), out)?;
    let hidden = trends.trends.len().saturating_sub(shown);
    if hidden > 0 {
        writeln!(out, "and {hidden} more with less time (--verbose)")?;
    }
    writeln!(
        out,
        "\nchange: from the first quarter of the records to the last. shortest, longest: the ranks of the \
         communicator\nwith these median times; a time includes the wait for other ranks."
    )
}

/// The heads of the table's columns.
const HEAD: [&str; 8] = [
    "operation",
    "communicator",
    "size",
    "records",
    "median",
    "change",
    "bus GB/s",
    "shortest, longest",
];

/// A time given in µs as text.
fn time(us: f64) -> String {
    match us < 1e3 {
        true => format!("{us:.0} µs"),
        false => duration_ms(us / 1e3),
    }
}

/// The cells of an operation in the table.
fn row(trend: &Trend) -> [String; 8] {
    let communicator = match trend.name.is_empty() {
        true => &trend.communicator,
        false => &trend.name,
    };
    let by_time = |a: &&RankTrend, b: &&RankTrend| a.median_us.total_cmp(&b.median_us);
    let ends = [
        trend.ranks.iter().min_by(by_time),
        trend.ranks.iter().max_by(by_time),
    ];
    let ends = match ends {
        [Some(shortest), Some(longest)] if shortest.rank != longest.rank => format!(
            "{}: {}, {}: {}",
            shortest.rank,
            time(shortest.median_us),
            longest.rank,
            time(longest.median_us)
        ),
        _ => "-".to_owned(),
    };
    let text = |text: &str| printable(text).into_owned();
    [
        text(&trend.function),
        format!("{} x{}", text(communicator), trend.size),
        bytes(trend.bytes),
        trend.records.to_string(),
        time(trend.median_us),
        trend.change.map_or_else(
            || "-".to_owned(),
            |change| format!("{:+.0} %", change * 100.0),
        ),
        trend
            .bus_gbs
            .map_or_else(|| "-".to_owned(), |gbs| format!("{gbs:.1}")),
        ends,
    ]
}

/// Writes rows with columns that are as wide as their widest text.
fn table(rows: impl Iterator<Item = [String; 8]>, out: &mut dyn Write) -> io::Result<()> {
    let rows: Vec<_> = rows.collect();
    let mut widths = [0; 8];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in &rows {
        let cells = row.iter().zip(widths);
        let cells: Vec<_> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        writeln!(out, "  {}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

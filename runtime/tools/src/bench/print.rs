//! Prints the results: as a table, as JSON or as CSV. Only one rank prints.

use super::cli::{Args, Format};
use super::operation::Operation;
use rcomm::ReduceOp;
use serde::Serialize;
use std::io::{self, Write};

/// The results for one size; each time is the maximum over the ranks.
pub(crate) struct Row {
    pub(crate) operation: Operation,
    pub(crate) bytes: usize,
    /// The number of elements.
    pub(crate) count: usize,
    pub(crate) iterations: usize,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) min_us: f64,
    /// Median time of the call that issues the operation, if it returns before the operation ends.
    pub(crate) issue_us: Option<f64>,
    /// Share of the shorter of operation and computation that was hidden by the longer one, if both ran at the same
    /// time.
    pub(crate) overlap: Option<f64>,
    /// Number of wrong elements over all ranks, if results were checked.
    pub(crate) errors: Option<u64>,
}

/// A [`Row`] with its bandwidths, as it is printed. The fields are the keys of the JSON format.
#[derive(Serialize)]
struct Line {
    op: &'static str,
    bytes: usize,
    count: usize,
    dtype: String,
    reduction: Option<&'static str>,
    ranks: u32,
    iterations: usize,
    p50_us: f64,
    p99_us: f64,
    min_us: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    issue_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overlap: Option<f64>,
    algbw_gbs: f64,
    busbw_gbs: f64,
    errors: Option<u64>,
}

/// Prints rows in the format of the command line.
pub(crate) struct Printer {
    format: Format,
    dtype: String,
    reduction: ReduceOp,
    ranks: u32,
    /// Whether this rank prints.
    prints: bool,
    lines: Vec<Line>,
}

impl Printer {
    pub(crate) fn new(args: &Args, ranks: u32, prints: bool) -> Self {
        let dtype = format!("{:?}", args.dtype).to_lowercase();
        Self {
            format: args.format,
            dtype,
            reduction: args.op.into(),
            ranks,
            prints,
            lines: Vec::new(),
        }
    }

    /// Adds the bandwidths and the facts of the whole measurement to a row.
    fn line(&self, row: &Row) -> Line {
        // Bytes per microsecond are megabytes per second.
        let algbw = if row.p50_us > 0.0 {
            row.bytes as f64 / row.p50_us / 1e3
        } else {
            0.0
        };
        Line {
            op: row.operation.name(),
            bytes: row.bytes,
            count: row.count,
            dtype: self.dtype.clone(),
            reduction: row.operation.reduces().then(|| self.reduction.name()),
            ranks: self.ranks,
            iterations: row.iterations,
            p50_us: row.p50_us,
            p99_us: row.p99_us,
            min_us: row.min_us,
            issue_us: row.issue_us,
            overlap: row.overlap,
            algbw_gbs: algbw,
            busbw_gbs: algbw * row.operation.bus_factor(self.ranks),
            errors: row.errors,
        }
    }

    /// Prints a row, or stores it for [`end`](Self::end) if the format is JSON. Does nothing on a rank that does
    /// not print.
    pub(crate) fn print_row(&mut self, row: &Row) -> io::Result<()> {
        if !self.prints {
            return Ok(());
        }
        let line = self.line(row);
        let is_first = self.lines.is_empty();
        let mut out = io::stdout().lock();
        let reduction = line.reduction.unwrap_or("-");
        let errors = line
            .errors
            .map_or("-".to_owned(), |errors| errors.to_string());
        match self.format {
            Format::Json => {}
            Format::Table => {
                let optional = [("issue", line.issue_us), ("overlap", line.overlap)];
                let columns = || {
                    let all = optional.iter();
                    all.filter_map(|(name, value)| Some((name, (*value)?)))
                };
                let optional: String = columns()
                    .map(|(_, value)| format!("{value:>10.2}"))
                    .collect();
                if is_first {
                    let head: String = columns().map(|(name, _)| format!("{name:>10}")).collect();
                    writeln!(
                        out,
                        "# {} ranks; times in us, maximum over ranks; bandwidth in GB/s (1e9 bytes)",
                        self.ranks
                    )?;
                    writeln!(
                        out,
                        "{:<15}{:>12}{:>12} {:>5} {:>8}{:>11}{:>11}{head}{:>9}{:>9}{:>8}",
                        "operation",
                        "bytes",
                        "count",
                        "type",
                        "op",
                        "p50",
                        "p99",
                        "algbw",
                        "busbw",
                        "errors"
                    )?;
                }
                writeln!(
                    out,
                    "{:<15}{:>12}{:>12} {:>5} {:>8}{:>11.2}{:>11.2}{optional}{:>9.2}{:>9.2}{:>8}",
                    line.op,
                    line.bytes,
                    line.count,
                    line.dtype,
                    reduction,
                    line.p50_us,
                    line.p99_us,
                    line.algbw_gbs,
                    line.busbw_gbs,
                    errors
                )?;
            }
            Format::Csv => {
                if is_first {
                    writeln!(
                        out,
                        "op,bytes,count,dtype,reduction,ranks,iterations,p50_us,p99_us,min_us,issue_us,overlap,algbw_gbs,busbw_gbs,errors"
                    )?;
                }
                let text =
                    |value: Option<f64>| value.map_or(String::new(), |number| number.to_string());
                let (issue, overlap) = (text(line.issue_us), text(line.overlap));
                writeln!(
                    out,
                    "{},{},{},{},{reduction},{},{},{},{},{},{issue},{overlap},{},{},{errors}",
                    line.op,
                    line.bytes,
                    line.count,
                    line.dtype,
                    line.ranks,
                    line.iterations,
                    line.p50_us,
                    line.p99_us,
                    line.min_us,
                    line.algbw_gbs,
                    line.busbw_gbs
                )?;
            }
        }
        self.lines.push(line);
        out.flush()
    }

    /// Prints the end: all rows as one object if the format is JSON; below a table the average bus bandwidth, as
    /// nccl-tests does.
    pub(crate) fn end(self) -> io::Result<()> {
        if !self.prints {
            return Ok(());
        }
        let mut out = io::stdout().lock();
        match self.format {
            Format::Json => {
                serde_json::to_writer(&mut out, &serde_json::json!({ "rows": self.lines }))?;
                writeln!(out)
            }
            Format::Table => {
                // An operation without bytes has no bandwidth.
                let moving = self.lines.iter().filter(|line| line.bytes > 0);
                let busbw: Vec<f64> = moving.map(|line| line.busbw_gbs).collect();
                if busbw.is_empty() {
                    return Ok(());
                }
                let average = busbw.iter().sum::<f64>() / busbw.len() as f64;
                writeln!(out, "# Avg bus bandwidth    : {average:.6}")
            }
            Format::Csv => Ok(()),
        }
    }
}

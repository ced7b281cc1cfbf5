//! Reads the log of NCCL's Inspector, a profiler plug-in that comes with NCCL (`plugins/profiler/inspector`), and
//! condenses it to trends.
//!
//! Each line of the log is a JSON object with `header` (communicator, rank, number of ranks), `metadata` (format, host,
//! process) and `coll_perf` or `p2p_perf` (function, number, bytes, time, bandwidth). Newer versions write header and
//! metadata once, before the objects that they belong to. Other objects, such as network transfers, are ignored.
//!
//! Inspector writes an operation once it has completed, and by default only if its message has 8 KiB or more. So its
//! log shows how times change, and not what hangs: no verdict is derived from it.
//!
//! Memory is bounded: [`MAX_SERIES`] series of at most [`MAX_SAMPLES`] samples each, whatever the size of the log.

mod line;
mod trends;

pub use trends::{RankTrend, Trend, Trends};

use line::{Line, Object};
use std::collections::HashMap;
use std::io::{self, BufRead};
use trends::{OperationKind, Series};

/// The largest number of series. A series has the calls of one function with one message size by one rank of one
/// communicator.
pub const MAX_SERIES: usize = 65_536;
/// The limit of the samples of a series. Whenever a series reaches the limit, every second sample is dropped, and from
/// then on half as many of its records are kept.
pub const MAX_SAMPLES: usize = 128;
/// The longest line that is read, bytes. Lines with the trace of every channel need some 100 KiB.
const MAX_LINE: usize = 4 << 20;
/// The number of first bytes by which a log is recognized.
const HEAD: usize = 4096;

/// Whether a file that begins with these bytes is a log of NCCL's Inspector.
pub fn is_log(bytes: &[u8]) -> bool {
    let head = &bytes[..bytes.len().min(HEAD)];
    let key = b"\"inspector_output_format_version\"";
    head.trim_ascii_start().first() == Some(&b'{')
        && head.windows(key.len()).any(|window| window == key)
}

/// Reads logs, and collects the times of their operations.
#[derive(Debug, Default)]
pub struct Reader {
    series: HashMap<(OperationKind, u32), Series>,
    records: u64,
    unread: u64,
    left_out: u64,
    files: u64,
}

impl Reader {
    /// Adds the log of one process and returns the number of its records. Lines that cannot be used, such as the last
    /// one of a process that was killed, are counted and skipped; other objects are skipped. Blocks until the input
    /// ends.
    ///
    /// # Errors
    /// If the input cannot be read; what was read before counts.
    pub fn add(&mut self, mut input: impl BufRead) -> io::Result<u64> {
        let before = self.records;
        let mut bytes = Vec::new();
        let mut latest = Object::default();
        let mut is_first = true;
        while let Some(is_whole) = next_line(&mut input, &mut bytes)? {
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            match is_whole.then(|| line::parse(&bytes, &mut latest)).flatten() {
                Some(Line::Operation(operation, rank, sample)) => {
                    self.files += u64::from(is_first);
                    is_first = false;
                    self.add_sample(operation, rank, sample);
                }
                Some(Line::Other) => {}
                None => self.unread += 1,
            }
        }
        Ok(self.records - before)
    }

    fn add_sample(&mut self, operation: OperationKind, rank: u32, sample: trends::Sample) {
        self.records += 1;
        let key = (operation, rank);
        if let Some(series) = self.series.get_mut(&key) {
            series.add(sample);
        } else if self.series.len() < MAX_SERIES {
            let mut series = Series::default();
            series.add(sample);
            self.series.insert(key, series);
        } else {
            self.left_out += 1;
        }
    }

    /// The trends of all logs, the operation with the most time first.
    pub fn finish(self) -> Trends {
        Trends {
            schema: Trends::SCHEMA.to_owned(),
            files: self.files,
            records: self.records,
            unread_lines: self.unread,
            left_out_records: self.left_out,
            trends: trends::trends_of(self.series),
        }
    }
}

/// Reads the next line without its end; `Some(false)` if it was longer than [`MAX_LINE`] and was cut there, `None` at
/// the end of the input.
fn next_line(input: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Option<bool>> {
    line.clear();
    let mut has_bytes = false;
    let mut is_whole = true;
    loop {
        let piece = match input.fill_buf() {
            Ok(piece) => piece,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if piece.is_empty() {
            return Ok(has_bytes.then_some(is_whole));
        }
        has_bytes = true;
        let end = piece.iter().position(|&byte| byte == b'\n');
        let taken = &piece[..end.unwrap_or(piece.len())];
        let kept = taken.len().min(MAX_LINE - line.len());
        is_whole &= kept == taken.len();
        line.extend_from_slice(&taken[..kept]);
        let used = taken.len() + usize::from(end.is_some());
        input.consume(used);
        if end.is_some() {
            return Ok(Some(is_whole));
        }
    }
}

#[cfg(test)]
mod tests;

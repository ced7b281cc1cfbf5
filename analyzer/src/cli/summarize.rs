//! `rcomm-fr summarize PATH... -o FILE`: condenses the records of one node into a summary.

use crate::cli::args::SummarizeArgs;
use crate::cli::failure::Failure;
use crate::cli::output::{self, is_stdout};
use crate::cli::progress::Meter;
use anstream::{AutoStream, ColorChoice};
use rcomm_analyzer::format::{bytes, count, printable};
use rcomm_analyzer::load::{self, LoadOptions, Loaded, Progress};
use rcomm_analyzer::rsum::{SummarizeError, Writer};
use rcomm_analyzer::{Code, Problem};
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

/// Maximum number of problems that are shown; the summary has all.
const MAX_SHOWN: usize = 20;

pub(super) fn run(args: &SummarizeArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    let to_failure = |error: SummarizeError| match error {
        SummarizeError::Io(source) => Failure::Write {
            target: args.output.clone(),
            source,
        },
        SummarizeError::TooLarge { .. } | SummarizeError::TooManyPaths => Failure::Summarize(error),
    };
    let io_to_failure = |error: io::Error| to_failure(SummarizeError::Io(error));
    let (loaded, size) = if is_stdout(&args.output) {
        let mut counted = Counted(io::stdout().lock(), 0);
        let loaded = summarize(args, &mut counted, &to_failure)?;
        (loaded, counted.1)
    } else {
        // Only the owner can read the file, and it is complete once it has its name.
        let partial = output::partial_file(&args.output).map_err(io_to_failure)?;
        let mut counted = Counted(BufWriter::new(partial.as_file()), 0);
        let loaded = summarize(args, &mut counted, &to_failure)?;
        counted.0.flush().map_err(io_to_failure)?;
        let size = counted.1;
        drop(counted);
        if loaded.dumps > 0 || !loaded.problems.is_empty() {
            let kept = partial.persist(&args.output);
            kept.map_err(|error| io_to_failure(error.error))?;
        }
        (loaded, size)
    };
    // Standard output may be the summary: messages about it go to standard error.
    let mut stderr = AutoStream::new(io::stderr(), color);
    let dumps = count(loaded.dumps as u64, "dump");
    let files = count(loaded.files as u64, "file");
    let _ = if is_stdout(&args.output) {
        writeln!(stderr, "wrote {} of {dumps} from {files}", bytes(size))
    } else if loaded.dumps > 0 || !loaded.problems.is_empty() {
        let (file, size) = (args.output.display(), bytes(size));
        writeln!(stderr, "wrote {file} ({size}): {dumps} from {files}")
    } else {
        writeln!(stderr, "wrote nothing: {dumps} from {files}")
    };
    for problem in loaded.problems.iter().take(MAX_SHOWN) {
        let text = format!("{}  {}: {}", problem.code, problem.path, problem.sentence);
        let _ = writeln!(stderr, "{}", printable(&text));
    }
    let more = loaded.problems.len().saturating_sub(MAX_SHOWN);
    if more > 0 {
        let more = count(more as u64, "more problem");
        let _ = writeln!(stderr, "... and {more}; the summary has all");
    }
    // N300 names logs, stacks and files without records: a report is complete without these. A path that was not found
    // may have led to records.
    let is_loss = |problem: &Problem| problem.code != Code::N300;
    let is_whole = loaded.unfound == 0 && !loaded.problems.iter().any(is_loss);
    Ok(match (loaded.dumps, is_whole) {
        (0, _) => ExitCode::from(2),
        (_, true) => ExitCode::SUCCESS,
        (_, false) => ExitCode::from(1),
    })
}

/// Reads the records and writes their summary. The result has a problem for each file that a summary cannot hold.
fn summarize(
    args: &SummarizeArgs,
    out: impl Write,
    to_failure: &impl Fn(SummarizeError) -> Failure,
) -> Result<Loaded, Failure> {
    let meter = Meter::new("reading", "files");
    let show_progress = |progress: Progress| meter.show(progress.done, progress.files);
    let options = LoadOptions {
        jobs: args.jobs,
        progress: Some(&show_progress),
        ..LoadOptions::default()
    };
    let mut writer = Writer::new(out).map_err(to_failure)?;
    let mut result = Ok(());
    let mut loaded = load::load(&args.paths, &options, |dump| {
        if result.is_ok() {
            result = writer.add(&dump);
        }
    })?;
    drop(meter);
    let logs = std::mem::take(&mut loaded.logs).into_iter();
    let stacks = std::mem::take(&mut loaded.stacks).into_iter();
    let logs = logs.map(|log| (log.path, "logs"));
    for (path, kind) in logs.chain(stacks.map(|stacks| (stacks.path, "stacks"))) {
        let sentence = format!(
            "left aside: a summary cannot hold {kind}; pass this file to `rcomm-fr analyze` together with the summary"
        );
        loaded.problems.push(Problem::stale_dump(path, sentence));
    }
    result
        .and_then(|()| writer.finish(&loaded).map(drop))
        .map_err(to_failure)?;
    Ok(loaded)
}

/// A writer that counts the bytes written.
struct Counted<W>(W, u64);

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.0.write(bytes)?;
        self.1 += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

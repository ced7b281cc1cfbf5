//! `rcomm-fr summarize PATH... -o FILE`: condenses the records of one node into a summary.

use crate::cli::args::SummarizeArgs;
use crate::cli::failure::Failure;
use crate::cli::output::{self, is_stdout};
use crate::cli::progress::Meter;
use anstream::{AutoStream, ColorChoice};
use rcomm_analyzer::Problem;
use rcomm_analyzer::format::{bytes, count};
use rcomm_analyzer::load::{self, LoadOptions, Loaded, Progress};
use rcomm_analyzer::rsum::{SummarizeError, Writer};
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

pub(super) fn run(args: &SummarizeArgs, color: ColorChoice) -> Result<ExitCode, Failure> {
    let failed = |error: SummarizeError| match error {
        SummarizeError::Io(source) => Failure::Write {
            target: args.output.clone(),
            source,
        },
        SummarizeError::TooLarge { .. } => Failure::Usage {
            sentence: error.to_string(),
        },
    };
    let wrote = |result: io::Result<()>| result.map_err(SummarizeError::Io).map_err(failed);
    let (loaded, size) = if is_stdout(&args.output) {
        let mut counted = Counted(io::stdout().lock(), 0);
        let loaded = summarize(args, &mut counted, &failed)?;
        (loaded, counted.1)
    } else {
        // Only the owner can read the file, and it is complete once it has its name.
        let partial = output::partial_file(&args.output);
        let partial = partial.map_err(SummarizeError::Io).map_err(&failed)?;
        let mut counted = Counted(BufWriter::new(partial.as_file()), 0);
        let loaded = summarize(args, &mut counted, &failed)?;
        wrote(counted.0.flush())?;
        let size = counted.1;
        drop(counted);
        if loaded.dumps > 0 || !loaded.problems.is_empty() {
            let kept = partial.persist(&args.output);
            wrote(kept.map(drop).map_err(|failed| failed.error))?;
        }
        (loaded, size)
    };
    // Standard output may be the summary: messages about it go to standard error.
    let mut stderr = AutoStream::new(io::stderr(), color);
    let _ = writeln!(
        stderr,
        "{} ({}) of {}",
        count(loaded.dumps as u64, "record"),
        bytes(size),
        count(loaded.files as u64, "file"),
    );
    for problem in loaded.problems.iter().take(20) {
        let _ = writeln!(
            stderr,
            "{}  {}: {}",
            problem.code, problem.path, problem.sentence
        );
    }
    Ok(match (loaded.dumps, loaded.problems.is_empty()) {
        (0, _) => ExitCode::from(2),
        (_, true) => ExitCode::SUCCESS,
        (_, false) => ExitCode::from(1),
    })
}

fn summarize(
    args: &SummarizeArgs,
    out: impl Write,
    failed: &impl Fn(SummarizeError) -> Failure,
) -> Result<Loaded, Failure> {
    let meter = Meter::new("reading", "files");
    let progress = |it: Progress| meter.show(it.done, it.files);
    let options = LoadOptions {
        jobs: args.jobs,
        progress: Some(&progress),
        ..LoadOptions::default()
    };
    let mut writer = Writer::new(out).map_err(failed)?;
    let mut result = Ok(());
    let mut loaded = load::load(&args.paths, &options, |dump| {
        if result.is_ok() {
            result = writer.add(&dump);
        }
    })?;
    drop(meter);
    for log in std::mem::take(&mut loaded.logs) {
        let sentence = "left aside: a summary holds no logs; give the log itself to analyze";
        loaded
            .problems
            .push(Problem::stale_dump(log.path, sentence));
    }
    result
        .and_then(|()| writer.finish(&loaded).map(drop))
        .map_err(failed)?;
    Ok(loaded)
}

/// A writer that counts its bytes.
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

//! The errors that end a command, with messages and hints.

use rcomm_analyzer::format::{bytes, count, duration_ms, printable};
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

/// Why a command failed.
///
/// Messages are fragments that fit after `error: `.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The code given to `explain` does not exist.
    #[error("there is no code {given:?}")]
    UnknownCode { given: String },
    /// The arguments or the files that they name cannot be used, or a file that the command needs is not installed.
    #[error("{sentence}")]
    Usage { sentence: String },
    /// A file or folder could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The system has no random numbers for pseudonyms.
    #[error("the system gives no random numbers for pseudonyms: {0}")]
    NoKey(io::Error),
    /// No path and no pattern gives a file, or a pattern is not valid.
    #[error(transparent)]
    Find(#[from] rcomm_analyzer::load::FindError),
    /// The records do not fit into the memory limit.
    #[error("the records need more than {} of memory; read so far: {}", bytes(*limit), count(*dumps_read as u64, "dump"))]
    MemoryLimit { limit: u64, dumps_read: usize },
    /// Nothing arrived in a watched folder.
    #[error("nothing arrived in {} within {}", dir.display(), duration_ms(after.as_secs_f64() * 1e3))]
    NothingArrived { dir: PathBuf, after: Duration },
    /// One side of a comparison has no record.
    #[error("no record of any rank could be read in {}, so there is nothing to compare", path.display())]
    NothingToCompare { path: PathBuf },
    /// A ring could not be read or removed, or a directory of rings could not be listed.
    #[error(transparent)]
    Ring(#[from] rcomm_recorder::Error),
    /// No ring matches the arguments.
    #[error("no ring of {wanted} in {}", directory.display())]
    NoRing { wanted: String, directory: PathBuf },
    /// Rings of several jobs match the arguments.
    #[error("{matching} rings of several jobs match {wanted}")]
    SeveralRings { wanted: String, matching: usize },
    /// A dump file could not be written.
    #[error(transparent)]
    DumpFile(#[from] rcomm_recorder::publish::DumpFileError),
    /// A summary cannot hold a part of the input.
    #[error(transparent)]
    Summarize(rcomm_analyzer::rsum::SummarizeError),
    /// A query failed.
    #[cfg(feature = "tables")]
    #[error(transparent)]
    Query(#[from] rcomm_analyzer::export::tables::TableError),
    /// `query` in a build without tables.
    #[cfg(not(feature = "tables"))]
    #[error("this rcomm-fr was built without `query`")]
    NoTables,
    /// The output could not be written.
    #[error("cannot write {}: {source}", target.display())]
    Write { target: PathBuf, source: io::Error },
}

impl Failure {
    /// A hint on what the user can do; `None` if there is nothing to add to the message.
    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::UnknownCode { .. } => Some("`rcomm-fr explain` lists all codes"),
            Self::NoRing { .. } => Some("`rcomm-fr rings list` shows what is there"),
            Self::SeveralRings { .. } => Some("narrow it with --job, or name the file"),
            Self::MemoryLimit { .. } => {
                Some("raise --memory-limit, or leave out --format html, perfetto and columns")
            }
            #[cfg(feature = "tables")]
            Self::Query(_) => Some(
                "`show tables` lists the tables, `select * from entries limit 1` shows columns",
            ),
            #[cfg(not(feature = "tables"))]
            Self::NoTables => Some(
                "build it with `cargo build --release -p rcomm-analyzer --features tables`; \
                 `rcomm-fr analyze --format json` gives the report to other tools",
            ),
            Self::Usage { .. }
            | Self::Read { .. }
            | Self::Find(_)
            | Self::NoKey(_)
            | Self::NothingArrived { .. }
            | Self::NothingToCompare { .. }
            | Self::Ring(_)
            | Self::DumpFile(_)
            | Self::Summarize(_)
            | Self::Write { .. } => None,
        }
    }

    /// Prints the error as one line on standard error.
    pub(crate) fn show(&self, color: anstream::ColorChoice) {
        let style = anstyle::AnsiColor::Red.on_default().bold();
        let mut stderr = anstream::AutoStream::new(io::stderr(), color);
        let text = self.to_string();
        let hint = self
            .hint()
            .map(|hint| format!(" (hint: {hint})"))
            .unwrap_or_default();
        // If standard error is closed, the message is lost.
        let _ = writeln!(stderr, "{style}error:{style:#} {}{hint}", printable(&text));
    }
}

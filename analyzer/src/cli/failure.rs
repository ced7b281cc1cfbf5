//! The errors that end a command: for each its message and its exit code.

use rcomm_analyzer::format::{bytes, duration_ms, printable};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Why a command could not answer.
///
/// Messages are fragments that fit after `error: `.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// `explain` was asked for a code that does not exist.
    #[error("there is no code {given:?}")]
    UnknownCode { given: String },
    /// Arguments that clap takes and that make no sense together.
    #[error("{sentence}")]
    Usage { sentence: String },
    /// A file that the arguments name could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A path that names nothing.
    #[error(transparent)]
    Find(#[from] rcomm_analyzer::load::FindError),
    /// What was asked for does not fit into the memory that was allowed.
    #[error("the records need more than {} of memory; {read} of them were read", bytes(*limit))]
    MemoryLimit { limit: u64, read: usize },
    /// A watched folder stayed empty.
    #[error("nothing arrived in {} within {}", dir.display(), duration_ms(after.as_secs_f64() * 1e3))]
    NothingArrived { dir: PathBuf, after: Duration },
    /// The recorder could not read or remove a ring.
    #[error(transparent)]
    Ring(#[from] rcomm_recorder::Error),
    /// No ring is there that was asked for.
    #[error("no ring of {wanted} in {}", directory.display())]
    NoRing { wanted: String, directory: PathBuf },
    /// Several rings fit.
    #[error("{fitting} rings are of {wanted}")]
    SeveralRings { wanted: String, fitting: usize },
    /// A dump file could not be written.
    #[error(transparent)]
    DumpFile(#[from] rcomm_recorder::publish::DumpFileError),
    /// A query that the tables cannot answer.
    #[cfg(feature = "tables")]
    #[error(transparent)]
    Query(#[from] rcomm_analyzer::export::tables::TableError),
    /// The answer could not be written.
    #[error("cannot write {}: {source}", target.display())]
    Write { target: PathBuf, source: io::Error },
}

impl Failure {
    /// What the caller could do about it.
    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::UnknownCode { .. } => Some("`rcomm-fr explain` lists all codes"),
            Self::NoRing { .. } => Some("`rcomm-fr rings list` shows what is there"),
            Self::SeveralRings { .. } => Some("narrow it with --job, or name the file"),
            Self::MemoryLimit { .. } => {
                Some("raise --memory-limit, or leave out --format html and perfetto")
            }
            #[cfg(feature = "tables")]
            Self::Query(_) => Some(
                "`show tables` lists the tables, `select * from entries limit 1` shows columns",
            ),
            Self::Usage { .. }
            | Self::Read { .. }
            | Self::Find(_)
            | Self::NothingArrived { .. }
            | Self::Ring(_)
            | Self::DumpFile(_)
            | Self::Write { .. } => None,
        }
    }

    /// 2 = inconclusive: a script must not take it for a finding.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            #[cfg(feature = "tables")]
            Self::Query(_) => ExitCode::from(2),
            Self::UnknownCode { .. }
            | Self::Usage { .. }
            | Self::Read { .. }
            | Self::Find(_)
            | Self::MemoryLimit { .. }
            | Self::NothingArrived { .. }
            | Self::Ring(_)
            | Self::NoRing { .. }
            | Self::SeveralRings { .. }
            | Self::DumpFile(_)
            | Self::Write { .. } => ExitCode::from(2),
        }
    }

    /// One line on standard error.
    pub(crate) fn show(&self, color: anstream::ColorChoice) {
        let alarm = anstyle::AnsiColor::Red.on_default().bold();
        let mut stderr = anstream::AutoStream::new(io::stderr(), color);
        let text = self.to_string();
        let hint = self
            .hint()
            .map(|hint| format!(" (hint: {hint})"))
            .unwrap_or_default();
        // No output is left when standard error is gone.
        let _ = writeln!(stderr, "{alarm}error:{alarm:#} {}{hint}", printable(&text));
    }
}

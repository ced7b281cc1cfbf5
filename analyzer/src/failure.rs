//! What can keep a command from answering, how it is said, and the exit code that goes with it.

use rcomm_analyzer::print::words::printable;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

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
    /// The answer could not be written.
    #[error("cannot write {}: {source}", target.display())]
    Write { target: PathBuf, source: io::Error },
}

impl Failure {
    /// What the caller could do about it.
    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::UnknownCode { .. } => Some("`rcomm-fr explain` lists all codes"),
            Self::Usage { .. } | Self::Read { .. } | Self::Write { .. } => None,
        }
    }

    /// 2 = could not tell: a script must not take it for a finding.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::UnknownCode { .. }
            | Self::Usage { .. }
            | Self::Read { .. }
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
        // Nobody is left to tell when standard error is gone.
        let _ = writeln!(stderr, "{alarm}error:{alarm:#} {}{hint}", printable(&text));
    }
}

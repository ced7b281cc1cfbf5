//! The error type of the recorder and the readers.

use std::io;
use std::path::PathBuf;

/// A `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error. Its sentence names the facts and ends without a full stop.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system returned an error.
    #[error("failed to {what}: {source}")]
    Io {
        /// What was tried, as a verb and its object.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// A value of the configuration is invalid.
    #[error("recorder configuration: {0}")]
    InvalidConfig(String),
    /// A TLS identity cannot be used.
    #[error("{0}")]
    Tls(String),
    /// Another living process records as this rank.
    #[error(
        "rank {rank} of job {job:?}, attempt {attempt}, is already recording in {path}; \
         was it started twice?",
        path = path.display()
    )]
    RankTaken {
        /// The job.
        job: String,
        /// The attempt.
        attempt: u32,
        /// The rank.
        rank: u32,
        /// The other process's ring.
        path: PathBuf,
    },
    /// The file is not a ring, or is a damaged one.
    #[error("{path} is not a readable ring: {why}", path = path.display())]
    NotARing {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The file is a ring of a layout that this reader does not know.
    #[error(
        "{path} is a ring of layout {found}, and this reader supports layout {known}: use a newer reader",
        path = path.display()
    )]
    UnknownLayout {
        /// The file.
        path: PathBuf,
        /// The file's major version.
        found: u32,
        /// The major version that this build reads.
        known: u32,
    },
    /// The endpoint cannot be served or reached, refuses a request, sends an invalid answer, or has a malformed
    /// address.
    #[error("endpoint {address}: {why}")]
    Endpoint {
        /// The endpoint's address.
        address: String,
        /// What is wrong.
        why: String,
    },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: source.into(),
        }
    }
}

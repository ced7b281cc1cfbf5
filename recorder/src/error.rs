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
    /// A TLS identity that cannot be used.
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
    /// Not a ring file, or one that is damaged.
    #[error("{path} is not a readable ring: {why}", path = path.display())]
    NotARing {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A ring file in a layout that this reader does not know.
    #[error(
        "{path} is a ring of layout {found}, this reader supports layout {known}; use a newer reader",
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
    /// An endpoint that cannot be served or reached, that refuses a request or sends an invalid answer, or whose
    /// address is malformed.
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

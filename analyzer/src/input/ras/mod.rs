//! Reads NCCL's own reports on a job, from its RAS subsystem (`ncclras`, since NCCL 2.24), in text or JSON.
//!
//! RAS reports what no flight recorder shows: which processes its network no longer reaches, and which communicators
//! ended with an error. It does not show what hangs: it counts only launches, and only of five functions. So its faults
//! are further evidence: [`join`] adds them to the findings on a rank. Only a dead or failed rank that no error names
//! becomes a separate finding (E150), which turns the verdicts `healthy`, `running`, `slow` and `inconclusive` into
//! `stuck`.
//!
//! `communicators` reads both forms for live views (see [`RasSource`](crate::live::source::RasSource)), [`RasReport`]
//! for reports that are stored with dumps.
//!
//! Faults are joined to ranks by host and process id; if the dumps name neither (PyTorch's do not), or the records of
//! the rank were not read, by the rank in a communicator as large as the world.

mod communicator;
mod faults;
mod join;
mod json;
mod text;

pub(crate) use communicator::Behind;
pub use communicator::{Communicator, Member, MemberState, Process};
pub use join::join;

use serde::{Deserialize, Serialize};

/// The faults in one report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RasReport {
    /// Each fault and its process, in the order of the report.
    pub faults: Vec<RasFault>,
}

/// One fault of one process. A process in several communicators may have several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RasFault {
    /// The process.
    pub process: RasSubject,
    /// The fault.
    pub kind: RasFaultKind,
}

/// A process or a rank of a communicator as RAS names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RasSubject {
    /// Host name or address; empty if unknown.
    pub host: String,
    /// Process id; 0 if unknown.
    pub pid: u32,
    /// The number of the device on the host; empty if unknown.
    pub device: String,
    /// The rank in a communicator and the size of that communicator; `None` if only the process is known.
    pub rank: Option<(u32, u32)>,
}

/// What is wrong with a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RasFaultKind {
    /// The RAS network has not reached the process for a minute.
    Dead,
    /// The process did not answer this query.
    Unresponsive,
    /// A communicator of the process reports this error.
    Error(String),
    /// The process launched fewer operations than most others.
    Behind {
        /// The function; `collective` if the report does not name it.
        function: String,
        /// The number of operations that the process launched.
        launched: u64,
        /// The number that most others launched.
        others: u64,
    },
    /// The program of the process aborted the communicator.
    Aborted,
}

impl RasReport {
    /// Reads a report; `None` if these bytes are not a report.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.trim_ascii_start().first() == Some(&b'{') && !json::is_report(bytes) {
            return None;
        }
        let communicators = communicators(bytes).ok()?;
        Some(Self {
            faults: faults::list(&communicators),
        })
    }
}

/// Reads a report of either form and returns its communicators, or why these bytes are not a report.
pub(crate) fn communicators(bytes: &[u8]) -> Result<Vec<Communicator>, String> {
    match bytes.trim_ascii_start().first() {
        Some(b'{') => json::read(bytes),
        _ => text::read(bytes),
    }
}

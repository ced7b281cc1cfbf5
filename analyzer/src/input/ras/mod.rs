//! NCCL's own reports on a job, from its RAS subsystem (`ncclras`, since NCCL 2.24), text or
//! JSON, as further evidence next to the dumps.
//!
//! RAS knows what no flight recorder does: which processes its network no longer reaches, and which
//! communicators ended with an error. It does not know what hangs: its counts are launches, of five
//! functions only. So it is further evidence, never the judge: [`join`] adds what it reports of a rank
//! that a finding names, and speaks up by itself (E150) only for a rank that is dead or failed and
//! that no finding names.
//!
//! The one reader of both forms is here: `communicators` for live views (see
//! [`RasSource`](crate::live::source::RasSource)), [`RasReport`] for the part that is kept with dumps.
//!
//! Facts are joined to ranks by host, process id and device; where the dumps name neither host nor
//! process (PyTorch's do not), by the rank in a communicator as large as the world.

mod communicator;
mod facts;
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
    pub facts: Vec<Fact>,
}

/// One thing that is wrong with one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// The process.
    pub who: RasSubject,
    /// The fault.
    pub what: RasState,
}

/// A process, or a rank of a communicator, as RAS names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RasSubject {
    /// Host name or address; empty if RAS does not know.
    pub host: String,
    /// Process id; 0 if RAS does not know.
    pub pid: u32,
    /// The device's number on the host; empty if RAS does not give it.
    pub device: String,
    /// Rank in a communicator, and that communicator's size.
    pub rank: Option<(u32, u32)>,
}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RasState {
    /// The RAS network has not reached the process for a minute.
    Dead,
    /// It did not answer this query.
    Unresponsive,
    /// A communicator reports an error.
    Error(String),
    /// It launched fewer operations than the others.
    Behind {
        /// Which function; empty if the report does not name it.
        function: String,
        /// How many it launched.
        launched: u64,
        /// How many most others did.
        others: u64,
    },
    /// Its program aborted the communicator.
    Aborted,
}

impl RasReport {
    /// Reads a report; `None` if these bytes are none.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.trim_ascii_start().first() == Some(&b'{') && !json::is_report(bytes) {
            return None;
        }
        let communicators = communicators(bytes).ok()?;
        Some(Self {
            facts: facts::of(&communicators),
        })
    }
}

/// Reads a report of either form: its communicators, or why these bytes are none.
pub(crate) fn communicators(bytes: &[u8]) -> Result<Vec<Communicator>, String> {
    match bytes.trim_ascii_start().first() {
        Some(b'{') => json::read(bytes),
        _ => text::read(bytes),
    }
}

//! Where a live view gets its records from.
//!
//! A [`Source`] is asked again and again for what changed. It knows how to reach the ranks; what
//! their records mean is left to the analysis, and how they are kept to [`Live`](crate::Live).

mod choice;
mod collector;
mod dump_requests;
mod endpoints;
mod files;
mod net;
mod questions;
mod ras;
mod records;
mod rings;
mod simulated;
mod stacks;
mod store;
mod threads;
mod worker_servers;

pub use choice::JobChoice;
pub use collector::CollectorSource;
pub use dump_requests::{DumpAnswers, DumpRequests};
pub use endpoints::{EndpointDumps, EndpointSource};
pub use files::FileSource;
pub use net::{AddressError, HostPort, HttpAddress};
pub use ras::{RAS_ADDRESS, RasSource};
pub use records::{RECORDS_SCHEMA, RecordHead, RecordsFollower, RecordsHead, RecordsQuestion};
pub use rings::{RingDumps, RingSource};
pub use simulated::SimulatedSource;
pub use stacks::{StackRequests, TakenStacks, WorkerServerStacks};
pub use store::hosts_in_store;
pub use threads::RingThreads;
pub use worker_servers::{WorkerAddress, WorkerServerDumps, WorkerServerSource};

use crate::input::ras::Communicator;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, LaunchRecord};
use rcomm_verdict::{Problem, Report};
use std::sync::Arc;
use std::time::Instant;

/// How many operations of one record a live view keeps, the newest ones: enough for every view and for
/// the analysis of what goes on, and a look at a job costs the same however large its rings are.
pub const NEWEST: usize = 1_024;

/// Many records, asked for again and again. Not shared: each source has a thread of its own.
pub trait Source: Send {
    /// What is asked, in a few words: `rings of job llama in /dev/shm/rcomm-0`.
    fn name(&self) -> String;

    /// Looks once. A rank that does not answer is an observation, not an error.
    ///
    /// # Blocking
    ///
    /// May block until `deadline`, and no longer.
    ///
    /// # Errors
    ///
    /// [`SourceError`] if nothing at all could be asked.
    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError>;

    /// Whether [`Source::poll`] will never see anything new, as with a folder of dumps.
    fn is_still(&self) -> bool {
        false
    }
}

/// What one look at a source saw.
#[derive(Debug, Default)]
pub struct Poll {
    /// One for every rank that the source knows of, changed or not.
    pub observations: Vec<Observation>,
    /// Files and answers that could not be used, or only in part.
    pub problems: Vec<Problem>,
    /// Ranks of the job, where the source knows better than the records.
    pub world_size: Option<u32>,
    /// What launchers know of the job's processes.
    pub launches: Vec<LaunchRecord>,
    /// What the communication library reports of its communicators.
    pub communicators: Vec<Communicator>,
    /// A report that another program judged already.
    pub collected: Option<Collected>,
    /// What this source showed before belongs to another job: it is to be forgotten.
    pub restart: bool,
}

/// A report that a collector made of records that it keeps.
#[derive(Clone, Debug)]
pub struct Collected {
    /// The job's name; empty if unknown.
    pub job: String,
    /// The report.
    pub report: Arc<Report>,
    /// Ranks that no longer answer the collector, ascending.
    pub silent: Vec<Rank>,
}

/// One rank, looked at once.
#[derive(Debug)]
pub struct Observation {
    /// Rank in the world.
    pub rank: Rank,
    /// Which of several recorders of one process; 0 where there is one.
    pub part: u8,
    /// Whether its process lives, as far as the source knows.
    pub liveness: Liveness,
    /// Its record.
    pub seen: Seen,
}

/// What was seen of a record.
#[derive(Debug)]
pub enum Seen {
    /// The record, changed since the last look.
    Changed(Box<Dump>),
    /// Nothing was written since the last look but a sign of life.
    Unchanged {
        /// When the rank's watchdog last made a round, wall clock, ns since the epoch; 0 if unknown.
        heartbeat_ns: i64,
        /// When it was looked at, wall clock, ns since the epoch; 0 if unknown.
        as_of_ns: i64,
    },
    /// No answer, with the reason as a sentence.
    Failed(String),
}

/// Whether the process behind a record lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Liveness {
    /// The source does not know.
    #[default]
    Unknown,
    /// It lives.
    Alive,
    /// It is gone.
    Dead,
}

/// Why a source could not be asked at all.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// There is nothing to look at (yet).
    #[error("{what}; {hint}")]
    Nothing {
        /// What was looked for, and where.
        what: String,
        /// How to get one.
        hint: String,
    },
    /// Input or output failed.
    #[error("failed to read {place}: {source}")]
    Io {
        /// File or address.
        place: String,
        /// What went wrong.
        source: std::io::Error,
    },
    /// What was read cannot be understood.
    #[error("cannot use {place}: {reason}")]
    Unusable {
        /// File or address.
        place: String,
        /// What is wrong with it, and what was expected.
        reason: String,
    },
}

/// Whether nothing was written but the heartbeat.
fn is_same(last: &Dump, dump: &Dump) -> bool {
    let metadata = |dump: &Dump| {
        let status = dump.status.as_ref();
        status.map(|s| (s.phase.clone(), s.phase_since_ns, s.step, s.dropped))
    };
    last.entries == dump.entries
        && last.groups == dump.groups
        && last.identity.reason == dump.identity.reason
        && metadata(last) == metadata(dump)
}

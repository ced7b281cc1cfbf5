//! The sources of the records of a live view.
//!
//! A [`Source`] is polled repeatedly for changes. It knows how to reach the ranks; the analysis interprets their
//! records, and [`Live`](crate::Live) stores them.

mod dump_requests;
mod files;
mod network;
mod node;
mod simulated;
mod stacks;

pub use dump_requests::{DumpAnswers, DumpRequests, RingDumps};
pub use files::FileSource;
pub use network::{
    AddressError, CollectorSource, EndpointDumps, EndpointSource, HostPort, HttpAddress,
    NetworkSources, RAS_ADDRESS, RECORDS_SCHEMA, RankStacksText, RasSource, RecordHead,
    RecordsFollower, RecordsHead, RecordsQuestion, StoreDumps, StoreSource, WorkerAddress,
    WorkerServerDumps, WorkerServerSource, hosts_in_store, raise_exception_dump,
};
pub use node::{
    DumpOfProcess, Fact, JobChoice, LocalDumps, LocalSource, PIPE_VARIABLE, PipeDumps,
    ProcessFacts, ProcessSource, ProcessStacks, Program, RankJob, RankProcess, RingProcessFacts,
    RingSource, RingThreads, dump_beginnings, ring_directory,
};
pub use simulated::SimulatedSource;
pub use stacks::{StackRequests, TakenStacks, WorkerServerStacks};

use crate::input::ras::Communicator;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, LaunchRecord};
use rcomm_verdict::{LaterAttempt, Problem, RecordFile, Report};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// A live view keeps at most this many newest operations of a record, and all from its oldest pending one on: enough
/// for every view and for the analysis. With this limit, the cost of a poll does not depend on the size of the rings.
pub const NEWEST: usize = 1_024;

/// A source of records that is polled repeatedly. It is not shared: each source has its own thread.
pub trait Source: Send {
    /// A short description of the source, like `rings of job llama in /dev/shm/rcomm-0`.
    fn name(&self) -> String;

    /// Reads all records once. A rank that does not answer is an observation, not an error.
    ///
    /// # Blocking
    ///
    /// At most until `deadline`, unless the source states something else.
    ///
    /// # Errors
    ///
    /// [`SourceError`] if no record could be read at all.
    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError>;

    /// Whether further polls never return anything new, as for a folder of dumps.
    fn is_static(&self) -> bool {
        false
    }
}

/// The result of one poll of a source.
#[derive(Debug, Default)]
pub struct Poll {
    /// One for every record that the source knows, changed or not.
    pub observations: Vec<Observation>,
    /// Files and answers that could not be used, or only in part.
    pub problems: Vec<Problem>,
    /// The number of ranks of the job, if the source knows it.
    pub world_size: Option<u32>,
    /// What is known of the files of the changed records, by rank and part.
    pub files: BTreeMap<(Rank, u8), RecordFile>,
    /// The records of launchers on the job's processes.
    pub launches: Vec<LaunchRecord>,
    /// A later attempt of the job, whose processes have no record yet.
    pub later_attempt: Option<LaterAttempt>,
    /// The communication library's reports on its communicators.
    pub communicators: Vec<Communicator>,
    /// A report that another program has made.
    pub collected: Option<Collected>,
    /// See [`SourceStatus::remains`](crate::SourceStatus::remains).
    pub remains: Option<String>,
    /// Whether all earlier observations of this source must be dropped: they belong to another job or an earlier
    /// attempt, or the source now reads records of another kind.
    pub restart: bool,
}

/// The report of a collector on its own records.
#[derive(Clone, Debug)]
pub struct Collected {
    /// The job's name; empty if unknown.
    pub job: String,
    /// The report.
    pub report: Arc<Report>,
    /// Ranks that no longer answer the collector, ascending.
    pub silent: Vec<Rank>,
}

/// One record of a rank in one poll.
#[derive(Debug)]
pub struct Observation {
    /// Rank in the world.
    pub rank: Rank,
    /// The index of the record among those of the rank in one source, from 0: a process may have several recorders,
    /// and a rank several files.
    pub part: u8,
    /// Whether the process of the record is alive.
    pub liveness: Liveness,
    /// The record, or why there is none.
    pub seen: Seen,
}

/// The result of a poll for one record.
#[derive(Debug)]
pub enum Seen {
    /// The record, which has changed since the last poll.
    Changed(Box<Dump>),
    /// The source found no change since the last poll, except that of the heartbeat.
    Unchanged {
        /// When the rank's watchdog last made a round, wall clock, ns since the epoch; 0 if unknown.
        heartbeat_ns: i64,
        /// When the record was read, wall clock, ns since the epoch; 0 if unknown.
        as_of_ns: i64,
    },
    /// There was no answer, for this reason.
    Failed(String),
}

/// Whether the process of a record is alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Liveness {
    /// The source does not know.
    #[default]
    Unknown,
    /// The process is alive.
    Alive,
    /// The process is gone.
    Dead,
}

/// Why a source could not be polled at all.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// There is no record (yet).
    #[error("{what}; {hint}")]
    Nothing {
        /// What is missing, and where.
        what: String,
        /// A hint on how to get a record.
        hint: String,
    },
    /// Input or output failed.
    #[error("failed to read {place}: {source}")]
    Io {
        /// File or address.
        place: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The data that was read is not valid.
    #[error("cannot use {place}: {reason}")]
    Unusable {
        /// File or address.
        place: String,
        /// What is wrong with the data, and what was expected.
        reason: String,
    },
}

/// Whether two dumps have the same operations and groups, and the [same facts](has_same_facts) besides.
fn is_same(last: &Dump, dump: &Dump) -> bool {
    last.entries == dump.entries && last.groups == dump.groups && has_same_facts(last, dump)
}

/// Whether two dumps have the same failures, connections, communicators, steps of reducers, end, exit code, reason,
/// phase, step and number of dropped records. Heartbeats may differ, and so may the waits for a processor: these are
/// counted all the time and matter only for the times of operations, with which they are taken.
fn has_same_facts(last: &Dump, dump: &Dump) -> bool {
    let of_status = |dump: &Dump| {
        let status = dump.status.as_ref();
        status.map(|s| (s.phase.clone(), s.phase_since_ns, s.step, s.dropped, s.exit))
    };
    last.failures == dump.failures
        && last.peers == dump.peers
        && last.nccl_comm_state == dump.nccl_comm_state
        && last.reducer_steps == dump.reducer_steps
        && last.closed_ns == dump.closed_ns
        && last.identity.reason == dump.identity.reason
        && of_status(last) == of_status(dump)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::{Failure, FailureKind, ProcessExit, ProcessorWait, RankStatus};

    #[test]
    fn an_end_and_a_failure_without_a_new_operation_are_changes() {
        let last = Dump::default();
        assert!(is_same(&last, &last.clone()));
        let exited = |exit: Option<ProcessExit>| Dump {
            status: Some(RankStatus {
                exit,
                ..RankStatus::default()
            }),
            ..Dump::default()
        };
        let exit = ProcessExit {
            time_ns: 7,
            code: 3,
        };
        assert!(!is_same(&exited(None), &exited(Some(exit))));
        let waited = Dump {
            processor_wait: Some(ProcessorWait::default()),
            ..Dump::default()
        };
        assert!(is_same(&last, &waited));
        let ended = Dump {
            closed_ns: 7,
            ..Dump::default()
        };
        assert!(!is_same(&last, &ended));
        let failed = Dump {
            failures: vec![Failure::new(FailureKind::Abort, &[0], 0, "loss")],
            ..Dump::default()
        };
        assert!(!is_same(&last, &failed));
    }
}

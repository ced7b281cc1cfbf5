//! Asks ranks to write their dumps.

use super::network::ask_all;
use super::{RingSource, SourceError};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{EndpointAddress, EndpointClient};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A way to request dumps from the ranks of a job.
pub trait DumpRequests: Send + Sync {
    /// Requests a dump from all ranks at once.
    ///
    /// # Blocking
    ///
    /// At most until the deadline.
    ///
    /// # Errors
    ///
    /// If no rank is known, or the rings or the store that show the ranks cannot be read.
    fn ask(&self, deadline: Instant) -> Result<DumpAnswers, SourceError>;
}

/// The answers of ranks to the request for their dumps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DumpAnswers {
    /// Ranks that have written their dump, with its path, ascending.
    pub written: Vec<(Rank, String)>,
    /// Ranks that answered and will write their dump, ascending.
    pub agreed: Vec<Rank>,
    /// Ranks that wrote no dump through an endpoint and were then requested through the job's store, ascending: they
    /// write a dump if they still read the store.
    pub requested: Vec<Rank>,
    /// Ranks that refused or did not answer, with the reason, ascending.
    pub refused: Vec<(Rank, String)>,
}

impl DumpAnswers {
    /// The answers of ranks that return the path of their dump.
    pub(super) fn of_writers(answers: Vec<(Rank, Result<String, String>)>) -> Self {
        let mut sorted = Self::default();
        for (rank, answer) in answers {
            match answer {
                Ok(path) => sorted.written.push((rank, path)),
                Err(reason) => sorted.refused.push((rank, reason)),
            }
        }
        sorted
    }
}

/// Requests dumps from the ranks of a job on this node, at the endpoints next to their rings.
pub struct RingDumps(Mutex<RingSource>);

impl RingDumps {
    /// Requests dumps from the ranks of the job that this source shows.
    pub fn new(source: RingSource) -> Self {
        Self(Mutex::new(source))
    }
}

impl DumpRequests for RingDumps {
    fn ask(&self, deadline: Instant) -> Result<DumpAnswers, SourceError> {
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sockets = source.sockets()?;
        let answers = ask_all(&sockets, |(rank, socket)| {
            let client = EndpointClient::new(EndpointAddress::Unix(socket.clone()), None);
            let written = client.write_dump(deadline).map(|written| written.place);
            (*rank, written.map_err(|error| error.to_string()))
        });
        Ok(DumpAnswers::of_writers(answers))
    }
}

//! Ranks that write their dumps themselves on request.

use super::SourceError;
use rcomm_recorder::model::Rank;
use std::time::Instant;

/// Ranks that can be asked to write their dumps.
pub trait DumpRequests: Send + Sync {
    /// Asks all of them at once.
    ///
    /// # Blocking
    ///
    /// At most until the deadline.
    ///
    /// # Errors
    ///
    /// If no rank is known.
    fn ask(&self, deadline: Instant) -> Result<DumpAnswers, SourceError>;
}

/// What ranks answered to the request to write their dumps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DumpAnswers {
    /// Ranks that have written theirs, and where, ascending.
    pub written: Vec<(Rank, String)>,
    /// Ranks that do it after they answered, ascending.
    pub agreed: Vec<Rank>,
    /// Ranks whose endpoints do not answer and that were asked through the job's store, ascending: they
    /// do it if they still read the store.
    pub requested: Vec<Rank>,
    /// Ranks that do not, or did not answer, with the reason, ascending.
    pub refused: Vec<(Rank, String)>,
}

impl DumpAnswers {
    /// What ranks answered that names the location of their dumps.
    pub(super) fn of_writers(answers: Vec<(Rank, Result<String, String>)>) -> Self {
        let mut all = Self::default();
        for (rank, answer) in answers {
            match answer {
                Ok(place) => all.written.push((rank, place)),
                Err(reason) => all.refused.push((rank, reason)),
            }
        }
        all
    }
}

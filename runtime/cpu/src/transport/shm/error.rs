//! [`ShmExchangeError`], and its meaning as a [`Failure`].

use crate::wait::{Failure, Interrupted};
use rcomm_recorder::model::Rank;
use std::io;

/// Why a phase of an exchange area has failed, or why a group has got no area.
#[derive(Debug)]
pub(crate) enum ShmExchangeError {
    /// The group was stopped; or the deadline passed before rank 0 of the group had claimed the area.
    Interrupted(Interrupted),
    /// The deadline passed in a phase, while this rank of the group was missing.
    Late(usize),
    /// This rank of the group has left it, or its process has ended.
    Gone(usize),
    /// The phase has failed for all ranks, since the rank `first` gave up this phase or an earlier one. `absent` are
    /// the ranks that have not published this phase; empty if an earlier phase was given up.
    GivenUp { first: usize, absent: Vec<usize> },
    /// A system call failed.
    Io(io::Error),
}

impl ShmExchangeError {
    /// Returns the failure for a group whose members have these ranks in the world.
    pub(crate) fn into_failure(self, ranks: &[Rank]) -> Failure {
        match self {
            Self::Interrupted(interruption) => interruption.into(),
            Self::Late(rank) => Failure::Late(vec![ranks[rank]]),
            Self::Gone(rank) => Failure::Gone(ranks[rank], None),
            Self::GivenUp { first, absent } => match ranks.get(first) {
                Some(&rank) => Failure::GivenUp {
                    rank,
                    absent: absent.into_iter().map(|rank| ranks[rank]).collect(),
                },
                // Another rank has written an invalid number into the shared memory.
                None => Failure::Io(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!(
                        "shared memory names group rank {first} as the first to give up, in a group of {} ranks",
                        ranks.len()
                    ),
                )),
            },
            Self::Io(error) => Failure::Io(error),
        }
    }
}

impl From<Interrupted> for ShmExchangeError {
    fn from(interruption: Interrupted) -> Self {
        Self::Interrupted(interruption)
    }
}

impl From<io::Error> for ShmExchangeError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

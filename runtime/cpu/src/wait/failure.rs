//! [`Failure`], the error type inside this crate.

use super::Interrupted;
use rcomm_core::{Error, ErrorKind};
use rcomm_recorder::model::Rank;
use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;

/// Why an operation failed, or a channel could not be opened. Ranks are ranks of the world.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The deadline passed, or the group was stopped.
    Interrupted(Interrupted),
    /// The peer has left the group, its process has ended, or it cannot be reached.
    Gone(Rank, Option<io::Error>),
    /// The operation has failed on all ranks, since `rank` gave up the operation or an earlier one. `absent` had not
    /// arrived at the operation when this rank learned of it; empty if an earlier operation was given up, or if they
    /// are not known.
    GivenUp { rank: Rank, absent: Vec<Rank> },
    /// The process at the peer's address refused the connection, or is not the peer.
    Refused {
        peer: Rank,
        address: SocketAddr,
        kind: ErrorKind,
        reason: Cow<'static, str>,
    },
    /// The peer's entry in the store is not a list of addresses.
    Address { peer: Rank, text: String },
    /// The deadline passed, and these ranks had not answered.
    Late(Vec<Rank>),
    /// This rank's own operation or buffers are not valid.
    Argument(Error),
    /// The peer sent bytes that violate the protocol; the text says what they are.
    Garbled(Rank, String),
    /// The headers of the ranks are exchanged in slots with space for `most` counts, and this operation has more.
    TooManyCounts { counts: usize, most: usize },
    /// The ranks do not agree on the operation.
    Mismatch(Rank, String),
    /// The store failed.
    Store(Error),
    /// A system call failed, memory of another rank is not what that rank described, or shared memory holds
    /// what a rank that follows the protocol does not write.
    Io(io::Error),
    /// The mesh was closed.
    Closed,
}

impl Failure {
    /// The failure of a wait for this peer alone.
    pub(crate) fn of_wait_for(peer: Rank, interruption: Interrupted) -> Self {
        match interruption {
            Interrupted::TimedOut => Self::Late(vec![peer]),
            Interrupted::Stopped(_) => interruption.into(),
        }
    }

    /// The failure if ranks of this host agree on the operation, but are in different phases of it. It names no rank:
    /// which of them is wrong is unknown.
    pub(crate) fn different_phases() -> Self {
        let message = "ranks of this host are in different phases of one operation";
        Self::Io(io::Error::new(io::ErrorKind::InvalidData, message))
    }
}

impl From<Interrupted> for Failure {
    fn from(interrupted: Interrupted) -> Self {
        Self::Interrupted(interrupted)
    }
}

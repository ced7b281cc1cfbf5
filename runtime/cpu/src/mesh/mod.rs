//! How the ranks of a world find and reach each other: one mesh for each rank, shared by its groups.
//!
//! Every rank listens on a port of each of its addresses, mostly one, and writes them to `cpu/addr/<rank>` in the
//! store, separated by commas. Connections are made when they are first needed. A *channel* is the connection, of one
//! or several sockets, for one group, one kind of traffic and one pair of ranks, so that no group's bytes block
//! another's. The higher rank dials, and the lower one accepts. A connection without the job's secret is refused and
//! counted (see [`handshake`](crate::mesh::handshake)).
//!
//! The thread `rcomm/mesh` answers callers. It does not use a channel after the handshake. The rank that gives out its
//! host's memory starts it at once. Any other rank starts it when it first waits for a caller, or else a moment after
//! the start of its world, since the thread would take time from the ranks that start.

pub(crate) mod address;
mod connections;
pub(crate) mod handshake;
pub(crate) mod host;
pub(crate) mod layout;
pub(crate) mod links;
mod listener;
mod shortage;
mod shortcut;

pub(super) use connections::{ChannelRequest, Mesh};

use rcomm_recorder::model::Rank;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Keys and values that a rank publishes in the world's store, so that others find the rank.
pub(crate) type KeysToPublish = Vec<(String, Vec<u8>)>;

/// The result of a check whether a peer still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerState {
    /// The peer has dropped its mesh, or its process has ended: it closed a connection, or nothing listens at its
    /// address.
    Gone,
    /// The peer has answered just now.
    Runs,
    /// The check showed neither.
    Unknown,
}

/// The key of a rank's addresses in the store.
fn address_key(rank: Rank) -> String {
    format!("cpu/addr/{rank}")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut bytes[filled..], flags)?;
    }
    Ok(())
}

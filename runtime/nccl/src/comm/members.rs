//! The ranks that form a communicator.

use rcomm_core::store::Store;
use rcomm_recorder::model::Rank;
use std::sync::Arc;

/// The scope of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The communicator has all members of the group, with the same ranks as in the group.
    Group,
    /// The communicator has two members of the group, which send each other single messages.
    Pair,
}

/// The ranks that are to join, and the store for their rendezvous.
pub(crate) struct BootstrapGroup {
    pub(crate) scope: Scope,
    /// The store, with a key prefix for this one communicator.
    pub(crate) store: Arc<dyn Store>,
    /// The members' ranks in the world, in the order of their ranks in the communicator.
    pub(crate) ranks: Vec<Rank>,
    /// This rank's index in `ranks`.
    pub(crate) own_index: u32,
    /// The communicator's name in the library's logs.
    pub(crate) name: String,
}

//! Which ranks form a communicator.

use rcomm_core::store::Store;
use rcomm_recorder::model::Rank;
use std::sync::Arc;

/// Whose communicator it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All members of the group, under their ranks there.
    Group,
    /// Two of them: the sender and the receiver.
    Pair,
}

/// The ranks that are to join, and the store through which they meet.
pub(crate) struct BootstrapGroup {
    pub(crate) scope: Scope,
    /// Prefixed for this one communicator.
    pub(crate) store: Arc<dyn Store>,
    /// The members' ranks in the world, in the order of their ranks in the communicator.
    pub(crate) ranks: Vec<Rank>,
    /// This rank's place among them.
    pub(crate) own: u32,
    /// What the library's logs call the communicator.
    pub(crate) name: String,
}

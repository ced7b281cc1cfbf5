//! [`GroupMaker`]: the interface by which a group has its world make another group of its members.

use crate::backend::{Backend, GroupContext};
use crate::group::process_group::{Group, ProcessGroup};
use crate::op::deadline::Deadline;
use crate::op::error::{ErrorKind, Result};
use crate::op::hints::Hints;
use crate::store::Store;
use rcomm_recorder::model::Rank;
use std::sync::Arc;
use std::time::Duration;

/// Makes groups, and gives access to the store, through which their members agree.
pub(crate) trait GroupMaker: Send + Sync {
    /// Makes a group of these ranks of the world.
    ///
    /// # Errors
    /// Those of [`World::new_group`](crate::World::new_group).
    fn new_group(
        self: Arc<Self>,
        ranks: &[Rank],
        options: &GroupOptions,
        origin: Origin<'_>,
    ) -> Result<ProcessGroup>;

    /// Takes part in a split of the group `parent` as a member that is in none of the new groups.
    ///
    /// # Errors
    /// `InvalidArgument` if the options name an unknown backend; otherwise the error of a backend.
    fn decline_split(&self, parent: &Group, options: &GroupOptions) -> Result<()>;

    /// The store, with a prefix for the group with this wire id.
    fn group_store(&self, wire_id: u64) -> Arc<dyn Store>;
}

/// Options of a new group.
#[derive(Clone, Debug, Default)]
pub struct GroupOptions {
    /// The purpose of the group (`dp`, `tp`, `pp`); records and errors show it.
    pub desc: String,
    /// The time-out of the group's operations; if `None`, that of the world.
    pub timeout: Option<Duration>,
    /// The group's backends, in the form of [`Config::backend`](crate::Config::backend); if `None`, those of the world.
    pub backend: Option<String>,
    /// Hints for the backends when they connect, and for calls that are given no others. Ranks may give different ones.
    pub hints: Hints,
}

impl GroupOptions {
    /// Options of a group with this purpose, and with the time-out and the backends of the world.
    pub fn named(desc: impl Into<String>) -> Self {
        Self {
            desc: desc.into(),
            ..Self::default()
        }
    }
}

/// The group, if any, that a new group is made from. Its backends may make those of the new group at less cost than new
/// connections.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// No other group.
    New,
    /// This group, of which some members form the new one. It stays open.
    Split(&'a Group),
    /// This group, of which the remaining members form the new one. It may have been aborted.
    Shrink(&'a Group),
}

impl Origin<'_> {
    /// The backend `name` of the new group, made from that of the old group; `None` if it must be connected again.
    ///
    /// # Errors
    /// Those of the old group's backend but `Unsupported`.
    pub(crate) fn derive(
        self,
        name: &str,
        context: &GroupContext,
        deadline: Deadline,
    ) -> Result<Option<Arc<dyn Backend>>> {
        let made = match self {
            Self::New => return Ok(None),
            Self::Split(parent) => match parent.backend(name) {
                Some(backend) => backend.split(context, deadline),
                None => return Ok(None),
            },
            Self::Shrink(parent) => match parent.backend(name) {
                Some(backend) => backend.shrink(context, deadline),
                None => return Ok(None),
            },
        };
        match made {
            Ok(backend) => Ok(Some(backend)),
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(None),
            Err(error) => Err(error),
        }
    }
}

//! [`GroupMaker`]: the interface by which a group asks its world to make another group of its members.

use crate::backend::{Backend, GroupContext};
use crate::group::process_group::{Group, ProcessGroup};
use crate::op::deadline::Deadline;
use crate::op::error::{ErrorKind, Result};
use crate::store::Store;
use rcomm_recorder::model::Rank;
use std::sync::Arc;
use std::time::Duration;

/// Makes groups, and gives access to the store through which members agree.
pub(crate) trait GroupMaker: Send + Sync {
    /// Makes a group of these ranks of the world.
    ///
    /// # Errors
    /// As [`World::new_group`](crate::World::new_group).
    fn new_group(
        self: Arc<Self>,
        ranks: &[Rank],
        options: &GroupOptions,
        origin: Origin<'_>,
    ) -> Result<ProcessGroup>;

    /// Takes part in a split of this group as a member of no part of it.
    fn decline_split(&self, parent: &Group, options: &GroupOptions) -> Result<()>;

    /// The store, with a prefix for the group of this wire id.
    fn notes(&self, wire_id: u64) -> Arc<dyn Store>;
}

/// Options of a new group.
#[derive(Clone, Debug, Default)]
pub struct GroupOptions {
    /// The purpose of the group (`dp`, `tp`, `pp`); records and errors show it.
    pub desc: String,
    /// How long its operations may take; `None` = as the world's.
    pub timeout: Option<Duration>,
    /// Its backends, in the form of [`Config::backend`](crate::Config::backend); `None` = as the world's.
    pub backend: Option<String>,
}

impl GroupOptions {
    /// A group for this purpose, otherwise like the world.
    pub fn named(desc: impl Into<String>) -> Self {
        Self {
            desc: desc.into(),
            ..Self::default()
        }
    }
}

/// The group that a new group is made from, if any: a backend may then have a cheaper way than connecting
/// anew.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// Nothing.
    New,
    /// Some members of this group, which stays open.
    Split(&'a Group),
    /// The members that are left of this group, which was aborted.
    Shrink(&'a Group),
}

impl Origin<'_> {
    /// The new group's backend, made by the old group's; `None` if it must be connected anew.
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

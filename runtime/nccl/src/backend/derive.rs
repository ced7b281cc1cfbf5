//! Makes groups from groups: the parts of a split with `ncclCommSplit`, and a smaller group of the remaining ranks with
//! `ncclCommShrink`.
//!
//! All ranks of the group must take part in a split, and all remaining ranks in a shrink. The ranks exchange values
//! over the store, so that a rank that times out can name the ranks that did not arrive. If the library lacks the
//! function, the group refuses, and the caller connects the new group from scratch.

use super::NcclBackend;
use crate::comm::init::{CommInit, InitParams, WarmUp};
use crate::comm::store_exchange::StoreExchange;
use crate::comm::{Comm, CommStatus};
use crate::context::Shared;
use crate::library::hash;
use crate::library::sys::{SHRINK_ABORT, SHRINK_DEFAULT};
use crate::queue::{CommQueue, QueueParts};
use rcomm_core::Deadline;
use rcomm_core::backend::{Backend, GroupContext};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::Rank;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The parts of a new group's backend, without its communicator.
struct NewQueue {
    shared: Arc<Shared>,
    parts: QueueParts,
}

impl NewQueue {
    /// Makes the parts for a group that is derived from the one with the state `parent`.
    ///
    /// # Errors
    /// Same as [`QueueParts::make`].
    fn make(parent: &Shared) -> Result<Self> {
        let shared = parent.sibling();
        let parts = QueueParts::make(&shared)?;
        Ok(Self { shared, parts })
    }

    fn warm_up(&self) -> Option<WarmUp> {
        self.parts.warm_up(&self.shared)
    }
}

impl NcclBackend {
    /// Takes part in a split of this group: as a member of `group`, or of no part if `None`. Returns the backend of
    /// `group`; `None` if the rank is in no part.
    ///
    /// # Blocking
    /// Until all ranks of this group take part, or the deadline.
    ///
    /// # Errors
    /// `Unsupported` if the library cannot split; `Timeout` names the ranks that did not arrive; those of the queue and
    /// of the store.
    pub(crate) fn derive_by_split(
        &self,
        group: Option<&GroupContext>,
        deadline: Deadline,
    ) -> Result<Option<Arc<dyn Backend>>> {
        let shared = &self.shared;
        if shared.library.table().comm_split.is_none() {
            return Err(shared.library.lacks("a split of a group", "ncclCommSplit"));
        }
        let deadline = deadline.started();
        self.main.join(deadline, shared.report_time)?;
        // The library requires that nothing is pending on the communicator.
        self.main.drain(deadline)?;
        let new = group.map(|_| NewQueue::make(shared)).transpose()?;
        let warm_up = new.as_ref().and_then(NewQueue::warm_up);
        let nth = self.splits.fetch_add(1, Ordering::Relaxed);
        let exchange = StoreExchange::new(&self.group, format!("split/{nth}"));
        exchange.arrive(deadline)?;
        // Groups of one split have no member in common, so their first members distinguish them.
        let color = group
            .map(|group| self.rank_here(group.info.ranks[0]))
            .transpose()?;
        let params = params_for(group);
        let begin = |comm: &Arc<Comm>| {
            let options = &shared.options.comm;
            CommInit::split(
                &shared.library,
                &shared.device,
                comm,
                (color, params),
                warm_up,
                options,
            )
        };
        let made = self
            .main
            .derive(begin, deadline)
            .map_err(|error| match error.kind() {
                ErrorKind::Timeout => error.with_more(&format!(
                    "did not arrive at the split of the group: {}",
                    exchange.not_arrived()
                )),
                _ => error,
            })?;
        exchange.remove_arrivals();
        match (made, group.zip(new), color) {
            (Some(comm), Some((group, new)), Some(color)) => {
                let made = (comm, (nth as u32 + 1, color));
                self.adopt(new, made, group, deadline).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Makes the backend of the remaining ranks, if all of them can shrink.
    ///
    /// # Blocking
    /// Until all remaining ranks take part, or the deadline.
    ///
    /// # Errors
    /// `Unsupported`, on all remaining ranks, if the library of one of them cannot shrink, if a communicator cannot be
    /// shrunk any more, if no rank is left out, or if the new group changes the order of ranks.
    /// `InvalidArgument` if a rank of `group` is not in this group; `Timeout` names the ranks that did not arrive.
    pub(crate) fn derive_by_shrink(
        &self,
        group: &GroupContext,
        deadline: Deadline,
    ) -> Result<Arc<dyn Backend>> {
        let shared = &self.shared;
        let deadline = deadline.started();
        let remaining: Result<Vec<u32>> = group
            .info
            .ranks
            .iter()
            .map(|&rank| self.rank_here(rank))
            .collect();
        let remaining = remaining?;
        let excluded: Vec<u32> = (0..self.group.size())
            .filter(|rank| !remaining.contains(rank))
            .collect();
        // A rank whose device has no more streams or memory cannot shrink.
        let new = NewQueue::make(shared);
        let can_shrink = new.is_ok()
            && shared.library.table().comm_shrink.is_some()
            && remaining.is_sorted()
            && !excluded.is_empty()
            && self.wait_for_abort(deadline)
            // After a connection error no communicator can be made from it (`ncclCommEnsureReady`).
            && self.main.comm().is_some_and(|comm| matches!(comm.status(), CommStatus::Ready));
        if !agree(group, can_shrink, deadline)? {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "not all remaining ranks have a communicator that can be shrunk",
            ));
        }
        let new = new?;
        let warm_up = new.warm_up();
        // An abort has already stopped the pending work.
        let is_stopped =
            shared.aborted.get().is_some() && shared.options.error_handling.cleans_up();
        let flags = if is_stopped {
            SHRINK_DEFAULT
        } else {
            SHRINK_ABORT
        };
        let params = params_for(Some(group));
        let begin = |comm: &Arc<Comm>| {
            let options = &shared.options.comm;
            let call = (&excluded[..], params, flags);
            CommInit::shrink(
                &shared.library,
                &shared.device,
                comm,
                call,
                warm_up,
                options,
            )
        };
        let made = self.main.derive(begin, deadline).map_err(|error| {
            error.with_more("while ncclCommShrink made a communicator of the remaining ranks")
        })?;
        let Some(comm) = made else {
            let message = "ncclCommShrink returned no communicator for a remaining rank";
            return Err(Error::new(ErrorKind::Backend, message));
        };
        // NCCL counts no shrinks: the number and the color of a shrunk communicator are 0.
        self.adopt(new, (comm, (0, 0)), group, deadline)
    }

    /// Makes the backend of a new group once the broadcast that connects its rings has ended on the device. Until then,
    /// the broadcast's kernel holds room on the device, for which operations of other groups may wait on other ranks.
    fn adopt(
        &self,
        NewQueue { shared, parts }: NewQueue,
        (comm, number_and_color): (Comm, (u32, u32)),
        group: &GroupContext,
        deadline: Deadline,
    ) -> Result<Arc<dyn Backend>> {
        let hash = comm.stated_hash().unwrap_or_else(|| {
            let parent = self.main.hash().unwrap_or_default();
            hash::of_child(shared.library.version(), parent, number_and_color)
        });
        let queue = CommQueue::from_comm(&shared, parts, comm, hash);
        queue
            .drain(deadline)
            .map_err(|error| error.with_more("while the rings of the new group were connected"))?;
        Ok(Self::new(group.clone(), shared, queue))
    }

    /// Converts a rank of the world to a rank of this group.
    fn rank_here(&self, rank: Rank) -> Result<u32> {
        self.group.info.group_rank_of(rank).ok_or_else(|| {
            let message = format!("rank {rank} is not a member of the parent group");
            Error::new(ErrorKind::InvalidArgument, message)
        })
    }
}

/// Returns the parameters of this rank in the new group. For a rank that is not in the group, they have no meaning.
fn params_for(group: Option<&GroupContext>) -> InitParams {
    InitParams {
        ids: Vec::new(),
        rank: group.map_or(0, |group| group.group_rank),
        size: group.map_or(0, GroupContext::size),
        name: group.map_or_else(String::new, |group| group.info.name.clone()),
    }
}

/// Returns whether all members of the new group can shrink.
fn agree(group: &GroupContext, can_shrink: bool, deadline: Deadline) -> Result<bool> {
    let exchange = StoreExchange::new(group, "shrink".to_owned());
    exchange.publish("can", if can_shrink { b"1" } else { b"0" }, deadline)?;
    let answers = exchange.gather("can", deadline)?;
    Ok(answers.iter().all(|answer| answer == b"1"))
}

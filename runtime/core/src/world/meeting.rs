//! [`MergeMeeting`]: where groups that are to be merged find each other in a store.

use crate::group::agreement::{EXTRA_TIME, REMOVAL_TIME};
use crate::group::process_group::ProcessGroup;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{Store, StoreQuery, raise};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The beginning of the result if a member has reached its deadline before all groups had come.
const GIVEN_UP: &str = "given up\n";
/// The most merges whose keys the last member to leave one removes: of that one, and of those before it that were given
/// up.
const SWEPT_ROUNDS: i64 = 64;

/// The key of the entries of the groups that have come.
const LIST: &str = "list";
/// The key of the number of members of these groups.
const COUNT: &str = "count";
/// The key of the result.
const WHOLE: &str = "whole";
/// The key of how many members have read the result.
const READ: &str = "read";

/// One of the merges for a purpose at a store. They are numbered from 1.
#[derive(Clone)]
pub(super) struct MergeMeeting {
    pub(super) store: Arc<dyn Store>,
    pub(super) purpose: String,
    pub(super) round: i64,
}

/// How a call for a merge ended.
pub(super) enum Met {
    /// All groups have come, with these entries.
    All(Vec<String>),
    /// A member reached its deadline. `arrived` holds the entries of the groups whose rank 0 had come by then.
    Late { error: Error, arrived: Vec<String> },
    /// The merge was complete without this group, and all its members have left it.
    Over,
}

/// A member of a group that is to be merged.
#[derive(Clone, Copy)]
pub(super) struct Member {
    /// The rank in the group.
    pub(super) rank: u32,
    group_size: u32,
    deadline: Instant,
}

impl Member {
    /// The caller, whose time-out counts from now.
    pub(super) fn of(group: &ProcessGroup) -> Self {
        Self {
            rank: group.rank(),
            group_size: group.size(),
            deadline: Deadline::In(group.timeout()).start(),
        }
    }

    /// How long this member may still wait for others.
    pub(super) fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Runs `meet`. Returns at most [`EXTRA_TIME`] after the deadline, whatever the store's own time-out is.
    ///
    /// # Errors
    /// Those of `meet`; `Timeout` if the store does not reply.
    pub(super) fn meet<T: Send + 'static>(
        &self,
        store: &Arc<dyn Store>,
        meet: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let limit = self.time_left().saturating_add(EXTRA_TIME);
        StoreQuery::within(store, limit, move |_| meet())
    }
}

impl MergeMeeting {
    /// The prefix of the keys of this merge.
    pub(super) fn prefix(&self) -> String {
        self.prefix_of(self.round)
    }

    fn prefix_of(&self, round: i64) -> String {
        format!("merge/{}/{round}", self.purpose)
    }

    fn key(&self, part: &str) -> String {
        format!("{}/{part}", self.prefix())
    }

    /// Publishes this group's entry, a text of one line, and returns the entries of all groups once these groups have
    /// `size` members together. The entries are in the order in which the rank 0 of each group called this. All members
    /// call this. The first that reaches its deadline gives the merge up for all, also for groups that come later.
    pub(super) fn hold(&self, member: Member, entry: &str, size: u32) -> Result<Met> {
        let store = &*self.store;
        let whole = self.key(WHOLE);
        if member.rank == 0 {
            let list = self.key(LIST);
            store.append(&list, format!("{entry}\n").as_bytes())?;
            // Each group adds its entry before it is counted, so the last one finds all of them.
            if store.add(&self.key(COUNT), member.group_size.into())? >= size.into()
                && let Some(entries) = peek(store, &list)?
            {
                store.compare_set(&whole, b"", &entries)?;
            }
        }
        // Only a group that is not in the merge can find that its members have left it. Then no other rank reads what
        // this group's rank 0 has just written.
        if self.is_swept()? {
            if member.rank == 0 {
                self.remove(self.round)?;
            }
            return Ok(Met::Over);
        }
        let (result, error) = match store.get(&whole, member.time_left()) {
            Ok(result) => {
                let message = "the merge was given up before all groups had come";
                (result, Error::new(ErrorKind::Timeout, message))
            }
            Err(error) if error.kind() == ErrorKind::Timeout => {
                if self.is_swept()? {
                    return Ok(Met::Over);
                }
                let arrived = peek(store, &self.key(LIST))?.unwrap_or_default();
                let given_up = [GIVEN_UP.as_bytes(), &arrived].concat();
                (store.compare_set(&whole, b"", &given_up)?, error)
            }
            Err(error) => return Err(error),
        };
        let result = String::from_utf8_lossy(&result);
        let lines = |text: &str| text.lines().map(str::to_owned).collect();
        Ok(match result.strip_prefix(GIVEN_UP) {
            None => Met::All(lines(&result)),
            Some(arrived) => Met::Late {
                error,
                arrived: lines(arrived),
            },
        })
    }

    /// Notes that this member has read the result, which has this many members. The last one removes the keys of this
    /// merge, and of those before it that were given up: all members of this one have left them.
    pub(super) fn leave(&self, members: usize) {
        let meeting = self.clone();
        let remove = move |store: &dyn Store| {
            let read = store.add(&meeting.key(READ), 1)?;
            if usize::try_from(read).is_ok_and(|read| read < members) {
                return Ok(());
            }
            let before = raise(store, &meeting.swept(), meeting.round)?;
            let first = before.max(meeting.round.saturating_sub(SWEPT_ROUNDS));
            (first.saturating_add(1)..=meeting.round).try_for_each(|round| meeting.remove(round))
        };
        // The groups are merged in any case: at worst the store keeps keys.
        if let Err(error) = StoreQuery::within(&self.store, REMOVAL_TIME, remove) {
            tracing::debug!(%error, purpose = self.purpose, "cannot remove the keys of a merge");
        }
    }

    /// Whether a member has reached its deadline before all groups had come.
    pub(super) fn is_given_up(&self) -> Result<bool> {
        let result = peek(&*self.store, &self.key(WHOLE))?;
        Ok(result.is_some_and(|result| result.starts_with(GIVEN_UP.as_bytes())))
    }

    fn is_swept(&self) -> Result<bool> {
        Ok(self.store.add(&self.swept(), 0)? >= self.round)
    }

    /// The key of the newest merge whose members have all left it. It is written before keys are removed, so that a
    /// group that does not find them knows why.
    fn swept(&self) -> String {
        format!("merge/{}/swept", self.purpose)
    }

    fn remove(&self, round: i64) -> Result<()> {
        let prefix = self.prefix_of(round);
        [LIST, COUNT, WHOLE, READ]
            .iter()
            .try_for_each(|part| self.store.delete(&format!("{prefix}/{part}")).map(drop))
    }
}

/// The value of a key, without waiting for it; `None` if there is no such key. No key that this reads has a single zero
/// byte as its value.
fn peek(store: &dyn Store, key: &str) -> Result<Option<Vec<u8>>> {
    let held = store.compare_set(key, &[0], &[0])?;
    Ok((held != [0]).then_some(held))
}

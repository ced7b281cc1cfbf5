//! [`MergeMeeting`]: where groups that are to be merged find each other in a store.

use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{Store, raise};

/// The beginning of the result if a member has reached its deadline before all groups had come.
const GIVEN_UP: &str = "given up\n";
/// The most merges that were given up whose keys are removed together with those of the next one that was complete.
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
pub(super) struct MergeMeeting<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) purpose: &'a str,
    pub(super) round: i64,
}

/// Groups that are to be merged did not find each other.
pub(super) enum Missed {
    /// A member reached its deadline. With the entries of the groups whose rank 0 had come.
    Late { error: Error, arrived: Vec<String> },
    /// The merge was complete without this group, and all its members have left it.
    Over,
    /// The store failed.
    Failed(Error),
}

impl From<Error> for Missed {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl MergeMeeting<'_> {
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
    pub(super) fn hold(
        &self,
        group: &ProcessGroup,
        entry: &str,
        size: u32,
    ) -> std::result::Result<Vec<String>, Missed> {
        let store = self.store;
        let whole = self.key(WHOLE);
        if group.rank() == 0 {
            let list = self.key(LIST);
            store.append(&list, format!("{entry}\n").as_bytes())?;
            // Each group adds its entry before it is counted, so the last one finds all of them.
            if store.add(&self.key(COUNT), group.size().into())? >= size.into()
                && let Some(entries) = peek(store, &list)?
            {
                store.compare_set(&whole, b"", &entries)?;
            }
        }
        // Only a group that is not in the merge can find that its members have left it. What rank 0 has just written is
        // nothing that another one reads then.
        if self.is_swept()? {
            if group.rank() == 0 {
                self.remove(self.round)?;
            }
            return Err(Missed::Over);
        }
        let (result, error) = match store.get(&whole, group.timeout()) {
            Ok(result) => {
                let message = "the merge was given up before all groups had come";
                (result, Error::new(ErrorKind::Timeout, message))
            }
            Err(error) if error.kind() == ErrorKind::Timeout => {
                if self.is_swept()? {
                    return Err(Missed::Over);
                }
                let arrived = peek(store, &self.key(LIST))?.unwrap_or_default();
                let given_up = [GIVEN_UP.as_bytes(), &arrived].concat();
                (store.compare_set(&whole, b"", &given_up)?, error)
            }
            Err(error) => return Err(error.into()),
        };
        let result = String::from_utf8_lossy(&result);
        let lines = |text: &str| text.lines().map(str::to_owned).collect();
        match result.strip_prefix(GIVEN_UP) {
            None => Ok(lines(&result)),
            Some(arrived) => Err(Missed::Late {
                error,
                arrived: lines(arrived),
            }),
        }
    }

    /// Notes that this member has read the result, which has this many members. The last one removes the keys of this
    /// merge, and of those before it that were given up: all members of this one have left them.
    pub(super) fn leave(&self, members: usize) {
        let removed = (|| {
            let read = self.store.add(&self.key(READ), 1)?;
            if usize::try_from(read).is_ok_and(|read| read < members) {
                return Ok(());
            }
            let before = raise(self.store, &self.swept(), self.round)?;
            let first = before.max(self.round.saturating_sub(SWEPT_ROUNDS));
            (first.saturating_add(1)..=self.round).try_for_each(|round| self.remove(round))
        })();
        // The groups are merged in any case: at worst the store keeps keys.
        if let Err(error) = removed {
            let error: Error = error;
            tracing::debug!(%error, purpose = self.purpose, "cannot remove the keys of a merge");
        }
    }

    /// Whether a member has reached its deadline before all groups had come.
    pub(super) fn is_given_up(&self) -> Result<bool> {
        let result = peek(self.store, &self.key(WHOLE))?;
        Ok(result.is_some_and(|result| result.starts_with(GIVEN_UP.as_bytes())))
    }

    fn is_swept(&self) -> Result<bool> {
        Ok(self.store.add(&self.swept(), 0)? >= self.round)
    }

    /// The key of the newest merge whose members have all left it. It is written before keys are removed, so that a group
    /// that does not find them knows why.
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

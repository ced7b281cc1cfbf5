//! [`Rounds`]: which merge for a purpose a call takes part in.

use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{Store, raise};
use crate::world::meeting::{Member, MergeMeeting};
use std::sync::Arc;

/// The merges for one purpose at one store, numbered from 1. A store may outlive the jobs that merge there, so a
/// group's first call does not count from the start: it takes part in the first merge that has not ended.
pub(super) struct Rounds {
    pub(super) store: Arc<dyn Store>,
    pub(super) purpose: String,
    /// The caller.
    pub(super) member: Member,
}

impl Rounds {
    /// The merge of this number.
    pub(super) fn meeting(&self, round: i64) -> MergeMeeting {
        MergeMeeting {
            store: self.store.clone(),
            purpose: self.purpose.clone(),
            round,
        }
    }

    /// The number of this call's merge. `group` names the caller's group at this store, and `rank` is the caller's rank
    /// in its world.
    pub(super) fn next(&self, group: &str, rank: u32) -> Result<i64> {
        // Counted in the store: a group may have been merged for the same purpose at another one.
        let calls = format!("merge/{}/calls/{group}/{rank}", self.purpose);
        let nth = self.store.add(&calls, 1)?;
        Ok(self.ended_before(group, rank)?.saturating_add(nth))
    }

    /// Notes that this merge and all before it have ended, for groups that have not called yet.
    pub(super) fn end(&self, round: i64) -> Result<()> {
        raise(&*self.store, &self.ended(), round).map(drop)
    }

    /// How many merges had ended when the first member of this group first called.
    fn ended_before(&self, group: &str, rank: u32) -> Result<i64> {
        let key = format!("merge/{}/before/{group}", self.purpose);
        let own = match self.store.check(&[&key])? {
            true => None,
            false => {
                let ended = self.store.add(&self.ended(), 0)?;
                let next = self.meeting(ended.saturating_add(1));
                Some((ended, next.is_given_up()?))
            }
        };
        let value = match own {
            None => self.store.get(&key, self.member.time_left())?,
            Some((ended, is_given_up)) => {
                // The rank in the value tells which member was the first.
                let proposal = format!("{ended} {rank}");
                let value = self.store.compare_set(&key, b"", proposal.as_bytes())?;
                // This group learns that the merge was given up, as groups that come late do. If its job is restarted,
                // it finds the same merge again, while the others are at the next one.
                if is_given_up && value == proposal.as_bytes() {
                    self.end(ended.saturating_add(1))?;
                }
                value
            }
        };
        let text = String::from_utf8_lossy(&value);
        let number = text.split(' ').next().and_then(|word| word.parse().ok());
        number.ok_or_else(|| {
            let message = format!("the store holds {text:?} at {key:?}, not a number of merges");
            Error::new(ErrorKind::Store, message)
        })
    }

    fn ended(&self) -> String {
        format!("merge/{}/ended", self.purpose)
    }
}

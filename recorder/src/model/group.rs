//! Ranks and the groups they form.

use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A rank in the world (a global rank). Ranks in a group are plain `u32`.
pub type Rank = u32;

/// The number of a group *in one process*, in the order of creation there.
///
/// Differs between ranks for the same group: never compare it across ranks.
pub type GroupId = u32;

/// A process's rank in a group and the group's size, for a record that does not contain the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupPlace {
    /// The process's rank in the group.
    pub rank: u32,
    /// Number of members of the group.
    pub size: u32,
}

/// One group, as recorded in one process.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessGroupInfo {
    /// The local number; the key of `pg_status` in a dump. [`Self::UNKNOWN_ID`] if not recorded.
    pub id: GroupId,
    /// The name, equal on all members. Two groups may share a name; name and ranks together identify a group.
    pub name: String,
    /// The purpose of the group (`default_pg` for the world, `undefined` if not given).
    pub desc: String,
    /// Global ranks in order of group rank; empty if the record does not contain them. The list is shared, since the
    /// records of a large group's members would otherwise hold one copy per member.
    pub ranks: Arc<[Rank]>,
}

impl ProcessGroupInfo {
    /// Value of a local number that was not recorded.
    pub const UNKNOWN_ID: GroupId = GroupId::MAX;

    /// Returns the group rank of a global rank; `None` if it is not a member.
    pub fn group_rank_of(&self, rank: Rank) -> Option<u32> {
        let index = self.ranks.iter().position(|&member| member == rank)?;
        u32::try_from(index).ok()
    }

    /// Returns the global rank of a group rank; `None` if there is no such member.
    pub fn global_rank_of(&self, group_rank: u32) -> Option<Rank> {
        self.ranks.get(group_rank as usize).copied()
    }
}

//! Groups made from a group: by color, of consecutive ranks, or as listed.

use crate::group::maker::{GroupOptions, Origin};
use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::Rank;

impl ProcessGroup {
    /// Splits this group: its members call this together, and those that name the same `color` form a
    /// new group, ordered by `key`, then by their rank in this group. A member without a color gets `None`.
    ///
    /// # Blocking
    /// As an `all_gather` of this group; then as [`World::new_group`](crate::World::new_group).
    ///
    /// # Errors
    /// Those of [`World::new_group`](crate::World::new_group) and `all_gather`.
    #[track_caller]
    pub fn split(
        &self,
        color: Option<u32>,
        key: i64,
        options: &GroupOptions,
    ) -> Result<Option<ProcessGroup>> {
        let choice = [color.map_or(-1, i64::from), key];
        let mut choices = vec![0i64; 2 * self.size() as usize];
        self.all_gather_single(&choice, &mut choices)?;
        let maker = self.group.maker()?;
        let Some(color) = color else {
            maker.decline_split(&self.group, options)?;
            return Ok(None);
        };
        let mut members: Vec<(i64, u32)> = (0..self.size())
            .zip(choices.chunks_exact(2))
            .filter(|(_, choice)| choice[0] == i64::from(color))
            .map(|(group_rank, choice)| (choice[1], group_rank))
            .collect();
        members.sort_unstable();
        let ranks: Vec<Rank> = members
            .iter()
            .filter_map(|&(_, group_rank)| self.global_rank(group_rank))
            .collect();
        let origin = Origin::Split(&self.group);
        maker.new_group(&ranks, options, origin).map(Some)
    }

    /// Splits this group into groups of `size` members with consecutive ranks, and returns the caller's
    /// group. All members call this with the same size.
    ///
    /// # Blocking
    /// See [`World::new_group`](crate::World::new_group).
    ///
    /// # Errors
    /// `InvalidArgument` if `size` does not divide the size of this group; otherwise as
    /// [`World::new_group`](crate::World::new_group).
    pub fn new_subgroups(&self, size: u32, options: &GroupOptions) -> Result<ProcessGroup> {
        if size == 0 || !self.size().is_multiple_of(size) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{} ranks do not divide into groups of {size}", self.size()),
            )
            .in_group(self.desc()));
        }
        let first = self.rank() / size * size;
        let ranks = &self.ranks()[first as usize..][..size as usize];
        let maker = self.group.maker()?;
        maker.new_group(ranks, options, Origin::Split(&self.group))
    }

    /// Splits this group as listed: each list holds ranks of the world, in the order of the new group.
    /// All members call this with the same lists; a member in no list gets `None`.
    ///
    /// # Blocking
    /// See [`World::new_group`](crate::World::new_group).
    ///
    /// # Errors
    /// `InvalidArgument`, on all callers, if a rank is listed twice or is not a member, or if a list is
    /// empty; otherwise as [`World::new_group`](crate::World::new_group).
    pub fn new_subgroups_by_enumeration(
        &self,
        lists: &[Vec<Rank>],
        options: &GroupOptions,
    ) -> Result<Option<ProcessGroup>> {
        let refuse = |message: String| {
            Err(Error::new(ErrorKind::InvalidArgument, message).in_group(self.desc()))
        };
        let mut seen = Vec::new();
        for (index, list) in lists.iter().enumerate() {
            if list.is_empty() {
                return refuse(format!("list {index} of sub-groups is empty"));
            }
            for &rank in list {
                if self.group_rank(rank).is_none() {
                    return refuse(format!(
                        "rank {rank} in list {index} of sub-groups is not a member"
                    ));
                }
                if seen.contains(&rank) {
                    return refuse(format!("rank {rank} is in the lists of sub-groups twice"));
                }
                seen.push(rank);
            }
        }
        let own_rank = self.ranks()[self.rank() as usize];
        let maker = self.group.maker()?;
        let Some(list) = lists.iter().find(|list| list.contains(&own_rank)) else {
            maker.decline_split(&self.group, options)?;
            return Ok(None);
        };
        let origin = Origin::Split(&self.group);
        maker.new_group(list, options, origin).map(Some)
    }
}

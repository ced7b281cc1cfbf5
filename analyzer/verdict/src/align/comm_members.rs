//! The members of NCCL's communicators: each process records only its own rank in them, so the lists are assembled from
//! all records.

use crate::align::record::Record;
use rcomm_recorder::model::Rank;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// For each group whose records state only their own group rank: the global ranks in order of group rank. The global
/// rank of a member without a record is derived if it is the only such rank of the job, or if the known members lie at
/// equal steps. Groups with contradicting records, or with a member that cannot be derived, are left out.
pub(crate) fn members(records: &[Record], world_size: Option<u32>) -> HashMap<u32, Arc<[Rank]>> {
    let mut groups: HashMap<u32, KnownRanks> = HashMap::new();
    for record in records {
        for local in &record.groups {
            if let Some(place) = local.place {
                let known_ranks = groups.entry(local.group).or_default();
                known_ranks.take(place.rank, place.size, record.rank);
            }
        }
    }
    let read: BTreeSet<Rank> = records.iter().map(|record| record.rank).collect();
    let stated = records
        .iter()
        .filter_map(|record| record.identity.world_size);
    let world = world_size.or(stated.max());
    groups
        .into_iter()
        .filter_map(|(group, known_ranks)| Some((group, known_ranks.members(&read, world)?)))
        .collect()
}

/// What all records state on one group.
#[derive(Default)]
struct KnownRanks {
    /// The number of members; 0 before the first record.
    size: u32,
    /// Global ranks by group rank.
    ranks: HashMap<u32, Rank>,
    /// Whether records contradict each other or a group rank lies outside the size, as with several devices in a
    /// process, or with a record of another run.
    in_doubt: bool,
}

/// No communicator is larger: a larger size in a record is damage.
const MAX_MEMBERS: u32 = 1 << 20;

impl KnownRanks {
    /// Adds what the record of `rank` states.
    fn take(&mut self, group_rank: u32, size: u32, rank: Rank) {
        let known = self.ranks.insert(group_rank, rank);
        let fits =
            group_rank < size && size <= MAX_MEMBERS && (self.size == 0 || self.size == size);
        self.in_doubt |= !fits || known.is_some_and(|other| other != rank);
        self.size = size;
    }

    /// The members in order of group rank; `None` if records contradict each other, or if a member cannot be derived.
    /// `read`: the ranks with a record.
    fn members(&self, read: &BTreeSet<Rank>, world: Option<u32>) -> Option<Arc<[Rank]>> {
        let taken: BTreeSet<Rank> = self.ranks.values().copied().collect();
        if self.in_doubt || taken.len() < self.ranks.len() {
            return None;
        }
        let free: Vec<u32> = (0..self.size)
            .filter(|group_rank| !self.ranks.contains_key(group_rank))
            .collect();
        // A rank whose record does not list the group is not a member.
        let fits = |rank: Rank| {
            !taken.contains(&rank) && !read.contains(&rank) && world.is_none_or(|size| rank < size)
        };
        let mut members: Vec<Option<Rank>> = (0..self.size)
            .map(|group_rank| self.ranks.get(&group_rank).copied())
            .collect();
        let unread: Vec<Rank> = world
            .map(|size| {
                (0..size.min(MAX_MEMBERS))
                    .filter(|&rank| fits(rank))
                    .collect()
            })
            .unwrap_or_default();
        if free.len() == unread.len() && free.len() == 1 {
            members[free[0] as usize] = Some(unread[0]);
        } else if !free.is_empty() {
            let (first, step) = self.progression()?;
            for group_rank in free {
                let rank = first + step * i64::from(group_rank);
                let rank = Rank::try_from(rank).ok().filter(|&rank| fits(rank))?;
                members[group_rank as usize] = Some(rank);
            }
        }
        members.into_iter().collect()
    }

    /// The global rank of group rank 0 and the step from one to the next, if at least three members are known and all
    /// agree.
    fn progression(&self) -> Option<(i64, i64)> {
        let mut known: Vec<(i64, i64)> = self
            .ranks
            .iter()
            .map(|(&group_rank, &rank)| (i64::from(group_rank), i64::from(rank)))
            .collect();
        known.sort_unstable();
        let [(a, x), (b, y), _, ..] = known[..] else {
            return None;
        };
        let step = (y - x).checked_div(b - a)?;
        let first = x - step * a;
        let agree = known
            .iter()
            .all(|&(group_rank, rank)| rank == first + step * group_rank);
        (agree && step != 0).then_some((first, step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known_ranks(size: u32, ranks: &[(u32, Rank)]) -> KnownRanks {
        let mut known_ranks = KnownRanks::default();
        for &(group_rank, rank) in ranks {
            known_ranks.take(group_rank, size, rank);
        }
        known_ranks
    }

    fn members(known_ranks: &KnownRanks, read: &[Rank], world: u32) -> Option<Vec<Rank>> {
        let read = read.iter().copied().collect();
        known_ranks
            .members(&read, Some(world))
            .map(|members| members.to_vec())
    }

    #[test]
    fn group_ranks_give_the_members_in_order() {
        let complete = known_ranks(2, &[(1, 0), (0, 3)]);
        assert_eq!(members(&complete, &[0, 3], 4), Some(vec![3, 0]));
    }

    #[test]
    fn the_only_rank_without_a_record_has_the_only_free_group_rank() {
        let all_but_one = known_ranks(4, &[(0, 0), (1, 1), (3, 3)]);
        assert_eq!(members(&all_but_one, &[0, 1, 3], 4), Some(vec![0, 1, 2, 3]));
        // Two group ranks are free, and four ranks left no record.
        assert_eq!(
            members(&known_ranks(4, &[(0, 0), (1, 2)]), &[0, 2], 6),
            None
        );
    }

    #[test]
    fn members_at_equal_steps_show_those_without_a_record() {
        let steps = known_ranks(5, &[(0, 1), (1, 3), (3, 7)]);
        assert_eq!(members(&steps, &[1, 3, 7], 16), Some(vec![1, 3, 5, 7, 9]));
        // Rank 5 left a record that does not list the group.
        assert_eq!(members(&steps, &[1, 3, 5, 7], 16), None);
        assert_eq!(members(&steps, &[1, 3, 7], 9), None);
    }

    #[test]
    fn contradicting_group_ranks_give_no_members() {
        assert_eq!(
            members(&known_ranks(2, &[(0, 0), (0, 1), (1, 2)]), &[0, 1, 2], 3),
            None
        );
        assert_eq!(members(&known_ranks(2, &[(0, 0), (1, 0)]), &[0], 1), None);
        assert_eq!(
            members(&known_ranks(2, &[(0, 0), (2, 1)]), &[0, 1], 2),
            None
        );
        let mut sizes = known_ranks(2, &[(0, 0)]);
        sizes.take(1, 3, 1);
        assert_eq!(members(&sizes, &[0, 1], 3), None);
    }
}

//! The members of NCCL's communicators: each process knows its own rank in them alone, so they are put together from
//! all records.

use crate::align::record::Record;
use rcomm_recorder::model::Rank;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Of each group whose members its records leave open: global ranks in order of group rank, where the seats that they
/// tell leave no doubt.
pub(crate) fn members(records: &[Record], world_size: Option<u32>) -> HashMap<u32, Arc<[Rank]>> {
    let mut groups: HashMap<u32, Table> = HashMap::new();
    for record in records {
        for local in &record.groups {
            if let Some(place) = local.place {
                let table = groups.entry(local.group).or_default();
                table.take(place.rank, place.size, record.rank);
            }
        }
    }
    let read: BTreeSet<Rank> = records.iter().map(|record| record.rank).collect();
    let told = records
        .iter()
        .filter_map(|record| record.identity.world_size);
    let world = world_size.or(told.max());
    groups
        .into_iter()
        .filter_map(|(group, table)| Some((group, table.members(&read, world)?)))
        .collect()
}

#[derive(Default)]
struct Table {
    size: u32,
    seats: HashMap<u32, Rank>,
    /// Two ranks on one seat, one rank on two, or two sizes: several devices in a process, or another run's record.
    in_doubt: bool,
}

/// Communicators are not larger.
const MOST_MEMBERS: u32 = 1 << 20;

impl Table {
    fn take(&mut self, seat: u32, size: u32, rank: Rank) {
        let known = self.seats.insert(seat, rank);
        let fits = seat < size && size <= MOST_MEMBERS && (self.size == 0 || self.size == size);
        self.in_doubt |= !fits || known.is_some_and(|other| other != rank);
        self.size = size;
    }

    fn members(&self, read: &BTreeSet<Rank>, world: Option<u32>) -> Option<Arc<[Rank]>> {
        let taken: BTreeSet<Rank> = self.seats.values().copied().collect();
        if self.in_doubt || taken.len() < self.seats.len() {
            return None;
        }
        let free: Vec<u32> = (0..self.size)
            .filter(|seat| !self.seats.contains_key(seat))
            .collect();
        // A rank whose record does not list the group is no member of it.
        let fits = |rank: Rank| {
            !taken.contains(&rank) && !read.contains(&rank) && world.is_none_or(|all| rank < all)
        };
        let mut members: Vec<Option<Rank>> = (0..self.size)
            .map(|seat| self.seats.get(&seat).copied())
            .collect();
        let unread: Vec<Rank> = world
            .map(|all| {
                (0..all.min(MOST_MEMBERS))
                    .filter(|&rank| fits(rank))
                    .collect()
            })
            .unwrap_or_default();
        if free.len() == unread.len() && free.len() == 1 {
            members[free[0] as usize] = Some(unread[0]);
        } else if !free.is_empty() {
            let (first, step) = self.progression()?;
            for seat in free {
                let rank = first + step * i64::from(seat);
                let rank = Rank::try_from(rank).ok().filter(|&rank| fits(rank))?;
                members[seat as usize] = Some(rank);
            }
        }
        members.into_iter().collect()
    }

    /// Rank of seat 0 and distance from seat to seat, if at least three members are known and all agree.
    fn progression(&self) -> Option<(i64, i64)> {
        let mut known: Vec<(i64, i64)> = self
            .seats
            .iter()
            .map(|(&seat, &rank)| (i64::from(seat), i64::from(rank)))
            .collect();
        known.sort_unstable();
        let [(a, x), (b, y), _, ..] = known[..] else {
            return None;
        };
        let step = (y - x).checked_div(b - a)?;
        let first = x - step * a;
        let agree = known
            .iter()
            .all(|&(seat, rank)| rank == first + step * seat);
        (agree && step != 0).then_some((first, step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(size: u32, seats: &[(u32, Rank)]) -> Table {
        let mut table = Table::default();
        for &(seat, rank) in seats {
            table.take(seat, size, rank);
        }
        table
    }

    fn members(table: &Table, read: &[Rank], world: u32) -> Option<Vec<Rank>> {
        let read = read.iter().copied().collect();
        table.members(&read, Some(world)).map(|it| it.to_vec())
    }

    #[test]
    fn seats_give_the_members_in_the_order_of_the_communicator() {
        let whole = table(2, &[(1, 0), (0, 3)]);
        assert_eq!(members(&whole, &[0, 3], 4), Some(vec![3, 0]));
    }

    #[test]
    fn the_only_rank_without_a_record_has_the_only_free_seat() {
        let three = table(4, &[(0, 0), (1, 1), (3, 3)]);
        assert_eq!(members(&three, &[0, 1, 3], 4), Some(vec![0, 1, 2, 3]));
        // Ranks 4 and 5 left none either.
        assert_eq!(members(&table(4, &[(0, 0), (1, 2)]), &[0, 2], 6), None);
    }

    #[test]
    fn members_in_steps_tell_those_that_left_no_record() {
        let steps = table(5, &[(0, 1), (1, 3), (3, 7)]);
        assert_eq!(members(&steps, &[1, 3, 7], 16), Some(vec![1, 3, 5, 7, 9]));
        // Rank 5 has left a record, which does not say that it is a member.
        assert_eq!(members(&steps, &[1, 3, 5, 7], 16), None);
        assert_eq!(members(&steps, &[1, 3, 7], 9), None);
    }

    #[test]
    fn seats_that_contradict_each_other_tell_nothing() {
        assert_eq!(
            members(&table(2, &[(0, 0), (0, 1), (1, 2)]), &[0, 1, 2], 3),
            None
        );
        assert_eq!(members(&table(2, &[(0, 0), (1, 0)]), &[0], 1), None);
        assert_eq!(members(&table(2, &[(0, 0), (2, 1)]), &[0, 1], 2), None);
        let mut sizes = table(2, &[(0, 0)]);
        sizes.take(1, 3, 1);
        assert_eq!(members(&sizes, &[0, 1], 3), None);
    }
}

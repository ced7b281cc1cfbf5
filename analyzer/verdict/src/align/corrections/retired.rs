//! Reopens operations that a recorder retired but that cannot have completed.
//!
//! Gloo's own recorder records only that an operation is over, whether it completed or timed out. An operation that is
//! over counts as completed unless the records together show that it cannot have:
//! - a member never issued it, and no other continued for several rounds since,
//! - members issued calls that do not match, or
//! - others wait for a rank whose newest operation it is, and it is the newest of all members or one of them has not
//!   issued it.

use crate::align::{Aligned, GroupIx, Presence, RecordIx, retiring_is_all};
use std::collections::{BTreeSet, HashMap};

impl Aligned<'_> {
    /// Reopens the operations that cannot have completed: those with calls that do not match, and the newest ones of
    /// ranks that others wait for.
    pub(crate) fn reopen(&mut self) {
        for group in 0..self.groups.len() {
            if let Some(misfit) = self.first_difference(group) {
                self.reopen_retired(group, Some(misfit));
            }
        }
        // Reopened operations show which ranks are missed, and that may reopen more. Eight rounds bound the time.
        for _ in 0..8 {
            if !self.reopen_newest() {
                break;
            }
        }
    }

    /// Reopens collectives that need every member and that a member never issued, unless the job continued while the
    /// records were taken. With `misfit`, a number under which the members' calls do not match, reopens from that
    /// number on in any case. Changes only records in which `retired` is the only sign of an end.
    pub(crate) fn reopen_retired(&mut self, group: GroupIx, misfit: Option<u32>) {
        let mut behind: Option<u32> = None;
        for member in 0..self.groups[group].ranks.len() {
            let Some((record, lane)) = self.groups[group].lanes[member] else {
                let rank = self.groups[group].ranks[member];
                let shows_none = |record: RecordIx| {
                    let full_record = &self.records[record];
                    let is_whole = !full_record.wrapped() && !full_record.only_active;
                    is_whole && self.lacks_newest(record).is_none()
                };
                if self.record_in(group, rank).is_some_and(shows_none) {
                    behind = Some(0);
                }
                continue;
            };
            // A record that lacks the newest operations does not show how far its rank came.
            if self.lacks_newest(record).is_some() {
                continue;
            }
            let newest = self.lanes[record][lane].collectives.last();
            let newest = newest.map_or(0, |&position| self.seq(record, position));
            if newest > 0 || !self.records[record].wrapped() {
                behind = Some(behind.map_or(newest, |b| b.min(newest)));
            }
        }
        if misfit.is_none() && self.went_on(group, behind) {
            return;
        }
        let before = misfit.map(|seq| seq.saturating_sub(1));
        let Some(behind) = behind.into_iter().chain(before).min() else {
            return;
        };
        for member in 0..self.groups[group].ranks.len() {
            let Some((record, lane)) = self.groups[group].lanes[member] else {
                continue;
            };
            if !retiring_is_all(self.records[record].recorder) {
                continue;
            }
            let list = &self.lanes[record][lane].collectives;
            let reopened = list.iter().position(|&position| {
                let op = self.op(record, position);
                op.seq > behind && (op.kind.needs_all_members() || misfit == Some(op.seq))
            });
            if let Some(index) = reopened {
                let from = &mut self.lanes[record][lane].pending_from;
                *from = (*from).min(index);
            }
        }
    }

    /// Whether the members' records were taken one after the other while the job ran. That is so if a member continued
    /// for several rounds since an operation that the last one lacks, or if the members ahead of the last one are at
    /// different operations. Members that wait for one rank stop at the same operation, or one apart if the first
    /// time-out ended a member sooner. `behind`: the newest number that every member has issued.
    fn went_on(&self, group: GroupIx, behind: Option<u32>) -> bool {
        if behind.is_some_and(|behind| self.completed_to[group].is_over(behind.saturating_add(1))) {
            return true;
        }
        let lanes = self.groups[group].lanes.iter().flatten();
        let ahead = lanes.filter_map(|&(record, lane)| {
            let lane = &self.lanes[record][lane];
            let newest = self.seq(record, *lane.collectives.last()?);
            let over = lane.pending_from >= lane.collectives.len();
            (over && retiring_is_all(self.records[record].recorder)).then_some(newest)
        });
        let ahead: Vec<u32> = ahead
            .filter(|&newest| behind.is_some_and(|behind| newest > behind))
            .collect();
        match (ahead.iter().min(), ahead.iter().max()) {
            (Some(least), Some(most)) => most - least >= 2,
            _ => false,
        }
    }

    /// The first sequence number under which members issued calls that do not match, and so cannot have completed;
    /// `None` if there is none, or if every record has other signs of an end than `retired`.
    fn first_difference(&self, group: GroupIx) -> Option<u32> {
        let lanes = || self.groups[group].lanes.iter().flatten().copied();
        if !lanes().any(|(record, _)| retiring_is_all(self.records[record].recorder)) {
            return None;
        }
        let mut first: HashMap<u32, u32> = HashMap::new();
        let mut lowest: Option<u32> = None;
        for (record, lane) in lanes() {
            let lane = &self.lanes[record][lane];
            // A coalesced block could be compared only as a whole.
            for &position in lane.collectives.iter().filter(|_| lane.dense) {
                let op = self.op(record, position);
                let known = *first.entry(op.seq).or_insert(op.call);
                if self.shared.calls.difference(known, op.call).is_some() {
                    lowest = Some(lowest.map_or(op.seq, |seq| seq.min(op.seq)));
                }
            }
        }
        lowest
    }

    /// Reopens the newest operation of ranks that others wait for and that seem to wait for nothing, in records in
    /// which `retired` is the only sign of an end. If it is the newest of all members with a record, or if a member has
    /// not issued it, the rank is still in it. Returns whether any was reopened.
    fn reopen_newest(&mut self) -> bool {
        let newest = |record: RecordIx| {
            let op = self.records[record].ops.last()?;
            op.kind
                .is_collective()
                .then_some((usize::from(op.group), op.seq))
        };
        let mut reopened: BTreeSet<(RecordIx, usize, u32)> = BTreeSet::new();
        let idle = self.idle();
        let missed = self.missed();
        for record in idle {
            let Some((lane, seq)) = newest(record) else {
                continue;
            };
            let group = self.lanes[record][lane].group;
            if !missed.contains(&record) {
                continue;
            }
            if self.groups[group].ranks.len() < 2 {
                continue;
            }
            let are_together = self.groups[group].ranks.iter().all(|&rank| {
                let Some(other) = self.record_in(group, rank) else {
                    return true;
                };
                let there = newest(other).map(|(lane, seq)| (self.lanes[other][lane].group, seq));
                self.records[other].cut || there == Some((group, seq))
            });
            if are_together {
                let lanes = self.groups[group].lanes.iter().flatten();
                reopened.extend(lanes.map(|&(record, lane)| (record, lane, seq)));
            } else if self.is_behind(group, seq) {
                reopened.insert((record, lane, seq));
            }
        }
        for &(record, lane, seq) in &reopened {
            if let Ok(index) = self.find(record, &self.lanes[record][lane], seq) {
                let from = &mut self.lanes[record][lane].pending_from;
                *from = (*from).min(index);
            }
        }
        !reopened.is_empty()
    }

    /// Whether a member has not issued this collective of the group, by a record that was neither cut nor taken too
    /// early.
    fn is_behind(&self, group: GroupIx, seq: u32) -> bool {
        let members = &self.groups[group];
        members
            .ranks
            .iter()
            .zip(&members.lanes)
            .any(|(&rank, lane)| {
                let Some(record) = self.record_in(group, rank) else {
                    return false;
                };
                let newest = lane.and_then(|(record, lane)| {
                    let newest = self.lanes[record][lane].collectives.last()?;
                    Some(self.seq(record, *newest))
                });
                let full_record = &self.records[record];
                match newest {
                    _ if self.lacks_newest(record).is_some() => false,
                    Some(newest) => newest < seq,
                    // The ring holds nothing of the group.
                    None if full_record.wrapped() => {
                        self.by_peers(group, record, seq) == Presence::Absent
                    }
                    None => false,
                }
            })
    }

    /// The records in which `retired` is the only sign of an end, and that have no collective pending.
    fn idle(&self) -> Vec<RecordIx> {
        let records = 0..self.records.len();
        records
            .filter(|&record| {
                let mut lanes = self.lanes[record].iter();
                retiring_is_all(self.records[record].recorder)
                    && lanes.all(|lane| lane.pending_from >= lane.collectives.len())
            })
            .collect()
    }

    /// The records of ranks that have not issued the newest collective of a group in which a peer waits.
    fn missed(&self) -> BTreeSet<RecordIx> {
        let mut missed = BTreeSet::new();
        for (index, group) in self.groups.iter().enumerate() {
            let waits_in = group.lanes.iter().flatten().filter_map(|&(record, lane)| {
                let lane = &self.lanes[record][lane];
                let newest = *lane.collectives.last()?;
                (lane.pending_from < lane.collectives.len()).then(|| self.seq(record, newest))
            });
            let Some(waits_in) = waits_in.max() else {
                continue;
            };
            for (member, &rank) in group.ranks.iter().enumerate() {
                let newest = group.lanes[member].and_then(|(record, lane)| {
                    let newest = self.lanes[record][lane].collectives.last()?;
                    Some(self.seq(record, *newest))
                });
                if newest.is_none_or(|newest| newest < waits_in) {
                    missed.extend(self.record_in(index, rank));
                }
            }
        }
        missed
    }
}

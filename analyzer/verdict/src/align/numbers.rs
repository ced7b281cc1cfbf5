//! A summary of what all members of a group recorded under each sequence number.
//!
//! Comparing the members one number after the other reads a little of every record for each number, and the records of
//! a large job do not fit into a processor's caches. Here each record is read once, in order.

use crate::align::record::NONE;
use crate::align::{Aligned, GroupIx, Lane, RecordIx};

/// One sequence number of a group over all members that recorded it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number {
    pub(crate) seq: u32,
    /// The number of members that completed it.
    pub(crate) done: u32,
    /// The number of members that have it pending.
    pub(crate) pending: u32,
    /// Whether all members that recorded it issued one call each, the same one.
    pub(crate) is_alike: bool,
    /// Whether the first calls of all members that completed it are the same.
    pub(crate) is_done_alike: bool,
    /// The first recorded call, or [`NONE`].
    call: u32,
    /// The first completed call, or [`NONE`].
    done_call: u32,
}

/// The sequence numbers of a group, from the oldest to the newest that a member recorded, without gaps.
#[derive(Debug)]
pub(crate) struct Numbers {
    pub(crate) all: Vec<Number>,
    low: u32,
}

impl Numbers {
    /// Summarizes the records of all members of a group. `None` if no member recorded a collective, or if the numbers
    /// span more than the number of entries: then some are damaged, or most are missing.
    pub(crate) fn of(aligned: &Aligned<'_>, group: GroupIx) -> Option<Self> {
        let (low, high) = aligned.recorded_seqs(group)?;
        let lanes = || aligned.groups[group].lanes.iter().flatten();
        let entries: usize = lanes()
            .map(|&(record, lane)| aligned.lanes[record][lane].collectives.len())
            .sum();
        if (high - low) as usize > entries {
            return None;
        }
        let mut numbers = Self {
            all: (low..=high)
                .map(|seq| Number {
                    seq,
                    done: 0,
                    pending: 0,
                    is_alike: true,
                    is_done_alike: true,
                    call: NONE,
                    done_call: NONE,
                })
                .collect(),
            low,
        };
        for &(record, lane) in lanes() {
            numbers.add(aligned, record, &aligned.lanes[record][lane]);
        }
        Some(numbers)
    }

    /// Adds the collectives of one member.
    fn add(&mut self, aligned: &Aligned<'_>, record: RecordIx, lane: &Lane) {
        let mut index = 0;
        while index < lane.collectives.len() {
            let op = aligned.op(record, lane.collectives[index]);
            let next = aligned.block(record, lane, index).end;
            let number = &mut self.all[(op.seq - self.low) as usize];
            if number.call == NONE {
                number.call = op.call;
            }
            number.is_alike &= next == index + 1 && number.call == op.call;
            if index < lane.pending_from {
                if number.done_call == NONE {
                    number.done_call = op.call;
                }
                number.is_done_alike &= number.done_call == op.call;
                number.done += 1;
            } else {
                number.pending += 1;
            }
            index = next;
        }
    }

    /// For each member with a record, the number of its completed collectives for which `counts` holds.
    pub(crate) fn count_done(
        &self,
        aligned: &Aligned<'_>,
        group: GroupIx,
        counts: impl Fn(&Number) -> bool,
    ) -> Vec<(RecordIx, usize)> {
        let mut before = Vec::with_capacity(self.all.len() + 1);
        let mut sum = 0;
        before.push(sum);
        for number in &self.all {
            sum += usize::from(counts(number));
            before.push(sum);
        }
        let count_in = |record: RecordIx, lane: &Lane| {
            let done = &lane.collectives[..lane.pending_from];
            let Some(&first) = done.first() else {
                return 0;
            };
            let index = |position: u32| (aligned.seq(record, position) - self.low) as usize;
            if lane.dense {
                let first = index(first);
                return before[first + done.len()] - before[first];
            }
            let mut indices: Vec<usize> = done.iter().map(|&position| index(position)).collect();
            indices.dedup();
            let counts = indices
                .into_iter()
                .map(|index| before[index + 1] - before[index]);
            counts.sum()
        };
        let lanes = aligned.groups[group].lanes.iter().flatten();
        lanes
            .map(|&(record, lane)| (record, count_in(record, &aligned.lanes[record][lane])))
            .collect()
    }
}

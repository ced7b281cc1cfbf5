//! How far the hosts' clocks are apart, estimated from the collectives themselves.
//!
//! A collective that needs everybody ends on all members at nearly one moment. The median difference of
//! two members' completion times over their newest common collectives is therefore the difference of
//! their clocks, within the time that a recorder takes to notice. Where no completion times are
//! recorded, issue times stand in. From group to group the estimate spreads to all ranks.

use crate::align::{Aligned, GroupIx, RecordIx, needs_everybody, retiring_is_all};
use std::cmp::Reverse;
use std::collections::VecDeque;

/// Newest common collectives that an estimate rests on.
const SAMPLES: usize = 33;

/// Where one record's clock stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offset {
    /// What to take from it to get common time, ns.
    pub(crate) ns: i64,
    /// How far from that it may be, ns: half of what most of the samples span, summed over the way from
    /// the clock that is the common one.
    pub(crate) spread_ns: i64,
}

/// The clock of each record; `None` where no common collective connects it to the others.
pub(crate) fn offsets(aligned: &Aligned<'_>) -> Vec<Option<Offset>> {
    let mut offsets: Vec<Option<Offset>> = vec![None; aligned.records.len()];
    let members = |group: GroupIx| aligned.groups[group].lanes.iter().flatten().count();
    // The clock of a record in the largest group is the common one.
    let largest = (0..aligned.groups.len()).max_by_key(|&group| (members(group), Reverse(group)));
    let Some(start) = largest.and_then(|group| aligned.groups[group].lanes.iter().flatten().next())
    else {
        return offsets;
    };
    offsets[start.0] = Some(Offset::default());
    let mut visited = vec![false; aligned.groups.len()];
    let mut queue = VecDeque::from([start.0]);
    while let Some(record) = queue.pop_front() {
        let lanes = aligned.lanes[record].iter();
        let mut groups: Vec<GroupIx> = lanes
            .map(|lane| lane.group)
            .filter(|&group| !visited[group])
            .collect();
        groups.sort_by_key(|&group| Reverse(members(group)));
        for group in groups {
            visited[group] = true;
            for &(other, _) in aligned.groups[group].lanes.iter().flatten() {
                if offsets[other].is_none()
                    && let Some(base) = offsets[record]
                    && let Some(difference) = difference(aligned, group, record, other)
                {
                    offsets[other] = Some(Offset {
                        ns: base.ns.saturating_add(difference.ns),
                        spread_ns: base.spread_ns.saturating_add(difference.spread_ns),
                    });
                    queue.push_back(other);
                }
            }
        }
    }
    offsets
}

/// `other`'s clock less `one`'s, from their newest common collectives in the group.
fn difference(
    aligned: &Aligned<'_>,
    group: GroupIx,
    one: RecordIx,
    other: RecordIx,
) -> Option<Offset> {
    let lane_of = |record: RecordIx| {
        aligned.lanes[record]
            .iter()
            .find(|lane| lane.group == group)
    };
    let (a, b) = (lane_of(one)?, lane_of(other)?);
    let mut ends = Vec::with_capacity(SAMPLES);
    let mut issues = Vec::with_capacity(SAMPLES);
    for at in (0..a.pending_from).rev() {
        let op = aligned.teller(one, a, at);
        if !needs_everybody(op.kind) {
            continue;
        }
        let Ok(there) = aligned.find(other, b, op.seq) else {
            continue;
        };
        let peer = aligned.teller(other, b, there);
        if let (Some(x), Some(y)) = (op.completed_ns(), peer.completed_ns()) {
            ends.push(y.saturating_sub(x));
        } else if retiring_is_all(aligned.records[one].recorder) {
            issues.push(peer.created_ns.saturating_sub(op.created_ns));
        }
        if ends.len() >= SAMPLES || issues.len() >= SAMPLES {
            break;
        }
    }
    median(ends).or_else(|| median(issues))
}

/// The median, and half of what the middle four fifths span.
fn median(mut values: Vec<i64>) -> Option<Offset> {
    values.sort_unstable();
    let last = values.len().checked_sub(1)?;
    let (low, high) = (values[last / 10], values[last - last / 10]);
    Some(Offset {
        ns: values[values.len() / 2],
        spread_ns: high.saturating_sub(low) / 2,
    })
}

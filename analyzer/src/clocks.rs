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

/// What to take from each record's clock to get the common one, ns; `None` where no common collective
/// connects the record to the others.
pub(crate) fn offsets_ns(aligned: &Aligned<'_>) -> Vec<Option<i64>> {
    let mut offsets: Vec<Option<i64>> = vec![None; aligned.records.len()];
    let members = |group: GroupIx| aligned.groups[group].lanes.iter().flatten().count();
    // The clock of a record in the largest group is the common one.
    let largest = (0..aligned.groups.len()).max_by_key(|&group| (members(group), Reverse(group)));
    let Some(start) = largest.and_then(|group| aligned.groups[group].lanes.iter().flatten().next())
    else {
        return offsets;
    };
    offsets[start.0] = Some(0);
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
                    && let Some(difference) = difference_ns(aligned, group, record, other)
                {
                    offsets[other] = Some(base.saturating_add(difference));
                    queue.push_back(other);
                }
            }
        }
    }
    offsets
}

/// `other`'s clock less `one`'s, ns, from their newest common collectives in the group.
fn difference_ns(
    aligned: &Aligned<'_>,
    group: GroupIx,
    one: RecordIx,
    other: RecordIx,
) -> Option<i64> {
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

fn median(mut values: Vec<i64>) -> Option<i64> {
    if values.is_empty() {
        return None;
    }
    let middle = values.len() / 2;
    let (_, median, _) = values.select_nth_unstable(middle);
    Some(*median)
}

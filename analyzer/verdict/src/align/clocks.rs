//! How far the hosts' clocks are apart, estimated from the collectives themselves.
//!
//! A collective that needs every member ends on all members at nearly one moment. The median
//! difference of
//! two members' completion times over their newest common collectives is therefore the difference of
//! their clocks, within the time that a recorder takes to notice. Where no completion times are
//! recorded, issue times take their place. From group to group the estimate spreads to all ranks.

use crate::align::{Aligned, GroupIx, RecordIx, retiring_is_all};
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};

/// Newest common collectives that an estimate rests on.
const SAMPLES: usize = 33;

/// Fewer samples do not show how far they scatter: the true difference lies outside of them too often.
const LEAST_SAMPLES: usize = 6;

/// Members of a group that are asked for the others' clocks: one ring may be too short to have anything
/// in common with another's.
const MEMBERS_ASKED: usize = 4;

/// The offset of one record's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offset {
    /// What to take from it to get common time, ns.
    pub(crate) ns: i64,
    /// How far from that it may be, ns: half of what most of the samples span, summed over the way from
    /// the clock that is the common one; `None` where they were too few for an estimate.
    pub(crate) spread_ns: Option<i64>,
}

/// The clock of each record; `None` where no common collective connects it to most of the others.
pub(crate) fn offsets(aligned: &Aligned<'_>) -> Vec<Option<Offset>> {
    let records = aligned.records.len();
    let mut offsets: Vec<Option<Offset>> = vec![None; records];
    let mut best: Vec<RecordIx> = Vec::new();
    // A start from a leftover of another run would reach no other clock: the largest circle counts.
    for start in 0..records {
        if offsets[start].is_none() {
            let circle = circle_of(aligned, start, &mut offsets);
            if circle.len() > best.len() {
                best = circle;
            }
        }
        if best.len() * 2 > records {
            break;
        }
    }
    let mut known = vec![None; records];
    for record in best {
        known[record] = offsets[record];
    }
    known
}

/// The records whose clocks common collectives connect to that of `start`, which is their common one.
fn circle_of(
    aligned: &Aligned<'_>,
    start: RecordIx,
    offsets: &mut [Option<Offset>],
) -> Vec<RecordIx> {
    let members = |group: GroupIx| aligned.groups[group].lanes.iter().flatten().count();
    let mut asked: HashMap<GroupIx, usize> = HashMap::new();
    offsets[start] = Some(Offset {
        ns: 0,
        spread_ns: Some(0),
    });
    let mut circle = vec![start];
    let mut queue = VecDeque::from([start]);
    while let Some(record) = queue.pop_front() {
        // The recorders of one process read one clock.
        for sibling in aligned.records_of(aligned.records[record].rank) {
            if offsets[sibling].is_none() {
                offsets[sibling] = offsets[record];
                circle.push(sibling);
                queue.push_back(sibling);
            }
        }
        let lanes = aligned.lanes[record].iter();
        let mut groups: Vec<GroupIx> = lanes
            .map(|lane| lane.group)
            .filter(|group| asked.get(group).is_none_or(|&asked| asked < MEMBERS_ASKED))
            .collect();
        groups.sort_by_key(|&group| Reverse(members(group)));
        for group in groups {
            *asked.entry(group).or_default() += 1;
            for &(other, _) in aligned.groups[group].lanes.iter().flatten() {
                if offsets[other].is_none()
                    && let Some(base) = offsets[record]
                    && let Some(difference) = difference(aligned, group, record, other)
                {
                    offsets[other] = Some(Offset {
                        ns: base.ns.saturating_add(difference.ns),
                        spread_ns: sum(base.spread_ns, difference.spread_ns),
                    });
                    circle.push(other);
                    queue.push_back(other);
                }
            }
        }
    }
    circle
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
        let op = aligned.status_op(one, a, at);
        if !op.kind.needs_all_members() {
            continue;
        }
        let Ok(there) = aligned.find(other, b, op.seq) else {
            continue;
        };
        let peer = aligned.status_op(other, b, there);
        if let (Some(x), Some(y)) = (op.completed_ns(), peer.completed_ns()) {
            ends.push(y.saturating_sub(x));
        } else if retiring_is_all(aligned.records[one].recorder) {
            issues.push(peer.created_ns.saturating_sub(op.created_ns));
        }
        if ends.len() >= SAMPLES || issues.len() >= SAMPLES {
            break;
        }
    }
    offset(ends).or_else(|| offset(issues))
}

/// Both together, where both are known.
pub(crate) fn sum(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    a.zip(b).map(|(a, b)| a.saturating_add(b))
}

/// The median, and half of what the middle four fifths span.
fn offset(mut values: Vec<i64>) -> Option<Offset> {
    values.sort_unstable();
    let last = values.len().checked_sub(1)?;
    let (low, high) = (values[last / 10], values[last - last / 10]);
    Some(Offset {
        ns: values[values.len() / 2],
        spread_ns: (values.len() >= LEAST_SAMPLES).then(|| high.saturating_sub(low) / 2),
    })
}

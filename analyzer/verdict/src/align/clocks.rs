//! How far the hosts' clocks are apart, estimated from the collectives themselves.
//!
//! A collective that needs every member ends on all members at nearly one moment. The difference of two
//! members' completion times, over all of their common collectives, is therefore the difference of their
//! clocks and of the delays with which their recorders noticed. Each delay may be long, a watchdog looks
//! now and then, but the delays of two ranks are alike, so their mean difference tends to the clocks'.
//! How far stretches of the record disagree shows how well it is known. Where no completion times are
//! recorded, issue times take their place. From group to group the estimate spreads to all ranks; ranks
//! of one host have one clock.

use crate::align::{Aligned, GroupIx, RecordIx, retiring_is_all};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Common collectives that an estimate rests on at most, all over the record.
const SAMPLES: usize = 512;

/// Stretches of the record whose means are compared.
const STRETCHES: usize = 16;

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
    /// The standard error of `ns`, summed likewise; `None` where the samples are too few for one.
    pub(crate) error_ns: Option<i64>,
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
    share_hosts(aligned, &mut known);
    known
}

/// Gives the ranks of one host the median of their estimates, as far as these agree.
fn share_hosts(aligned: &Aligned<'_>, offsets: &mut [Option<Offset>]) {
    let mut hosts: BTreeMap<&str, Vec<RecordIx>> = BTreeMap::new();
    for (record, whole) in aligned.records.iter().enumerate() {
        let host = whole.identity.host.as_str();
        if !host.is_empty() && offsets[record].is_some() {
            hosts.entry(host).or_default().push(record);
        }
    }
    for records in hosts.values().filter(|records| records.len() > 1) {
        let all = records.iter().filter_map(|&record| offsets[record]);
        let mut moments: Vec<i64> = all.map(|offset| offset.ns).collect();
        moments.sort_unstable();
        let common = moments[moments.len() / 2];
        let root = (records.len() as f64).sqrt();
        for &record in records {
            if let Some(own) = &mut offsets[record]
                && let (Some(spread), Some(error)) = (own.spread_ns, own.error_ns)
                && own.ns.abs_diff(common) <= spread.unsigned_abs().max(1_000_000)
            {
                own.ns = common;
                own.error_ns = Some((error as f64 / root) as i64);
            }
        }
    }
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
        error_ns: Some(0),
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
                        error_ns: sum(base.error_ns, difference.error_ns),
                    });
                    circle.push(other);
                    queue.push_back(other);
                }
            }
        }
    }
    circle
}

/// `other`'s clock less `one`'s, from their common collectives in the group.
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
    let step = (a.pending_from / SAMPLES).max(1);
    for at in (0..a.pending_from).rev().step_by(step) {
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
    estimate(&ends).or_else(|| estimate(&issues))
}

/// Both together, where both are known.
pub(crate) fn sum(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    a.zip(b).map(|(a, b)| a.saturating_add(b))
}

/// The mean without what lies far out, half of what the middle four fifths span, and how far the mean
/// may be off.
fn estimate(values: &[i64]) -> Option<Offset> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let last = sorted.len().checked_sub(1)?;
    let (low, high) = (sorted[last / 10], sorted[last - last / 10]);
    let median = sorted[sorted.len() / 2];
    if sorted.len() < LEAST_SAMPLES {
        return Some(Offset {
            ns: median,
            spread_ns: None,
            error_ns: None,
        });
    }
    let spread = high.saturating_sub(low) / 2;
    let usual = |value: &i64| value.abs_diff(median) <= 3 * spread.unsigned_abs();
    let mean = |values: &[i64]| {
        let kept = values.iter().filter(|value| usual(value));
        let sum = kept
            .clone()
            .map(|&value| value.saturating_sub(median) as f64);
        let count = kept.clone().count();
        (count > 0).then(|| sum.sum::<f64>() / count as f64)
    };
    let stretch = values.len().div_ceil(STRETCHES);
    let means: Vec<f64> = values.chunks(stretch).filter_map(mean).collect();
    let middle = means.iter().sum::<f64>() / means.len() as f64;
    let squares = means.iter().map(|mean| (mean - middle).powi(2));
    let degrees = (means.len() * means.len().saturating_sub(1)).max(1) as f64;
    Some(Offset {
        ns: median.saturating_add(mean(values).unwrap_or(0.0) as i64),
        spread_ns: Some(spread),
        error_ns: Some((squares.sum::<f64>() / degrees).sqrt() as i64),
    })
}

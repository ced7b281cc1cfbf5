//! Estimates the offsets of the hosts' clocks from the collectives themselves.
//!
//! A collective that needs every member ends on all members at nearly the same moment. The difference of two members'
//! completion times is therefore the difference of their clocks plus that of the delays with which their recorders
//! noticed. A single delay may be long, since a watchdog checks periodically. But the delays of two ranks are
//! distributed alike, so the mean difference over all common collectives approaches that of the clocks. Its error
//! follows from how much the means of stretches of the record differ. For a recorder that records no completion times,
//! issue times are used. The estimate spreads from group to group to all ranks; the ranks of one host share a clock.

use crate::align::record::Record;
use crate::align::{Aligned, GroupIx, RecordIx, retiring_is_all};
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};

/// An estimate uses at most this many common collectives, spread over the record.
const SAMPLES: usize = 512;

/// The samples are divided into at most this many stretches of the record, whose means are compared.
const STRETCHES: usize = 16;

/// With fewer samples their scatter says too little: the true difference too often lies outside it.
const LEAST_SAMPLES: usize = 6;

/// At most this many members of a group are compared with the others. One is not enough: its ring may be too short to
/// have a collective in common with another's.
const MEMBERS_COMPARED: usize = 4;

/// The offset of one record's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offset {
    /// The offset to subtract to get common time, ns.
    pub(crate) ns: i64,
    /// The spread of the samples, ns: half of the range of their middle four fifths, summed over the path from the
    /// reference clock. `None` if the samples are too few.
    pub(crate) spread_ns: Option<i64>,
    /// The standard error of `ns`, summed in the same way; `None` if the samples are too few.
    pub(crate) error_ns: Option<i64>,
}

/// The offset of each record's clock; `None` if no common collective connects it to the largest set of connected
/// clocks.
pub(crate) fn offsets(aligned: &Aligned<'_>) -> Vec<Option<Offset>> {
    let records = aligned.records.len();
    let mut offsets: Vec<Option<Offset>> = vec![None; records];
    let mut best: Vec<RecordIx> = Vec::new();
    // A leftover record of another run connects to no other clock, so the largest set of connected clocks counts.
    for start in 0..records {
        if offsets[start].is_none() {
            let connected = connected_to(aligned, start, &mut offsets);
            if connected.len() > best.len() {
                best = connected;
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

/// Replaces the estimate of a rank with the median of its host's ranks, if it differs from the median by at most the
/// spread of its own values, or 1 ms if that is more. Ranks of one host share a clock, so the error shrinks with the
/// root of their number.
fn share_hosts(aligned: &Aligned<'_>, offsets: &mut [Option<Offset>]) {
    let mut hosts: HashMap<&str, Vec<RecordIx>> = HashMap::new();
    for (record, full_record) in aligned.records.iter().enumerate() {
        let host = full_record.identity.host.as_str();
        if !host.is_empty() && offsets[record].is_some() {
            hosts.entry(host).or_default().push(record);
        }
    }
    for records in hosts.values().filter(|records| records.len() > 1) {
        let estimates = records.iter().filter_map(|&record| offsets[record]);
        let mut sorted_ns: Vec<i64> = estimates.map(|offset| offset.ns).collect();
        sorted_ns.sort_unstable();
        let median_ns = sorted_ns[sorted_ns.len() / 2];
        let root = (records.len() as f64).sqrt();
        for &record in records {
            if let Some(offset) = &mut offsets[record]
                && let (Some(spread), Some(error)) = (offset.spread_ns, offset.error_ns)
                && offset.ns.abs_diff(median_ns) <= spread.unsigned_abs().max(1_000_000)
            {
                offset.ns = median_ns;
                offset.error_ns = Some((error as f64 / root) as i64);
            }
        }
    }
}

/// Gives each record without an offset that of another record of its host: the ranks of a host share a clock. A rank
/// that ended before its first collective has no other way to be compared.
pub(crate) fn take_from_host(records: &[Record], offsets: &mut [Option<Offset>]) {
    let known = |(record, offset): (&Record, &Option<Offset>)| {
        let host = record.identity.host.clone();
        offset
            .filter(|_| !host.is_empty())
            .map(|offset| (host, offset))
    };
    let known: HashMap<String, Offset> = match offsets.iter().any(Option::is_none) {
        true => records.iter().zip(&*offsets).filter_map(known).collect(),
        false => return,
    };
    for (record, offset) in records.iter().zip(offsets) {
        if offset.is_none() {
            *offset = known.get(&record.identity.host).copied();
        }
    }
}

/// The records whose clocks common collectives connect to that of `start`, which becomes the reference clock. Sets
/// their offsets.
fn connected_to(
    aligned: &Aligned<'_>,
    start: RecordIx,
    offsets: &mut [Option<Offset>],
) -> Vec<RecordIx> {
    let members = |group: GroupIx| aligned.groups[group].lanes.iter().flatten().count();
    let mut compared: HashMap<GroupIx, usize> = HashMap::new();
    offsets[start] = Some(Offset {
        ns: 0,
        spread_ns: Some(0),
        error_ns: Some(0),
    });
    let mut connected = vec![start];
    let mut queue = VecDeque::from([start]);
    while let Some(record) = queue.pop_front() {
        // The recorders of one process use one clock.
        for sibling in aligned.records_of(aligned.records[record].rank) {
            if offsets[sibling].is_none() {
                offsets[sibling] = offsets[record];
                connected.push(sibling);
                queue.push_back(sibling);
            }
        }
        let lanes = aligned.lanes[record].iter();
        let mut groups: Vec<GroupIx> = lanes
            .map(|lane| lane.group)
            .filter(|group| {
                compared
                    .get(group)
                    .is_none_or(|&count| count < MEMBERS_COMPARED)
            })
            .collect();
        groups.sort_by_key(|&group| Reverse(members(group)));
        for group in groups {
            *compared.entry(group).or_default() += 1;
            let Some(base) = offsets[record] else {
                continue;
            };
            let lanes = aligned.groups[group].lanes.iter().flatten();
            let unknown = lanes.filter(|(other, _)| offsets[*other].is_none());
            let unknown: Vec<RecordIx> = unknown.map(|&(other, _)| other).collect();
            let differences = aligned.shared.map(unknown.len(), |index| {
                difference(aligned, group, record, unknown[index])
            });
            for (other, difference) in unknown.into_iter().zip(differences) {
                if let Some(difference) = difference {
                    offsets[other] = Some(Offset {
                        ns: base.ns.saturating_add(difference.ns),
                        spread_ns: sum(base.spread_ns, difference.spread_ns),
                        error_ns: sum(base.error_ns, difference.error_ns),
                    });
                    connected.push(other);
                    queue.push_back(other);
                }
            }
        }
    }
    connected
}

/// The clock of `other` minus that of `one`, from when the group's collectives that both records hold ended, or were
/// issued if the recorder notes no ends; `None` if there are none.
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
    let (lane, other_lane) = (lane_of(one)?, lane_of(other)?);
    let mut ends = Vec::with_capacity(SAMPLES);
    let mut issues = Vec::with_capacity(SAMPLES);
    let step = (lane.pending_from / SAMPLES).max(1);
    for index in (0..lane.pending_from).rev().step_by(step) {
        let op = aligned.status_op(one, lane, index);
        if !op.kind.needs_all_members() {
            continue;
        }
        let Ok(peer_index) = aligned.find(other, other_lane, op.seq) else {
            continue;
        };
        let peer = aligned.status_op(other, other_lane, peer_index);
        if let (Some(ended_ns), Some(peer_ended_ns)) = (op.completed_ns(), peer.completed_ns()) {
            ends.push(peer_ended_ns.saturating_sub(ended_ns));
        } else if retiring_is_all(aligned.records[one].recorder) {
            issues.push(peer.created_ns.saturating_sub(op.created_ns));
        }
        if ends.len() >= SAMPLES || issues.len() >= SAMPLES {
            break;
        }
    }
    estimate(&ends).or_else(|| estimate(&issues))
}

/// The sum; `None` if either is unknown.
pub(crate) fn sum(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    a.zip(b).map(|(a, b)| a.saturating_add(b))
}

/// The mean without outliers, half of the range of the middle four fifths, and the standard error of the mean. Too few
/// values give only the median; `None` without values.
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

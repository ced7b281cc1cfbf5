//! Ranks that arrive late, derived from how long all members waited.
//!
//! In a collective that needs every member, all leave together, so the last to arrive waits least: a
//! member's *lag* is the longest wait in the instance less its own. That needs no clock in common. What
//! an instance *lost* to its last member is how much earlier it would have ended had that member come
//! with the second last. A rank may be late only because it waited for another before, in a message or
//! on another group. What it waited since the group's previous instance, beyond what the second last
//! did, is taken off: what remains is its own doing.
//!
//! Waits are the backend's durations, else issue to completion. Completions may be noticed late (a
//! watchdog looks now and then): by as much as the members' moments of completion lie apart in common
//! time, such waits are in doubt, and so much is not counted against any rank. Where a recorder has
//! neither
//! (gloo's own), issue times on the common clock take their place.

use crate::align::record::Op;
use crate::align::{Aligned, GroupIx, Lane, RecordIx, retiring_is_all};
use rcomm_recorder::model::OpType;
use std::collections::BTreeMap;

/// Newest lags of a rank, and newest worst lags of a group, that percentiles are made from.
const SAMPLES: usize = 1024;

/// Issue times on an estimated clock cannot resolve less than this.
const ISSUE_NOISE_MS: f32 = 20.0;

/// One rank's lateness.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankLateness {
    /// What instances lost to this rank, ms, where it was the last.
    pub(crate) lost: Vec<f32>,
    /// Sum of `lost`.
    pub(crate) cost_ms: f64,
    /// Instances that it took part in.
    pub(crate) instances: usize,
    /// In the group that is looked at.
    lags: Vec<f32>,
    lag_p50_ms: Option<f64>,
}

impl RankLateness {
    /// Median lag in the group where that is largest, ms: a rank that is late for one group out of
    /// three is in
    /// time for most operations.
    pub(crate) fn lag_p50_ms(&self) -> Option<f64> {
        self.lag_p50_ms
    }

    fn end_group(&mut self) {
        let median = percentile(&self.lags, 0.5);
        self.lag_p50_ms = match (self.lag_p50_ms, median) {
            (Some(known), Some(median)) => Some(known.max(median)),
            (known, median) => known.or(median),
        };
        self.lags.clear();
    }
}

/// The lateness of all ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lateness {
    /// By record.
    pub(crate) ranks: Vec<RankLateness>,
    /// By host, in order of names: net cost of all its ranks together, ms, and how often the host was
    /// last.
    pub(crate) hosts: BTreeMap<String, (f64, usize)>,
    /// By group: worst lags, ms.
    groups: Vec<Vec<f32>>,
    /// Differences between those that are not last, ms: what is usual.
    pub(crate) usual_ms: f64,
    /// What the records span, ms: the job's time.
    pub(crate) span_ms: f64,
}

impl Lateness {
    /// Measures all completed collectives.
    pub(crate) fn new(aligned: &Aligned<'_>) -> Self {
        let mut lateness = Self {
            ranks: vec![RankLateness::default(); aligned.records.len()],
            groups: vec![Vec::new(); aligned.groups.len()],
            span_ms: span_ms(aligned),
            ..Self::default()
        };
        let mut usual = Vec::new();
        let mut row = InstanceArrivals::default();
        let mut waits = message_waits(aligned);
        for group in 0..aligned.groups.len() {
            each_instance(aligned, group, &mut row, |row| {
                let least = row.members.iter().map(|one| one.wait_ms);
                let least = least.fold(f32::MAX, f32::min);
                for one in &row.members {
                    waits[one.record][one.position as usize] = one.wait_ms - least;
                }
            });
        }
        for group in 0..aligned.groups.len() {
            each_instance(aligned, group, &mut row, |row| {
                lateness.take(aligned, group, row, &waits, &mut usual);
            });
            for &(record, _) in aligned.groups[group].lanes.iter().flatten() {
                lateness.ranks[record].end_group();
            }
        }
        lateness.usual_ms = percentile(&usual, 0.5).unwrap_or(0.0);
        lateness
    }

    /// A group's worst lag of an instance, ms, at a percentile (0..1).
    pub(crate) fn group_lag_ms(&self, group: GroupIx, at: f64) -> Option<f64> {
        percentile(&self.groups[group], at)
    }

    fn take(
        &mut self,
        aligned: &Aligned<'_>,
        group: GroupIx,
        row: &InstanceArrivals,
        waits: &[Vec<f32>],
        usual: &mut Vec<f32>,
    ) {
        let mut by_wait: [Option<&Arrived>; 3] = [None; 3];
        let mut most = 0.0f32;
        for one in &row.members {
            most = most.max(one.wait_ms);
            let mut carried = Some(one);
            for place in &mut by_wait {
                match (*place, carried) {
                    (Some(held), Some(new)) if new.wait_ms >= held.wait_ms => {}
                    _ => carried = std::mem::replace(place, carried),
                }
                if carried.is_none() {
                    break;
                }
            }
        }
        let [Some(last), Some(second), third] = by_wait else {
            return;
        };
        // What the rank waited itself since the group's previous instance.
        let waited = |one: &Arrived| -> f32 {
            let since = waits[one.record].get(one.previous as usize..one.position as usize);
            since.map_or(0.0, |since| since.iter().sum())
        };
        let gap = second.wait_ms - last.wait_ms;
        let excused = if gap > 0.0 {
            (waited(last) - waited(second)).max(0.0)
        } else {
            0.0
        };
        let lost = (gap - excused - row.doubt_ms).max(0.0);
        for one in &row.members {
            let rank = &mut self.ranks[one.record];
            rank.instances += 1;
            if rank.lags.len() < SAMPLES {
                rank.lags.push(most - one.wait_ms);
            }
        }
        let rank = &mut self.ranks[last.record];
        rank.cost_ms += f64::from(lost);
        rank.lost.push(lost);
        usual.push(third.map_or(gap, |third| third.wait_ms - second.wait_ms));
        if self.groups[group].len() < SAMPLES {
            self.groups[group].push(most - last.wait_ms);
        }
        self.take_hosts(aligned, row, waited);
    }

    /// The same with hosts for ranks: a host is late if all its ranks are, so its earliest counts, and
    /// one that waited for another rank since, on whatever host, excuses it.
    fn take_hosts(
        &mut self,
        aligned: &Aligned<'_>,
        row: &InstanceArrivals,
        waited: impl Fn(&Arrived) -> f32,
    ) {
        let host = |record: RecordIx| aligned.records[record].identity.host.as_str();
        if row.members.iter().any(|one| host(one.record).is_empty()) {
            return;
        }
        let mut hosts: Vec<HostPart<'_>> = Vec::new();
        for one in &row.members {
            let (name, excuse) = (host(one.record), waited(one));
            match hosts.iter_mut().find(|part| part.name == name) {
                Some(part) => {
                    part.wait_ms = part.wait_ms.max(one.wait_ms);
                    part.excuse_ms = part.excuse_ms.max(excuse);
                    part.least_excuse_ms = part.least_excuse_ms.min(excuse);
                    part.ranks += 1;
                }
                None => hosts.push(HostPart {
                    name,
                    wait_ms: one.wait_ms,
                    excuse_ms: excuse,
                    least_excuse_ms: excuse,
                    ranks: 1,
                }),
            }
            if hosts.len() > 64 {
                return;
            }
        }
        // One rank is no measure of its host.
        if hosts.len() < 2 || hosts.iter().any(|part| part.ranks < 2) {
            return;
        }
        hosts.sort_by(|a, b| a.wait_ms.total_cmp(&b.wait_ms));
        let (last, second) = (&hosts[0], &hosts[1]);
        let excused = (last.excuse_ms - second.least_excuse_ms).max(0.0);
        let lost = (second.wait_ms - last.wait_ms - excused - row.doubt_ms).max(0.0);
        if lost <= 0.0 {
            return;
        }
        let late = self.hosts.entry(last.name.to_owned()).or_default();
        late.0 += f64::from(lost);
        late.1 += 1;
        for part in &hosts[1..] {
            let early = self.hosts.entry(part.name.to_owned()).or_default();
            early.0 -= f64::from(part.wait_ms - last.wait_ms);
        }
    }
}

/// One host's part in one instance.
struct HostPart<'a> {
    name: &'a str,
    /// Of its earliest rank.
    wait_ms: f32,
    /// The most that any of its ranks waited since the group's previous instance.
    excuse_ms: f32,
    /// And the least.
    least_excuse_ms: f32,
    ranks: usize,
}

/// One member's part in one instance.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    record: RecordIx,
    /// Positions in the record's operations: of this instance, and after the group's previous one.
    position: u32,
    previous: u32,
    wait_ms: f32,
}

/// All members' parts in one instance.
#[derive(Default)]
struct InstanceArrivals {
    members: Vec<Arrived>,
    /// How far the differences of their waits may be off.
    doubt_ms: f32,
}

/// What each rank waited in messages, by position; the rest is zero.
fn message_waits(aligned: &Aligned<'_>) -> Vec<Vec<f32>> {
    let of_record = |record: &crate::align::record::Record| {
        let wait = |op: &Op| {
            let waits = op.completed() && (op.kind.is_p2p() || op.kind == OpType::Coalesced);
            op.wait_ms().filter(|_| waits).unwrap_or(0.0)
        };
        record.ops.iter().map(wait).collect()
    };
    aligned.records.iter().map(of_record).collect()
}

/// Walks a group's completed instances that all members recorded.
fn each_instance(
    aligned: &Aligned<'_>,
    group: GroupIx,
    row: &mut InstanceArrivals,
    mut see: impl FnMut(&InstanceArrivals),
) {
    let lanes: Vec<(RecordIx, usize)> = aligned.groups[group]
        .lanes
        .iter()
        .flatten()
        .copied()
        .collect();
    if lanes.len() < 2 || lanes.len() < aligned.groups[group].ranks.len() {
        return;
    }
    let length =
        |&&(record, lane): &&(RecordIx, usize)| aligned.lanes[record][lane].collectives.len();
    let Some(&(first, first_lane)) = lanes.iter().min_by_key(length) else {
        return;
    };
    let reference = &aligned.lanes[first][first_lane];
    let mut at = 0;
    while at < reference.pending_from {
        let op = aligned.op(first, reference.collectives[at]);
        if op.kind.needs_all_members() && read_row(aligned, &lanes, op.seq, row) {
            see(row);
        }
        at = aligned.block(first, reference, at).end;
    }
}

/// The waits of all members in one instance; `false` if one is not known.
fn read_row(
    aligned: &Aligned<'_>,
    lanes: &[(RecordIx, usize)],
    seq: u32,
    row: &mut InstanceArrivals,
) -> bool {
    row.members.clear();
    row.doubt_ms = 0.0;
    let mut measured = true;
    let mut newest: Option<i64> = None;
    for &(record, lane_at) in lanes {
        let lane = &aligned.lanes[record][lane_at];
        let Ok(at) = aligned.find(record, lane, seq) else {
            return false;
        };
        if at >= lane.pending_from {
            return false;
        }
        let op = aligned.status_op(record, lane, at);
        let mut wait_ms = 0.0;
        if retiring_is_all(aligned.records[record].recorder) {
            newest = newest.max(Some(aligned.created_ns(record, op)));
        } else {
            measured &= op.duration_ms >= 0.0;
            let Some(wait) = op.wait_ms() else {
                return false;
            };
            wait_ms = wait;
        }
        let before = at.checked_sub(1);
        let previous = before.map_or(0, |before| lane.collectives[before] + 1);
        wait_ms = wait_ms.min(alone_ms(aligned, record, lane, op, before));
        row.members.push(Arrived {
            record,
            position: lane.collectives[at],
            previous,
            wait_ms,
        });
    }
    let (mut ends, mut ends_before) = (Span::default(), Span::default());
    for (one, &(record, lane)) in row.members.iter_mut().zip(lanes) {
        let lane = &aligned.lanes[record][lane];
        let Ok(at) = aligned.find(record, lane, seq) else {
            return false;
        };
        let op = aligned.status_op(record, lane, at);
        if let Some(newest) = newest {
            let wait_ms = newest.saturating_sub(aligned.created_ns(record, op)) as f32 / 1e6;
            one.wait_ms = if wait_ms < ISSUE_NOISE_MS {
                0.0
            } else {
                wait_ms
            };
        } else if !measured {
            // Durations and times of notice do not compare: all by the latter.
            let Some(end) = op.completed_ns() else {
                return false;
            };
            let before = one.previous.checked_sub(1);
            let before = before.and_then(|position| lane.collectives.binary_search(&position).ok());
            ends.take(end.saturating_sub(aligned.offsets_ns[record]));
            let previous =
                before.and_then(|at| aligned.op(record, lane.collectives[at]).completed_ns());
            if let Some(end) = previous {
                ends_before.take(end.saturating_sub(aligned.offsets_ns[record]));
            }
            one.wait_ms = end.saturating_sub(op.created_ns) as f32 / 1e6;
            one.wait_ms = one
                .wait_ms
                .min(alone_ms(aligned, one.record, lane, op, before));
        } else {
            break;
        }
    }
    row.doubt_ms = ends.ms() + ends_before.ms();
    true
}

/// From the first to the last of some moments, ns.
#[derive(Default)]
struct Span(Option<(i64, i64)>);

impl Span {
    fn take(&mut self, at: i64) {
        let (first, last) = self.0.unwrap_or((at, at));
        self.0 = Some((first.min(at), last.max(at)));
    }

    fn ms(&self) -> f32 {
        self.0
            .map_or(0.0, |(first, last)| last.saturating_sub(first) as f32 / 1e6)
    }
}

/// How long at most an operation waited by itself: a group's operations end one after the other, and
/// what is in flight together waits together for a late rank, which counts once.
fn alone_ms(
    aligned: &Aligned<'_>,
    record: RecordIx,
    lane: &Lane,
    op: &Op,
    before: Option<usize>,
) -> f32 {
    let before = before.map(|before| aligned.op(record, lane.collectives[before]));
    match (before.and_then(Op::completed_ns), op.completed_ns()) {
        (Some(before), Some(end)) => end.saturating_sub(before).max(0) as f32 / 1e6,
        _ => f32::MAX,
    }
}

fn span_ms(aligned: &Aligned<'_>) -> f64 {
    let mut spans: Vec<f32> = aligned
        .records
        .iter()
        .filter_map(|record| {
            let done = record
                .ops
                .iter()
                .rev()
                .find(|op| op.completed() || op.retired)?;
            let end = done.completed_ns().unwrap_or(done.created_ns);
            Some(end.saturating_sub(record.ops.first()?.created_ns) as f32 / 1e6)
        })
        .collect();
    spans.sort_by(f32::total_cmp);
    spans
        .get(spans.len() / 2)
        .map_or(0.0, |&span| f64::from(span))
}

fn percentile(values: &[f32], at: f64) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let mut sorted = values.to_vec();
    let nth = ((sorted.len() - 1) as f64 * at).round() as usize;
    let (_, value, _) = sorted.select_nth_unstable_by(nth, f32::total_cmp);
    Some(f64::from(*value))
}

//! Who arrives late, told from how long everybody waited.
//!
//! In a collective that needs everybody, all leave together, so who arrives last waits least: a
//! member's *lag* is the longest wait in the instance less its own. That needs no clock in common. What
//! an instance *lost* to its last member is how much earlier it would have ended had that member come
//! with the second last. A rank that is late only because it waited for another before has itself
//! waited as long elsewhere, so its own waits are taken off: what remains is its net cost.
//!
//! Waits are the backend's durations, else issue to completion. Where a recorder has neither (gloo's
//! own), issue times on the common clock stand in.

use crate::align::{Aligned, GroupIx, RecordIx, needs_everybody, retiring_is_all};
use std::collections::BTreeMap;

/// Newest lags of a rank, and newest worst lags of a group, that percentiles are made from.
const SAMPLES: usize = 1024;

/// Issue times on an estimated clock say nothing about less than this.
const ISSUE_NOISE_MS: f32 = 20.0;

/// One rank's lateness.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankLateness {
    /// What instances lost to this rank, ms, where it was the last.
    pub(crate) lost: Vec<f32>,
    /// Sum of `lost`.
    pub(crate) cost_ms: f64,
    /// What this rank waited for others, ms.
    pub(crate) waited_ms: f64,
    /// Instances that it took part in.
    pub(crate) instances: usize,
    lags: Vec<f32>,
}

impl RankLateness {
    /// What the job lost to this rank and not to those that it waited for itself, ms.
    pub(crate) fn net_ms(&self) -> f64 {
        self.cost_ms - self.waited_ms
    }

    /// Median lag, ms.
    pub(crate) fn lag_p50_ms(&self) -> Option<f64> {
        percentile(&self.lags, 0.5)
    }
}

/// Everybody's lateness.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lateness {
    /// By record.
    pub(crate) ranks: Vec<RankLateness>,
    /// By host, in order of names: net cost of all its ranks together, ms, and how often the host was last.
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
        let mut row = Vec::new();
        for group in 0..aligned.groups.len() {
            lateness.measure(aligned, group, &mut row, &mut usual);
        }
        lateness.usual_ms = percentile(&usual, 0.5).unwrap_or(0.0);
        lateness
    }

    /// A group's worst lag of an instance, ms, at a percentile (0..1).
    pub(crate) fn group_lag_ms(&self, group: GroupIx, at: f64) -> Option<f64> {
        percentile(&self.groups[group], at)
    }

    fn measure(
        &mut self,
        aligned: &Aligned<'_>,
        group: GroupIx,
        row: &mut Vec<(RecordIx, f32)>,
        usual: &mut Vec<f32>,
    ) {
        let lanes: Vec<(RecordIx, usize)> = aligned.groups[group]
            .lanes
            .iter()
            .flatten()
            .copied()
            .collect();
        // The members' whole row is walked along the shortest lane: an instance counts only where all have it.
        if lanes.len() < 2 || lanes.len() < aligned.groups[group].ranks.len() {
            return;
        }
        let shortest = lanes
            .iter()
            .min_by_key(|&&(record, lane)| aligned.lanes[record][lane].collectives.len());
        let Some(&(first, first_lane)) = shortest else {
            return;
        };
        let reference = &aligned.lanes[first][first_lane];
        for at in 0..reference.pending_from {
            let op = aligned.op(first, reference.collectives[at]);
            if !needs_everybody(op.kind) || !read_row(aligned, &lanes, op.seq, row) {
                continue;
            }
            self.take(aligned, group, row, usual);
        }
    }

    fn take(
        &mut self,
        aligned: &Aligned<'_>,
        group: GroupIx,
        row: &[(RecordIx, f32)],
        usual: &mut Vec<f32>,
    ) {
        let mut least = (f32::MAX, 0);
        let (mut second, mut third, mut most) = (f32::MAX, f32::MAX, 0.0f32);
        for &(record, wait) in row {
            most = most.max(wait);
            if wait < least.0 {
                (third, second) = (second, least.0);
                least = (wait, record);
            } else if wait < second {
                (third, second) = (second, wait);
            } else if wait < third {
                third = wait;
            }
        }
        let lost = second - least.0;
        for &(record, wait) in row {
            let rank = &mut self.ranks[record];
            rank.instances += 1;
            rank.waited_ms += f64::from(wait - least.0);
            if rank.lags.len() < SAMPLES {
                rank.lags.push(most - wait);
            }
        }
        let last = &mut self.ranks[least.1];
        last.cost_ms += f64::from(lost);
        last.lost.push(lost);
        if third < f32::MAX {
            usual.push(third - second);
        } else {
            usual.push(lost);
        }
        if self.groups[group].len() < SAMPLES {
            self.groups[group].push(most - least.0);
        }
        self.take_hosts(aligned, row);
    }

    /// The same with hosts for ranks: a host is as late as its latest rank is early.
    fn take_hosts(&mut self, aligned: &Aligned<'_>, row: &[(RecordIx, f32)]) {
        let host = |record: RecordIx| aligned.records[record].identity.host.as_str();
        if row.iter().any(|&(record, _)| host(record).is_empty()) {
            return;
        }
        // A host is late if all its ranks here are: its earliest counts.
        let mut hosts: Vec<(&str, f32, usize)> = Vec::new();
        for &(record, wait) in row {
            match hosts.iter_mut().find(|(name, ..)| *name == host(record)) {
                Some((_, longest, ranks)) => {
                    *longest = longest.max(wait);
                    *ranks += 1;
                }
                None => hosts.push((host(record), wait, 1)),
            }
            if hosts.len() > 64 {
                return;
            }
        }
        if hosts.len() < 2 {
            return;
        }
        hosts.sort_by(|a, b| a.1.total_cmp(&b.1));
        let lost = hosts[1].1 - hosts[0].1;
        let last = self.hosts.entry(hosts[0].0.to_owned()).or_default();
        last.0 += f64::from(lost);
        last.1 += 1;
        for (name, wait, _) in &hosts[1..] {
            self.hosts.entry((*name).to_owned()).or_default().0 -= f64::from(wait - hosts[0].1);
        }
    }
}

/// The waits of all members in one instance; `false` if one is not known.
fn read_row(
    aligned: &Aligned<'_>,
    lanes: &[(RecordIx, usize)],
    seq: u32,
    row: &mut Vec<(RecordIx, f32)>,
) -> bool {
    row.clear();
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
        let op = aligned.teller(record, lane, at);
        if retiring_is_all(aligned.records[record].recorder) {
            newest = newest.max(Some(aligned.created_ns(record, op)));
            row.push((record, 0.0));
            continue;
        }
        measured &= op.duration_ms >= 0.0;
        let Some(wait) = op.wait_ms() else {
            return false;
        };
        row.push((record, wait));
    }
    if let Some(newest) = newest {
        for (record, wait) in row.iter_mut() {
            let lane = lanes
                .iter()
                .find(|&&(other, _)| other == *record)
                .map(|&(_, lane)| lane);
            let Some(lane) = lane.map(|lane| &aligned.lanes[*record][lane]) else {
                return false;
            };
            let Ok(at) = aligned.find(*record, lane, seq) else {
                return false;
            };
            let op = aligned.teller(*record, lane, at);
            let wait_ms = newest.saturating_sub(aligned.created_ns(*record, op)) as f32 / 1e6;
            *wait = if wait_ms < ISSUE_NOISE_MS {
                0.0
            } else {
                wait_ms
            };
        }
    } else if !measured {
        // Durations and times of notice do not compare: all by the latter.
        for ((record, wait), &(_, lane)) in row.iter_mut().zip(lanes) {
            let lane = &aligned.lanes[*record][lane];
            let Ok(at) = aligned.find(*record, lane, seq) else {
                return false;
            };
            let op = aligned.teller(*record, lane, at);
            let Some(end) = op.completed_ns() else {
                return false;
            };
            *wait = end.saturating_sub(op.created_ns) as f32 / 1e6;
        }
    }
    true
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

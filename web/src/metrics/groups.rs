//! Gauges of single groups: the first [`MOST_GROUPS`] have series of their own.

use super::writer::{Kind, Writer};
use rcomm_analyzer::Snapshot;
use std::collections::BTreeMap;

/// Groups with series of their own.
const MOST_GROUPS: usize = 512;

/// Sums and extremes over the groups of one name and description: groups may share both, and a series
/// must not appear twice.
#[derive(Default)]
struct GroupSums {
    ranks: f64,
    in_flight: f64,
    oldest_s: f64,
    last_seq: f64,
    behind: f64,
    completed_seq: Option<f64>,
    lag_p50_s: f64,
    lag_p99_s: f64,
    busbw: f64,
}

type GroupMetric = (&'static str, &'static str, fn(&GroupSums) -> Option<f64>);

const GROUP_METRICS: [GroupMetric; 9] = [
    ("rcomm_group_ranks", "Members of the group.", |sums| {
        Some(sums.ranks)
    }),
    (
        "rcomm_group_inflight_collectives",
        "Pending operations of the group.",
        |sums| Some(sums.in_flight),
    ),
    (
        "rcomm_group_oldest_inflight_seconds",
        "Age of the group's oldest pending operation.",
        |sums| Some(sums.oldest_s),
    ),
    (
        "rcomm_last_issued_seq",
        "Newest collective sequence number that any member issued.",
        |sums| Some(sums.last_seq),
    ),
    (
        "rcomm_last_completed_seq",
        "Newest collective sequence number completed by every member, where records include it.",
        |sums| sums.completed_seq,
    ),
    (
        "rcomm_members_behind_seq",
        "Collectives by which the last member is behind the first.",
        |sums| Some(sums.behind),
    ),
    (
        "rcomm_group_arrival_lag_p50_seconds",
        "Median arrival lag of the recorded collectives.",
        |sums| Some(sums.lag_p50_s),
    ),
    (
        "rcomm_group_arrival_lag_p99_seconds",
        "99th percentile of the arrival lag.",
        |sums| Some(sums.lag_p99_s),
    ),
    (
        "rcomm_bus_bandwidth_bytes_per_second",
        "Median bus bandwidth of collectives of at least 1 MiB.",
        |sums| Some(sums.busbw),
    ),
];

/// By group name: the newest collective that all members have completed.
fn completed(snapshot: &Snapshot) -> BTreeMap<&str, i64> {
    let mut least = BTreeMap::new();
    for (_, dump) in snapshot.dumps() {
        for group in &dump.groups {
            if let Some(status) = group.status {
                let seq = least
                    .entry(group.info.name.as_str())
                    .or_insert(status.last_completed);
                *seq = status.last_completed.min(*seq);
            }
        }
    }
    least
}

pub(super) fn groups(w: &mut Writer, snapshot: &Snapshot) {
    let completed = completed(snapshot);
    let mut sums: BTreeMap<(&str, &str), GroupSums> = BTreeMap::new();
    let reports = &snapshot.report.groups;
    for group in reports.iter().take(MOST_GROUPS) {
        let row = sums
            .entry((&group.group.name, &group.group.desc))
            .or_default();
        let last = group.last_seq.unwrap_or(0) as f64;
        row.ranks += group.group.ranks.len() as f64;
        row.in_flight += group.in_flight as f64;
        row.oldest_s = row.oldest_s.max(group.oldest_ms.unwrap_or(0.0) / 1e3);
        row.last_seq = row.last_seq.max(last);
        row.behind = row.behind.max(last - group.min_seq.unwrap_or(0) as f64);
        let seq = completed.get(group.group.name.as_str());
        row.completed_seq = seq.map(|&seq| seq.max(0) as f64);
        row.lag_p50_s = row.lag_p50_s.max(group.lag_p50_ms.unwrap_or(0.0) / 1e3);
        row.lag_p99_s = row.lag_p99_s.max(group.lag_p99_ms.unwrap_or(0.0) / 1e3);
        row.busbw = row.busbw.max(group.busbw_gbs.unwrap_or(0.0) * 1e9);
    }
    for (name, help, value) in GROUP_METRICS {
        w.family(name, Kind::Gauge, help);
        for ((group, desc), row) in &sums {
            if let Some(value) = value(row) {
                w.sample(name, &[("group", group), ("desc", desc)], value);
            }
        }
    }
    w.gauge(
        "rcomm_groups_omitted",
        "Groups beyond the first 512, which have no series.",
        reports.len().saturating_sub(MOST_GROUPS) as f64,
    );
}

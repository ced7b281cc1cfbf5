//! Gauges of single groups, for the first [`MAX_GROUPS`] groups of the report.

use super::list::{self, Metric};
use super::writer::Writer;
use rcomm_analyzer::Snapshot;
use std::collections::BTreeMap;

/// Maximum number of groups that have series.
const MAX_GROUPS: usize = 512;

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

type GroupMetric = (&'static Metric, fn(&GroupSums) -> Option<f64>);

const GROUP_METRICS: [GroupMetric; 9] = [
    (&list::GROUP_RANKS, |sums| Some(sums.ranks)),
    (&list::GROUP_INFLIGHT_COLLECTIVES, |sums| {
        Some(sums.in_flight)
    }),
    (&list::GROUP_OLDEST_INFLIGHT_SECONDS, |sums| {
        Some(sums.oldest_s)
    }),
    (&list::LAST_ISSUED_SEQ, |sums| Some(sums.last_seq)),
    (&list::LAST_COMPLETED_SEQ, |sums| sums.completed_seq),
    (&list::MEMBERS_BEHIND_SEQ, |sums| Some(sums.behind)),
    (&list::GROUP_ARRIVAL_LAG_P50_SECONDS, |sums| {
        Some(sums.lag_p50_s)
    }),
    (&list::GROUP_ARRIVAL_LAG_P99_SECONDS, |sums| {
        Some(sums.lag_p99_s)
    }),
    (&list::BUS_BANDWIDTH_BYTES_PER_SECOND, |sums| {
        Some(sums.busbw)
    }),
];

/// By name and description of the group, the sequence number of the newest collective that all its ranks have
/// completed, as far as their records note it; -1 if there is none.
fn completed(snapshot: &Snapshot) -> BTreeMap<(&str, &str), i64> {
    let mut least = BTreeMap::new();
    for (_, dump) in snapshot.dumps() {
        for group in &dump.groups {
            if let Some(status) = group.status {
                let seq = least
                    .entry((group.info.name.as_str(), group.info.desc.as_str()))
                    .or_insert(status.last_completed);
                *seq = status.last_completed.min(*seq);
            }
        }
    }
    least
}

/// Writes the gauges of groups, and the number of groups that have none.
pub(super) fn groups(writer: &mut Writer, snapshot: &Snapshot) {
    let completed = completed(snapshot);
    let mut sums: BTreeMap<(&str, &str), GroupSums> = BTreeMap::new();
    let reports = &snapshot.report.groups;
    for group in reports.iter().take(MAX_GROUPS) {
        let row = sums
            .entry((&group.group.name, &group.group.desc))
            .or_default();
        let last = group.last_seq.unwrap_or(0) as f64;
        row.ranks += group.group.ranks.len() as f64;
        row.in_flight += group.in_flight as f64;
        row.oldest_s = row.oldest_s.max(group.oldest_ms.unwrap_or(0.0) / 1e3);
        row.last_seq = row.last_seq.max(last);
        row.behind = row.behind.max(last - group.min_seq.unwrap_or(0) as f64);
        let seq = completed.get(&(group.group.name.as_str(), group.group.desc.as_str()));
        row.completed_seq = seq.map(|&seq| seq.max(0) as f64);
        row.lag_p50_s = row.lag_p50_s.max(group.lag_p50_ms.unwrap_or(0.0) / 1e3);
        row.lag_p99_s = row.lag_p99_s.max(group.lag_p99_ms.unwrap_or(0.0) / 1e3);
        row.busbw = row.busbw.max(group.busbw_gbs.unwrap_or(0.0) * 1e9);
    }
    for (metric, value) in GROUP_METRICS {
        writer.family(metric);
        for ((group, desc), row) in &sums {
            if let Some(value) = value(row) {
                writer.sample(metric.name, &[("group", group), ("desc", desc)], value);
            }
        }
    }
    writer.gauge(
        &list::GROUPS_OMITTED,
        reports.len().saturating_sub(MAX_GROUPS) as f64,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::simulate::{Simulation, Situation};
    use rcomm_analyzer::source::{SimulatedSource, Source};
    use rcomm_analyzer::{Live, LiveOptions, Moment, analyze};
    use rcomm_recorder::model::ProcessGroupStatus;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    #[test]
    fn groups_of_one_name_have_the_progress_of_their_description() {
        let simulation = Simulation::new(Situation::Healthy, 8, 0);
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
        let at = Moment {
            elapsed: Duration::from_secs(3),
            wall_ns: 3_000_000_000,
        };
        let mut source = SimulatedSource::new(simulation, || 3_000_000_000);
        live.observe(0, source.poll(Instant::now()), at);
        let mut snapshot = live.refresh(at).expect("the first look gives a snapshot");
        let mut ranks = snapshot.ranks.to_vec();
        for dump in ranks.iter_mut().flat_map(|view| &mut view.dumps) {
            for group in &mut Arc::make_mut(dump).groups {
                let last_completed = if group.info.desc == "dp" { 41 } else { 7 };
                group.info.name = "0".into();
                group.status = Some(ProcessGroupStatus {
                    last_completed,
                    ..ProcessGroupStatus::default()
                });
            }
        }
        snapshot.ranks = ranks.into();
        let completed = completed(&snapshot);
        assert_eq!(completed.get(&("0", "dp")), Some(&41), "{completed:?}");
        assert_eq!(completed.get(&("0", "tp")), Some(&7), "{completed:?}");
    }
}

//! Four figures of the job over time, drawn on the first screen.

use rcomm_analyzer::{InstanceReport, InstanceState, Snapshot};
use std::collections::VecDeque;

/// Maximum number of snapshots whose figures are kept: more than a terminal has columns.
const MAX_SAMPLES: usize = 512;

/// The figures of one snapshot.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    /// Time of the snapshot, wall clock, ns since the epoch.
    wall_ns: i64,
    /// The highest step of any rank.
    step: Option<i64>,
    /// Steps per second since the previous sample; `None` without a previous one, or if a step is unknown or decreased.
    steps_per_s: Option<f64>,
    /// The highest bus bandwidth of any group, GB/s.
    busbw_gbs: Option<f64>,
    /// The longest median arrival lag of any rank, ms; `None` if an operation is overdue or has failed, and no
    /// collective has completed since the previous sample.
    lag_ms: Option<f64>,
    /// Age of the oldest pending operation, ms; 0 if none is pending, `None` if no pending operation has a recorded
    /// age.
    oldest_ms: Option<f64>,
}

/// The figures of the newest snapshots, oldest first.
#[derive(Debug, Default)]
pub struct Trends {
    samples: VecDeque<Sample>,
}

/// One figure over time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Trend {
    /// Name and unit.
    pub(crate) name: &'static str,
    /// What is shown if no value is known: the reason.
    pub(crate) unknown: &'static str,
    /// One value per snapshot, oldest first; `None` if unknown.
    pub(crate) values: Vec<Option<f64>>,
}

impl Trend {
    /// Whether any value is known.
    pub(crate) fn is_known(&self) -> bool {
        self.values.iter().any(Option::is_some)
    }
}

impl Trends {
    /// Adds the figures of a new snapshot. If the job is not that of the snapshot `before`, drops the older figures.
    pub(super) fn observe(&mut self, before: Option<&Snapshot>, snapshot: &Snapshot) {
        if before.is_some_and(|before| before.job != snapshot.job) {
            self.samples.clear();
        }
        let report = &snapshot.report;
        let max = |values: &mut dyn Iterator<Item = f64>| values.reduce(f64::max);
        let step = report.ranks.iter().filter_map(|rank| rank.step).max();
        // While a job hangs, the medians are those of its past.
        let is_stuck =
            |instance: &InstanceReport| instance.overdue || instance.state == InstanceState::Failed;
        let hangs = report.in_flight.iter().any(is_stuck);
        let lags = |snapshot: &Snapshot| -> Vec<Option<f64>> {
            snapshot
                .report
                .ranks
                .iter()
                .map(|rank| rank.lag_p50_ms)
                .collect()
        };
        let are_lags_old = hangs && before.is_some_and(|before| lags(before) == lags(snapshot));
        let mut sample = Sample {
            wall_ns: snapshot.at.wall_ns,
            step,
            steps_per_s: None,
            busbw_gbs: max(&mut report.groups.iter().filter_map(|group| group.busbw_gbs)),
            lag_ms: max(&mut report.ranks.iter().filter_map(|rank| rank.lag_p50_ms))
                .filter(|_| !are_lags_old),
            oldest_ms: match report.pending().next() {
                None => Some(0.0),
                Some(_) => max(&mut report.pending().filter_map(|it| it.age_ms)),
            },
        };
        if let Some(last) = self.samples.back()
            && let (Some(then), Some(now)) = (last.step, step)
            && sample.wall_ns > last.wall_ns
        {
            let seconds = (sample.wall_ns - last.wall_ns) as f64 / 1e9;
            // A job that was restarted counts from the beginning, so there is no rate.
            sample.steps_per_s = (now >= then).then(|| (now - then) as f64 / seconds);
        }
        self.samples.push_back(sample);
        if self.samples.len() > MAX_SAMPLES {
            self.samples.pop_front();
        }
    }

    /// The figures up to this time, wall clock, ns since the epoch.
    pub(crate) fn until(&self, wall_ns: i64) -> [Trend; 4] {
        let samples = || self.samples.iter().filter(|it| it.wall_ns <= wall_ns);
        let trend = |name, unknown, value: fn(&Sample) -> Option<f64>| Trend {
            name,
            unknown,
            values: samples().map(value).collect(),
        };
        let no_steps_because = match samples().any(|it| it.step.is_some()) {
            true => "no two steps to compare yet",
            false => "the program reports no steps",
        };
        [
            trend("steps/s", no_steps_because, |it| it.steps_per_s),
            trend(
                "bus GB/s",
                "no collective of 1 MiB or more with a measured time",
                |it| it.busbw_gbs,
            ),
            trend("lag ms", "no completed collective to compare", |it| {
                it.lag_ms
            }),
            trend("oldest s", "the age is not recorded", |it| {
                it.oldest_ms.map(|ms| ms / 1e3)
            }),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::{GroupRef, RankReport, Report, SeqKind};
    use std::sync::Arc;

    fn snapshot_at(second: i64, step: impl Into<Option<i64>>) -> Snapshot {
        let mut snapshot = Snapshot::empty(Default::default());
        snapshot.at.wall_ns = second * 1_000_000_000;
        let mut report = Report::clone(&snapshot.report);
        report.ranks.push(RankReport {
            rank: 0,
            host: String::new(),
            pid: 1,
            read: true,
            phase: None,
            step: step.into(),
            pending: 0,
            failure: None,
            lost: 0,
            last_call: None,
            lag_p50_ms: None,
            lag_share: None,
        });
        snapshot.report = Arc::new(report);
        snapshot
    }

    #[test]
    fn steps_are_counted_between_snapshots_and_not_across_a_restart() {
        let mut trends = Trends::default();
        for (second, step) in [(0, 10), (1, 14), (3, 20), (4, 2)] {
            trends.observe(None, &snapshot_at(second, step));
        }
        let [steps, ..] = trends.until(i64::MAX);
        assert_eq!(steps.values, [None, Some(4.0), Some(3.0), None]);
        let [steps, .., oldest] = trends.until(1_000_000_000);
        assert_eq!((steps.values.len(), oldest.values), (2, vec![Some(0.0); 2]));
    }

    #[test]
    fn a_job_that_hangs_or_has_failed_has_no_lag_once_no_collective_completes() {
        let overdue = InstanceReport {
            group: GroupRef {
                name: "dp".into(),
                desc: String::new(),
                ranks: [0, 1].into(),
            },
            seq: 7,
            seq_kind: SeqKind::CollectiveSeqId,
            op: "all_reduce".into(),
            bytes: 4,
            least_bytes: None,
            joined: vec![0],
            missing: vec![1],
            unknown: vec![],
            state: InstanceState::Waiting,
            error: None,
            age_ms: Some(9_000.0),
            overdue: true,
        };
        let with_lag = |second, lag_ms, hangs: Option<InstanceState>| {
            let mut snapshot = snapshot_at(second, None);
            let mut report = Report::clone(&snapshot.report);
            report.ranks[0].lag_p50_ms = Some(lag_ms);
            report.in_flight.extend(hangs.map(|state| InstanceReport {
                state,
                overdue: state != InstanceState::Failed,
                ..overdue.clone()
            }));
            snapshot.report = Arc::new(report);
            snapshot
        };
        let snapshots = [
            with_lag(1, 5.0, None),
            // A look in which nothing has completed, while nothing is overdue.
            with_lag(2, 5.0, None),
            with_lag(3, 6.0, Some(InstanceState::Waiting)),
            with_lag(4, 6.0, Some(InstanceState::Waiting)),
            with_lag(5, 7.0, Some(InstanceState::Failed)),
            with_lag(6, 7.0, Some(InstanceState::Failed)),
        ];
        let mut trends = Trends::default();
        let mut before = None;
        for snapshot in &snapshots {
            trends.observe(before, snapshot);
            before = Some(snapshot);
        }
        let [_, _, lag, _] = trends.until(i64::MAX);
        assert_eq!(
            lag.values,
            [Some(5.0), Some(5.0), Some(6.0), None, Some(7.0), None]
        );
    }

    #[test]
    fn the_reason_why_a_rate_is_unknown_is_that_of_the_time_that_is_shown() {
        let mut trends = Trends::default();
        trends.observe(None, &snapshot_at(1, None));
        trends.observe(None, &snapshot_at(2, 7));
        let reason = |second: i64| trends.until(second * 1_000_000_000)[0].unknown;
        assert_eq!(reason(1), "the program reports no steps");
        assert_eq!(reason(2), "no two steps to compare yet");
    }

    #[test]
    fn the_figures_of_another_job_begin_empty_and_their_number_is_limited() {
        let mut trends = Trends::default();
        for second in 0..2_000 {
            trends.observe(None, &snapshot_at(second, second));
        }
        assert_eq!(trends.until(i64::MAX)[0].values.len(), MAX_SAMPLES);
        let mut other = snapshot_at(3_000, 1);
        other.job = "another".into();
        trends.observe(Some(&snapshot_at(2_000, 1)), &other);
        assert_eq!(trends.until(i64::MAX)[0].values.len(), 1);
    }
}

//! Metrics of reducers, by the description of their group.

use super::list;
use super::writer::Writer;
use rcomm_analyzer::Snapshot;
use rcomm_recorder::model::{GroupId, Rank, ReducerSums};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The reducers of groups of one description.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ReducerSeries {
    /// The longest of the ranks' newest steps, in seconds.
    pub(crate) newest_step: f64,
    /// The longest exposed communication of these steps, in seconds.
    pub(crate) newest_exposed: f64,
    /// Sums over all steps, counted on each rank.
    pub(crate) sums: ReducerSums,
}

/// A part of a step: its name, and its sum in ns.
type Part = (&'static str, fn(&ReducerSums) -> u64);

/// The parts of a step, as values of the label `part`.
pub(crate) const PARTS: [Part; 4] = [
    ("forward", |sums| sums.forward_ns),
    ("backward", |sums| sums.backward_ns),
    ("communication", |sums| sums.communication_ns),
    ("exposed", |sums| sums.exposed_ns),
];

/// A reducer on a rank: rank, attempt, process and group.
type Key = (Rank, u32, u32, GroupId);

/// What the records show of reducers. The sums include what a reducer did before its first read.
#[derive(Debug, Default)]
pub(crate) struct ReducerCounters {
    series: BTreeMap<Arc<str>, ReducerSeries>,
    /// The sums of each reducer at the last read.
    last: HashMap<Key, ReducerSums>,
}

impl ReducerCounters {
    /// All series, by description of the group.
    pub(crate) fn series(&self) -> &BTreeMap<Arc<str>, ReducerSeries> {
        &self.series
    }

    /// Takes the newest steps. `description` returns the description under which a group is counted.
    pub(crate) fn take(
        &mut self,
        snapshot: &Snapshot,
        mut description: impl FnMut(&str) -> Arc<str>,
    ) {
        for series in self.series.values_mut() {
            (series.newest_step, series.newest_exposed) = (0.0, 0.0);
        }
        let mut seen = HashMap::new();
        for view in snapshot.reducers() {
            let times = &view.step.times;
            let id = &view.dump.identity;
            let key = (view.rank, id.attempt, id.pid, view.step.group);
            let last = self.last.get(&key).copied().unwrap_or_default();
            let series = self
                .series
                .entry(description(&view.group.desc))
                .or_default();
            let seconds = |ns: u64| ns as f64 / 1e9;
            series.newest_step = series.newest_step.max(seconds(times.total_ns()));
            series.newest_exposed = series.newest_exposed.max(seconds(times.exposed_ns));
            // If a reducer started over in the same group, its sums restarted at zero.
            let last = match times.sums.steps >= last.steps {
                true => last,
                false => ReducerSums::default(),
            };
            let (sums, now) = (&mut series.sums, &times.sums);
            for (sum, now, last) in [
                (&mut sums.steps, now.steps, last.steps),
                (&mut sums.forward_ns, now.forward_ns, last.forward_ns),
                (&mut sums.backward_ns, now.backward_ns, last.backward_ns),
                (
                    &mut sums.communication_ns,
                    now.communication_ns,
                    last.communication_ns,
                ),
                (&mut sums.exposed_ns, now.exposed_ns, last.exposed_ns),
            ] {
                *sum = sum.saturating_add(now.saturating_sub(last));
            }
            seen.insert(key, times.sums);
        }
        self.last = seen;
    }
}

pub(super) fn reducers(writer: &mut Writer, counters: &ReducerCounters) {
    type Gauge = (&'static list::Metric, fn(&ReducerSeries) -> f64);
    const GAUGES: [Gauge; 2] = [
        (&list::REDUCER_STEP_SECONDS, |series| series.newest_step),
        (&list::REDUCER_EXPOSED_SECONDS, |series| {
            series.newest_exposed
        }),
    ];
    for (metric, value) in GAUGES {
        writer.family(metric);
        for (desc, series) in counters.series() {
            writer.sample(metric.name, &[("desc", desc)], value(series));
        }
    }
    writer.family(&list::REDUCER_STEPS);
    let name = format!("{}_total", list::REDUCER_STEPS.name);
    for (desc, series) in counters.series() {
        writer.sample(&name, &[("desc", desc)], series.sums.steps as f64);
    }
    writer.family(&list::REDUCER_SECONDS);
    let name = format!("{}_total", list::REDUCER_SECONDS.name);
    for (desc, series) in counters.series() {
        for (part, value) in PARTS {
            let labels = [("desc", &**desc), ("part", part)];
            writer.sample(&name, &labels, value(&series.sums) as f64 / 1e9);
        }
    }
}

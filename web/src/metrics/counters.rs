//! Counters and histograms since start-up; each operation is counted once.
//!
//! A collective is measured over the members whose records are read. If all members depend on each other, they leave
//! together. So the shortest wait is the run time since the arrival of the last member, and the difference between the
//! longest and the shortest wait is how late that member was. This needs no common clock.

use crate::metrics::new_entries::{NewEntries, is_completed};
use crate::metrics::reducers::ReducerCounters;
use rcomm_analyzer::Snapshot;
use rcomm_recorder::model::{Entry, OpType, Rank};
use rcomm_recorder::publish::Dump;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Upper bounds of the buckets of both histograms, in seconds; one more bucket has no bound.
pub(crate) const BOUNDS: [f64; 13] = [
    1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0,
];
/// Maximum number of group descriptions with separate series; groups with further descriptions share [`OTHERS`].
const MAX_DESCRIPTIONS: usize = 64;
/// Maximum number of collectives of one group that are tracked until their last member completes them. Beyond it, the
/// one with the lowest sequence number is dropped without a measurement.
const MAX_OPEN: usize = 1024;
/// Description under which groups beyond [`MAX_DESCRIPTIONS`] are counted.
const OTHERS: &str = "(others)";

/// Identity of a group: two groups may share a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupId {
    /// The group's name.
    pub(crate) name: String,
    /// Global ranks of its members, in order of group rank.
    pub(crate) ranks: Vec<Rank>,
}

/// The newest collective in a bucket, as an example of its values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Example {
    /// The collective's group.
    pub(crate) group: Arc<GroupId>,
    /// The collective's sequence number.
    pub(crate) seq: u64,
    /// The measured value, in seconds.
    pub(crate) value: f64,
    /// When it ended, wall clock, ns since the epoch.
    pub(crate) at_ns: i64,
}

/// Counts by bucket.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Histogram {
    /// Not cumulative; the last bucket holds values above every bound.
    pub(crate) counts: [u64; BOUNDS.len() + 1],
    /// Sum of all values, in seconds.
    pub(crate) sum: f64,
    /// The newest collective in each bucket.
    pub(crate) examples: [Option<Example>; BOUNDS.len() + 1],
}

impl Histogram {
    fn observe(&mut self, example: Example) {
        let value = example.value;
        let bucket = BOUNDS.partition_point(|bound| *bound < value);
        self.counts[bucket] += 1;
        self.sum += value;
        self.examples[bucket] = Some(example);
    }
}

/// All operations of one kind on groups of one description.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Series {
    /// Operations that completed, counted on each rank.
    pub(crate) completed: u64,
    /// Operations that ended with an error or a time-out, counted on each rank.
    pub(crate) failed: u64,
    /// Operations that failed once their time-out had passed, counted on each rank.
    pub(crate) timed_out: u64,
    /// Input bytes of completed operations, over all ranks.
    pub(crate) bytes: u64,
    /// From the arrival of the last member to the end, one value per collective.
    pub(crate) duration: Histogram,
    /// From the arrival of the first member to that of the last, one value per collective.
    pub(crate) lag: Histogram,
}

/// Description of the group, and operation.
pub(crate) type SeriesKey = (Arc<str>, &'static str);

/// One collective of which some members' completion was read, but not that of all.
#[derive(Clone, Copy, Debug)]
struct OpenCollective {
    /// The number of members whose completion was read.
    members: usize,
    /// Shortest and longest wait in seconds as the backends measured them; `None` if a member has no measurement.
    measured: Option<(f64, f64)>,
    /// Shortest and longest wait in seconds from the issue to the end that the recorder noticed.
    noted: (f64, f64),
    ended_ns: i64,
}

/// Counters and histograms of all records read since start-up.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    new_entries: NewEntries,
    /// Collectives that are not measured yet, by group and sequence number.
    groups: HashMap<Arc<GroupId>, BTreeMap<u64, OpenCollective>>,
    descriptions: BTreeSet<Arc<str>>,
    series: BTreeMap<SeriesKey, Series>,
    /// By rank, the losses that its ring counted at the last read.
    last_lost: HashMap<Rank, u64>,
    lost: u64,
    reducers: ReducerCounters,
}

impl Counters {
    /// All series, by group description and operation.
    pub(crate) fn series(&self) -> &BTreeMap<SeriesKey, Series> {
        &self.series
    }

    /// What the records show of reducers.
    pub(crate) fn reducers(&self) -> &ReducerCounters {
        &self.reducers
    }

    /// Operations that rings dropped or overwrote, over all ranks; includes what a ring lost before its first read.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// Operations overwritten before they were seen to end, which were never counted.
    pub(crate) fn unread(&self) -> u64 {
        self.new_entries.unread()
    }

    /// Counts what is new in `snapshot`.
    pub(crate) fn take(&mut self, snapshot: &Snapshot) {
        for rank in &snapshot.report.ranks {
            let last = self.last_lost.insert(rank.rank, rank.lost).unwrap_or(0);
            // A number that decreased belongs to a new ring, which begins at zero.
            self.lost += rank.lost.checked_sub(last).unwrap_or(rank.lost);
        }
        // By group, the number of members whose records are read.
        let mut read: HashMap<(&str, &[Rank]), usize> = HashMap::new();
        for (_, dump) in snapshot.counted() {
            for group in &dump.groups {
                let key = (group.info.name.as_str(), &*group.info.ranks);
                *read.entry(key).or_default() += 1;
            }
        }
        let mut reducers = std::mem::take(&mut self.reducers);
        reducers.take(snapshot, |desc| self.description(desc));
        self.reducers = reducers;
        let mut new_entries = std::mem::take(&mut self.new_entries);
        new_entries.take(snapshot, |_, dump, entry| {
            self.count_ended(dump, entry, &read)
        });
        self.new_entries = new_entries;
        self.groups
            .retain(|group, _| read.contains_key(&(group.name.as_str(), &*group.ranks)));
    }

    /// Counts an operation that has ended on one rank; a block of operations is not counted. `read` has the number of
    /// members of each group whose records are read.
    fn count_ended(&mut self, dump: &Dump, entry: &Entry, read: &HashMap<(&str, &[Rank]), usize>) {
        if entry.op == OpType::Coalesced {
            return;
        }
        let (Some(group), Some(signature)) = (
            dump.groups.get(entry.group as usize),
            dump.signatures.get(entry.signature as usize),
        ) else {
            return;
        };
        let key = (self.description(&group.info.desc), entry.op.name());
        let series = self.series.entry(key.clone()).or_default();
        if !is_completed(dump, entry) {
            series.failed += 1;
            let waited_ns = entry
                .time_discovered_completed_ns
                .saturating_sub(entry.time_created_ns);
            let limit_ns = i64::try_from(entry.timeout_ms.saturating_mul(1_000_000));
            if entry.timeout_ms > 0 && limit_ns.is_ok_and(|limit| waited_ns >= limit) {
                series.timed_out += 1;
            }
            return;
        }
        series.completed += 1;
        series.bytes = series.bytes.saturating_add(signature.input_bytes());
        if !entry.op.needs_all_members() || entry.time_discovered_completed_ns == 0 {
            return;
        }
        let members = (group.info.name.as_str(), &*group.info.ranks);
        let wanted = read.get(&members).copied().unwrap_or(1);
        self.add_member(&key, &group.info.name, &group.info.ranks, entry, wanted);
    }

    /// Adds a member to its collective; with the last of the `wanted` members, the collective is measured.
    fn add_member(
        &mut self,
        key: &SeriesKey,
        name: &str,
        ranks: &[Rank],
        entry: &Entry,
        wanted: usize,
    ) {
        let noted = entry
            .time_discovered_completed_ns
            .saturating_sub(entry.time_created_ns)
            .max(0) as f64
            / 1e9;
        let measured = entry.duration_ms.map(|ms| f64::from(ms) / 1e3);
        let id = Arc::new(GroupId {
            name: name.to_owned(),
            ranks: ranks.to_vec(),
        });
        let group = self.groups.entry(id.clone()).or_default();
        let open = group
            .entry(entry.collective_seq_id)
            .or_insert(OpenCollective {
                members: 0,
                measured: Some((f64::INFINITY, 0.0)),
                noted: (f64::INFINITY, 0.0),
                ended_ns: 0,
            });
        let widen = |(least, most): (f64, f64), wait: f64| (least.min(wait), most.max(wait));
        open.members += 1;
        open.noted = widen(open.noted, noted);
        open.measured = open
            .measured
            .zip(measured)
            .map(|(span, wait)| widen(span, wait));
        open.ended_ns = open.ended_ns.max(entry.time_discovered_completed_ns);
        if open.members < wanted {
            if group.len() > MAX_OPEN {
                group.pop_first();
            }
            return;
        }
        let OpenCollective {
            measured,
            noted,
            ended_ns,
            ..
        } = *open;
        group.remove(&entry.collective_seq_id);
        let (least, most) = measured.unwrap_or(noted);
        let example = |value: f64| Example {
            group: id.clone(),
            seq: entry.collective_seq_id,
            value,
            at_ns: ended_ns,
        };
        let series = self.series.entry(key.clone()).or_default();
        series.duration.observe(example(least));
        // If only one member is read, there is no other to compare it with.
        if wanted > 1 {
            series.lag.observe(example(most - least));
        }
    }

    /// The description under which a group is counted: its own, or [`OTHERS`].
    fn description(&mut self, desc: &str) -> Arc<str> {
        if let Some(known) = self.descriptions.get(desc) {
            return known.clone();
        }
        if self.descriptions.len() >= MAX_DESCRIPTIONS {
            return OTHERS.into();
        }
        let desc: Arc<str> = desc.into();
        self.descriptions.insert(desc.clone());
        desc
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::simulate::{Simulation, Situation};
    use rcomm_analyzer::source::{SimulatedSource, Source};
    use rcomm_analyzer::{Live, LiveOptions, Moment, analyze};
    use std::time::{Duration, Instant};

    /// The counters of a simulated job that is read at each of `read_times`, ns after its beginning.
    fn counters_of(simulation: &Simulation, read_times: impl IntoIterator<Item = i64>) -> Counters {
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
        let mut counters = Counters::default();
        for ns in read_times {
            let mut source = SimulatedSource::new(simulation.clone(), move || ns);
            let at = Moment {
                elapsed: Duration::from_nanos(ns as u64),
                wall_ns: ns,
            };
            live.observe(0, source.poll(Instant::now()), at);
            if let Some(snapshot) = live.refresh(at) {
                counters.take(&snapshot);
            }
        }
        counters
    }

    fn total(counters: &Counters, value: impl Fn(&Series) -> u64) -> u64 {
        counters.series().values().map(value).sum()
    }

    #[test]
    fn operations_are_counted_once_however_often_they_are_seen() {
        let simulation = Simulation::new(Situation::Healthy, 8, 0);
        let once = counters_of(&simulation, [8_000_000_000]);
        let often = counters_of(&simulation, (1..=400).map(|n| n * 20_000_000));
        assert!(total(&once, |s| s.completed) > 500);
        // The example of a bucket and the last bits of a sum depend on the order.
        let facts = |counters: &Counters| -> Vec<_> {
            let series = counters.series().iter();
            series
                .map(|(key, s)| {
                    (
                        key.clone(),
                        s.completed,
                        s.bytes,
                        s.duration.counts,
                        s.lag.counts,
                    )
                })
                .collect()
        };
        assert_eq!(facts(&often), facts(&once));
        assert_eq!(often.unread(), 0);
    }

    #[test]
    fn each_collective_gives_one_value_and_each_member_one_completion() {
        let counters = counters_of(
            &Simulation::new(Situation::Healthy, 8, 0),
            [4_010_000_000, 8_010_000_000],
        );
        let (_, barrier) = counters
            .series()
            .iter()
            .find(|((_, op), _)| *op == "barrier")
            .expect("the job has barriers");
        let instances: u64 = barrier.duration.counts.iter().sum();
        assert_eq!(barrier.completed, 8 * instances);
        assert_eq!(barrier.lag.counts.iter().sum::<u64>(), instances);
    }

    #[test]
    fn lateness_of_a_host_shows_in_the_lag_and_not_in_the_duration() {
        let read_times = || (1..=40).map(|n| n * 200_000_000);
        let late = counters_of(&Simulation::new(Situation::Straggler, 16, 0), read_times());
        let healthy = counters_of(&Simulation::new(Situation::Healthy, 16, 0), read_times());
        let sums = |counters: &Counters| {
            let series = counters.series().values();
            series.fold((0.0, 0.0), |sums, s| {
                (sums.0 + s.lag.sum, sums.1 + s.duration.sum)
            })
        };
        let (late, healthy) = (sums(&late), sums(&healthy));
        assert!(late.0 > 2.0 * healthy.0, "{late:?} {healthy:?}");
        assert!(late.1 < 1.5 * healthy.1, "{late:?} {healthy:?}");
    }

    #[test]
    fn operations_lost_between_two_reads_are_counted() {
        let simulation = Simulation::new(Situation::Healthy, 8, 0).with_window(16);
        let counters = counters_of(&simulation, [1_000_000_000, 9_000_000_000]);
        assert!(counters.unread() > 100, "{}", counters.unread());
    }

    #[test]
    fn descriptions_beyond_the_limit_share_a_series() {
        let mut counters = Counters::default();
        for n in 0..MAX_DESCRIPTIONS {
            assert_eq!(&*counters.description(&n.to_string()), n.to_string());
        }
        assert_eq!(&*counters.description("one more"), OTHERS);
        assert_eq!(&*counters.description("3"), "3");
    }
}

//! Leaves aside the records of an earlier run of a job of the same name.
//!
//! A job that is started again under its name, by hand or because it was queued again, writes next to the rings that
//! its earlier run left, with the same ranks and often the same attempt. A run that ends in order removes its own rings
//! and leaves its launcher's record next to the rings of older runs; that record shows that those are older. Without
//! it, the times of the rings distinguish the runs: the processes of one run live at the same time.

use super::{CLOCKS_AGREE_NS, LeftAside};
use crate::align::record::Record;
use crate::report::format::time_of_day;
use rcomm_recorder::publish::LaunchRecord;
use std::collections::{BTreeMap, BTreeSet};

/// The world sizes of the newest runs of the jobs of which records were left aside.
pub(crate) struct NewestWorlds {
    /// By job: when its launcher started its ranks, ns since the epoch, or 0 if no launcher states the size; and the
    /// size.
    by_job: BTreeMap<String, (i64, u32)>,
}

impl NewestWorlds {
    /// The size of the newest run of the job that these records are of; `None` if none of its records was left aside.
    /// Without records, that of the job that a launcher started last.
    pub(crate) fn size_for(&self, records: &[Record]) -> Option<u32> {
        let mut jobs = records.iter().map(|record| &record.identity.job);
        let newest = match jobs.find(|job| !job.is_empty()) {
            Some(job) => self.by_job.get(job),
            None => self.by_job.values().max(),
        };
        newest.map(|&(_, size)| size)
    }
}

/// Leaves aside the records that ended before the launcher on their host started its ranks, and then the rings whose
/// processes were gone before every newer ring was made. Returns the world sizes of the newest runs.
pub(crate) fn leave_earlier_runs_aside(
    records: &mut Vec<Record>,
    launches: &[LaunchRecord],
    aside: &mut LeftAside,
) -> NewestWorlds {
    let mut by_job = leave_ended_before_launch(records, launches, aside);
    // The clocks of one host agree, those of several only roughly.
    let mut jobs =
        leave_ended_before_others(records, |record| record.identity.host.as_str(), 0, aside);
    jobs.extend(leave_ended_before_others(
        records,
        |_| "",
        CLOCKS_AGREE_NS,
        aside,
    ));
    for job in jobs {
        let of_job = records.iter().filter(|record| record.identity.job == job);
        let sizes = of_job.filter_map(|record| record.identity.world_size);
        match sizes.max() {
            Some(size) => by_job.insert(job, (0, size)),
            None => by_job.remove(&job),
        };
    }
    NewestWorlds { by_job }
}

/// Leaves aside the records that ended before the launcher on their host started its ranks. Returns, for each job of
/// which it left records aside, when the newest of these launchers started its ranks, and the world size that it
/// states. The time decides, not the process id: a rank may be a child of the process that the launcher started, and
/// process ids repeat in containers. Clocks of several hosts differ, so only times of one host are compared.
fn leave_ended_before_launch(
    records: &mut Vec<Record>,
    launches: &[LaunchRecord],
    aside: &mut LeftAside,
) -> BTreeMap<String, (i64, u32)> {
    let mut by_job: BTreeMap<String, (i64, u32)> = BTreeMap::new();
    records.retain(|record| {
        let later = launches.iter().filter(|launch| is_earlier(record, launch));
        let Some(launch) = later.max_by_key(|launch| launch.started_ns) else {
            return true;
        };
        let newest = by_job.entry(launch.job.clone()).or_default();
        *newest = (*newest).max((launch.started_ns, launch.world_size));
        let before = format!(
            "before job {} was started again at {}; to judge the earlier run, pass only its files",
            launch.job,
            time_of_day(launch.started_ns),
        );
        aside.add_ended(record, before);
        false
    });
    by_job
}

/// Whether a record is of the job and the host of a launcher, and ended before that launcher started its ranks.
fn is_earlier(record: &Record, launch: &LaunchRecord) -> bool {
    let identity = &record.identity;
    let is_same_job = !identity.job.is_empty() && identity.job == launch.job;
    let is_same_host = !identity.host.is_empty() && identity.host == launch.host;
    let last_ns = newest_sign_of_life_ns(record);
    is_same_job && is_same_host && last_ns > 0 && last_ns < launch.started_ns
}

/// A process may live this long after its newest recorded sign of life, ns: the second between two rounds of its
/// watchdog, and half a second of delay.
const MAX_SILENCE_NS: i64 = 1_500_000_000;

/// Leaves aside the rings of one job and attempt whose processes are gone and gave their last sign of life more than
/// [`MAX_SILENCE_NS`] plus `apart_ns` before each newer ring was made. Only rings with the same `key` are compared.
/// Returns the jobs of these rings.
///
/// A process that died before all others began is left aside as well: nothing distinguishes it from one of an earlier
/// run.
fn leave_ended_before_others(
    records: &mut Vec<Record>,
    key: impl Fn(&Record) -> &str,
    apart_ns: i64,
    aside: &mut LeftAside,
) -> BTreeSet<String> {
    type Key = (String, u32, String);
    let key = |record: &Record| -> Option<Key> {
        let identity = &record.identity;
        let is_known = record.is_ring() && identity.begun_ns > 0 && !identity.job.is_empty();
        is_known.then(|| {
            (
                identity.job.clone(),
                identity.attempt,
                key(record).to_owned(),
            )
        })
    };
    let mut lives: BTreeMap<Key, Vec<(i64, i64)>> = BTreeMap::new();
    for record in records.iter() {
        if let Some(key) = key(record) {
            let life = (record.identity.begun_ns, last_sign_of_life_ns(record));
            lives.entry(key).or_default().push(life);
        }
    }
    let mut newest_run_begun_ns: BTreeMap<Key, i64> = BTreeMap::new();
    for (key, mut lives) in lives {
        lives.sort_unstable();
        let mut begun = i64::MIN;
        let mut last = i64::MIN;
        for (from, until) in lives {
            if from > last.saturating_add(MAX_SILENCE_NS).saturating_add(apart_ns) {
                begun = from;
            }
            last = last.max(until);
        }
        newest_run_begun_ns.insert(key, begun);
    }
    let mut jobs = BTreeSet::new();
    records.retain(|record| {
        let begun = key(record).and_then(|key| newest_run_begun_ns.get(&key).copied());
        let Some(begun) = begun.filter(|begun| record.identity.begun_ns < *begun) else {
            return true;
        };
        let before = format!(
            "before the first of the others began, at {}: of an earlier run, or of a process that ended before the \
             others began; to judge the earlier run, pass only its files",
            time_of_day(begun),
        );
        aside.add_ended(record, before);
        jobs.insert(record.identity.job.clone());
        false
    });
    jobs
}

/// When a ring's process was last seen alive, ns by its own clock; `i64::MAX` if it lives.
fn last_sign_of_life_ns(record: &Record) -> i64 {
    match record.died() || record.closed() {
        true => newest_sign_of_life_ns(record),
        false => i64::MAX,
    }
}

/// The newest sign of life in a record, also the closing of its ring; ns by its own clock, 0 if it has none.
pub(super) fn newest_sign_of_life_ns(record: &Record) -> i64 {
    record.latest_ns().max(record.closed_ns)
}

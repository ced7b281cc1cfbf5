//! Leaves aside the records of an earlier run of the same name.
//!
//! A job that is started again under its name, by hand or because it was queued again, writes beside the rings that its
//! earlier run left, with the same ranks and often the same attempt. A run that ends in order removes its own rings and
//! leaves the record of its launcher beside the older ones.

use crate::align::record::Record;
use crate::report::Problem;
use crate::report::format::time_of_day;
use rcomm_recorder::publish::LaunchRecord;

/// Leaves aside the records that ended before the launcher on their host started its ranks. Returns the size of the
/// newest run's world if there were any.
///
/// The time decides, not the process id: a rank may be a child of the process that the launcher started, and process
/// ids repeat in containers. Clocks of several hosts differ, so only times of one host are compared.
pub(crate) fn leave_earlier_runs_aside(
    records: &mut Vec<Record>,
    launches: &[LaunchRecord],
    problems: &mut Vec<Problem>,
) -> Option<u32> {
    let mut newest: Option<(i64, u32)> = None;
    records.retain(|record| {
        let later = launches.iter().filter(|launch| is_earlier(record, launch));
        let Some(launch) = later.max_by_key(|launch| launch.started_ns) else {
            return true;
        };
        newest = newest.max(Some((launch.started_ns, launch.world_size)));
        let sentence = format!(
            "the record of rank {} was left aside: its newest sign of life is from {}, before job {} was started again at \
             {}; to judge the earlier run, pass only its files",
            record.rank,
            time_of_day(record.latest_ns()),
            launch.job,
            time_of_day(launch.started_ns),
        );
        problems.push(Problem::stale_dump(record.path.clone(), sentence));
        false
    });
    newest.map(|(_, world_size)| world_size)
}

fn is_earlier(record: &Record, launch: &LaunchRecord) -> bool {
    let identity = &record.identity;
    let is_same_job = !identity.job.is_empty() && identity.job == launch.job;
    let is_same_host = !identity.host.is_empty() && identity.host == launch.host;
    let last_ns = record.latest_ns();
    is_same_job && is_same_host && last_ns > 0 && last_ns < launch.started_ns
}

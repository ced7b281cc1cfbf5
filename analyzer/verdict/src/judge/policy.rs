//! The settings of an analysis.

use crate::align::Aligned;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::LaunchRecord;
use std::time::Duration;

/// The inputs of an analysis other than the dumps.
// invariant 7: the current time is one of them, since the analysis reads no clock.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The time of judgment, wall clock, ns since the epoch.
    ///
    /// `None` = the newest time in any dump. A dump without a time (PyTorch's) is taken as written because of a hang.
    pub now_ns: Option<i64>,
    /// Whether the dumps are a snapshot of a running job: operations that are pending but not overdue are then no
    /// finding, and the verdict is `running`.
    pub snapshot: bool,
    /// The age from which a pending operation counts as stuck in a snapshot; a short time-out lowers it
    /// ([`Policy::overdue_after`]).
    pub overdue: Duration,
    /// The number of ranks expected, if another source than the dumps states it (a scheduler, a flag).
    pub world_size: Option<u32>,
    /// Ranks whose record is missing because they no longer answer; the live view reports that itself.
    pub silent: Vec<Rank>,
    /// When the newest of the files was written that state no time themselves, ns since the epoch.
    pub written_ns: Option<i64>,
    /// The records of launchers on the processes of the job, of all hosts.
    pub launches: Vec<LaunchRecord>,
    /// At most this many newest operations of each record were given, even if the ring holds more; `None` = all.
    pub newest: Option<usize>,
    /// At most this many victims of a finding are listed.
    pub max_victims: usize,
    /// The share of the job's time, 0..1, that a straggler must have cost to be reported.
    pub straggler_share: f64,
    /// Ranks that were late in the previous snapshot. They remain late until they clearly no longer are, which keeps a
    /// live view stable.
    pub late: Vec<Rank>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            now_ns: None,
            snapshot: false,
            overdue: Duration::from_secs(5),
            world_size: None,
            silent: Vec::new(),
            written_ns: None,
            launches: Vec::new(),
            newest: None,
            max_victims: 64,
            straggler_share: 0.02,
            late: Vec::new(),
        }
    }
}

impl Policy {
    /// While others live, a process that ended is judged this long after its end: if the whole job is being terminated,
    /// the others end soon.
    pub const SETTLE: Duration = Duration::from_secs(1);

    /// The age from which an operation with this time-out, ms, counts as stuck in a snapshot: `overdue`, or half of the
    /// time-out if that is shorter. A time-out of 0 is unknown.
    ///
    /// With `overdue` alone, a hang of a job with a short time-out would be seen only after the job has given up.
    pub fn overdue_after(&self, timeout_ms: u64) -> Duration {
        match timeout_ms {
            0 => self.overdue,
            known => self.overdue.min(Duration::from_millis(known) / 2),
        }
    }
}

/// The time of judgment, common time, ns: the policy's, else the newest time in any record. `None` if no time is known.
pub(crate) fn now_ns(aligned: &Aligned<'_>, policy: &Policy) -> Option<i64> {
    let of_records = aligned
        .records
        .iter()
        .enumerate()
        .map(|(at, record)| record.latest_ns().saturating_sub(aligned.offsets_ns[at]));
    policy
        .now_ns
        .or_else(|| of_records.max())
        .filter(|&now| now > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_a_short_time_out_is_overdue_and_of_a_long_one_the_usual_time() {
        let policy = Policy::default();
        let after = |timeout_ms| policy.overdue_after(timeout_ms).as_millis();
        assert_eq!(
            (after(0), after(600_000), after(u64::MAX)),
            (5000, 5000, 5000)
        );
        assert_eq!((after(10_000), after(3000), after(1)), (5000, 1500, 0));
    }
}

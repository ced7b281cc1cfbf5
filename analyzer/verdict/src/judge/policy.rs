//! The settings of an analysis.

use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::LaunchRecord;
use std::time::Duration;

/// Parameters of an analysis.
// invariant 7: the current time is one of them, since the analysis reads no clock.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The time of judgement, wall clock, ns since the epoch.
    ///
    /// `None` = each dump's own time, and where a dump carries none (PyTorch's), it is taken as made
    /// because something hung.
    pub now_ns: Option<i64>,
    /// The dumps are a look at a running job: what is merely pending and not overdue is no finding, and
    /// the verdict is `running`.
    pub snapshot: bool,
    /// From which age on a pending operation counts as stuck in a snapshot, at the latest
    /// ([`Policy::overdue_after`]).
    pub overdue: Duration,
    /// Ranks that should be there, where another source than the dumps lists them (a scheduler, a flag).
    pub world_size: Option<u32>,
    /// Ranks whose record is not given since they no longer answer: a live view reports that itself.
    pub silent: Vec<Rank>,
    /// When the files were written that note no time themselves, the newest of them, ns since the epoch.
    pub written_ns: Option<i64>,
    /// What launchers know of the processes of the job, of any hosts.
    pub launches: Vec<LaunchRecord>,
    /// Of each record the newest so many operations were given, whatever the ring holds; `None` = all.
    pub newest: Option<usize>,
    /// How many of a finding's victims are listed before the list is cut.
    pub max_victims: usize,
    /// From which share of the job's time on a straggler is worth a warning, 0..1.
    pub straggler_share: f64,
    /// Ranks that the look before this one found late: they stay so until they clearly are no more, so
    /// that a live view does not waver.
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
    /// While others live, a process that ended is judged this long after its end: where a whole job is being
    /// ended, the others' ends come soon.
    pub const SETTLE: Duration = Duration::from_secs(1);

    /// From which age on an operation with this time-out, ms, counts as stuck in a snapshot: `overdue`,
    /// or half of the time-out where that is shorter; 0 = the time-out is not known.
    ///
    /// With `overdue` alone the hang of a job with a short time-out would be seen only once the
    /// job has given up.
    pub fn overdue_after(&self, timeout_ms: u64) -> Duration {
        match timeout_ms {
            0 => self.overdue,
            known => self.overdue.min(Duration::from_millis(known) / 2),
        }
    }
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

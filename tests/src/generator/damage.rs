//! Damages the records of a job: records are lost, cut, left over from another run, of other versions, or written
//! without the completed operations.

use super::{Job, Random};
use rcomm_recorder::model::{EntryState, Rank};
use rcomm_recorder::publish::{FormatVersion, Recorder};

/// A kind of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Damage {
    /// The records of a rank that is not at fault are lost.
    Missing,
    /// The file of a rank that is not at fault ends too early.
    Cut,
    /// The record of a rank that is not at fault is one that the same recorder left in an earlier run.
    Stale,
    /// Half of the records are of an older version, which holds less.
    MixedVersions,
    /// All records lack the operations that had completed.
    OnlyActive,
}

impl Damage {
    /// All kinds of damage.
    pub const ALL: &'static [Self] = &[
        Self::Missing,
        Self::Cut,
        Self::Stale,
        Self::MixedVersions,
        Self::OnlyActive,
    ];
}

impl Job {
    /// Damages the records. Returns `false` if this job's records cannot be damaged in this way; they are unchanged
    /// then.
    pub fn apply(&mut self, damage: Damage, random: &mut Random) -> bool {
        let guilty = self.culprits();
        let innocent = |rank: Option<Rank>| rank.is_some_and(|rank| !guilty.contains(&rank));
        let candidates: Vec<usize> = (0..self.dumps.len())
            .filter(|&at| innocent(self.dumps[at].identity.rank))
            .collect();
        if candidates.is_empty() {
            return false;
        }
        let at = *random.pick(&candidates);
        match damage {
            Damage::Missing => {
                // A process may have several recorders.
                let rank = self.dumps[at].identity.rank;
                self.dumps.retain(|dump| dump.identity.rank != rank);
            }
            Damage::Cut => {
                let dump = &mut self.dumps[at];
                let count = dump.entries.len();
                if count < 4 {
                    return false;
                }
                dump.entries
                    .truncate(random.between(count as u64 / 4, count as u64 * 3 / 4) as usize);
                // In PyTorch's JSON files, the status of the groups follows the entries, so that it is lost too.
                for group in &mut dump.groups {
                    group.status = None;
                }
                self.cut.extend(dump.identity.rank);
            }
            Damage::Stale => return self.replace_with_stale(at),
            Damage::MixedVersions => {
                for dump in self.dumps.iter_mut().step_by(2) {
                    dump.version = FormatVersion { major: 2, minor: 2 };
                    for group in &mut dump.groups {
                        group.status = None;
                    }
                }
            }
            Damage::OnlyActive => {
                if matches!(
                    self.spec.recording.recorder,
                    Recorder::NativeGloo | Recorder::Rcomm | Recorder::Torchcomms
                ) {
                    return false;
                }
                for dump in &mut self.dumps {
                    dump.entries
                        .retain(|entry| entry.state != EntryState::Completed);
                }
            }
        }
        true
    }

    /// Replaces a record with that of the same rank and recorder in an earlier, healthy run of another program. Returns
    /// `false` if the rank left none in that run.
    fn replace_with_stale(&mut self, at: usize) -> bool {
        const EARLIER_NS: i64 = 3_600_000_000_000;
        let mut spec = self.spec.clone();
        spec.seed = spec.seed.wrapping_add(7);
        spec.faults.clear();
        let earlier = spec.make();
        let (rank, recorder) = (self.dumps[at].identity.rank, self.dumps[at].recorder);
        let Some(mut stale) = earlier
            .dumps
            .into_iter()
            .find(|dump| dump.identity.rank == rank && dump.recorder == recorder)
        else {
            return false;
        };
        // A time of 0 is not known.
        let set_back = |time: &mut i64| *time -= if *time > 0 { EARLIER_NS } else { 0 };
        for entry in &mut stale.entries {
            set_back(&mut entry.time_created_ns);
            set_back(&mut entry.time_discovered_started_ns);
            set_back(&mut entry.time_discovered_completed_ns);
        }
        if let Some(status) = &mut stale.status {
            set_back(&mut status.heartbeat_ns);
            set_back(&mut status.phase_since_ns);
        }
        set_back(&mut stale.identity.dump_time_ns);
        self.dumps[at] = stale;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generator::Spec;

    /// Three jobs, each before and after the damage. `prepare` changes the parameters of a job, and returns whether the
    /// job is of use.
    fn damaged(damage: Damage, prepare: impl Fn(&mut Spec) -> bool) -> Vec<(Job, Job)> {
        let jobs = (0..100).filter_map(|seed| {
            let mut spec = Spec::random(seed, 8);
            if !prepare(&mut spec) {
                return None;
            }
            let mut after = spec.make();
            let is_applied = after.apply(damage, &mut Random::new(seed));
            is_applied.then(|| (spec.make(), after))
        });
        jobs.take(3).collect()
    }

    #[test]
    fn all_times_of_a_stale_record_are_of_its_run() {
        let jobs = damaged(Damage::Stale, |spec| {
            spec.recording.recorder == Recorder::Rcomm
        });
        assert_eq!(jobs.len(), 3);
        for dump in jobs.iter().flat_map(|(_, after)| &after.dumps) {
            let Some(status) = &dump.status else { continue };
            let age_ns = dump.identity.dump_time_ns - status.heartbeat_ns;
            assert!((0..60_000_000_000).contains(&age_ns), "{age_ns}");
        }
    }

    #[test]
    fn a_rank_whose_records_are_lost_has_none_by_a_second_recorder() {
        let jobs = damaged(Damage::Missing, |spec| {
            spec.recording.second_recorder = Some(Recorder::Hook);
            spec.recording.recorder == Recorder::Nccl
        });
        assert_eq!(jobs.len(), 3);
        for (before, after) in jobs {
            let ranks = |job: &Job| -> std::collections::BTreeSet<Option<Rank>> {
                job.dumps.iter().map(|dump| dump.identity.rank).collect()
            };
            assert_eq!(ranks(&after).len() + 1, ranks(&before).len());
        }
    }
}

//! Damage to the records after the job: lost, cut, left over from another run, of other versions, or written
//! without completed operations.

use super::{Job, Random};
use rcomm_recorder::model::{EntryState, Rank};
use rcomm_recorder::publish::{FormatVersion, Recorder};

/// One kind of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Damage {
    /// The record of a rank that is not at fault is lost.
    Missing,
    /// The file of a rank that is not at fault ends too early.
    Cut,
    /// Instead of the record of a rank that is not at fault there is one of an earlier run.
    Stale,
    /// Half of the records are of an older version, which holds less.
    MixedVersions,
    /// All records were written without the operations that had completed.
    OnlyActive,
}

impl Damage {
    /// All kinds.
    pub const ALL: &'static [Self] = &[
        Self::Missing,
        Self::Cut,
        Self::Stale,
        Self::MixedVersions,
        Self::OnlyActive,
    ];
}

impl Job {
    /// Damages the records; `false` if this job has none that can be damaged in this way.
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
                self.dumps.remove(at);
            }
            Damage::Cut => {
                let dump = &mut self.dumps[at];
                let all = dump.entries.len();
                if all < 4 {
                    return false;
                }
                dump.entries
                    .truncate(random.between(all as u64 / 4, all as u64 * 3 / 4) as usize);
                // What follows the entries in a file is lost with them.
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

    /// Replaces a record with that of the same rank in an earlier, healthy run of another program; `false` if
    /// the rank left none there.
    fn replace_with_stale(&mut self, at: usize) -> bool {
        const EARLIER_NS: i64 = 3_600_000_000_000;
        let mut spec = self.spec.clone();
        spec.seed = spec.seed.wrapping_add(7);
        spec.faults.clear();
        let earlier = spec.make();
        let rank = self.dumps[at].identity.rank;
        let Some(mut stale) = earlier
            .dumps
            .into_iter()
            .find(|dump| dump.identity.rank == rank)
        else {
            return false;
        };
        for entry in &mut stale.entries {
            entry.time_created_ns -= EARLIER_NS;
            for time in [
                &mut entry.time_discovered_started_ns,
                &mut entry.time_discovered_completed_ns,
            ] {
                *time -= if *time > 0 { EARLIER_NS } else { 0 };
            }
        }
        stale.identity.dump_time_ns -= if stale.identity.dump_time_ns > 0 {
            EARLIER_NS
        } else {
            0
        };
        self.dumps[at] = stale;
        true
    }
}

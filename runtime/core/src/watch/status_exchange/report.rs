//! [`RankReport`]: what one rank publishes about its progress.

use super::SMALL_GROUP;
use rcomm_recorder::model::{
    EntryState, Failure, FailureKind, GroupId, LinkEnd, ProcessGroupStatus, Rank,
};
use rcomm_recorder::publish::Dump;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A time-out that the reporting rank recorded longer ago than this, in ms, is not among its waits: it did not lead to
/// the current fault.
const RECENT_TIMEOUT_MS: u64 = 10_000;

/// One rank's progress, as it publishes it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RankReport {
    /// The status of each group, by its `wire_id` in hexadecimal.
    pub(super) groups: BTreeMap<String, ProcessGroupStatus>,
    /// What the program says it is doing.
    pub(super) phase: String,
    /// How long the program has been in `phase`, in ms.
    pub(super) phase_ms: u64,
    /// The step that the program set last; -1 if it set none.
    pub(super) step: i64,
    /// The ranks for which operations of this rank wait, or waited until their time-out, and for how long, in ms. 0 if
    /// that is not known: the record does not hold the operation, or the time-out belongs to no operation.
    #[serde(default)]
    pub(super) waits: BTreeMap<Rank, u64>,
    /// The oldest pending collective of each group of at most [`SMALL_GROUP`] members.
    #[serde(default)]
    pub(super) pending: Vec<PendingCollective>,
}

/// A collective that a rank has issued and that has not ended.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct PendingCollective {
    /// The group's `wire_id` in hexadecimal.
    pub(super) group: String,
    pub(super) seq: u64,
    pub(super) members: Vec<Rank>,
    /// For how long it has been pending, in ms.
    pub(super) waited_ms: u64,
}

impl RankReport {
    /// A report of these groups, by `wire_id`, and of what this rank's record says now: its phase, its step, and what
    /// it waits for. It waits for the ranks at the other ends of connections on which an operation waits, for the ranks
    /// that its recent time-outs name, and for absent members of the oldest pending collective of each small group.
    ///
    /// `wire_ids` holds the groups' wire ids by their numbers in this process. Collectives of other groups are left
    /// out.
    ///
    /// All ages are by the record's own clock, which does not jump with the wall clock.
    pub(crate) fn of(
        groups: impl Iterator<Item = (u64, ProcessGroupStatus)>,
        record: &Dump,
        wire_ids: &BTreeMap<GroupId, u64>,
    ) -> Self {
        let now_ns = record.identity.dump_time_ns;
        let ms_since = |ns: i64| u64::try_from((now_ns - ns) / 1_000_000).unwrap_or(0);
        let status = record.status.clone().unwrap_or_default();
        let mut report = Self {
            groups: groups.map(|(id, status)| (wire_name(id), status)).collect(),
            phase_ms: ms_since(status.phase_since_ns),
            phase: status.phase,
            step: status.step,
            waits: BTreeMap::new(),
            pending: Vec::new(),
        };
        for link in &record.peers {
            if let LinkEnd::Rank(rank) = link.end
                && link.waited_since_ns > 0
            {
                report.waits.insert(rank, ms_since(link.waited_since_ns));
            }
        }
        let is_recent_timeout = |failure: &&Failure| {
            failure.kind == FailureKind::Timeout && ms_since(failure.time_ns) < RECENT_TIMEOUT_MS
        };
        for failure in record.failures.iter().filter(is_recent_timeout) {
            let failed = failure.operation.as_ref().and_then(|operation| {
                let mut entries = record.entries.iter();
                entries.rfind(|entry| entry.record_id == operation.record_id)
            });
            for &rank in &failure.ranks {
                let waited_ms = failed.map_or(0, |entry| ms_since(entry.time_created_ns));
                let longest = report.waits.entry(rank).or_default();
                *longest = waited_ms.max(*longest);
            }
        }
        let mut seen = BTreeSet::new();
        for entry in &record.entries {
            let is_pending = matches!(entry.state, EntryState::Scheduled | EntryState::Started);
            if !is_pending || entry.op.is_p2p() || !seen.insert(entry.group) {
                continue;
            }
            let group = &record.groups[entry.group as usize].info;
            if let Some(&wire_id) = wire_ids.get(&group.id)
                && group.ranks.len() <= SMALL_GROUP
            {
                report.pending.push(PendingCollective {
                    group: wire_name(wire_id),
                    seq: entry.collective_seq_id,
                    members: group.ranks.to_vec(),
                    waited_ms: ms_since(entry.time_created_ns),
                });
            }
        }
        report
    }

    /// The ranks for which this rank has waited for at least half of `timeout`.
    pub(super) fn long_waits(&self, timeout: Duration) -> impl Iterator<Item = Rank> {
        let waits = self.waits.iter();
        let long_waits = waits.filter(move |&(_, &waited_ms)| is_long(waited_ms, timeout));
        long_waits.map(|(&rank, _)| rank)
    }

    /// Whether this rank is known to have issued this collective, or a later one of the group.
    pub(super) fn has_arrived_at(&self, collective: &PendingCollective) -> bool {
        let status = self.groups.get(&collective.group);
        let last = status.map_or(-1, |status| status.last_enqueued);
        u64::try_from(last).is_ok_and(|last| last >= collective.seq)
    }
}

/// Whether a wait of `waited_ms` may have caused another that ended at its time-out of `timeout`: it has lasted for at
/// least half of that time-out.
pub(super) fn is_long(waited_ms: u64, timeout: Duration) -> bool {
    u128::from(waited_ms) >= timeout.as_millis() / 2
}

/// The name of a group in keys and reports.
pub(super) fn wire_name(wire_id: u64) -> String {
    format!("{wire_id:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::RankStatus;
    use std::time::SystemTime;

    #[test]
    fn a_jump_of_the_wall_clock_changes_no_age_of_a_report() {
        let wall = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        let wall = i64::try_from(wall).unwrap();
        let hour = 3_600_000_000_000;
        // The wall clock has jumped by an hour since the record began. The record's own clock does not follow.
        for now in [wall - hour, wall, wall + hour] {
            let mut record = Dump::default();
            record.identity.dump_time_ns = now;
            record.status = Some(RankStatus {
                phase: "load data".to_owned(),
                phase_since_ns: now - 5_000_000_000,
                ..RankStatus::default()
            });
            let mut late = Failure::new(FailureKind::Timeout, &[3], 0, "it did not come");
            late.time_ns = now - 1_000_000_000;
            record.failures.push(late);
            let report = RankReport::of(std::iter::empty(), &record, &BTreeMap::new());
            assert_eq!(
                (report.phase.as_str(), report.phase_ms),
                ("load data", 5_000)
            );
            assert_eq!(report.waits, BTreeMap::from([(3, 0)]));
        }
    }
}

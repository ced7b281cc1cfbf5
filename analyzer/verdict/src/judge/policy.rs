//! The settings of an analysis, and the times as of which it judges.

use crate::align::p2p::Messages;
use crate::align::pending::pending_of;
use crate::align::record::{Extent, Op, Record};
use crate::align::{Aligned, RecordIx, Taken};
use crate::judge::life::raised::RAISED;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::LaunchRecord;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The inputs of an analysis other than the dumps.
// Invariant 7 of docs/ARCHITECTURE.md: the current time is one of these inputs, since the analysis reads no clock.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The time of judgment, wall clock, ns since the epoch.
    ///
    /// `None` = the newest time in any dump. A dump that states no time (PyTorch's) counts as written because of a
    /// hang, unless the time of its file shows that nothing was overdue then.
    pub now_ns: Option<i64>,
    /// Whether the dumps are a snapshot of a running job: operations that are pending but not overdue are then no
    /// finding, and the verdict is `running`.
    pub snapshot: bool,
    /// Whether rings of living processes count as such a snapshot if no dump is among the records: a dump may have been
    /// written because of a hang.
    pub snapshot_of_rings: bool,
    /// The age from which a pending operation counts as stuck in a snapshot; a short time-out lowers it
    /// ([`Policy::overdue_after`]).
    pub overdue: Duration,
    /// The number of ranks expected, if another source than the dumps states it (a scheduler, a flag).
    pub world_size: Option<u32>,
    /// Ranks whose records are left out because they no longer answer; the live view reports that itself.
    pub silent: Vec<Rank>,
    /// When the newest file of a dump that states no time was written, ns since the epoch; `None` if unknown.
    pub written_ns: Option<i64>,
    /// What is known of the files of the dumps that are given all at once, in the order of these dumps. A dump without
    /// an entry here was read whole, and its file's time is unknown.
    pub files: Vec<RecordFile>,
    /// The records of launchers on the processes of the job, of all hosts.
    pub launches: Vec<LaunchRecord>,
    /// A later attempt of the job, if its processes were seen and none of them has left a record yet.
    pub later_attempt: Option<LaterAttempt>,
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

/// What the file of a dump shows besides the dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordFile {
    /// When the file was written, ns since the epoch. `None` if that is unknown, or if the dump states when it was
    /// taken.
    pub written_ns: Option<i64>,
    /// Whether all of the file was read.
    pub extent: Extent,
}

/// An attempt of a job that has begun after the records were left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaterAttempt {
    /// The number of the attempt, counted from 0.
    pub attempt: u32,
    /// The ranks of this attempt whose processes were seen, ascending.
    pub ranks: Vec<Rank>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            now_ns: None,
            snapshot: false,
            snapshot_of_rings: false,
            overdue: Duration::from_secs(5),
            world_size: None,
            silent: Vec::new(),
            written_ns: None,
            files: Vec::new(),
            launches: Vec::new(),
            later_attempt: None,
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

    /// A running job that has nothing pending is said to have stopped communicating after this time at the earliest.
    pub fn shortest_silence(&self) -> Duration {
        self.overdue.saturating_mul(2)
    }

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
    let now = policy.now_ns.unwrap_or(aligned.newest_common_ns);
    (now > 0).then_some(now)
}

/// When the newest of the files whose records state no time was written, common time, ns. `None` if this is unknown, or
/// if the file is older than the newest record or more than a day younger: then it was copied, and its time means
/// nothing.
///
/// [`Policy::written_ns`] is by the clock of the newest file's host. If the times of the records' own files in common
/// time ([`newest_own`]) differ from it, those decide. Common time is an estimate, which may put the newest record
/// after its own file, so file and record are also compared by the clock that gave both their times. The result is
/// never before the time of judgment.
pub(crate) fn written_ns(aligned: &Aligned<'_>, policy: &Policy) -> Option<i64> {
    let now = now_ns(aligned, policy)?;
    let written = policy.written_ns?;
    // The clocks of hosts are related by estimates, so a small difference means nothing.
    let is_apart = |own: &i64| own.abs_diff(written) > SLACK_NS.unsigned_abs();
    if let Some(newest) = newest_own(aligned).filter(is_apart) {
        return Some(newest.max(now));
    }
    if (now..now.saturating_add(COPIED_NS)).contains(&written) {
        return Some(written);
    }
    let records = aligned.records.iter().zip(&aligned.offsets_ns);
    let (newest, offset) = records
        .map(|(record, &offset)| (record.latest_ns(), offset))
        .max()?;
    let plausible = newest.saturating_sub(SLACK_NS)..newest.saturating_add(COPIED_NS);
    plausible
        .contains(&written)
        .then(|| written.saturating_sub(offset).max(now))
}

/// When the newest file was written, common time, ns, each file by the clock of its own host. Only records whose clocks
/// are connected to the others' count, or all if none is. `None` if the time of one of these is unknown or impossible.
fn newest_own(aligned: &Aligned<'_>) -> Option<i64> {
    let any_known = aligned.clock_known.iter().any(|&known| known);
    let records =
        (0..aligned.records.len()).filter(|&record| aligned.clock_known[record] || !any_known);
    let in_common = |record: usize| {
        let own = own_written_ns(&aligned.records[record])?;
        Some(own.saturating_sub(aligned.offsets_ns[record]))
    };
    let times: Option<Vec<i64>> = records.map(in_common).collect();
    times?.into_iter().max()
}

/// For each record: when its file was written at the latest, common time, ns, so that it holds nothing issued later.
/// `None` if the time of its file, or how its clock relates to the others', is not known.
pub(crate) fn each_written_ns(aligned: &Aligned<'_>) -> Vec<Option<i64>> {
    let in_common = |record: usize| {
        let own = own_written_ns(&aligned.records[record])?;
        let known = aligned.clock_known[record];
        known.then(|| {
            own.saturating_add(SLACK_NS)
                .saturating_sub(aligned.offsets_ns[record])
        })
    };
    (0..aligned.records.len()).map(in_common).collect()
}

/// For each record: when it was taken. A rank that no longer answers cannot show more than its last record does.
pub(crate) fn each_taken(aligned: &Aligned<'_>, policy: &Policy) -> Vec<Taken> {
    let written = each_written_ns(aligned).into_iter().enumerate();
    let answers = |record: RecordIx| !policy.silent.contains(&aligned.records[record].rank);
    let of_record = |(record, sure_until_ns)| Taken {
        at_ns: taken_ns(aligned, policy, record).filter(|_| answers(record)),
        sure_until_ns,
    };
    written.map(of_record).collect()
}

/// When a record was taken from a process that continued, or when its file was written. Common time, ns; by its own
/// clock if it is not known how that relates to the others'. `None` if the time is not known, and for a ring or the
/// last record of a process, which lack nothing. `None` also for a dump of a job that is watched: a record that has not
/// changed is not taken again.
pub(crate) fn taken_ns(aligned: &Aligned<'_>, policy: &Policy, record: RecordIx) -> Option<i64> {
    let full_record = &aligned.records[record];
    let phase = full_record.status.as_ref().map(|status| &status.phase);
    let is_last = full_record.is_ring()
        || full_record.closed_ns > 0
        || !full_record.failures.is_empty()
        || phase.is_some_and(|phase| phase.starts_with(RAISED));
    let own = match full_record.identity.dump_time_ns {
        0 => own_written_ns(full_record).or_else(|| written_empty_ns(aligned, full_record)),
        _ if policy.snapshot && policy.now_ns.is_some() => None,
        taken => Some(taken),
    };
    let in_common = own?.saturating_sub(aligned.offsets_ns[record]);
    (!is_last).then_some(in_common)
}

/// When the newest of the records was taken, as [`taken_ns`] has it, by the clocks whose relation to others' is known.
pub(crate) fn newest_taken_ns(aligned: &Aligned<'_>, policy: &Policy) -> Option<i64> {
    let newest = |is_known: bool| {
        let records = 0..aligned.records.len();
        let records = records.filter(|&record| aligned.clock_known[record] == is_known);
        records
            .filter_map(|record| taken_ns(aligned, policy, record))
            .max()
    };
    newest(true).or_else(|| newest(false))
}

/// When the file of a record was written, ns by the clock of its host. `None` if that is unknown, or is impossible: the
/// file is older than the record or more than a day younger.
pub(crate) fn own_written_ns(record: &Record) -> Option<i64> {
    let written = record.written_ns?;
    let newest = record.latest_ns();
    let plausible = newest.saturating_sub(SLACK_NS)..newest.saturating_add(COPIED_NS);
    plausible.contains(&written).then_some(written)
}

/// When the file of a record without operations was written, ns by the clock of its host. `None` if that is unknown, or
/// a day or more from the newest time in the other records: then the file is another run's, or was copied.
fn written_empty_ns(aligned: &Aligned<'_>, record: &Record) -> Option<i64> {
    let written = record.written_ns.filter(|_| record.latest_ns() == 0)?;
    let is_near = written.abs_diff(aligned.newest_ns) < COPIED_NS.unsigned_abs();
    is_near.then_some(written)
}

/// A file that is younger than its record by this much, ns, was copied.
const COPIED_NS: i64 = 86_400_000_000_000;
/// PyTorch takes a dump's operations, then names the frames of all stacks, and writes the file last: on a busy host,
/// the file is younger than the operations in it by up to this much.
pub(crate) const NAMING: Duration = Duration::from_secs(10);
/// Times of files and records that differ by at most this, ns, prove no order: some file systems keep coarse times, and
/// the clocks of hosts are related by estimates.
const SLACK_NS: i64 = 1_000_000_000;

/// The policy for records that state no time and in which operations were pending, but none overdue, when their files
/// were written; the time that it may take to write a file ([`NAMING`]) is allowed for. Such records are judged as of
/// that time, as a snapshot. `None` for all others.
///
/// Such files are no sign of a hang: in a dump that a time-out has caused, an operation is older than half of the
/// time-out.
pub(crate) fn of_young_files(
    aligned: &Aligned<'_>,
    messages: &Messages,
    policy: &Policy,
) -> Option<Policy> {
    let is_dated = policy.snapshot || policy.now_ns.is_some();
    let mut records = aligned.records.iter();
    if is_dated || records.any(|record| record.identity.dump_time_ns > 0) {
        return None;
    }
    let written = written_ns(aligned, policy)?;
    let as_of_writing = Policy {
        snapshot: true,
        now_ns: Some(written),
        overdue: policy.overdue.saturating_add(NAMING),
        ..policy.clone()
    };
    let mut has_pending = false;
    for record in 0..aligned.records.len() {
        for operation in pending_of(aligned, messages, record) {
            has_pending = true;
            let op = aligned.op(record, operation.position);
            let timeout_ms = aligned.shared.calls.get(op.call).timeout_ms;
            let age = age_when_written(aligned, record, op, written);
            if age >= as_of_writing.overdue_after(timeout_ms) {
                return None;
            }
        }
    }
    has_pending.then_some(as_of_writing)
}

/// How old an operation of a record was when the newest file was written, at `written_ns`, common time; or when the
/// record's own file was written, if that gives a lower age, since the newest file may be of a host whose clock is
/// ahead.
pub(crate) fn age_when_written(
    aligned: &Aligned<'_>,
    record: RecordIx,
    op: &Op,
    written_ns: i64,
) -> Duration {
    let age = written_ns.saturating_sub(aligned.created_ns(record, op));
    let own = own_written_ns(&aligned.records[record]);
    let own_age = own.map_or(i64::MAX, |own| own.saturating_sub(op.created_ns));
    Duration::from_nanos(u64::try_from(age.min(own_age)).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_overdue_at_half_of_a_short_time_out_and_else_at_the_usual_age() {
        let policy = Policy::default();
        let after = |timeout_ms| policy.overdue_after(timeout_ms).as_millis();
        assert_eq!(
            (after(0), after(600_000), after(u64::MAX)),
            (5000, 5000, 5000)
        );
        assert_eq!((after(10_000), after(3000), after(1)), (5000, 1500, 0));
    }
}

//! How long ranks have waited.

use super::Context;
use crate::align::RecordIx;
use crate::align::pending::PendingKind;
use crate::align::record::Record;
use crate::judge::life::{BEFORE_TIMEOUT, End};
use crate::judge::policy::{now_ns, written_ns};
use crate::judge::waits::wait_graph::Place;
use crate::report::Until;
use crate::report::format::format_time;
use rcomm_recorder::model::{EntryState, FailureKind};

/// An operation that failed after less than this, ms, does not show that a missing rank was late.
const TOO_SHORT_MS: f64 = 1e3;

impl Context<'_> {
    /// What states the end of the time that ages measure.
    pub(crate) fn until(&self) -> Until {
        match (&self.life.end, self.policy.now_ns) {
            _ if self.young_files => Until::Written,
            (Some(_), _) => Until::Ended,
            (None, _) if !self.life.lives_on() => Until::Taken,
            (None, Some(_)) => Until::Now,
            (None, None) if self.states_when_taken() => Until::Taken,
            (None, None) => Until::Written,
        }
    }

    /// Whether a record states when it was taken. If others do not, the record of a process that is gone does not
    /// count.
    fn states_when_taken(&self) -> bool {
        let is_dated = |record: &&Record| record.identity.dump_time_ns > 0;
        let records = &self.aligned.records;
        let are_all_dated = records.iter().all(|record| is_dated(&record));
        // The record of a process that is gone states its last sign of life, after which others may have waited on.
        let is_taken = |record: &Record| are_all_dated || self.life.gone(record.rank).is_none();
        records.iter().filter(is_dated).any(is_taken)
    }

    /// The end of the time that ages measure, common time, ns. `None` if the records do not state when they were taken,
    /// since their newest operations may be much older; but not if they are judged by the times of their files. `None`
    /// also if the job is over and the time of its end is unknown.
    pub(crate) fn as_of_ns(&self) -> Option<i64> {
        match self.until() {
            Until::Written if !self.young_files => None,
            Until::Written => self.policy.now_ns,
            // The last event is not the end: the processes may have waited on for any time.
            Until::Ended if !self.life.end.as_ref().is_some_and(End::is_dated) => None,
            Until::Now | Until::Taken | Until::Ended => now_ns(self.aligned, self.policy),
        }
    }

    /// How long the first rank at a place has waited, or waited until all ranks there gave up, ms; `None` if times are
    /// unknown or the wait is less than 1 ms.
    pub(crate) fn waited_ms(&self, place: usize) -> Option<f64> {
        let since = self.waiting_since(place)?;
        let until = self.gave_up_ns(place).or_else(|| self.last_seen_ns(place));
        let until = until.unwrap_or(i64::MAX);
        let ms = self.as_of_ns()?.min(until).saturating_sub(since) as f64 / 1e6;
        (ms >= 1.0).then_some(ms)
    }

    /// When the last dump of the ranks that wait at a place was taken, common time, ns: what these ranks did later is
    /// not known. `None` if their records are not all dumps that state their time, or if ages do not end when records
    /// were taken ([`until`](Self::until)).
    fn last_seen_ns(&self, place: usize) -> Option<i64> {
        let operations = self.ops_of(place).into_iter();
        let taken: Option<Vec<i64>> = operations
            .map(|(record, _)| self.taken_until_ns(record))
            .collect();
        taken?.into_iter().max()
    }

    /// When a dump was taken, common time, ns: what its rank did later is not known. `None` if the record is no dump
    /// that states its time, or if ages do not end when records were taken ([`until`](Self::until)).
    pub(crate) fn taken_until_ns(&self, record: RecordIx) -> Option<i64> {
        let full_record = &self.aligned.records[record];
        let is_dated = full_record.identity.dump_time_ns > 0 && !full_record.is_ring();
        let latest_ns = || {
            let latest_ns = full_record.latest_ns();
            latest_ns.saturating_sub(self.aligned.offsets_ns[record])
        };
        (is_dated && self.until() == Until::Taken).then(latest_ns)
    }

    /// How long the ranks that are missing at a place have been missed, ms: until the records were taken, also those of
    /// ranks that do not wait there. `None` as for [`waits_ms`](Self::waits_ms).
    pub(crate) fn missed_ms(&self, place: usize) -> Option<f64> {
        if self.gave_up_ns(place).is_some() {
            return None;
        }
        let since = self.waiting_since(place)?;
        let ms = self.as_of_ns()?.saturating_sub(since) as f64 / 1e6;
        (ms >= 1.0).then_some(ms)
    }

    /// Like [`waited_ms`](Self::waited_ms), but `None` if all ranks there gave up: a wait that is over grows no older.
    pub(crate) fn waits_ms(&self, place: usize) -> Option<f64> {
        self.waited_ms(place)
            .filter(|_| self.gave_up_ns(place).is_none())
    }

    /// How long the first rank at a place had waited when the files of the records were written, ms. `None` if ages do
    /// not end at these times ([`until`](Self::until)), if the times are unknown, or if all ranks at the place gave up.
    pub(crate) fn waited_when_written_ms(&self, place: usize) -> Option<f64> {
        if self.until() != Until::Written || self.gave_up_ns(place).is_some() {
            return None;
        }
        let since_ns = self.waiting_since(place)?;
        let written_ns = written_ns(self.aligned, self.policy)?;
        Some(written_ns.saturating_sub(since_ns) as f64 / 1e6)
    }

    /// A part of a sentence on one or `many` ranks at a place: `has waited 7 s`, or `waited 6 s, until it failed`. If
    /// it is unknown how long, without the time: `waits`, or `waited` if the job is over.
    pub(crate) fn waiting(&self, place: usize, many: bool) -> String {
        let time = self.waited_ms(place).map(format_time);
        match (time, self.gave_up_ns(place), many) {
            (Some(time), Some(_), _) => format!("waited {time}, until it failed"),
            (None, Some(_), _) => "waited until it failed".to_owned(),
            (Some(time), None, false) => format!("has waited {time}"),
            (Some(time), None, true) => format!("have waited {time}"),
            (None, None, _) if self.life.end.is_some() => "waited".to_owned(),
            (None, None, false) => "waits".to_owned(),
            (None, None, true) => "wait".to_owned(),
        }
    }

    /// Whether the operation of a place failed soon after it was issued, and long before its time-out: such a wait does
    /// not show that another rank is late. It failed on all ranks that were in it; or it failed on some because they
    /// lost a rank, and the others had not waited longer by then. Those may not know of the loss, or be lost.
    pub(crate) fn failed_at_once(&self, place: usize) -> bool {
        let operations = self.ops_of(place);
        let losses = operations
            .iter()
            .filter_map(|&(record, position)| self.lost_a_rank_ns(record, position));
        let first_loss_ns = losses.min();
        let is_short = |&(record, position): &(RecordIx, u32)| {
            let op = self.aligned.op(record, position);
            match first_loss_ns {
                Some(lost_ns) if op.state != EntryState::Failed => {
                    let waited_ns = lost_ns.saturating_sub(self.aligned.created_ns(record, op));
                    (waited_ns as f64) < TOO_SHORT_MS * 1e6
                }
                _ => self.op_failed_at_once(record, position),
            }
        };
        !operations.is_empty() && operations.iter().all(is_short)
    }

    /// When an operation of a record failed, common time, ns, if it failed at once and because its rank lost another.
    fn lost_a_rank_ns(&self, record: RecordIx, position: u32) -> Option<i64> {
        let op = self.aligned.op(record, position);
        let failure = self.failure_in(record, op)?;
        let own = self.aligned.records[record].rank;
        let names_another = failure.ranks.iter().any(|&rank| rank != own);
        let is_loss = failure.kind == FailureKind::PeerGone && names_another;
        if !is_loss || !self.op_failed_at_once(record, position) {
            return None;
        }
        let offset_ns = self.aligned.offsets_ns[record];
        Some(op.failed_ns()?.saturating_sub(offset_ns))
    }

    /// Whether an operation of a record failed soon after it was issued, and long before its time-out.
    fn op_failed_at_once(&self, record: RecordIx, position: u32) -> bool {
        let op = self.aligned.op(record, position);
        let limit_ms = self.aligned.limit_ms(record, op).unwrap_or(f64::INFINITY);
        let lasted = op.wait_ms().filter(|_| op.state == EntryState::Failed);
        lasted
            .map(f64::from)
            .is_some_and(|ms| ms < TOO_SHORT_MS && ms < limit_ms * BEFORE_TIMEOUT)
    }

    /// The record and the position of each operation that waits at a place.
    pub(crate) fn ops_of(&self, place: usize) -> Vec<(RecordIx, u32)> {
        match self.graph.places[place] {
            Place::Collective { .. } => self.arrived(place).collect(),
            Place::Batch {
                record, pending, ..
            } => {
                let halves = self.halves(record, pending).iter();
                halves.map(|half| (record, half.position)).collect()
            }
        }
    }

    /// When the last of the ranks at a place gave up, common time, ns; `None` while one still waits, or if a record
    /// does not state it. A rank whose process is gone no longer waits, and does not count.
    pub(crate) fn gave_up_ns(&self, place: usize) -> Option<i64> {
        let ended = |record: RecordIx, position: u32| {
            let failed_ns = self.aligned.op(record, position).failed_ns()?;
            Some(failed_ns.saturating_sub(self.aligned.offsets_ns[record]))
        };
        let is_there = |&(record, position): &(RecordIx, u32)| {
            let has_failed = self.aligned.op(record, position).state == EntryState::Failed;
            has_failed || self.life.gone(self.aligned.records[record].rank).is_none()
        };
        let operations = self.ops_of(place).into_iter().filter(is_there);
        let ends: Vec<Option<i64>> = operations
            .map(|(record, position)| ended(record, position))
            .collect();
        ends.into_iter()
            .collect::<Option<Vec<i64>>>()?
            .into_iter()
            .max()
    }

    /// When the first of the ranks that wait at a place issued the operation, common time, ns; `None` if none waits
    /// there.
    pub(crate) fn waiting_since(&self, place: usize) -> Option<i64> {
        match self.graph.places[place] {
            Place::Collective { .. } => self.arrivals(place).map(|(at_ns, _)| at_ns).min(),
            Place::Batch {
                record, pending, ..
            } => {
                let first = self
                    .aligned
                    .op(record, self.first_of_batch(record, pending));
                Some(self.aligned.created_ns(record, first))
            }
        }
    }

    /// Whether the last member of a collective came so long ago that it should have finished; also true if this is not
    /// a snapshot or times are unknown. Until then the others have waited for this member, and the fabric has had no
    /// time.
    pub(crate) fn is_long_complete(&self, place: usize) -> bool {
        let now = now_ns(self.aligned, self.policy).filter(|_| self.policy.snapshot);
        let last = self.arrivals(place).max();
        now.zip(last).is_none_or(|(now, (last_ns, timeout_ms))| {
            let age = u128::try_from(now.saturating_sub(last_ns)).unwrap_or(0);
            age >= self.policy.overdue_after(timeout_ms).as_nanos()
        })
    }

    /// Whether an unfinished operation is overdue, leaving out collectives whose last member came only a short time
    /// ago.
    pub(crate) fn is_anything_overdue(&self) -> bool {
        let is_fresh = |group: usize, seq: u32| {
            let place = self.graph.collective(group, seq);
            place.is_some_and(|place| {
                self.graph.missing[place].is_empty() && !self.is_long_complete(place)
            })
        };
        self.graph
            .pending
            .iter()
            .enumerate()
            .any(|(record, pending)| {
                pending.iter().enumerate().any(|(index, operation)| {
                    let fresh = match operation.kind {
                        PendingKind::Collective { seq } => is_fresh(operation.group, seq),
                        _ => false,
                    };
                    self.graph.is_overdue(record, index) && !fresh
                })
            })
    }

    /// When the ranks that are inside a collective issued it, common time, ns, each with the time-out, ms; empty for a
    /// batch.
    pub(crate) fn arrivals(&self, place: usize) -> impl Iterator<Item = (i64, u64)> {
        self.arrived(place).map(|(record, position)| {
            let op = self.aligned.op(record, position);
            let timeout_ms = self.aligned.shared.calls.get(op.call).timeout_ms;
            (self.aligned.created_ns(record, op), timeout_ms)
        })
    }

    /// The record and the position of the operation of each rank that is inside a collective; empty for a batch.
    fn arrived(&self, place: usize) -> impl Iterator<Item = (RecordIx, u32)> {
        let collective = match self.graph.places[place] {
            Place::Collective { group, seq } => Some((group, seq)),
            Place::Batch { .. } => None,
        };
        let nodes = collective.map_or(&[][..], |_| &self.graph.arrived[place]);
        nodes.iter().filter_map(move |&node| {
            let (group, seq) = collective?;
            let record = self.aligned.record_in(group, self.rank(node))?;
            let pending = self.graph.pending[record].iter().find(|operation| {
                operation.group == group
                    && matches!(operation.kind, PendingKind::Collective { seq: pending_seq } if pending_seq == seq)
            })?;
            Some((record, pending.position))
        })
    }
}

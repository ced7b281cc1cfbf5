//! Finds dumps from which completed operations were left out (onlyActive).
//!
//! Record ids that are missing between operations show such a dump. If no ids are missing there, the dump looks like a
//! small ring that has wrapped and whose operations are all unfinished. But such a ring may have dropped unfinished
//! operations. The status of the groups shows that it has not, if it states it. Else the other dumps show which of the
//! two it is, since the dumps of a job are all written in one way.

use crate::align::record::{Record, may_leave_out};
use rcomm_recorder::publish::Recorder;
use std::collections::HashMap;

/// A dump with this many operations or more counts as a ring.
const LEAST_RING: usize = 64;

/// Sets [`Record::only_active`] in the records from which completed operations were left out, but whose ids do not show
/// it.
pub(crate) fn settle(records: &mut [Record]) {
    let mut dumps: HashMap<Recorder, Dumps> = HashMap::new();
    for record in records.iter().filter(|record| !record.cut) {
        let of_recorder = dumps.entry(record.recorder).or_default();
        of_recorder.has_done |= !has_none_done(record);
        of_recorder.shows_it |= record.only_active;
        if looks_active(record) {
            of_recorder.shows_it |= holds_all_unfinished(record);
            of_recorder.note(record.ops.len());
        }
    }
    for record in records.iter_mut().filter(|record| looks_active(record)) {
        let held = record.ops.len();
        let of_recorder = dumps.get(&record.recorder);
        let are_active = of_recorder.map_or(held == 1, |dumps| dumps.are_active(held));
        record.only_active |= are_active;
    }
}

/// What the dumps of a job by one recorder show, without those that are cut.
#[derive(Default)]
struct Dumps {
    /// Whether one holds a completed operation.
    has_done: bool,
    /// Whether one shows by its record ids that operations were left out.
    shows_it: bool,
    /// The smallest and the largest number of operations of those that look active. Others say nothing about the size
    /// of rings: they may not have filled theirs.
    held: Option<(usize, usize)>,
}

impl Dumps {
    /// Notes the number of operations of a dump that looks active.
    fn note(&mut self, held: usize) {
        let (least, most) = self.held.unwrap_or((held, held));
        self.held = Some((least.min(held), most.max(held)));
    }

    /// Whether a dump that looks active and holds `held` operations is no wrapped ring. That is so if no dump holds a
    /// completed operation, and either one dump shows by its ids that operations were left out, or the dumps that look
    /// active are not all of one size. A dump of a single operation is no ring.
    fn are_active(&self, held: usize) -> bool {
        let differ = self
            .held
            .is_some_and(|(least, most)| (least, most) != (held, held));
        !self.has_done && (held == 1 || self.shows_it || differ)
    }
}

/// Whether a record holds no operation that has ended.
fn has_none_done(record: &Record) -> bool {
    !record.ops.iter().any(|op| op.completed() || op.retired)
}

/// Whether a record has wrapped, by its first number, and holds fewer operations than rings usually do, none of them
/// completed.
fn looks_active(record: &Record) -> bool {
    may_leave_out(record.recorder)
        && record.wrapped()
        && !record.ops.is_empty()
        && has_none_done(record)
        && (record.ops.len() < LEAST_RING || holds_all_unfinished(record))
}

/// Whether the first collective of each group in a record follows the last one that the group's status states as
/// completed: then the record lacks no unfinished operation. False if a group has messages, which have other numbers.
fn holds_all_unfinished(record: &Record) -> bool {
    let mut first: HashMap<u16, u32> = HashMap::new();
    for op in &record.ops {
        if op.is_p2p || op.kind.is_p2p() {
            return false;
        }
        first.entry(op.group).or_insert(op.seq);
    }
    !first.is_empty()
        && first.into_iter().all(|(group, seq)| {
            let group = record.groups.get(usize::from(group));
            let status = group.and_then(|group| group.status);
            status.is_some_and(|status| status.last_completed.max(0) + 1 == i64::from(seq))
        })
}

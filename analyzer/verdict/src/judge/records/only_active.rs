//! Dumps from which completed operations were left out (onlyActive).
//!
//! Record ids that are missing between operations show it. Where the unfinished operations of a rank follow each other,
//! such a dump looks like a small ring that has wrapped and whose operations are all unfinished; but that one may have
//! dropped unfinished operations. The dumps of a job are all written in one way, so the others tell the two apart.

use crate::align::record::{Record, may_leave_out};
use rcomm_recorder::publish::Recorder;

/// A dump with this many operations or more is taken for a ring.
const LEAST_RING: usize = 64;

/// Marks the records from which completed operations were left out, of those that do not show it themselves.
pub(crate) fn settle(records: &mut [Record]) {
    let looks_active: Vec<bool> = records.iter().map(looks_active).collect();
    let marked: Vec<bool> = records
        .iter()
        .zip(looks_active)
        .map(|(record, looks)| looks && are_active(records, record.recorder, record.ops.len()))
        .collect();
    for (record, is_marked) in records.iter_mut().zip(marked) {
        record.only_active |= is_marked;
    }
}

fn has_none_done(record: &Record) -> bool {
    !record.ops.iter().any(|op| op.completed() || op.retired)
}

/// Whether a record has wrapped, by its first number, and holds fewer operations than rings usually do, none of them
/// completed.
fn looks_active(record: &Record) -> bool {
    may_leave_out(record.recorder)
        && record.wrapped()
        && !record.ops.is_empty()
        && record.ops.len() < LEAST_RING
        && has_none_done(record)
}

/// Whether the records by this recorder, one of which looks active and holds `held` operations, are no wrapped rings of
/// one size: none holds a completed operation, and one shows that operations were left out, or their numbers of
/// operations differ. A single operation is no ring.
fn are_active(records: &[Record], recorder: Recorder, held: usize) -> bool {
    let same = || {
        let records = records.iter();
        records.filter(|record| record.recorder == recorder && !record.cut)
    };
    let differs = |record: &Record| record.only_active || record.ops.len() != held;
    same().all(has_none_done) && (held == 1 || same().any(differs))
}

//! Leaves out calls that PyTorch refused at once, such as those with invalid arguments: they were never issued, and no
//! other rank has them.
//!
//! In a program that uses PyTorch's own backends, rcomm's recorder learns of calls by PyTorch's hooks. It notes such a
//! call as failed, without retiring it, and gives its number to the next operation. A call whose exception ends the
//! program has no successor.

use crate::align::record::{Op, Record};
use crate::align::shared::Shared;
use crate::judge::life::raised::RAISED;
use rcomm_recorder::model::{EntryState, OpType};
use rcomm_recorder::publish::Recorder;
use std::collections::HashMap;

/// The phase that notes an exception begins within this time, ns, of the refused call that raised it.
const SOON_NS: i64 = 1_000_000_000;
/// A last call that lasted longer than this, ms, may have waited for others.
const AT_ONCE_MS: f32 = 1e3;
/// The recorder notes that a call was refused when the next one is issued: the times of both may differ by this, ns.
const SLACK_NS: i64 = 1_000_000;

/// Removes the calls that were refused from these records.
pub(crate) fn leave_out(shared: &Shared, records: &mut [Record]) {
    let refused = shared.map(records.len(), |index| refused(&records[index]));
    for (record, refused) in records.iter_mut().zip(refused) {
        if let Some(refused) = refused {
            let mut refused = refused.into_iter();
            record.ops.retain(|_| !refused.next().unwrap_or(false));
        }
    }
}

/// For each operation of a record, whether it was refused; `None` if none was.
fn refused(record: &Record) -> Option<Vec<bool>> {
    let may_be_refused = |op: &Op| op.state == EntryState::Failed && !op.retired;
    if record.recorder != Recorder::Rcomm || !record.ops.iter().any(may_be_refused) {
        return None;
    }
    let mut refused = vec![false; record.ops.len()];
    let mut newest: HashMap<(u16, bool), usize> = HashMap::new();
    for (index, op) in record.ops.iter().enumerate() {
        let before = newest.insert((op.group, op.is_p2p), index);
        let before = before.map(|before| (before, &record.ops[before]));
        if let Some((before, other)) = before
            && op.kind != OpType::Coalesced
            && may_be_refused(other)
            && number(other) == number(op)
            && other
                .failed_ns()
                .is_some_and(|ns| ns <= op.created_ns.saturating_add(SLACK_NS))
        {
            refused[before] = true;
        }
    }
    for index in newest.into_values() {
        refused[index] |=
            may_be_refused(&record.ops[index]) && raised_soon(record, &record.ops[index]);
    }
    Some(refused)
}

/// The number of an operation among the collectives or the messages of its group.
fn number(op: &Op) -> u32 {
    match op.is_p2p {
        true => op.p2p_seq,
        false => op.seq,
    }
}

/// Whether this call failed at once, and an exception left the program soon after.
fn raised_soon(record: &Record, op: &Op) -> bool {
    if op.wait_ms().is_none_or(|ms| ms >= AT_ONCE_MS) {
        return false;
    }
    let status = record.status.as_ref();
    let status = status.filter(|status| status.phase.starts_with(RAISED));
    let since = status.map(|status| status.phase_since_ns);
    since
        .zip(op.failed_ns())
        .is_some_and(|(since, failed)| since.abs_diff(failed) <= SOON_NS.unsigned_abs())
}
